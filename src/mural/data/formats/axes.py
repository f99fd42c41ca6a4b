"""Axes: which dim of a file is which dim of (C, H, W) or (C, D, H, W)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from mural.data.formats.dtypes import Array
from mural.errors import DataError
from mural.geometry import Box, Interval

SYNONYMS = {"S": "C", "Z": "D", "Y": "H", "X": "W"}
FEW = 4
"""A dim without a name and with at most this many positions holds channels."""


@dataclass(frozen=True)
class Axes:
    """A letter for each dim of a file: C, D, H, W, or `_` for a dim of extent 1 that is left out.

    Several C are one dim of channels, the last of them fastest.

    >>> axes = Axes("HWC")
    >>> axes.shape((40, 50, 3))
    (3, 40, 50)
    >>> Axes("CHWC").shape((2, 40, 50, 3))
    (6, 40, 50)
    """

    letters: str

    @property
    def channels(self) -> tuple[int, ...]:
        """The file's dims of channels."""
        return tuple(dim for dim, letter in enumerate(self.letters) if letter == "C")

    @property
    def spatial(self) -> tuple[int, ...]:
        """The file's dims of depth (where it has any), height and width."""
        return tuple(self.letters.index(letter) for letter in "DHW" if letter in self.letters)

    def shape(self, stored: Sequence[int]) -> tuple[int, ...]:
        """The shape with channels first of a file's shape."""
        return prod(stored[dim] for dim in self.channels), *(stored[dim] for dim in self.spatial)

    def chunks(self, stored: Sequence[int], chunks: Sequence[int]) -> tuple[int, ...]:
        """The chunk with channels first; of several dims of channels, a chunk spans those that it holds whole."""
        channels = 1
        for dim in reversed(self.channels):
            channels *= min(chunks[dim], stored[dim])
            if chunks[dim] < stored[dim]:
                break
        return channels, *(min(chunks[dim], stored[dim]) for dim in self.spatial)

    def windows(self, box: Box, stored: Sequence[int]) -> Iterator[tuple[Interval, Box]]:
        """The file's boxes that make up a box with channels first, each with the channels that it holds."""
        extents = [stored[dim] for dim in self.channels]
        for channels, parts in split(box[0], extents):
            window = [Interval(0, 1)] * len(self.letters)
            for dims, intervals in ((self.channels, parts), (self.spatial, box[1:])):
                for dim, interval in zip(dims, intervals, strict=True):
                    window[dim] = interval
            yield channels, tuple(window)

    def as_stored(self, array: Array, window: Box) -> Array:
        """A view, with the file's dims, of an array with channels first that is to hold that window."""
        channels = [window[dim].size for dim in self.channels]
        view = array.reshape(*channels, *array.shape[1:], *(1,) * self.letters.count("_"))
        left_out = [dim for dim, letter in enumerate(self.letters) if letter == "_"]
        order = [*self.channels, *self.spatial, *left_out]
        return view.transpose([order.index(dim) for dim in range(len(order))])


def split(interval: Interval, extents: Sequence[int]) -> Iterator[tuple[Interval, Box]]:
    """Boxes of dims of these extents, the last fastest, that together are an interval of their merged positions.

    Each comes with its own place in the interval, which begins at 0.

    >>> for place, box in split(Interval(1, 6), (3, 2)):
    ...     print(*place, [tuple(i) for i in box])
    0 1 [(0, 1), (1, 2)]
    1 5 [(1, 3), (0, 2)]
    """
    if len(extents) <= 1:
        yield Interval(0, interval.size), (interval,) * len(extents)
        return
    inner, at = prod(extents[1:]), interval.start
    while at < interval.stop:
        row, column = divmod(at, inner)
        if column or interval.stop - at < inner:
            stop = min(interval.stop, (row + 1) * inner)
            for place, box in split(Interval(column, column + stop - at), extents[1:]):
                yield place.shift(at - interval.start), (Interval(row, row + 1), *box)
        else:
            rows = (interval.stop - at) // inner
            stop = at + rows * inner
            rest = (Interval(0, extent) for extent in extents[1:])
            yield Interval(at - interval.start, stop - interval.start), (Interval(row, row + rows), *rest)
        at = stop


def guessed(shape: Sequence[int]) -> str:
    """Letters for an array whose dims have no names: channels first, unless only the last dim can be channels.

    >>> [guessed(shape) for shape in ((64, 80), (3, 64, 80), (64, 80, 3), (64, 80, 96), (20, 64, 80, 2))]
    ['HW', 'CHW', 'HWC', 'CHW', 'DHWC']
    """
    names = {2: "HW", 3: "CHW", 4: "CDHW", 5: "TCDHW"}.get(len(shape), "?" * len(shape))
    last = len(shape) in (3, 4) and shape[-1] <= FEW < shape[0]
    return names[1:] + "C" if last else names


def resolved(name: str, letters: str, shape: Sequence[int], chosen: str | None, *, thin: bool = True) -> Axes:
    """The axes of a file whose dims have these letters; `chosen` is what the user says instead.

    Q and I stand for dims without a name. A depth of extent 1 stays where `thin` is true or the user names it.
    """
    if chosen is not None:
        return checked(name, chosen.upper(), letters, shape)
    found = [SYNONYMS.get(letter, letter) for letter in letters.upper()]
    drop = "CHW" + ("D" if thin else "")
    found = ["_" if n == 1 and letter not in drop else letter for letter, n in zip(found, shape, strict=True)]
    unnamed = [dim for dim, letter in enumerate(found) if letter in "QI"]
    if len(unnamed) == 2 and not set(found) & set("CD"):
        found[unnamed[0]], found[unnamed[1]] = "C", "D"
    elif len(unnamed) == 1:
        few = shape[unnamed[0]] <= FEW and "C" not in found
        found[unnamed[0]] = "C" if few or "D" in found else "D"
    return checked(name, "".join(found), letters, shape)


def checked(name: str, chosen: str, letters: str, shape: Sequence[int]) -> Axes:
    """The axes of letters that name each dim of the file once, or an error that says how to name them."""
    found = "".join(SYNONYMS.get(letter, letter) for letter in chosen)
    at = {letter: found.count(letter) for letter in "DHW"}
    wrong = [n for letter, n in zip(found, shape, strict=False) if letter not in "CDHW" and (letter != "_" or n != 1)]
    if len(found) == len(shape) and not wrong and at["H"] == at["W"] == 1 and at["D"] <= 1:
        return Axes(found)
    raise DataError(
        f"{name}: the file's dims {letters or '?' * len(shape)} of shape {tuple(shape)}, read as {chosen!r}, do not "
        f"make (C, H, W) or (C, D, H, W): name each dim with axes=, for instance axes={example(shape)!r} "
        "(C or S channels, D or Z depth, H or Y height, W or X width, _ a dim of extent 1 that goes; "
        "several C become one dim of channels)",
        name,
    )


def example(shape: Sequence[int]) -> str:
    """Letters that would fit a file of that many dims."""
    return "HW" if len(shape) == 2 else "C" * (len(shape) - 2) + "HW"
