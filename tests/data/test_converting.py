"""Conversion: exact at full resolution, means or labels below it, readable by others, complete or not there at all."""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import tifffile
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import mural.data
from mural.data.writing.downsample import halve
from mural.errors import DataError


def pixels(*shape: int, dtype: str = "uint8") -> np.ndarray:
    values = np.random.default_rng(0).integers(0, 250, shape)
    return values > 120 if dtype == "bool" else values.astype(dtype)


def saved(folder: Path, data: np.ndarray) -> mural.data.Source:
    np.save(folder / "in.npy", data)
    return mural.data.open(folder / "in.npy", axes="CDHW" if data.ndim == 4 else "CHW")


def means(data: np.ndarray, dims: int) -> np.ndarray:
    """Half the resolution, the slow way: the mean of the pixels that are there, ties to even."""
    shape = [*data.shape[:-dims], *(-(-n // 2) for n in data.shape[-dims:])]
    out = np.empty(shape, data.dtype)
    for index in np.ndindex(*shape):
        block = data[(*index[:-dims], *(slice(2 * i, 2 * i + 2) for i in index[-dims:]))]
        mean = block.astype(np.float64).mean()
        out[index] = np.rint(mean) if data.dtype.kind in "iu" else mean
    return out


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint16", "int32", "float32", "float64"])
def test_half_the_resolution(dtype: str) -> None:
    for shape, dims in (((2, 7, 10), 2), ((1, 5, 6, 3), 3), ((1, 4, 5, 5), 2), ((1, 1, 9), 2)):
        data = pixels(*shape, dtype=dtype)
        assert np.allclose(halve(data, "mean", dims), means(data, dims), rtol=1e-6)
        assert halve(data, "mean", dims).dtype == data.dtype
    assert np.array_equal(halve(data, "nearest", 2), data[:, ::2, ::2])


drawn = st.data()


@given(drawn)
@settings(max_examples=15)
def test_ome_zarr_is_exact_and_zarr_python_agrees(draw: Any) -> None:
    shape = (
        draw.draw(st.integers(1, 6)),
        *(draw.draw(st.integers(1, 70)) for _ in range(draw.draw(st.integers(2, 3)))),
    )
    dtypes = ("uint8", "bool", "int16", "uint16", "uint32", "int64", "float16", "float32", "float64")
    data = pixels(*shape, dtype=draw.draw(st.sampled_from(dtypes)))
    chunks = tuple(draw.draw(st.integers(1, n)) for n in shape)
    chunks = tuple(max(c, 8 if i else 1) for i, c in enumerate(chunks))
    labels = draw.draw(st.booleans())
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.ome.zarr"
        shard = tuple(min(c, n) * draw.draw(st.integers(1, 3)) for c, n in zip(chunks, shape, strict=True))
        source = saved(Path(folder), data)
        mural.data.convert(source, out, chunks=chunks, shard=draw.draw(st.sampled_from((None, shard))), labels=labels)
        with mural.data.open(out) as found:
            assert np.array_equal(found.read().numpy(), data)
            group = zarr.open_group(out, mode="r")
            expected = data
            for level in range(len(found.levels)):
                assert np.array_equal(group[str(level)][...], expected)
                assert np.array_equal(found.read(level=level).numpy(), expected)
                expected = halve(expected, "nearest" if labels else "mean", data.ndim - 1)
            last = found.levels[-1].shape
            assert all(n <= c for n, c in zip(last[1:], chunks[1:], strict=True))


def test_the_metadata_are_those_of_ome_zarr(tmp_path: Path) -> None:
    out = mural.data.convert(
        saved(tmp_path, pixels(3, 100, 130)), tmp_path / "a.ome.zarr", chunks=(3, 32, 32), levels=2
    )
    ome = json.loads((out / "zarr.json").read_text())["attributes"]["ome"]
    (scale,) = ome["multiscales"]
    assert ome["version"] == "0.5"
    assert [axis["name"] for axis in scale["axes"]] == ["c", "y", "x"]
    assert [axis["type"] for axis in scale["axes"]] == ["channel", "space", "space"]
    assert [dataset["path"] for dataset in scale["datasets"]] == ["0", "1"]
    assert scale["datasets"][1]["coordinateTransformations"] == [
        {"type": "scale", "scale": [1.0, 2.0, 2.0]},
        {"type": "translation", "translation": [0.0, 0.5, 0.5]},
    ]
    array = json.loads((out / "0" / "zarr.json").read_text())
    assert array["dimension_names"] == ["c", "y", "x"]
    assert array["codecs"][0]["name"] == "sharding_indexed"
    assert array["codecs"][0]["configuration"]["chunk_shape"] == [3, 32, 32]
    assert len([f for f in (out / "0").rglob("*") if f.is_file()]) == 2  # one shard, and its zarr.json


@pytest.mark.parametrize(("shape", "dtype"), [
    ((3, 150, 210), "uint8"), ((1, 150, 210), "uint16"), ((7, 90, 60), "float32"), ((2, 9, 80, 70), "uint16"),
    ((3, 4, 80, 70), "uint8"), ((1, 64, 64), "int64"), ((1, 100, 1), "uint8"), ((2, 1, 100), "float32"),
    ((2, 100, 1), "int64"), ((4, 1, 1), "float32"), ((2, 4, 100, 1), "int64"),
])  # fmt: skip
def test_tiff_is_exact_and_tifffile_agrees(tmp_path: Path, shape: tuple[int, ...], dtype: str) -> None:
    data = pixels(*shape, dtype=dtype)
    out = mural.data.convert(saved(tmp_path, data), tmp_path / "out.tif", chunks=(32, 48))
    with mural.data.open(out) as found:
        assert np.array_equal(found.read().numpy(), data)
        if dtype != "int64" and max(shape[-2:]) > 48:
            assert len(found.levels) > 1
            assert np.array_equal(found.read(level=1).numpy(), halve(data, "mean", 2))
    with tifffile.TiffFile(out) as file:
        assert file.is_bigtiff
        assert file.pages[0].is_tiled
    expected = np.moveaxis(data, 0, -1) if shape[0] == 3 and dtype == "uint8" else data
    assert np.array_equal(tifffile.imread(out).squeeze(), expected.squeeze())


def test_any_source_becomes_ome_zarr(tmp_path: Path) -> None:
    data = pixels(20, 30, 40)
    nibabel.save(nibabel.Nifti1Image(data, np.eye(4)), tmp_path / "a.nii.gz")
    tifffile.imwrite(tmp_path / "a.tif", data, photometric="minisblack", compression="zlib")
    for name in ("a.nii.gz", "a.tif"):
        seen: list[tuple[int, int]] = []

        def look(done: int, total: int, seen: list[tuple[int, int]] = seen) -> None:
            seen.append((done, total))

        out = mural.data.convert(tmp_path / name, tmp_path / f"{name}.zarr", chunks=(1, 8, 16, 16), progress=look)
        with mural.data.open(out) as found:
            assert np.array_equal(found.read().numpy(), data[None])
        assert seen == sorted(seen)
        assert seen[-1][0] == seen[-1][1] > 1.1 * data.nbytes
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.nii.gz", "a.nii.gz.zarr", "a.tif", "a.tif.zarr"]


def test_what_is_there_is_not_overwritten_unless_told(tmp_path: Path) -> None:
    first, second = pixels(1, 40, 50), pixels(1, 60, 70)
    for name in ("out.ome.zarr", "out.tif"):
        out = mural.data.convert(saved(tmp_path, first), tmp_path / name)
        source = saved(tmp_path, second)
        with pytest.raises(DataError, match="it exists: choose another name, or pass overwrite=True"):
            mural.data.convert(source, out)
        with mural.data.open(out) as found:
            assert found.shape == first.shape
        mural.data.convert(source, out, overwrite=True)
        with mural.data.open(out) as found:
            assert np.array_equal(found.read().numpy(), second)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.npy", "out.ome.zarr", "out.tif"]


@pytest.mark.parametrize("name", ["out.ome.zarr", "out.tif"])
def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path, name: str) -> None:
    data = pixels(300, 300)
    path = tmp_path / "in.tif"
    tifffile.imwrite(path, data, tile=(64, 64), compression="zlib")
    with tifffile.TiffFile(path) as file:
        start, count = file.pages[0].dataoffsets[-1], file.pages[0].databytecounts[-1]
    broken = bytearray(path.read_bytes())
    broken[start : start + count] = bytes(count)
    path.write_bytes(broken)
    with pytest.raises(DataError, match=r"in.tif: box .* cannot be read: tile 24"):
        mural.data.convert(path, tmp_path / name, chunks=(1, 64, 64), shard=(1, 64, 64) if "zarr" in name else None)
    assert [p.name for p in tmp_path.iterdir()] == ["in.tif"]

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mural.data.convert(saved(tmp_path, data[None]), tmp_path / name, chunks=(1, 64, 64), progress=stop)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.npy", "in.tif"]


def test_options_that_do_not_fit(tmp_path: Path) -> None:
    source = saved(tmp_path, pixels(1, 40, 50))
    for name, options, match in (
        ("a.png", {}, "end it in .ome.zarr or in .tif"),
        ("a.zarr", {"chunks": (16, 16)}, "chunks .* do not fit the shape"),
        ("a.zarr", {"chunks": (1, 16, 16), "shard": (1, 24, 16)}, "shard .* is not made of whole chunks"),
        ("a.zarr", {"levels": 0}, "there is at least one"),
        ("a.tif", {"chunks": (20, 20)}, "multiples of 16"),
    ):
        with pytest.raises(DataError, match=match):
            mural.data.convert(source, tmp_path / name, **options)
    assert [p.name for p in tmp_path.iterdir()] == ["in.npy"]


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"it cannot be written: .* a file is in the way"):
        mural.data.convert(saved(tmp_path, pixels(1, 40, 50)), tmp_path / "file" / "out.zarr")


KILLED = """
import os, signal, sys, mural.data
def stop(done, total):
    if done > total // 3:
        os.kill(os.getpid(), signal.SIGKILL)
mural.data.convert(sys.argv[1], sys.argv[2], chunks=(1, 64, 64), shard=(1, 64, 64), workers=1, progress=stop)
"""


@pytest.mark.slow
def test_a_killed_conversion_leaves_nothing_that_looks_complete(tmp_path: Path) -> None:
    saved(tmp_path, pixels(1, 300, 300))
    out = tmp_path / "out.ome.zarr"
    command = [sys.executable, "-c", KILLED, str(tmp_path / "in.npy"), str(out)]
    assert subprocess.run(command, timeout=120, check=False).returncode == -signal.SIGKILL
    assert not out.exists()
    (left,) = [p for p in tmp_path.iterdir() if p.name != "in.npy"]
    assert left.name.endswith(".partial")
    with pytest.raises(DataError, match="no Zarr"):
        mural.data.open(left)
    mural.data.convert(tmp_path / "in.npy", out)


MEASURED = """
import resource, sys, mural.data
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
small, large, out = sys.argv[1:4]
options = dict(chunks=(1, 256, 256), workers=2) | ({} if out.endswith(".tif") else dict(shard=(1, 1024, 1024)))
mural.data.convert(small, out, **options)
before = peak()
mural.data.convert(large, out, overwrite=True, **options)
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["out.ome.zarr", "out.tif"])
def test_memory_does_not_grow_with_the_image(tmp_path: Path, name: str) -> None:
    for side, file in ((1024, "small.npy"), (16384, "large.npy")):
        data = np.lib.format.open_memmap(tmp_path / file, "w+", np.uint8, (1, side, side))
        for row in range(0, side, 1024):
            data[:, row : row + 1024] = (np.arange(side) * (row + 1) // 37).astype(np.uint8)
        data.flush()
        del data
    command = [
        sys.executable,
        "-c",
        MEASURED,
        str(tmp_path / "small.npy"),
        str(tmp_path / "large.npy"),
        str(tmp_path / name),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    grown = int(done.stdout)
    assert grown < 64 * 2**20, f"{grown / 2**20:.0f} MiB more for an image of 256 MiB"


def test_a_gzip_that_is_no_nifti(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "x.nii.gz", "wb") as file:
        file.write(b"no volume" * 100)
    with pytest.raises(DataError, match=r"/x.nii.gz: by its name it is a NIfTI"):
        mural.data.convert(tmp_path / "x.nii.gz", tmp_path / "x.zarr")
    assert [p.name for p in tmp_path.iterdir()] == ["x.nii.gz"]


def test_a_mask_of_bool_keeps_its_type(tmp_path: Path) -> None:
    data = pixels(1, 90, 70, dtype="bool")
    out = mural.data.convert(saved(tmp_path, data), tmp_path / "out.zarr", chunks=(1, 16, 16))
    with mural.data.open(out) as found:
        assert found.dtype == torch.bool
        assert np.array_equal(found.read(level=1).numpy(), data[:, ::2, ::2])
