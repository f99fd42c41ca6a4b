"""The values in a model's result by their place in it, and how far apart two of them are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from math import inf
from typing import Any, cast

import torch
from torch import Tensor

from mural.engine.result_tiles import ResultTile
from mural.geometry import slices
from mural.shard import ShardedTensor
from mural.shard.in_time import Rows


@dataclass(frozen=True)
class Gap:
    """How far two values are apart: the largest difference of their entries, or in words why they do not compare.

    Of whole numbers it is the part of the entries that differ.
    """

    size: float = 0.0
    words: str = ""


NONE = Gap()


def leaves(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Every value in nested dicts, tuples, lists and dataclasses, with its place there.

    >>> [place for place, _ in leaves({"out": (1, 2), "aux": [3]})]
    ["['out'][0]", "['out'][1]", "['aux'][0]"]
    """
    if isinstance(value, Mapping):
        for key, part in cast("Mapping[Any, Any]", value).items():
            yield from leaves(part, f"{place}[{key!r}]")
    elif isinstance(value, (tuple, list)):
        for index, part in enumerate(cast("list[Any]", value)):
            yield from leaves(part, f"{place}[{index}]")
    elif is_dataclass(value) and not isinstance(value, (type, ResultTile)):
        for field in fields(value):
            yield from leaves(getattr(value, field.name), f"{place}.{field.name}")
    else:
        yield place, value


def kept(value: Any) -> Any:
    """A tensor's values on the CPU, which later steps do not change; other values as they are."""
    value = value.full() if isinstance(value, ShardedTensor) else value
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def matching(mine: Any, whole: Any, rows: Rows | None) -> tuple[Any, Any]:
    """This rank's plain piece of a result, and the same part of the whole one.

    Where they have no common shape, both come back as they are. Nothing is communicated: what ranks hold may differ.
    """
    if isinstance(mine, ResultTile) and isinstance(whole, Tensor):
        return mine.output, whole[slices(mine.box)]
    if not isinstance(mine, Tensor) or not isinstance(whole, Tensor):
        return mine, whole
    if rows is not None and rows.count < rows.total:
        if not whole.ndim or whole.shape[0] % rows.total:
            return None, None  # one value for the whole batch: micro-batches have others
        each = whole.shape[0] // rows.total
        whole = whole[rows.start * each : rows.stop * each]
    if not isinstance(mine, ShardedTensor) or tuple(mine.shape) != tuple(whole.shape):
        return mine, whole
    apart = whole.reshape(mine.placement.shape)
    return mine.local, apart[slices(mine.box)]


def gap(mine: Any, other: Any) -> Gap:
    """How far a plan's value is from that of one device.

    >>> gap(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5])).size
    0.5
    >>> gap(None, torch.ones(2)).words
    'is missing'
    """
    if not isinstance(mine, Tensor) or not isinstance(other, Tensor):
        return unlike(mine, other)
    if tuple(mine.shape) != tuple(other.shape):
        return Gap(inf, f"has the shape {tuple(mine.shape)} instead of {tuple(other.shape)}")
    if mine.dtype != other.dtype:
        return Gap(inf, f"is {mine.dtype} instead of {other.dtype}")
    if torch.equal(mine.detach().cpu(), other.detach().cpu()):
        return NONE
    a, b = numbers(mine), numbers(other)
    if not counted_in_ulps(mine):
        return Gap(float((a != b).double().mean()))
    same = (a == b) | (a.isnan() & b.isnan())
    size = torch.where(same, 0.0, (a - b).abs())
    wrong = ~size.isfinite()
    if bool(wrong.any()):
        where = [("not a number", a.isnan() & ~b.isnan()), ("finite", a.isfinite()), ("infinite", a.isinf())]
        how = next(words for words, found in where if bool((found & wrong).any()))
        instead = "" if how == "not a number" else ", but not on one device,"
        return Gap(inf, f"is {how}{instead} at {int(wrong.sum())} of {wrong.numel()} places")
    return Gap(float(size.max()))


def unlike(mine: Any, other: Any) -> Gap:
    """The gap of two values of which at most one is a tensor."""
    if isinstance(mine, Tensor):
        return Gap(inf, f"is a tensor of {tuple(mine.shape)}, and there is none on one device")
    if isinstance(other, Tensor):
        return Gap(inf, "is missing" if mine is None else f"is a {type(mine).__name__} instead of a tensor")
    if isinstance(mine, (bool, int, float, complex)) and isinstance(other, (bool, int, float, complex)):
        return gap(torch.tensor(mine, dtype=torch.complex128), torch.tensor(other, dtype=torch.complex128))
    plain = isinstance(mine, (str, bytes, type(None))) or isinstance(other, (str, bytes, type(None)))
    same = bool(mine == other) if plain else type(mine) is type(other)
    return NONE if same else Gap(inf, f"is {mine!r:.40} instead of {other!r:.40}")


def counted_in_ulps(value: Tensor) -> bool:
    """Whether a tensor's entries are rounded; of others, the part of the entries that differ is their difference."""
    return value.is_floating_point() or value.is_complex()


def numbers(value: Tensor) -> Tensor:
    """A tensor's entries in double precision on the CPU; of a complex one, both parts."""
    value = value.detach().cpu()
    return torch.view_as_real(value.to(torch.complex128).resolve_conj()) if value.is_complex() else value.double()


def largest(value: Any) -> float:
    """The largest finite entry of a tensor, or the size of a number; 0 where there is none, and 1 of whole numbers."""
    if not isinstance(value, Tensor):
        return abs(value) if isinstance(value, (int, float, complex)) else 0.0
    if not counted_in_ulps(value):
        return 1.0
    entries = numbers(value).abs()
    entries = entries[entries.isfinite()]
    return float(entries.max()) if entries.numel() else 0.0
