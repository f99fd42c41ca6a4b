"""Functions that torch.jit compiled run past Python: refused on every rank, by name, with what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mural
from law import Grid, image, raises


@torch.jit.script
def stretched(x: Tensor, by: float = 2.0) -> Tensor:
    return x * by


@torch.jit.script
def joined(xs: list[Tensor]) -> Tensor:
    return torch.cat(xs, 1)


@torch.jit.script
def named(xs: dict[str, Tensor]) -> Tensor:
    return xs["image"] + 1


@torch.jit.script
def rows(x: Tensor) -> int:
    return x.shape[2]


class Doubles(nn.Module):
    """A small layer to compile."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Keeps(nn.Module):
    """Calls something that is kept where no module is looked for, between two layers."""

    def __init__(self, make: Callable[[], Any]):
        super().__init__()
        self.layer = nn.Conv2d(4, 4, 3, padding=1).double()
        self.kept = [make]

    def forward(self, x: Tensor) -> Tensor:
        return self.kept[0]()(self.layer(x)).relu()


def scripted_module() -> nn.Module:
    return torch.jit.script(Doubles())


def scripted_method() -> Any:
    return torch.jit.script(Doubles()).forward


def traced_module() -> nn.Module:
    return torch.jit.trace(Doubles(), image(1, 4, 13, 11))


def traced_function() -> Any:
    return torch.jit.trace(torch.relu, image(1, 4, 13, 11))


def scripted_function() -> Any:
    return stretched


def with_keywords() -> Any:
    return lambda x: stretched(by=3.0, x=x)


def with_a_list() -> Any:
    return lambda x: joined([x, x])


def with_a_dict() -> Any:
    return lambda x: named({"image": x})


def asking_for_sizes() -> Any:
    return lambda x: x * rows(x)


CASES = [
    (scripted_function, "stretched"), (with_keywords, "stretched"), (with_a_list, "joined"), (with_a_dict, "named"),
    (asking_for_sizes, "rows"), (scripted_module, "Doubles.forward"), (scripted_method, "Doubles.forward"),
    (traced_module, "Doubles.forward"), (traced_function, "relu"),
]  # fmt: skip
NAMES = [make.__name__ for make, _ in CASES]


def on_a_cut_image(make: Callable[[], Any], requires_grad: bool) -> None:
    x = Grid((2, 1)).shard(image(1, 4, 13, 11))
    Keeps(make)(x.requires_grad_(requires_grad))


@pytest.mark.parametrize(("make", "name"), CASES, ids=NAMES)
def test_a_compiled_function_is_refused_by_name(make: Callable[[], Any], name: str) -> None:
    for requires_grad in (False, True):
        raises(f"{name} was compiled by torch.jit", mural.UnsupportedOp, on_a_cut_image, make, requires_grad)
        raises("PYTORCH_JIT=0", mural.UnsupportedOp, on_a_cut_image, make, requires_grad)


@pytest.mark.parametrize(("make", "name"), CASES, ids=NAMES)
def test_capture_refuses_a_compiled_function_by_name(make: Callable[[], Any], name: str) -> None:
    """A scripted `x + 1` was noted as a new tensor that depends on nothing."""
    with pytest.raises(mural.UnsupportedOp, match=f"{name} was compiled by torch.jit"):
        mural.capture(Keeps(make), (1, 4, 13, 11))


def test_compiled_functions_of_plain_tensors_stay_as_they_are() -> None:
    x = image(1, 4, 5, 5).requires_grad_()
    assert torch.equal(stretched(x, by=3.0), x * 3)
    assert torch.equal(joined([x, x]), torch.cat([x, x], 1))
    assert torch.equal(scripted_module()(x), x * 2)
    assert torch.equal(traced_function()(x), x.relu())
    assert rows(x) == 5
    assert stretched.graph is not None
    assert torch.equal(torch.jit.trace(lambda y: stretched(y) + 1, x)(x), x * 2 + 1)


REMEDY = """
import torch, mural

@torch.jit.script
def stretched(x: torch.Tensor) -> torch.Tensor:
    return x * 2

x = mural.shard(torch.rand(1, 3, 8, 8), mural.init())
assert type(stretched(x)) is mural.ShardedTensor
assert torch.equal(torch.jit.trace(torch.relu, torch.rand(2))(x).full(), x.full())
assert torch.jit.script(torch.nn.ReLU())(x).shape == x.shape
"""


def test_the_advice_works() -> None:
    subprocess.run([sys.executable, "-c", REMEDY], env=os.environ | {"PYTORCH_JIT": "0"}, check=True, timeout=120)
