"""Samples of operations: torch's own (OpInfo), and images of odd extents for what these lack."""

from __future__ import annotations

import random
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hunt.rules_draw import Draw
from hunt.rules_images import IMAGES

MOST_SAMPLES, MOST_NUMBERS = 150, 4000
IMAGE = "image: "
"""How the names of our own samples begin."""
WRONG = "!"
"""How the names of samples end that torch refuses."""


@dataclass(frozen=True)
class Sample:
    """A call: the operation, how torch offers it otherwise, and its arguments."""

    function: Callable[..., Any]
    method: Callable[..., Any] | None
    in_place: Callable[..., Any] | None
    aliases: tuple[Any, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])

    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments, in order."""
        return [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]


@lru_cache(maxsize=1)
def op_infos() -> dict[str, Any]:
    """Torch's descriptions of operations, by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return {f"{op.name}.{op.variant_test_name}".rstrip("."): op for op in op_db}


def names() -> list[str]:
    """The names of all operations of which there are samples."""
    infos = op_infos()
    wrong = [name + WRONG for name, op in infos.items() if op.error_inputs_func is not None]
    return [name for name in (*infos, *wrong, *(IMAGE + name for name in IMAGES)) if dtypes_of(name)]


def dtypes_of(name: str) -> tuple[torch.dtype, ...]:
    """The types of numbers in which an operation has samples; all that matter here."""
    if name.startswith(IMAGE):
        return (torch.float64,)
    taken = op_infos()[name.rstrip(WRONG)].supported_dtypes("cpu")
    wanted = (torch.float64, torch.float32, torch.bfloat16, torch.complex128, torch.int64, torch.bool)
    return tuple(t for t in wanted if t in taken)


@lru_cache(maxsize=8)
def torch_samples(name: str, dtype: torch.dtype) -> tuple[Sample, ...]:
    """Torch's samples of an operation, the same in every process."""
    op = op_infos()[name.rstrip(WRONG)]
    torch.manual_seed(zlib.crc32(name.encode()))
    random.seed(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name.endswith(WRONG):
            given = [error.sample_input for error in islice(op.error_inputs("cpu"), MOST_SAMPLES)]
        else:
            given = list(islice(op.sample_inputs("cpu", dtype), MOST_SAMPLES))
    forms = (op.op, op.method_variant, op.inplace_variant, tuple(op.aliases))
    found = [Sample(*forms, (one.input, *one.args), dict(one.kwargs)) for one in given]
    return tuple(one for one in found if one.tensors() and all(usable(t) for t in one.tensors()))


def usable(tensor: Tensor) -> bool:
    """Whether a tensor is small, in memory and of a plain layout."""
    return tensor.numel() <= MOST_NUMBERS and tensor.layout == torch.strided and tensor.device.type == "cpu"


def sample_of(name: str, dtype: torch.dtype, number: int) -> Sample | None:
    """A sample by number, counted round; None if the operation has none."""
    if name.startswith(IMAGE):
        short = name.removeprefix(IMAGE)
        function, args, kwargs = IMAGES[short](Draw(f"{short}/{number}"))
        plain = getattr(function, "__name__", "")
        forms = (getattr(torch.Tensor, plain, None), getattr(torch.Tensor, f"{plain}_", None))
        return Sample(function, *forms, (), args, kwargs)
    found = torch_samples(name, dtype)
    return found[number % len(found)] if found else None
