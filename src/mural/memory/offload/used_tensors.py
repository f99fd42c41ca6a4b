"""Which of its arguments an operation of torch needs in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

SHAPES = frozenset([
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "new_empty", "new_zeros",
    "new_ones", "new_full", "new_empty_strided", "is_same_size", "detach", "alias", "view",
])  # fmt: skip
"""Operations that look at the shape of a tensor alone. Other views check that the memory is there."""


def tensors_used(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors that have to be in memory for an operation."""
    if function._schema.name.split("::")[-1] not in SHAPES:
        yield from tensors_in((*args, *kwargs.values()))


def tensors_in(values: Sequence[Any]) -> Iterator[Tensor]:
    """The tensors among values, in order."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)
