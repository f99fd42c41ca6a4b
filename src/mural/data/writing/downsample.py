"""Half the resolution of an image: the mean of the pixels that become one, or the nearest of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mural.data.formats.dtypes import Array

METHODS = ("mean", "nearest")


def halved(shape: Sequence[int], dims: int) -> tuple[int, ...]:
    """The shape at half the resolution: the last `dims` extents halved and rounded up, the others as they are.

    >>> halved((3, 101, 1), 2)
    (3, 51, 1)
    """
    return *shape[:-dims], *(-(-extent // 2) for extent in shape[-dims:])


def pyramid(shape: Sequence[int], chunks: Sequence[int], levels: int | None, dims: int) -> tuple[tuple[int, ...], ...]:
    """The shapes of the levels: a given number of them, or until a level is one chunk along the halved dims.

    >>> pyramid((3, 1000, 300), (3, 256, 256), None, 2)
    ((3, 1000, 300), (3, 500, 150), (3, 250, 75))
    """
    found = [tuple(shape)]
    while len(found) != levels:
        last = found[-1]
        small = all(extent <= chunk for extent, chunk in zip(last[-dims:], chunks[-dims:], strict=True))
        if max(last[-dims:]) <= 1 or (levels is None and small):
            break
        found.append(halved(last, dims))
    return tuple(found)


def halve(array: Array, method: str, dims: int) -> Array:
    """An array at half its resolution along its last dims, in the same type; integers are rounded, ties to even.

    >>> halve(np.array([[[1, 3, 9]]], np.uint8), "mean", 2)
    array([[[2, 9]]], dtype=uint8)
    """
    if method == "nearest" or array.dtype == np.bool_:
        return array[(..., *(slice(None, None, 2),) * dims)]
    # Sums of up to eight values of 16 bits are exact in float32.
    precise = array.dtype.itemsize > 2 and array.dtype != np.float32
    wide = np.complex128 if array.dtype.kind == "c" else np.float64 if precise else np.float32
    mean = array.astype(wide)
    for dim in range(array.ndim - dims, array.ndim):
        mean = averaged(mean, dim)
    return np.rint(mean).astype(array.dtype) if array.dtype.kind in "iu" else mean.astype(array.dtype)


def averaged(array: Array, dim: int) -> Array:
    """Each pair of neighbours along a dim as their mean; a last one without a neighbour stays."""
    first = np.moveaxis(array, dim, 0)
    even, odd = first[0::2].copy(), first[1::2]
    even[: len(odd)] += odd
    even[: len(odd)] *= 0.5
    return np.moveaxis(even, 0, dim)


def scales(shapes: Sequence[Sequence[int]], dims: int) -> list[tuple[float, ...]]:
    """How many pixels of level 0 a pixel of each level stands for, per dim.

    >>> scales([(3, 101, 1), (3, 51, 1)], 2)
    [(1.0, 1.0, 1.0), (1.0, 2.0, 1.0)]
    """
    kept, extents = shapes[0][:-dims], shapes[0][-dims:]
    found: list[tuple[float, ...]] = []
    for level in range(len(shapes)):
        # An extent of n is 1 after as many halvings as n - 1 has bits.
        steps = [min(level, (extent - 1).bit_length()) for extent in extents]
        found.append((*(1.0,) * len(kept), *(float(2**step) for step in steps)))
    return found
