"""What Python itself asks of a tensor: comparisons with anything, membership, copies, conversions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mural
from law import Expr, Grid, holds, image, raises
from ranks import run_on

GRIDS = [Grid((2, 1)), Grid((2, 2)), Grid((1, 1), data=2), Grid((3, 1), cuts=((0, 9, 4),))]

ANSWERS = """
x == None
x != None
None == x
None != x
x == "same"
x != "same"
x == object
x == [1, 2]
x != (1, 2)
x == slice(1)
x.relu() == None
x.flatten(2) == None
x.flatten(2) != "same"
x.__eq__(None)
x in (None, "same")
x in [None, x]
torch.jit.isinstance(x, torch.Tensor)
torch.jit.isinstance(x, list[torch.Tensor])
torch.jit.isinstance([x, x], list[torch.Tensor])
torch.is_tensor(x), isinstance(x, torch.nn.Parameter), callable(x)
0.5 in x
float(image(2, 4, 13, 11)[1, 2, 12, 3]) in x
image(2, 4, 13, 11)[0, 0, 0, 0] in x
len(x), len(list(x)), bool(x.sum() > 0)
x.is_same_size(x.relu()), x.is_same_size(x[:, :2])
torch.result_type(x, 1), torch.result_type(x.int(), 1.5), torch.result_type(1, x > 0)
x.nbytes, x.itemsize
"shape" in dir(x)
""".strip().splitlines()

VALUES = """
torch.stack(list(reversed(x)))
torch.atleast_1d(x)
torch.atleast_2d(x[0, 0], x[0, 0, 0])
torch.atleast_3d(x[0, 0])
x[0, 0].H
x.adjoint()
2 ** x + 7 / (x + 9) - (x + 9) % 7 + True
x.__rsub__(1) + x.__radd__(2)
torch.jit.annotate(torch.Tensor, x) * 2
sum(x) + sum([x, x])
""".strip().splitlines()


def answers(grid: Grid, codes: list[str]) -> list[tuple[Any, Any]]:
    """What a plain and a sharded tensor answer."""
    plain, sharded = image(2, 4, 13, 11), grid.shard(image(2, 4, 13, 11))
    return [(Expr(code)(plain), Expr(code)(sharded)) for code in codes]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_python_gets_the_answers_of_a_plain_tensor(grid: Grid) -> None:
    for rank in run_on(grid.world, answers, grid, ANSWERS):
        assert {code: got for code, (_, got) in zip(ANSWERS, rank, strict=True)} == {
            code: expected for code, (expected, _) in zip(ANSWERS, rank, strict=True)
        }


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("code", VALUES)
def test_python_gets_the_tensors_of_a_plain_tensor(code: str, grid: Grid) -> None:
    holds(Expr(code), image(2, 4, 13, 11), grid)


class Adapts(nn.Module):
    """Asks what an input is before it uses it, as MONAI's NetAdapter does."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.jit.isinstance(x, tuple[torch.Tensor]):
            x = x[0]
        return x if x == None or x == "same" else x * 2  # noqa: E711 - what models write


def test_a_model_that_asks_for_the_type_of_its_input() -> None:
    holds(Adapts(), image(2, 4, 13, 11), Grid((2, 1)))


REFUSED = [
    "x.tolist()", "x.item()", "x.numpy()", "bool(x)", "__import__('copy').copy(x)", "__import__('pickle').dumps(x)",
    "__import__('numpy').asarray(x)", "torch.tensor(x)", "x.data_ptr()", "x.stride()",
]  # fmt: skip


def evaluated(code: str) -> None:
    Expr(code)(Grid((2, 1)).shard(image(2, 4, 13, 11)))


@pytest.mark.parametrize("code", REFUSED)
def test_what_needs_all_values_is_refused_by_name(code: str) -> None:
    raises("", mural.UnsupportedOp, evaluated, code)


def test_what_torch_refuses_raises_the_same_kind() -> None:
    for code in ("x < None", "x + 'a'", "None + x", "torch.eq(x, None)"):
        raises("", TypeError, evaluated, code)
    raises("__contains__", RuntimeError, evaluated, "'a' in x")
