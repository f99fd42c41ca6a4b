"""Python values as JSON and back, types kept: tuples, counters and dicts with other keys are marked, tensors named.

(0.9, 0.999)      {"$tuple": [0.9, 0.999]}
{1, 2}            {"$set": [1, 2]}
b"mural"          {"$bytes": "bXVyYWw="}
torch.float16     {"$dtype": "float16"}
Counter({30: 1})  {"$counter": [[30, 1]]}
{0: "a"}          {"$dict": [[0, "a"]]}
a tensor          {"$tensor": "optimizer.state.conv.weight.exp_avg"}
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from mural.errors import CheckpointError

SEQUENCES: dict[type[Any], str] = {
    list: "",
    tuple: "$tuple",
    torch.Size: "$tuple",
    set: "$set",
    frozenset: "$frozenset",
}
"""How collections are marked; a list needs no mark."""
KINDS: dict[str, type[Any]] = {"$tuple": tuple, "$set": set, "$frozenset": frozenset}
SINGLE: dict[str, Callable[[Any], Any]] = {
    "$bytes": base64.b64decode,
    "$complex": lambda parts: complex(*parts),
    "$dtype": lambda name: dtype_of(name),
}
"""How the value under each mark of a single value is decoded."""


def dtype_of(name: str) -> torch.dtype:
    """The type of that name."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"{name!r} is not a type of tensors")
    return found


def encode(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    """The value as JSON; its tensors go into `tensors`, under names that begin with `where`.

    >>> encode({"betas": (0.9, 0.999), "foreach": None}, "optimizer.groups.0", {})
    {'betas': {'$tuple': [0.9, 0.999]}, 'foreach': None}
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        tensors[where] = value
        return {"$tensor": where}
    if type(value) in SEQUENCES:
        items = [encode(item, f"{where}.{i}", tensors) for i, item in enumerate(value)]
        return {SEQUENCES[type(value)]: items} if SEQUENCES[type(value)] else items
    if isinstance(value, bytes | bytearray):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, complex):
        return {"$complex": [value.real, value.imag]}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, Mapping):
        mapping = cast(Mapping[Any, Any], value)
        coded = {key: encode(item, f"{where}.{key}", tensors) for key, item in mapping.items()}
        if all(isinstance(key, str) and not key.startswith("$") for key in coded) and not isinstance(value, Counter):
            return coded
        pairs = [[encode(key, where, tensors), item] for key, item in coded.items()]
        return {"$counter" if isinstance(value, Counter) else "$dict": pairs}
    if isinstance(value, float):  # numpy.float64 among them
        return float(value)
    raise CheckpointError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold: it holds "
        f"tensors, numbers, strings, bytes, None, and tuples, lists, sets and dicts of these, since reading one never "
        f"runs code"
    )


def decode(value: Any, tensor: Callable[[str], Any]) -> Any:
    """The value that was encoded; `tensor` gives the tensor of a name.

    >>> decode({"betas": {"$tuple": [0.9, 0.999]}}, str)
    {'betas': (0.9, 0.999)}
    """
    if isinstance(value, list):
        return [decode(item, tensor) for item in cast(list[Any], value)]
    if not isinstance(value, dict):
        return value
    coded = cast(dict[str, Any], value)
    if len(coded) == 1:
        ((mark, inner),) = coded.items()
        if mark == "$tensor":
            return tensor(inner)
        if mark in SINGLE:
            return SINGLE[mark](inner)
        if mark in KINDS:
            return KINDS[mark](decode(item, tensor) for item in inner)
        if mark in ("$counter", "$dict"):
            pairs = {decode(key, tensor): decode(item, tensor) for key, item in inner}
            return Counter(pairs) if mark == "$counter" else pairs
    return {key: decode(item, tensor) for key, item in coded.items()}


def check_plain(value: Any, where: str) -> None:
    """Raise unless a value comes back from JSON as it was."""
    if value is None or type(value) in (bool, int, float, str):
        return
    if type(value) is list:
        for i, item in enumerate(cast(list[Any], value)):
            check_plain(item, f"{where}[{i}]")
        return
    if isinstance(value, Mapping):
        for key, item in cast(Mapping[Any, Any], value).items():
            if type(key) is not str:
                raise CheckpointError(f"{where} has the key {key!r}: JSON has strings for keys")
            check_plain(item, f"{where}[{key!r}]")
        return
    raise CheckpointError(
        f"{where} is a {type(value).__name__}: give values as JSON has them (None, bool, int, float, str, list, dict), "
        f"and tensors among the tensors"
    )
