"""Arrays that a file stores as they are: NumPy's .npy and .npz, and whatever else is neither tiled nor compressed."""

from __future__ import annotations

import os
import threading
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from mural.data.formats.axes import guessed, resolved
from mural.data.formats.dtypes import Array
from mural.data.formats.stored import OpenedFile, Options, Stored
from mural.data.formats.whole import WholeArray
from mural.data.source import Counter
from mural.errors import DataError
from mural.geometry import Box, Interval


class Handle:
    """The bytes of a file, which several threads read at once, each at its own place.

    It is opened by the first read, and again by a read after `close`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._file: int | None = None
        self._users = 0
        self._closing = False

    def read(self, offset: int, count: int) -> bytes:
        """That many bytes from an offset on."""
        buffer = bytearray(count)
        self.read_into(memoryview(buffer), count, (offset,))
        return bytes(buffer)

    def read_into(self, buffer: memoryview, length: int, offsets: Iterable[int]) -> None:
        """Fill a buffer with stretches of that many bytes from these offsets on; raise where the file ends before."""
        file, at = self._begin(), 0
        try:
            for offset in offsets:
                if os.preadv(file, [buffer[at : at + length]], offset) != length:
                    fill(file, buffer[at : at + length], offset)
                at += length
        finally:
            self._end()

    def _begin(self) -> int:
        with self._lock:
            if self._file is None:
                self._file = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            self._users += 1
            return self._file

    def _end(self) -> None:
        with self._lock:
            self._users -= 1
            if self._closing and not self._users:
                self._shut()

    def close(self) -> None:
        """Close the file once nobody reads."""
        with self._lock:
            self._closing = self._users > 0
            if not self._closing:
                self._shut()

    def _shut(self) -> None:
        self._closing = False
        if self._file is not None:
            os.close(self._file)
            self._file = None


def fill(file: int, buffer: memoryview, offset: int) -> None:
    """Fill a buffer by as many reads as it takes: one is at most about 2 GiB, and may be interrupted."""
    done = 0
    while done < len(buffer):
        got = os.preadv(file, [buffer[done : done + 2**30]], offset + done)
        if not got:
            size = os.fstat(file).st_size
            raise EOFError(f"bytes {offset} to {offset + len(buffer)} are wanted, but the file has {size}")
        done += got


PIXEL = 64
"""A last dim of up to this many bytes, such as the channels of a pixel, is always read whole."""


@dataclass(frozen=True)
class Raw:
    """An array in C order that is stored in a file as it is, from an offset on."""

    handle: Handle
    offset: int
    shape: tuple[int, ...]
    kept: np.dtype[Any]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the pixels, in native order of bytes."""
        return self.kept.newbyteorder("=")

    @property
    def chunks(self) -> tuple[int, ...]:
        """Single pixels; with all their channels where those come last."""
        last = self.shape[-1]
        return (1,) * (len(self.shape) - 1) + (last if last * self.kept.itemsize <= PIXEL else 1,)

    def read_into(self, out: Array, box: Box, counter: Counter) -> None:
        """Fill an array with the pixels of a box, by one read for each stretch of bytes."""
        read = (*box[:-1], Interval(0, self.shape[-1]) if self.chunks[-1] > 1 else box[-1])
        extents = [interval.size for interval in read]
        direct = out.flags.c_contiguous and read[-1] == box[-1] and self.kept.isnative
        rows = out if direct else np.empty(extents, self.kept)
        length, offsets = stretches(read, self.shape, self.kept.itemsize)
        self.handle.read_into(rows.reshape(-1).view(np.uint8).data, length, (self.offset + at for at in offsets))
        counter.add(tiles=1, bytes_=rows.nbytes)
        if not direct:
            skip = box[-1].start - read[-1].start
            out[...] = rows[..., skip : skip + box[-1].size]


def stretches(box: Box, shape: Sequence[int], width: int) -> tuple[int, Iterator[int]]:
    """The bytes of each contiguous stretch of a box, and where the stretches begin.

    >>> length, offsets = stretches((Interval(1, 3), Interval(0, 4)), (5, 4), 2)
    >>> length, list(offsets)
    (16, [8])
    """
    strides = [width * prod(shape[dim + 1 :]) for dim in range(len(shape))]
    inner = len(shape) - 1
    while inner > 0 and box[inner].size == shape[inner]:
        inner -= 1
    length = box[inner].size * strides[inner]
    first = box[inner].start * strides[inner]
    outer = product(*(range(i.start * s, i.stop * s, s) for i, s in zip(box[:inner], strides[:inner], strict=True)))
    return length, (first + sum(at) for at in outer)


