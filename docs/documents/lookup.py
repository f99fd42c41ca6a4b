"""Numbers that are looked up: in results files, in tables made of them, and in what the documents printed."""

from __future__ import annotations

import importlib.util
import json
import operator
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
Step = str | int | Mapping[str, object]
Reduction = Callable[[Sequence[float]], float]
median, mean = statistics.median, statistics.fmean


def only(values: Sequence[float]) -> float:
    """The one value that was found."""
    if len(values) != 1:
        raise LookupError(
            f"{len(values)} values where there should be one: select further, or say what is made of them"
        )
    return values[0]


class Number:
    """Something with a value, and arithmetic of such things."""

    def __truediv__(self, other: Number | float) -> Made:
        return Made(operator.truediv, (self, other))

    def __mul__(self, other: Number | float) -> Made:
        return Made(operator.mul, (self, other))

    def __add__(self, other: Number | float) -> Made:
        return Made(operator.add, (self, other))

    def __sub__(self, other: Number | float) -> Made:
        return Made(operator.sub, (self, other))

    def __pow__(self, other: float) -> Made:
        return Made(operator.pow, (self, other))


@dataclass(frozen=True)
class Among:
    """What a list has to contain, where it stands for the value of an element."""

    value: object


@dataclass(frozen=True)
class Field(Number):
    """Values of a results file, brought to one number.

    A step of the path is a key of a table, a place in a list, or the values that elements of a list must have to be
    taken; `case.ranks` looks into an element's tables, and a value that is `Among` a list. Lists at the end of the path
    are taken as a whole.
    """

    file: str
    """BENCHMARK/FILE.json"""
    path: tuple[Step, ...]
    of: Reduction = only


@dataclass(frozen=True)
class Cell(Number):
    """A cell of a table that `mural bench NAME --page` wrote from results, for what takes long to compute from them."""

    benchmark: str
    mark: str
    """Of the block of the page."""
    row: tuple[str, ...]
    """How its first cells begin."""
    column: str


@dataclass(frozen=True)
class Printed(Number):
    """What a document printed, as the benchmark's `published.py` has it."""

    benchmark: str
    of: Callable[[Any], float]
    """From that module."""


@dataclass(frozen=True)
class Made(Number):
    """A number that is computed from others."""

    of: Callable[..., float]
    parts: tuple[Number | float, ...]


# ----------------------------------------------------------------------------------------------------------- values


def value(number: Number | float) -> float:
    """The number, looked up now."""
    match number:
        case Field():
            found = values(number)
            if not found:
                raise LookupError(f"benchmarks/{number.file} has nothing at {number.path}")
            try:
                return number.of(found)
            except LookupError as error:
                raise LookupError(f"benchmarks/{number.file}, {number.path}: {error}") from error
        case Cell():
            return cell(number)
        case Printed():
            return number.of(published(number.benchmark))
        case Made():
            return number.of(*map(value, number.parts))
        case float() | int():
            return number
        case _:
            raise TypeError(f"a {type(number).__name__} is no number")


def leaves(number: Number | float) -> Iterator[Number]:
    """What a number is made of in the end, constants aside."""
    if isinstance(number, Made):
        for part in number.parts:
            yield from leaves(part)
    elif isinstance(number, Number):
        yield number


def known(number: Number | float) -> bool:
    """Whether the number can be looked up: what it is made of was measured."""
    try:
        value(number)
    except LookupError:
        return False
    return True


def values(field: Field) -> list[float]:
    """All values that the path leads to; none where nothing is there."""
    found: list[Any] = [results(field.file)]
    for step in field.path:
        match step:
            case str():
                found = [value[step] for value in found if isinstance(value, dict) and step in value]
            case int():
                found = [value[step] for value in found]
            case _:
                found = [element for value in found for element in value if has(element, step)]
    return [float(number) for value in found for number in flat(value)]


def has(element: Mapping[str, Any], wanted: Mapping[str, object]) -> bool:
    """Whether an element of a list has these values.

    >>> has({"kind": "limit", "case": {"ranks": 8}}, {"kind": "limit", "case.ranks": 8})
    True
    >>> has({"cells": ["a", "b"]}, {"cells": Among("b")}), has({"cells": ["a"]}, {"cells": Among("b")})
    (True, False)
    """
    for name, expected in wanted.items():
        at: Any = element
        for key in name.split("."):
            at = at.get(key) if isinstance(at, dict) else None
        if expected.value not in (at or ()) if isinstance(expected, Among) else at != expected:
            return False
    return True


def flat(value: Any) -> Iterator[float]:
    """The numbers of nested lists, in order."""
    if isinstance(value, list):
        for element in value:
            yield from flat(element)
    else:
        yield value


@lru_cache
def results(file: str) -> Any:
    """The contents of a results file; nothing, where it was not written yet."""
    benchmark, name = file.split("/")
    path = BENCHMARKS / benchmark / "results" / name
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


@lru_cache
def published(benchmark: str) -> Any:
    """A benchmark's module of what was published; all are called `published`, so it is loaded from its file."""
    if str(BENCHMARKS) not in sys.path:
        sys.path.insert(0, str(BENCHMARKS))
    name = f"published_for_{benchmark}"
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / benchmark / "published.py")
    if spec is None or spec.loader is None:
        raise LookupError(f"benchmarks/{benchmark} has no published.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cell(wanted: Cell) -> float:
    """The number in a cell, the first if there are several; of a percentage, the share."""
    page = (BENCHMARKS / wanted.benchmark / "README.md").read_text(encoding="utf-8")
    begin, end = f"<!-- {wanted.mark}: written by run.py --page -->", f"<!-- end of {wanted.mark} -->"
    column: int | None = None
    for line in page.split(begin)[1].split(end)[0].splitlines():
        cells = [text.strip() for text in line.strip("|").split("|")]
        if wanted.column in cells:
            column = cells.index(wanted.column)
        elif column is not None and all(map(str.startswith, cells, wanted.row)):
            first = cells[column].partition(" ")[0]
            return float(first.rstrip("%")) / (100 if first.endswith("%") else 1)
    raise LookupError(f"benchmarks/{wanted.benchmark}/README.md has no {wanted.row} with {wanted.column!r}")


# -------------------------------------------------------------------------------------------------- ways to write it


def record(file: str, field: str, of: Reduction = only, **has: object) -> Field:
    """A field of the records that have these values; `__` in a name stands for a dot."""
    wanted = {name.replace("__", "."): expected for name, expected in has.items()}
    return Field(file, ("records", wanted, *field.split(".")), of)


def gib(size: Number) -> Made:
    """Bytes in GiB."""
    return size / 2**30


def ms(seconds: Number) -> Made:
    """Seconds in milliseconds."""
    return seconds * 1000
