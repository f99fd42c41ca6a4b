"""The law of sources: what is read is the slice of what was written, and only the tiles it touches are decoded."""

from __future__ import annotations

import pickle
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import tensorstore as ts
import tifffile
import torch
import zarr
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import mural.data
from mural.data import Source
from mural.data.formats.tiff import Tiles

DTYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "float32", "float64")
COMPRESSIONS = (None, "deflate", "lzw", "zstd", "packbits", "lzma")
draws = st.data()


def pixels(shape: Sequence[int], dtype: str) -> np.ndarray:
    """Pixels that all differ from their neighbours; the same for the same shape."""
    values = np.random.default_rng(prod(shape)).integers(0, 250, tuple(shape))
    return values.astype(dtype) if dtype != "bool" else values > 120


def box_in(draw: Any, shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """A box, which may be empty or all."""
    ends = [sorted(draw.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return tuple((a, b) for a, b in ends)


def tiles_of(box: Sequence[tuple[int, int]], chunks: Sequence[int]) -> int:
    """How many tiles of that size a box touches."""
    if any(a == b for a, b in box):
        return 0
    return prod(-(-b // c) - a // c for (a, b), c in zip(box, chunks, strict=True))


def holds(source: Source, expected: np.ndarray, box: Sequence[tuple[int, int]], tile: Sequence[int] | None) -> None:
    """The law; `tile` is what the file is made of, channels first, or None where it has no tiles."""
    assert source.shape == expected.shape
    source.counter.reset()
    found = source.read(box)
    assert np.array_equal(found.numpy(), expected[tuple(slice(*pair) for pair in box)])
    assert source.dtype == found.dtype == getattr(torch, expected.dtype.newbyteorder("=").name)
    assert found.is_contiguous()
    assert source.counter.reads == 1
    width = expected.dtype.itemsize
    if tile is None:
        assert source.counter.bytes_decoded == prod(b - a for a, b in box) * width
        return
    touched = tiles_of(box, tile)
    assert source.counter.tiles_decoded == touched
    assert source.counter.bytes_decoded <= touched * prod(tile) * width
    assert source.chunks == tuple(min(t, n) for t, n in zip(tile, expected.shape, strict=True))


extents = st.integers(1, 90)
tile_extents = st.sampled_from((16, 32, 48))


@given(draws)
def test_tiled_tiff(draw: Any) -> None:
    shape = (draw.draw(st.sampled_from((1, 3, 4))), draw.draw(extents), draw.draw(extents))
    tile = (draw.draw(tile_extents), draw.draw(tile_extents))
    separate = draw.draw(st.booleans()) and shape[0] > 1
    expected = pixels(shape, draw.draw(st.sampled_from(DTYPES)))
    compression, order = draw.draw(st.sampled_from(COMPRESSIONS)), draw.draw(st.sampled_from("<>"))
    predicted = compression not in (None, "packbits") and draw.draw(st.booleans())
    options: dict[str, Any] = {"photometric": "minisblack" if shape[0] == 1 else "rgb", "byteorder": order}
    data = expected if separate else np.moveaxis(expected, 0, -1) if shape[0] > 1 else expected[0]
    if shape[0] > 1:
        options["planarconfig"] = "separate" if separate else "contig"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.tif"
        tifffile.imwrite(path, data, tile=tile, compression=compression, predictor=predicted or None, **options)
        with mural.data.open(path, threads=draw.draw(st.integers(1, 3))) as source:
            # A page whose only tile is as wide as it is lies in one stretch, and is read without tiles.
            plain = compression is None and source.chunks[-2:] == (1, 1)
            channels = 1 if separate else shape[0]
            box = box_in(draw, shape)
            if not plain:
                holds(source, expected, box, (channels, *tile))
            assert np.array_equal(source.read(box).numpy(), expected[tuple(slice(*pair) for pair in box)])


@given(draws)
def test_stacks_of_pages(draw: Any) -> None:
    sides = st.integers(2, 90)  # tifffile does not write pages of one column
    shape = (draw.draw(st.integers(1, 3)), draw.draw(st.integers(2, 6)), draw.draw(sides), draw.draw(sides))
    expected = pixels(shape, draw.draw(st.sampled_from(("uint8", "uint16", "float32"))))
    compression, rows = draw.draw(st.sampled_from((None, "deflate", "zstd"))), draw.draw(st.integers(1, 40))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.ome.tif"
        strips = {} if compression is None else {"rowsperstrip": rows}
        axes = {"axes": "CZYX"}
        tifffile.imwrite(path, expected, photometric="minisblack", compression=compression, metadata=axes, **strips)
        with mural.data.open(path) as source:
            tile = None if compression is None else (1, 1, min(rows, shape[2]), shape[3])
            holds(source, expected, box_in(draw, shape), tile)


@given(draws)
def test_zarr(draw: Any) -> None:
    shape = tuple(draw.draw(extents) for _ in range(draw.draw(st.integers(2, 3))))
    shape = shape if len(shape) == 2 else (draw.draw(st.integers(1, 4)), *shape[1:])
    chunks = tuple(draw.draw(st.integers(3, 40)) for _ in shape)
    chunks = tuple(min(c, n) for c, n in zip(chunks, shape, strict=True))
    version = draw.draw(st.sampled_from((2, 3)))
    shards = (
        tuple(c * draw.draw(st.integers(1, 3)) for c in chunks) if version == 3 and draw.draw(st.booleans()) else None
    )
    data = pixels(shape, draw.draw(st.sampled_from((*DTYPES, "bool", "int64"))))
    expected = data if len(shape) == 3 else data[None]
    names = {"dimension_names": ("c", "y", "x")[-len(shape) :]} if version == 3 else {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.zarr"
        array = zarr.create_array(
            path, shape=shape, chunks=chunks, shards=shards, dtype=data.dtype, zarr_format=version, **names
        )
        array[...] = data
        with mural.data.open(path, axes=None if version == 3 else "CYX"[-len(shape) :]) as source:
            holds(source, expected, box_in(draw, expected.shape), (1, *chunks)[-3:])


@given(draws)
def test_numpy(draw: Any) -> None:
    shape = (draw.draw(st.integers(1, 3)), *(draw.draw(extents) for _ in range(draw.draw(st.integers(2, 3)))))
    expected = pixels(shape, draw.draw(st.sampled_from((*DTYPES, "bool", "int64"))))
    last, order = draw.draw(st.booleans()), draw.draw(st.sampled_from("CF"))
    data = np.asarray(np.moveaxis(expected, 0, -1) if last else expected, order=order)
    data = data.astype(data.dtype.newbyteorder(draw.draw(st.sampled_from("<>"))))
    letters = "CDHW" if len(shape) == 4 else "CHW"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.npy"
        np.save(path, data)
        with mural.data.open(path, axes=letters[1:] + "C" if last else letters) as source:
            box = box_in(draw, shape)
            assert np.array_equal(source.read(box).numpy(), expected[tuple(slice(*pair) for pair in box)])
            # Of a short last dim, such as the channels of a pixel, all is read; of others, the box alone.
            whole = [c if c > 1 else b - a for c, (a, b) in zip(source.chunks, box, strict=True)]
            bytes_ = prod(whole) * data.itemsize if prod(b - a for a, b in box) else 0
            assert source.counter.bytes_decoded == bytes_


@given(draws)
def test_nifti(draw: Any) -> None:
    shape = tuple(draw.draw(st.integers(2, 30)) for _ in range(draw.draw(st.integers(3, 4))))
    data = pixels(shape, draw.draw(st.sampled_from(("uint8", "int16", "uint16", "int32", "float32", "float64"))))
    expected = np.moveaxis(data, -1, 0) if data.ndim == 4 else data[None]
    kind = draw.draw(st.sampled_from((nibabel.Nifti1Image, nibabel.Nifti2Image)))
    compressed = draw.draw(st.booleans())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ("x.nii.gz" if compressed else "x.nii")
        nibabel.save(kind(data, np.eye(4), dtype=data.dtype), path)
        with mural.data.open(path, whole=compressed) as source:
            box = box_in(draw, expected.shape)
            assert np.array_equal(source.read(box).numpy(), expected[tuple(slice(*pair) for pair in box)])
            if compressed and prod(b - a for a, b in box):
                assert source.counter.bytes_decoded == data.nbytes


MODES = {
    "L": ("uint8", 0),
    "I;16": ("uint16", 0),
    "1": ("bool", 0),
    "LA": ("uint8", 2),
    "RGB": ("uint8", 3),
    "RGBA": ("uint8", 4),
}


@given(draws)
def test_pictures(draw: Any) -> None:
    dtype, channels = MODES[draw.draw(st.sampled_from(sorted(MODES)))]
    shape = (draw.draw(extents), draw.draw(extents))
    data = pixels((*shape, channels) if channels else shape, dtype)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.png"
        Image.fromarray(data).save(path)
        with mural.data.open(path) as source:
            expected = np.moveaxis(data, -1, 0) if channels else data[None]
            for number in range(2):
                box = box_in(draw, expected.shape)
                found = source.read(box).numpy()
                assert np.array_equal(found, expected[tuple(slice(*pair) for pair in box)])
                # Decoded once, whatever is read.
                assert source.counter.bytes_decoded in (0, data.nbytes)
                assert source.counter.reads == number + 1


def test_what_is_counted_for_zarr_is_what_tensorstore_reads(tmp_path: Path) -> None:
    array = zarr.create_array(
        tmp_path / "x.zarr",
        shape=(3, 256, 256),
        chunks=(3, 32, 32),
        shards=(3, 128, 128),
        dtype="uint8",
        compressors=None,
    )
    array[...] = pixels((3, 256, 256), "uint8")

    def bytes_read() -> int:
        (found,) = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
        return found["values"][0]["value"]

    with mural.data.open(tmp_path / "x.zarr") as source:
        source.read([(0, 3), (0, 1), (0, 1)])
        before = bytes_read()
        source.counter.reset()
        source.read([(0, 3), (100, 140), (10, 20)])
        assert source.counter.tiles_decoded == 2
        index = 2 * (16 * 16 + 4)  # of each shard: offset and length of 16 chunks, and a checksum
        assert bytes_read() - before == source.counter.bytes_decoded + index


def test_a_grid_of_boxes_decodes_its_share_and_the_rim(tmp_path: Path) -> None:
    expected, tile = pixels((3, 500, 700), "uint8"), 64
    tifffile.imwrite(
        tmp_path / "x.tif", np.moveaxis(expected, 0, -1), tile=(tile, tile), photometric="rgb", compression="lzw"
    )
    with mural.data.open(tmp_path / "x.tif") as source:
        for rows in ((0, 250), (250, 500)):
            for columns in ((0, 350), (350, 700)):
                source.counter.reset()
                source.read([(0, 3), rows, columns])
                share = 3 * 250 * 350
                row_of_tiles = 3 * tile * (250 + 350 + 2 * tile)
                assert share <= source.counter.bytes_decoded <= share + 2 * row_of_tiles


def test_threads_read_at_once_and_are_all_counted(tmp_path: Path) -> None:
    expected = pixels((3, 300, 400), "uint16")
    tifffile.imwrite(
        tmp_path / "x.tif", np.moveaxis(expected, 0, -1), tile=(64, 64), photometric="rgb", compression="zstd"
    )
    source = mural.data.open(tmp_path / "x.tif")
    boxes = [((0, 3), (r, r + 90), (c, c + 110)) for r in range(0, 200, 30) for c in range(0, 280, 35)]

    def right(box: Any) -> bool:
        return np.array_equal(source.read(box).numpy(), expected[tuple(slice(*pair) for pair in box)])

    with ThreadPoolExecutor(8) as executor:
        assert all(executor.map(right, boxes))
    assert source.counter.reads == len(boxes)
    assert source.counter.tiles_decoded == sum(tiles_of(box, (3, 64, 64)) for box in boxes)
    source.close()
    assert right(boxes[0])  # a closed source opens its file again
    source.close()


def test_one_read_decodes_its_tiles_on_several_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tifffile.imwrite(tmp_path / "x.tif", pixels((256, 256), "uint8"), tile=(64, 64), compression="deflate")
    both, names = threading.Barrier(2, timeout=30), set[str]()
    decode = Tiles._segment

    def waiting(self: Tiles, *args: Any) -> Any:
        both.wait()  # nobody gets past unless two are here at once
        names.add(threading.current_thread().name)
        return decode(self, *args)

    monkeypatch.setattr(Tiles, "_segment", waiting)
    with mural.data.open(tmp_path / "x.tif", threads=2) as source:
        source.read()
    assert len(names) == 2


def test_a_source_is_pickled_as_its_path_and_options(tmp_path: Path) -> None:
    data = pixels((40, 50, 3), "uint8")
    np.save(tmp_path / "x.npy", data)
    with mural.data.open(tmp_path / "x.npy", axes="YXS") as source:
        text = pickle.dumps(source)
        assert len(text) < 1000
        with pickle.loads(text) as again:
            assert again.shape == source.shape == (3, 40, 50)
            assert torch.equal(again.read(), source.read())
            assert again.counter.reads == 1