def header(name: str, file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether in Fortran's order, and type of a .npy, whose pixels follow in the file; nothing is unpickled."""
    version = npy.read_magic(file)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, fortran, dtype = read(file)
    if dtype.hasobject:
        raise DataError(
            f"{name}: it holds Python objects, which are only read by running code from the file: save numbers", name
        )
    return tuple(shape), fortran, dtype


@dataclass(frozen=True)
class Reversed:
    """A stored array with its dims in reverse: what C order calls an array in Fortran's order, and back."""

    inner: Stored

    @property
    def shape(self) -> tuple[int, ...]:
        """The extents, the fastest first."""
        return self.inner.shape[::-1]

    @property
    def chunks(self) -> tuple[int, ...]:
        """What is decoded at a time."""
        return self.inner.chunks[::-1]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the pixels, in native order of bytes."""
        return self.inner.dtype

    def read_into(self, out: Array, box: Box, counter: Counter) -> None:
        """Fill an array with the pixels of a box."""
        self.inner.read_into(out.transpose(), box[::-1], counter)


def held(
    path: Path, offset: int, shape: tuple[int, ...], fortran: bool, dtype: np.dtype[Any], options: Options
) -> OpenedFile:
    """An opened array whose pixels are in the file from an offset on."""
    check_size(str(path), offset + prod(shape) * dtype.itemsize, path.stat().st_size)
    raw = Raw(Handle(path), offset, shape[::-1] if fortran else shape, dtype)
    axes = resolved(str(path), guessed(shape), shape, options.axes)
    return OpenedFile((Reversed(raw) if fortran else raw,), axes, raw.handle.close)


def open_npy(path: Path, options: Options) -> OpenedFile:
    """A .npy file, read in windows."""
    with path.open("rb") as file:
        shape, fortran, dtype = header(str(path), file)
        offset = file.tell()
    return held(path, offset, shape, fortran, dtype, options)


def check_size(name: str, wanted: int, size: int) -> None:
    """Raise where a file is shorter than its header says."""
    if size < wanted:
        raise DataError(
            f"{name}: its header says {wanted} bytes, but the file has {size}: it is truncated; copy or write it again",
            name,
        )


def open_npz(path: Path, options: Options) -> OpenedFile:
    """One array of a .npz: in windows where it is stored as it is, whole where it is compressed."""
    with zipfile.ZipFile(path) as archive:
        member = chosen(str(path), archive, options.key)
        with archive.open(member) as file:
            shape, fortran, dtype = header(str(path), file)
            start = file.tell()
    if member.compress_type == zipfile.ZIP_STORED:
        return held(path, data_offset(path, member) + start, shape, fortran, dtype, options)

    def load() -> Array:
        with np.load(path, allow_pickle=False) as arrays:
            return np.asarray(arrays[member.filename.removesuffix(".npy")])

    whole = WholeArray(str(path), shape, dtype, load, options.whole)
    return OpenedFile((whole,), resolved(str(path), guessed(shape), shape, options.axes), whole.close)


def chosen(name: str, archive: zipfile.ZipFile, key: str | None) -> zipfile.ZipInfo:
    """The member of a .npz that was asked for, or its only one."""
    members = {
        info.filename.removesuffix(".npy"): info for info in archive.infolist() if info.filename.endswith(".npy")
    }
    if key is None and len(members) == 1:
        return next(iter(members.values()))
    if key is None or key not in members:
        what = "it holds several arrays" if key is None else f"it holds no array {key!r}"
        raise DataError(f"{name}: {what}: choose one of {', '.join(members) or 'none'} with key=", name)
    return members[key]


def data_offset(path: Path, member: zipfile.ZipInfo) -> int:
    """Where a stored member's bytes begin: after its own header, whose name and extra field vary in length."""
    with path.open("rb") as file:
        file.seek(member.header_offset + 26)
        lengths = np.frombuffer(file.read(4), "<u2")
    return member.header_offset + 30 + int(lengths.sum())
