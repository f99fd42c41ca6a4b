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
NORMS = frozenset(["native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"])
"""Operations that move the statistics which they take in places 3 and 4, in training: torch's schemas do not say so."""


def writes(function: Any) -> bool:
    """Whether an operation may write to what it takes."""
    return function._schema.is_mutable or function._schema.name.split("::")[-1] in NORMS


def tensors_used(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors that have to be in memory for an operation."""
    if function._schema.name.split("::")[-1] not in SHAPES:
        yield from tensors_in((*args, *kwargs.values()))


def tensors_written(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors that an operation writes to.

    >>> import torch
    >>> x, y = torch.zeros(2), torch.ones(2)
    >>> [t is x for t in tensors_written(torch.ops.aten.add_.Tensor, (x, y), {})]
    [True]
    """
    if function._schema.name.split("::")[-1] in NORMS and args[5]:
        yield from tensors_in(args[3:5])
    for place, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from tensors_in((given,))


def tensors_in(values: Sequence[Any]) -> Iterator[Tensor]:
    """The tensors among values, in order."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)
