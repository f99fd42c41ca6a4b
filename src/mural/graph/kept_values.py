"""A value as it was: what is in it, how to put that back, and whether it is still the same."""

from __future__ import annotations

import random
import types
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mural.graph.without_memory import Absent
from mural.shard.tensor import ShardedTensor

NUMBERS = (bool, int, float, complex, str, bytes, type(None))
FIXED = (*NUMBERS, type, torch.dtype, torch.device, torch.Size, nn.Module, types.FunctionType,
         types.BuiltinFunctionType, types.ModuleType)  # fmt: skip
"""What cannot be changed in place, or is looked at by itself."""
MUTABLE = (list, dict, set, deque, np.ndarray, random.Random, torch.Generator, np.random.Generator)
"""What is changed in place."""
FOREACH_COPY: Callable[[list[Tensor], list[Tensor]], None] = torch._foreach_copy_  # type: ignore[attr-defined]


@dataclass(frozen=True)
class KeptValue:
    """A value as it was: the object, and what was in it."""

    value: Any
    content: Any = None
    restore: Callable[[], None] | None = None
    always: bool = False
    """Whether it is put back without a comparison, with others: torch's batch norm does not count its writes."""


def renew(was: KeptValue, always: bool = False) -> None:
    """Put the content of a value back into it, if it has another; into a tensor `always`, if asked to."""
    if was.restore is not None and ((always and isinstance(was.value, Tensor)) or moved(was.value, was)):
        was.restore()


def moved(value: Any, was: KeptValue | None) -> bool:
    """Whether a value is another object than it was, or has other content."""
    if was is None or (value is not was.value and not (is_plain(value) and same(value, was.value))):
        return True
    if isinstance(value, Tensor) and isinstance(was.content, tuple):
        return value._version != was.content[0] and not torch.equal(value.detach(), was.content[1])
    return was.restore is not None and not same(content(value), was.content)


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text, or a tuple of these, as a shape: an equal one stands for it."""
    return isinstance(value, NUMBERS) or (isinstance(value, tuple) and all(map(is_plain, value)))


def kept(value: Any, values: bool = True) -> KeptValue:
    """A value with what is needed to put it back."""
    if isinstance(value, FIXED):
        return KeptValue(value)
    if isinstance(value, Tensor):
        return kept_tensor(value) if values else KeptValue(value)
    if isinstance(value, types.MethodType):
        held = kept(value.__self__, values)
        return KeptValue(value, held.content, held.restore)
    now = content(value)
    return KeptValue(value) if now is value else KeptValue(value, now, restorer(value, now))


def kept_tensor(value: Tensor) -> KeptValue:
    """A tensor with a copy of its values, if it has any of its own."""
    if not has_values(value):
        return KeptValue(value)
    copy, version = value.detach().clone(), value._version

    def restore() -> None:
        value.data.copy_(copy)  # not seen by autograd, as torch's own norms move them

    return KeptValue(value, (version, copy), restore)


def has_values(value: Any) -> bool:
    """Whether a value is a plain tensor with memory, and not a parameter."""
    plain = isinstance(value, Tensor) and type(value) in (Tensor, nn.Buffer) and not isinstance(value, nn.Parameter)
    return plain and not value.is_meta


def clones(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of tensors, made by one call for each type and device."""
    made = [torch.empty_like(tensor) for tensor in tensors]
    copy_all(made, tensors)
    return made


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors to others of the same types and devices, by one call for each; autograd does not see it."""
    groups: dict[tuple[torch.dtype, torch.device], list[tuple[Tensor, Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        groups.setdefault((source.dtype, source.device), []).append((target.data, source.data))
    for pairs in groups.values():
        FOREACH_COPY([target for target, _ in pairs], [source for _, source in pairs])


def content(value: Any, copied: bool = False) -> Any:
    """What is in a value, which stays as it is when the value is changed in place; the value itself where nothing is.

    A tensor counts by its identity and version, or is `copied`.
    """
    if isinstance(value, Tensor):
        plain = type(value) in (Tensor, nn.Buffer) and not value.is_meta
        return value.detach().clone() if plain and copied else value if copied else (id(value), value._version)
    if isinstance(value, types.MethodType):
        return content(value.__self__, copied)
    if isinstance(value, FIXED) or id(value) in _looking:
        return value
    _looking.add(id(value))
    try:
        return inside(value, copied)
    finally:
        _looking.discard(id(value))


_looking: set[int] = set()
"""The values whose content is being looked at: one that holds itself is met again."""


def inside(value: Any, copied: bool) -> Any:
    """The content of a value that may contain others."""
    if isinstance(value, (list, tuple, deque)):
        return type(value), [content(item, copied) for item in value]
    if isinstance(value, dict):
        return type(value), {key: content(item, copied) for key, item in value.items()}
    if isinstance(value, set):
        return set, frozenset(value)
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return value.get_state().clone()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, types.GenericAlias):
        return type(value), {k: content(v, copied) for k, v in vars(value).items() if not isinstance(v, nn.Module)}
    return value


def restorer(value: Any, now: Any) -> Callable[[], None] | None:
    """How to give a value its content back; None where it cannot be given."""
    if isinstance(value, list):
        items = [*value]
        inner = [kept(item) for item in items]
        return lambda: (value.__setitem__(slice(None), items), [renew(k) for k in inner])[0]
    if isinstance(value, deque):
        items = [*value]
        return lambda: (value.clear(), value.extend(items))[0]
    if isinstance(value, set):
        members = set(value)
        return lambda: (value.clear(), value.update(members))[0]
    if isinstance(value, dict):
        entries = dict(value)
        inner = [kept(item) for item in entries.values()]
        return lambda: (value.clear(), value.update(entries), [renew(k) for k in inner])[0]
    if isinstance(value, np.ndarray):
        return lambda: value.__setitem__(..., now)
    if isinstance(value, random.Random):
        return lambda: value.setstate(now)
    if isinstance(value, torch.Generator):
        return lambda: value.set_state(now) and None
    if isinstance(value, np.random.Generator):
        state = value.bit_generator.state
        return lambda: setattr(value.bit_generator, "state", state)
    if isinstance(getattr(value, "__dict__", None), dict):
        attributes = dict(vars(value))
        inner = [kept(item) for item in attributes.values()]
        return lambda: (vars(value).clear(), vars(value).update(attributes), [renew(k) for k in inner])[0]
    return None


def same(one: Any, other: Any) -> bool:
    """Whether two contents are equal."""
    if one is other:
        return True
    if isinstance(one, Absent) and isinstance(other, Absent):
        return one.key == other.key
    if isinstance(one, ShardedTensor) and isinstance(other, ShardedTensor) and one.mesh.now and other.mesh.now:
        # Pieces of a tensor of the batch, of different micro-batches: only such a piece can be left, and a later step
        # that reads it meets two times in one call, which is refused.
        return one.shape == other.shape and one.mesh.now == other.mesh.now
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        plain = all(type(t) in (Tensor, nn.Parameter, nn.Buffer) and not t.is_meta for t in (one, other))
        return plain and one.shape == other.shape and one.dtype == other.dtype and bool(torch.equal(one, other))
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return type(one) is type(other) and np.array_equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return equal(one, other)


def equal(one: Any, other: Any) -> bool:
    """Whether two values say that they are equal; NaN is."""
    try:
        return bool(one == other) or (one != one and other != other)
    except Exception:  # a value that cannot be compared is another one
        return False
