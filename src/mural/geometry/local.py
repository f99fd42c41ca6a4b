"""Local coordinates: where a global box is in a piece, as slices of the piece."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mural.geometry.interval import Interval


def slices(box: Iterable[Interval], piece: Iterable[Interval] | None = None) -> tuple[slice, ...]:
    """The slices at a global box of a tensor that holds the box `piece`; of one that holds everything, unless given.

    >>> slices((Interval(3, 5), Interval(0, 4)), (Interval(2, 9), Interval(0, 4)))
    (slice(1, 3, None), slice(0, 4, None))
    """
    if piece is None:
        return tuple(slice(*part) for part in box)
    return tuple(slice_of(part, (held,)) for part, held in zip(box, piece, strict=True))


def slice_of(part: Interval, held: Sequence[Interval]) -> slice:
    """The slice at a global interval of a dim that holds disjoint intervals one after the other.

    >>> slice_of(Interval(8, 9), (Interval(0, 2), Interval(7, 9)))
    slice(3, 4, None)
    """
    offset = 0
    for interval in held:
        if interval.contains(part):
            return slice(part.start - interval.start + offset, part.stop - interval.start + offset)
        offset += interval.size
    raise ValueError(f"{part} is not part of {held}")
