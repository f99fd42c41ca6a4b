"""Numbers and shapes in words, the same in all drawings of a graph."""

from __future__ import annotations

from collections.abc import Iterable

from mural.graph.nodes import Shape

UNITS = ("", "k", "M", "G", "T", "P", "E")
SIZES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def shapes_in_words(shapes: Iterable[Shape]) -> str:
    """The shapes of one or several tensors.

    >>> shapes_in_words([(1, 64, 56, 56), ()])
    '1×64×56×56, scalar'
    """
    return ", ".join("×".join(map(str, shape)) or "scalar" for shape in shapes)


def count_in_words(count: float) -> str:
    """A count in three digits.

    >>> [count_in_words(n) for n in (0, 999, 1000, 12_345, 999_999, 8_000_000_000)]
    ['0', '999', '1.00 k', '12.3 k', '1.00 M', '8.00 G']
    """
    return _in_units(count, 1000, UNITS)


def bytes_in_words(count: float) -> str:
    """A number of bytes in three digits.

    >>> [bytes_in_words(n) for n in (0, 1023, 1024, 3 * 2**30)]
    ['0 B', '1023 B', '1.00 KiB', '3.00 GiB']
    """
    return _in_units(count, 1024, SIZES)


def _in_units(count: float, base: int, units: tuple[str, ...]) -> str:
    if count < base:
        return f"{count:.0f} {units[0]}".strip()
    unit = 0
    while unit + 1 < len(units) and round(count, 2) >= (base if unit < 1 else base - 0.5 * base / 1000):
        count, unit = count / base, unit + 1
    digits = 2 if count < 9.995 else 1 if count < 99.95 else 0
    return f"{count:.{digits}f} {units[unit]}"
