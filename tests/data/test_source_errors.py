"""Broken input: every error names the file, what is wrong and what to do; with a box, that too."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import tifffile
from PIL import Image

import mural.data
from mural.data.formats import whole
from mural.errors import DataError, MuralError

SHAPE = (3, 200, 300)
PIXELS = np.random.default_rng(0).integers(0, 250, SHAPE).astype(np.uint8)


def refused(path: Path, match: str, box: Any = None, **options: Any) -> DataError:
    """The error of opening and reading a file, which names it."""
    with pytest.raises(DataError, match=match) as caught, mural.data.open(path, **options) as source:
        source.read(box)
    error = caught.value
    assert isinstance(error, MuralError)
    assert str(path) in str(error)
    assert error.name.startswith(str(path))
    return error


def test_files_that_are_not_what_they_are_called(tmp_path: Path) -> None:
    refused(tmp_path / "none.tif", "there is no such file or folder")
    (tmp_path / "empty.tif").write_bytes(b"")
    refused(tmp_path / "empty.tif", "the file is empty")
    (tmp_path / "text.tif").write_bytes(b"no image at all" * 30)
    refused(tmp_path / "text.tif", "by its name it is a TIFF, but its first bytes are not")
    Image.fromarray(PIXELS[0]).save(tmp_path / "x.png")
    os.rename(tmp_path / "x.png", tmp_path / "x.tif")
    refused(tmp_path / "x.tif", "it begins like a picture: rename it, or pass reader='picture'")
    (tmp_path / "x.what").write_bytes(b"what")
    refused(tmp_path / "x.what", r"not known by its name or first bytes. Can be read: TIFF \(.tif, .tiff.*NIfTI")
    (tmp_path / "folder").mkdir()
    refused(tmp_path / "folder", "is a folder, but no Zarr")
    (tmp_path / "x.zarr").write_bytes(b"what")
    refused(tmp_path / "x.zarr", "a Zarr is a folder")
    refused(tmp_path / "x.what", "there is no reader 'nothing': choose one of tiff, zarr", reader="nothing")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", PIXELS)
    (tmp_path / "x.npy").chmod(0)
    refused(tmp_path / "x.npy", "it cannot be read: Permission denied. Change its permissions")


def test_a_file_that_the_system_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "x.npy", PIXELS)

    def no(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", no)
    refused(tmp_path / "x.npy", "it cannot be read: Permission denied. Change its permissions")


def tiff(path: Path, **options: Any) -> bytes:
    tifffile.imwrite(path, np.moveaxis(PIXELS, 0, -1), photometric="rgb", **options)
    return path.read_bytes()


def test_a_tiff_cut_anywhere_is_found_when_it_is_opened(tmp_path: Path) -> None:
    data = tiff(tmp_path / "x.tif", tile=(64, 64), compression="zlib")
    path = tmp_path / "cut.tif"
    for length in (4, 8, 12, 100, 300, len(data) // 4, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(DataError, match=r"truncated|damaged"):
            mural.data.open(path)
    error = refused(path, r"1 of 20 tiles or strips reach up to byte \d+, but the file has \d+ bytes: it is truncated")
    assert error.box is None


@pytest.mark.parametrize("options", [{}, {"compression": "zlib"}])
def test_a_stack_cut_anywhere_does_not_become_a_smaller_one(tmp_path: Path, options: Any) -> None:
    path = tmp_path / "x.tif"
    tifffile.imwrite(path, np.stack([PIXELS[0]] * 20), photometric="minisblack", **options)
    data = path.read_bytes()
    for length in (100, 400, len(data) // 3, len(data) // 2, len(data) - 100):
        path.write_bytes(data[:length])
        with pytest.raises(DataError, match=r"truncated|damaged"):
            mural.data.open(path)


@pytest.mark.parametrize("compression", ["zlib", "lzw", "zstd", "jpeg", "packbits"])
def test_a_damaged_tile_is_named_with_its_box_and_others_can_be_read(tmp_path: Path, compression: str) -> None:
    path = tmp_path / "x.tif"
    data = bytearray(tiff(path, tile=(64, 64), compression=compression))
    with tifffile.TiffFile(path) as file:
        start, count = file.pages[0].dataoffsets[3], file.pages[0].databytecounts[3]
    data[start : start + count] = bytes(count)
    path.write_bytes(data)
    box = ((0, 3), (0, 64), (190, 250))
    error = refused(path, rf"box {re.escape(str(box))} cannot be read: tile 3 of page 0, bytes {start} to", box)
    assert error.box == box
    assert error.__cause__ is not None
    assert "copy or write it again" in str(error)
    with mural.data.open(path) as source:
        source.read([(0, 3), (0, 64), (0, 190)])


def test_a_tiff_of_one_huge_strip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiff(tmp_path / "x.tif", compression="zlib", rowsperstrip=200)
    monkeypatch.setattr("mural.data.formats.tiff.LIMIT", 100_000)
    refused(tmp_path / "x.tif", "a single tile or strip has 0 MiB, .*: run `mural convert .*x.tif OUT.ome.zarr` once")
    with mural.data.open(tmp_path / "x.tif", whole=True) as source:
        assert np.array_equal(source.read().numpy(), PIXELS)


def test_a_file_that_shrinks_while_it_is_open(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", PIXELS)
    tiff(tmp_path / "x.tif", tile=(64, 64), compression="zlib")
    for name in ("x.npy", "x.tif"):
        with mural.data.open(tmp_path / name) as source:
            os.truncate(tmp_path / name, 5000)
            with pytest.raises(DataError, match=r"box .* cannot be read: .*but the file has 5000") as caught:
                source.read()
            assert caught.value.box == ((0, 3), (0, 200), (0, 300))


@pytest.mark.parametrize("box", [
    [(0, 3), (0, 10)],
    [(0, 3), (-1, 10), (0, 10)],
    [(0, 3), (0, 201), (0, 10)],
    [(0, 3), (10, 5), (0, 10)],
    [(0, 3), (0.5, 5), (0, 10)],
    [0, 3, 5],
])  # fmt: skip
def test_boxes_that_do_not_fit(tmp_path: Path, box: Any) -> None:
    np.save(tmp_path / "x.npy", PIXELS)
    error = refused(tmp_path / "x.npy", r"box .*(is not within|dims, but the shape|is not one \(start, stop\))", box)
    assert error.box == box


def test_arrays_of_numpy(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", PIXELS)
    data = (tmp_path / "x.npy").read_bytes()
    for length in (5, 20, 200, len(data) - 1):
        (tmp_path / "cut.npy").write_bytes(data[:length])
        refused(tmp_path / "cut.npy", r"truncated|damaged")
    refused(tmp_path / "cut.npy", f"its header says {len(data)} bytes, but the file has {len(data) - 1}")
    np.save(tmp_path / "x.npy", np.array([{}, 1], dtype=object), allow_pickle=True)
    refused(tmp_path / "x.npy", "it holds Python objects, which are only read by running code")
    np.savez(tmp_path / "x.npz", a=np.array([{}, 1], dtype=object))
    refused(tmp_path / "x.npz", "it holds Python objects")
    np.save(tmp_path / "x.npy", np.zeros((3, 4, 5), "U3"))
    refused(tmp_path / "x.npy", "pixels of type <U3 have no type in torch")
    np.save(tmp_path / "x.npy", np.zeros(7))
    refused(tmp_path / "x.npy", "name each dim with axes=")
    np.savez(tmp_path / "x.npz", a=PIXELS, b=PIXELS)
    refused(tmp_path / "x.npz", "it holds several arrays: choose one of a, b with key=")
    data = (tmp_path / "x.npz").read_bytes()
    (tmp_path / "x.npz").write_bytes(data[: len(data) // 2])
    refused(tmp_path / "x.npz", "cannot be opened as NumPy archive", key="a")


def test_nifti(tmp_path: Path) -> None:
    volume = nibabel.Nifti1Image(PIXELS, np.eye(4))
    nibabel.save(volume, tmp_path / "x.nii")
    data = (tmp_path / "x.nii").read_bytes()
    for length in (100, 350, 1000, len(data) - 1):
        (tmp_path / "cut.nii").write_bytes(data[:length])
        refused(tmp_path / "cut.nii", r"truncated|damaged")
    nibabel.save(volume, tmp_path / "x.nii.gz")
    refused(tmp_path / "x.nii.gz", "cannot be read in windows: run `mural convert .*x.nii.gz OUT.ome.zarr` once")
    data = (tmp_path / "x.nii.gz").read_bytes()
    for length in (10, 100, len(data) // 2, len(data) - 4):
        (tmp_path / "cut.nii.gz").write_bytes(data[:length])
        refused(tmp_path / "cut.nii.gz", r"truncated|damaged", whole=True)
        with pytest.raises(DataError, match="cannot be unpacked"):
            mural.data.convert(tmp_path / "cut.nii.gz", tmp_path / "out.zarr")
    assert not (tmp_path / "out.zarr").exists()


def test_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("x.png", "x.jpg"):
        Image.fromarray(np.moveaxis(PIXELS, 0, -1)).save(tmp_path / name)
        data = (tmp_path / name).read_bytes()
        for length in (10, 200, len(data) // 2):
            (tmp_path / f"cut-{name}").write_bytes(data[:length])
            refused(tmp_path / f"cut-{name}", r"truncated|damaged")
    (tmp_path / "cut.png").write_bytes((tmp_path / "x.png").read_bytes()[:-3])
    with pytest.raises(DataError, match="it is truncated"):  # when it is opened
        mural.data.open(tmp_path / "cut.png")
    monkeypatch.setattr(whole, "LIMIT", 100_000)
    refused(tmp_path / "x.png", "can only be decoded all at once, .*: run `mural convert .*x.png OUT.ome.zarr` once")
    with mural.data.open(tmp_path / "x.png", whole=True) as source:
        assert source.read().shape == SHAPE


def test_decoded_pictures_are_kept_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole._recent, "limit", 2 * PIXELS.nbytes)
    for number in range(3):
        Image.fromarray(np.moveaxis(PIXELS, 0, -1)).save(tmp_path / f"{number}.png")
    sources = [mural.data.open(tmp_path / f"{number}.png") for number in range(3)]
    for source in (*sources, sources[2], sources[1], sources[0]):
        source.read([(0, 3), (0, 1), (0, 1)])
    assert [source.counter.tiles_decoded for source in sources] == [2, 1, 1]
    for source in sources:
        source.close()


def test_a_zarr_with_damaged_parts(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", PIXELS)
    path = mural.data.convert(tmp_path / "x.npy", tmp_path / "x.ome.zarr", chunks=(3, 32, 32), shard=(3, 64, 64))
    shard = path / "0" / "c" / "0" / "0" / "0"
    data = shard.read_bytes()
    damaged = bytearray(data)
    damaged[50] ^= 1
    for content in (bytes(damaged), data[:100], b""):
        shard.write_bytes(content)
        error = refused(path, r"box \(\(0, 3\), \(0, 200\), \(0, 300\)\) cannot be read: .*copy or write it again")
        assert error.__cause__ is not None
        with mural.data.open(path) as source:
            source.read([(0, 3), (100, 150), (100, 150)])
    metadata = path / "0" / "zarr.json"
    text = metadata.read_text()
    metadata.write_text(text[:50])
    refused(path, "not valid JSON")
    metadata.write_text(text.replace("zstd", "unheard-of"))
    refused(path, "tensorstore cannot open this Zarr v3 array: .*name a codec that it lacks")
    metadata.unlink()
    refused(path, "its OME metadata name the array '0', which is not there")


def test_options_that_make_no_sense(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", PIXELS)
    refused(tmp_path / "x.npy", "at least one thread", threads=0)
    refused(tmp_path / "x.npy", "read as 'HW', do not make", axes="HW")
    refused(tmp_path / "x.npy", "read as 'CHH', do not make", axes="CHH")
    with pytest.raises(TypeError):
        mural.data.open(tmp_path / "x.npy", axis="CHW")  # type: ignore[call-arg]
