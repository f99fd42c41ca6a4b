"""Numbers, shapes and tables in words, the same in all drawings, pages and lines on a terminal."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

COUNTS = ("", "k", "M", "G", "T", "P", "E")
SIZES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def shapes_in_words(shapes: Iterable[tuple[int, ...]]) -> str:
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
    return _in_units(count, 1000, COUNTS)


def flops_in_words(count: float) -> str:
    """A number of floating-point operations in three digits.

    >>> flops_in_words(480), flops_in_words(5_270_000)
    ('480 FLOPs', '5.27 MFLOPs')
    """
    return _in_units(count, 1000, [f"{unit}FLOPs" for unit in COUNTS])


def bytes_in_words(count: float) -> str:
    """A number of bytes in three digits.

    >>> [bytes_in_words(n) for n in (0, 1023, 1024, 3 * 2**30)]
    ['0 B', '1023 B', '1.00 KiB', '3.00 GiB']
    """
    return _in_units(count, 1024, SIZES)


def seconds_in_words(seconds: float) -> str:
    """A duration in three digits, from two minutes, hours or days on in two units.

    >>> [seconds_in_words(s) for s in (0, 0.00001, 0.0123, 0.9996, 3.214, 754)]
    ['0 s', '10.0 µs', '12.3 ms', '1.00 s', '3.21 s', '12 min 34 s']
    >>> [seconds_in_words(s) for s in (7100, 7200, 260_000)]
    ['118 min 20 s', '2 h 0 min', '3 d 0 h']
    """
    for unit, large, small in ((3600, "d", "h"), (60, "h", "min"), (1, "min", "s")):
        if round(seconds / unit) >= (48 if unit == 3600 else 120):
            many, rest = divmod(round(seconds / unit), 24 if unit == 3600 else 60)
            return f"{many} {large} {rest} {small}"
    return _in_units(seconds * 1e6, 1000, ("µs", "ms", "s"), whole=False) if seconds else "0 s"


def _in_units(count: float, base: int, units: Sequence[str], whole: bool = True) -> str:
    """Three digits and the largest unit below the number; if it counts `whole` things, all digits of a small one."""
    if whole and count < base:
        return f"{count:.0f} {units[0]}".strip()
    unit = 0
    while unit + 1 < len(units) and count >= 0.9995 * base:
        count, unit = count / base, unit + 1
    digits = 2 if count < 9.995 else 1 if count < 99.95 else 0
    return f"{count:.{digits}f} {units[unit]}"


def aligned(rows: Sequence[Sequence[str]], right: Container[int]) -> list[str]:
    """The rows of a table as lines, in columns two spaces apart; those with the given numbers end on the right.

    >>> aligned([("layer", "FLOPs"), ("conv", "12")], right=[1])
    ['layer  FLOPs', 'conv      12']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.rjust if column in right else str.ljust for column in range(len(widths))]
    lines = (zip(sides, row, widths, strict=True) for row in rows)
    return ["  ".join(side(cell, width) for side, cell, width in line).rstrip() for line in lines]
