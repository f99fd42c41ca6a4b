"""Errors of a rule that torch itself would not raise: the rule does not know this form of the call, and says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mural.errors import UnsupportedOp
from mural.shard.shape_probes import unseen
from mural.shard.table import name_of

KINDS = (
    TypeError, KeyError, AttributeError, ValueError, RuntimeError, NotImplementedError, AssertionError,
    ZeroDivisionError, StopIteration,
)  # fmt: skip
"""What a rule raises that misreads a call; subclasses of these are errors of memory, of networks, of mathematics."""
OUT_OF_SEQUENCE = ("tuple index", "list index", "out of range for a tensor of")
"""What an IndexError says where a rule misses an argument or a dim; others are about a tensor's values."""


def misread(error: BaseException) -> bool:
    """Whether an error may come from a rule that does not know a form of its call."""
    if isinstance(error, IndexError):
        return any(text in str(error) for text in OUT_OF_SEQUENCE)
    return type(error) in KINDS


def refusal_of(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], error: BaseException
) -> UnsupportedOp | None:
    """The refusal of a call for which a rule failed; None if the call is wrong, as torch finds with empty tensors."""
    if not misread(error):
        return None
    try:
        with unseen():
            func(*pytree.tree_map(probe, args), **pytree.tree_map(probe, dict(kwargs)))
    except NotImplementedError:
        pass  # torch does not know without values
    except Exception:
        return None
    form = ", ".join([*map(described, args), *(f"{key}={described(value)}" for key, value in kwargs.items())])
    return UnsupportedOp(
        f"{name_of(func)}({form}): the rule for sharded tensors does not take this call ({type(error).__name__}: "
        f"{error}): write it in another form, call .full() first if the whole tensor fits on one rank, or extend the "
        f"rule in src/mural/shard/ops/"
    )


def probe(value: Any) -> Any:
    """A tensor of the same shape and type without memory; anything else unchanged."""
    if not isinstance(value, Tensor):
        return value
    history: Tensor = getattr(value, "carrier", value)  # a sharded tensor's is that of its piece
    wanted = history.requires_grad
    made = torch.empty(tuple(value.shape), dtype=value.dtype, device="meta", requires_grad=wanted)
    return made.clone() if wanted and not history.is_leaf else made


def described(value: Any) -> str:
    """An argument as an error shows it: of a tensor, its shape."""
    if isinstance(value, Tensor):
        return f"tensor of shape {tuple(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(described, value))}]"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
