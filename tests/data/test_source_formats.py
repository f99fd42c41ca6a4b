"""What the files of other libraries look like as sources: axes, levels, series, palettes, scaled values."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import imagecodecs
import nibabel
import numpy as np
import pytest
import tifffile
import torch
import zarr
from PIL import Image

import mural.data
from mural.errors import DataError


def pixels(*shape: int, dtype: str = "uint8") -> np.ndarray:
    return np.random.default_rng(0).integers(0, 250, shape).astype(dtype)


def read(path: Path, level: int = 0, **options: Any) -> np.ndarray:
    with mural.data.open(path, **options) as source:
        found = source.read(level=level)
        assert tuple(found.shape) == source.levels[level].shape
        return found.numpy()


def same(path: Path, expected: np.ndarray, level: int = 0, **options: Any) -> None:
    found = read(path, level, **options)
    assert found.shape == expected.shape
    assert np.array_equal(found, expected)


@pytest.mark.parametrize(("shape", "letters", "order"), [
    ((40, 50), "YX", None),
    ((5, 40, 50), "ZYX", None),
    ((2, 5, 40, 50), "CZYX", (0, 1, 2, 3)),
    ((5, 2, 40, 50), "ZCYX", (1, 0, 2, 3)),
])  # fmt: skip
def test_ome_tiff_says_its_axes(tmp_path: Path, shape: tuple[int, ...], letters: str, order: Any) -> None:
    data = pixels(*shape, dtype="uint16")
    for name in ("x.ome.tif", "x.tif"):
        tifffile.imwrite(tmp_path / name, data, photometric="minisblack", metadata={"axes": letters}, compression="lzw")
        same(tmp_path / name, data.transpose(order) if order else data[None])


def test_imagej_stacks(tmp_path: Path) -> None:
    data = pixels(7, 2, 40, 50, dtype="uint16")
    tifffile.imwrite(tmp_path / "x.tif", data, imagej=True, metadata={"axes": "ZCYX"})
    same(tmp_path / "x.tif", data.transpose(1, 0, 2, 3))


def test_pages_without_names_are_depth_unless_they_are_few(tmp_path: Path) -> None:
    many, few = pixels(20, 40, 50), pixels(3, 40, 50)
    for data, expected in ((many, many[None]), (few, few)):
        for options in ({}, {"metadata": None}, {"compression": "zlib"}):
            tifffile.imwrite(tmp_path / "x.tif", data, photometric="minisblack", **options)
            same(tmp_path / "x.tif", expected)
    same(tmp_path / "x.tif", few[None], axes="ZYX")
    tifffile.imwrite(tmp_path / "x.tif", many, photometric="minisblack")
    same(tmp_path / "x.tif", many, axes="CYX")


def test_a_stack_with_one_directory_for_all_pages(tmp_path: Path) -> None:
    data = pixels(9, 40, 50, dtype="uint16")
    tifffile.imwrite(tmp_path / "x.tif", data, photometric="minisblack", truncate=True)
    same(tmp_path / "x.tif", data[None])


def test_several_dims_of_channels_become_one(tmp_path: Path) -> None:
    data = pixels(2, 40, 50, 3)
    path = tmp_path / "x.ome.tif"
    tifffile.imwrite(path, data, photometric="rgb", metadata={"axes": "CYXS"}, tile=(16, 16), compression="lzw")
    expected = data.transpose(0, 3, 1, 2).reshape(6, 40, 50)
    same(path, expected)
    with mural.data.open(path) as source:
        assert np.array_equal(source.read([(1, 5), (3, 20), (7, 30)]).numpy(), expected[1:5, 3:20, 7:30])


def test_time_has_to_be_named(tmp_path: Path) -> None:
    data = pixels(4, 5, 40, 50)
    tifffile.imwrite(tmp_path / "x.ome.tif", data, photometric="minisblack", metadata={"axes": "TZYX"})
    with pytest.raises(DataError, match=r"dims TZYX of shape \(4, 5, 40, 50\).*axes='CCHW'"):
        mural.data.open(tmp_path / "x.ome.tif")
    same(tmp_path / "x.ome.tif", data, axes="CZYX")
    same(tmp_path / "x.ome.tif", data.reshape(20, 40, 50), axes="CCYX")


def test_volumes_with_tiles_in_depth(tmp_path: Path) -> None:
    data = pixels(20, 40, 50)
    tifffile.imwrite(
        tmp_path / "x.tif", data, volumetric=True, tile=(16, 16, 32), photometric="minisblack", compression="zlib"
    )
    same(tmp_path / "x.tif", data[None])


@pytest.mark.parametrize("nested", [True, False])
def test_levels_of_a_tiff(tmp_path: Path, nested: bool) -> None:
    data = pixels(200, 300, 3)
    path = tmp_path / "x.tif"
    options: dict[str, Any] = {"tile": (64, 64), "photometric": "rgb", "compression": "zlib"}
    with tifffile.TiffWriter(path, bigtiff=nested, ome=nested) as file:
        for level in range(3):
            place = {"subifds": 2} if nested and level == 0 else {"subfiletype": int(level > 0)}
            more = {} if nested else {"metadata": None}
            file.write(data[:: 2**level, :: 2**level], **place, **more, **options)
    with mural.data.open(path) as source:
        assert [level.shape for level in source.levels] == [(3, 200, 300), (3, 100, 150), (3, 50, 75)]
        assert [level.downsample for level in source.levels] == [(1, 1, 1), (1, 2, 2), (1, 4, 4)]
    for level in range(3):
        same(path, data[:: 2**level, :: 2**level].transpose(2, 0, 1), level)
    with pytest.raises(DataError, match="level 3 was asked for, but the levels are 0 to 2"):
        read(path, 3)


def test_series_of_a_tiff(tmp_path: Path) -> None:
    first, second = pixels(40, 50), pixels(3, 7, 90, dtype="float32")
    with tifffile.TiffWriter(tmp_path / "x.tif") as file:
        file.write(first, photometric="minisblack")
        file.write(second, photometric="minisblack")
    same(tmp_path / "x.tif", first[None])
    same(tmp_path / "x.tif", second, series=1)
    with pytest.raises(DataError, match="series 2 was asked for, but the file's series are 0: YX"):
        mural.data.open(tmp_path / "x.tif", series=2)


def test_a_set_of_ome_tiff_files(tmp_path: Path) -> None:
    data = pixels(2, 40, 50)
    for name, plane in zip("ab", data, strict=True):
        tifffile.imwrite(
            tmp_path / f"{name}.ome.tif", plane, photometric="minisblack", metadata=None, compression="zlib"
        )
    planes = "".join(
        f'<TiffData FirstC="{c}" FirstZ="0" FirstT="0" IFD="0" PlaneCount="1">'
        f'<UUID FileName="{n}.ome.tif">urn:uuid:{c}</UUID></TiffData>'
        for c, n in enumerate("ab")
    )
    text = (
        '<?xml version="1.0"?><OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06" UUID="urn:uuid:0">'
        '<Image ID="Image:0"><Pixels ID="Pixels:0" DimensionOrder="XYZCT" Type="uint8" SizeX="50" SizeY="40" SizeZ="1" '
        f'SizeC="2" SizeT="1"><Channel ID="c:0"/><Channel ID="c:1"/>{planes}</Pixels></Image></OME>'
    )
    tifffile.imwrite(
        tmp_path / "a.ome.tif", data[0], photometric="minisblack", description=text, metadata=None, compression="zlib"
    )
    same(tmp_path / "a.ome.tif", data)


def test_sparse_tiles_are_fill(tmp_path: Path) -> None:
    rasterio = pytest.importorskip("rasterio")
    path = tmp_path / "x.tif"
    form = {"driver": "GTiff", "width": 128, "height": 96, "count": 1, "dtype": "uint8", "tiled": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rasterio.errors.NotGeoreferencedWarning)
        with rasterio.open(path, "w", **form, blockxsize=32, blockysize=32, sparse_ok=True, compress="lzw") as file:
            file.write(np.full((1, 32, 32), 7, np.uint8), window=((32, 64), (32, 64)))
    expected = np.zeros((1, 96, 128), np.uint8)
    expected[:, 32:64, 32:64] = 7
    same(path, expected)
    with mural.data.open(path) as source:
        source.read()
        assert source.counter.tiles_decoded == 1


def test_a_bilevel_tiff_is_bool(tmp_path: Path) -> None:
    data = pixels(40, 50) > 120
    tifffile.imwrite(tmp_path / "x.tif", data, photometric="minisblack")
    same(tmp_path / "x.tif", data[None])


@pytest.mark.parametrize("reader", ["rasterio", "openslide", None])
@pytest.mark.parametrize("compression", ["jpeg", "zlib"])
def test_other_libraries_read_the_same_tiled_tiff(tmp_path: Path, reader: str | None, compression: str) -> None:
    path = tmp_path / "x.tif"
    soft = np.clip(np.add.outer(np.arange(200), np.arange(300)) // 3, 0, 255).astype(np.uint8)
    tifffile.imwrite(
        path, np.stack([soft] * 3, -1), tile=(64, 64), photometric="rgb", compression=compression, metadata=None
    )
    expected = np.moveaxis(tifffile.imread(path), -1, 0)
    with mural.data.open(path, reader=reader) as source:
        assert source.shape == (3, 200, 300)
        assert source.chunks == (3, 64, 64)
        for box in (((0, 3), (10, 150), (33, 290)), ((1, 2), (0, 200), (64, 128))):
            found = source.read(box).numpy().astype(int)
            # Decoders of JPEG differ by a level of rounding; of anything else, not at all.
            assert np.abs(found - expected[tuple(slice(*p) for p in box)]).max() <= (3 if compression == "jpeg" else 0)
        assert source.counter.tiles_decoded == 3 * 5 + 4 * 1


def test_overviews_are_levels(tmp_path: Path) -> None:
    rasterio = pytest.importorskip("rasterio")
    path, data = tmp_path / "x.tif", pixels(3, 200, 300)
    form = {"driver": "GTiff", "width": 300, "height": 200, "count": 3, "dtype": "uint8", "tiled": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rasterio.errors.NotGeoreferencedWarning)
        with rasterio.open(path, "w", **form, blockxsize=64, blockysize=32, compress="deflate") as file:
            file.write(data)
        with rasterio.open(path, "r+") as file:
            file.build_overviews([2, 4])
        with rasterio.open(path, overview_level=1) as file:
            coarse = file.read()
    for reader in ("rasterio", "tiff"):
        same(path, data, reader=reader)
        same(path, coarse, 2, reader=reader)


def multiscale(path: Path, data: np.ndarray, names: str, version: int) -> None:
    """An OME-Zarr image of two levels, by zarr-python."""
    group = zarr.open_group(path, mode="w", zarr_format=version)
    for level in range(2):
        part = data[..., :: 2**level, :: 2**level]
        chunks = tuple(min(16, n) for n in part.shape)
        array = group.create_array(str(level), shape=part.shape, chunks=chunks, dtype=part.dtype)
        array[...] = part
    scales = [{"type": "scale", "scale": [1.0] * data.ndim}]
    datasets = [{"path": str(level), "coordinateTransformations": scales} for level in range(2)]
    kinds = {"t": "time", "c": "channel"}
    axes = [{"name": n, "type": kinds.get(n, "space")} for n in names]
    scale = {"axes": axes, "datasets": datasets, "version": "0.4"}
    group.attrs.update(
        {"multiscales": [scale]} if version == 2 else {"ome": {"version": "0.5", "multiscales": [scale]}}
    )


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize(("names", "shape", "order"), [
    ("yx", (40, 60), None),
    ("cyx", (2, 40, 60), (0, 1, 2)),
    ("zyx", (9, 40, 60), None),
    ("zyx", (1, 40, 60), None),
    ("czyx", (2, 9, 40, 60), (0, 1, 2, 3)),
    ("tczyx", (1, 3, 1, 40, 60), "plane"),
    ("tczyx", (1, 3, 5, 40, 60), "volume"),
])  # fmt: skip
def test_ome_zarr(tmp_path: Path, version: int, names: str, shape: tuple[int, ...], order: Any) -> None:
    data = pixels(*shape, dtype="uint16")
    multiscale(tmp_path / "x.ome.zarr", data, names, version)

    def expected(part: np.ndarray) -> np.ndarray:
        if order == "plane":
            return part[0, :, 0]
        return part[0] if order == "volume" else part if order else part[None]

    for level in range(2):
        same(tmp_path / "x.ome.zarr", expected(data[..., :: 2**level, :: 2**level]), level)


def test_zarr_below_a_group(tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "x.zarr", mode="w")
    data = pixels(3, 40, 60)
    array = group.create_array("images/first", shape=data.shape, chunks=(3, 16, 16), dtype=data.dtype)
    array[...] = data
    with pytest.raises(DataError, match="choose one of images/first with key="):
        mural.data.open(tmp_path / "x.zarr")
    same(tmp_path / "x.zarr", data, key="images/first")
    same(tmp_path / "x.zarr" / "images" / "first", data)


def test_chunks_that_are_not_there_are_fill(tmp_path: Path) -> None:
    array = zarr.create_array(tmp_path / "x.zarr", shape=(1, 40, 60), chunks=(1, 16, 16), dtype="int16", fill_value=-3)
    array[:, :16, :16] = 5
    expected = np.full((1, 40, 60), -3, np.int16)
    expected[:, :16, :16] = 5
    same(tmp_path / "x.zarr", expected)


def test_scaled_nifti_is_what_nibabel_gives(tmp_path: Path) -> None:
    image = nibabel.Nifti1Image(np.random.default_rng(0).standard_normal((9, 10, 11)), np.eye(4))
    image.set_data_dtype(np.int16)
    for name in ("x.nii", "x.nii.gz"):
        nibabel.save(image, tmp_path / name)
        expected = np.asarray(nibabel.load(tmp_path / name).dataobj)
        same(tmp_path / name, expected[None], whole=True)
        same(tmp_path / name, expected.transpose(2, 1, 0)[None], whole=True, axes="XYZ")


def test_arrays_of_numpy_are_channels_first_unless_the_last_dim_alone_is_short(tmp_path: Path) -> None:
    for shape, order in (
        ((40, 50), None),
        ((3, 40, 50), (0, 1, 2)),
        ((40, 50, 3), (2, 0, 1)),
        ((9, 40, 50), (0, 1, 2)),
    ):
        data = pixels(*shape)
        np.save(tmp_path / "x.npy", data)
        same(tmp_path / "x.npy", data.transpose(order) if order else data[None])
    same(tmp_path / "x.npy", data[None], axes="DHW")
    np.savez(tmp_path / "x.npz", first=data, second=data[:2])
    same(tmp_path / "x.npz", data, key="first")
    np.savez_compressed(tmp_path / "x.npz", first=data)
    same(tmp_path / "x.npz", data)


def test_a_palette_gives_its_indices(tmp_path: Path) -> None:
    data = pixels(40, 50) % 5
    picture = Image.fromarray(data)
    picture.putpalette(list(range(15)))
    picture.save(tmp_path / "x.png")
    with Image.open(tmp_path / "x.png") as saved:
        assert saved.mode == "P"
    same(tmp_path / "x.png", data[None])


@pytest.mark.parametrize("channels", [2, 3, 4])
def test_colours_of_16_bits_keep_them(tmp_path: Path, channels: int) -> None:
    data = pixels(40, 50, channels, dtype="uint16") * 259
    (tmp_path / "x.png").write_bytes(imagecodecs.png_encode(data))
    same(tmp_path / "x.png", data.transpose(2, 0, 1))


def test_other_pictures(tmp_path: Path) -> None:
    data = pixels(40, 50, 3)
    for name, options in (("x.bmp", {}), ("x.webp", {"lossless": True}), ("x.jpg", {})):
        Image.fromarray(data).save(tmp_path / name, **options)
        with Image.open(tmp_path / name) as saved:
            expected = np.asarray(saved)
        assert name == "x.jpg" or np.array_equal(expected, data)
        same(tmp_path / name, expected.transpose(2, 0, 1))
    (tmp_path / "x.jpg").rename(tmp_path / "no-name")
    same(tmp_path / "no-name", expected.transpose(2, 0, 1))


def test_level_one_of_a_slide(tmp_path: Path) -> None:
    data = pixels(128, 192, 3)
    path = tmp_path / "x.tif"
    with tifffile.TiffWriter(path) as file:
        for level in range(2):
            part = data[:: 2**level, :: 2**level]
            file.write(part, tile=(32, 32), photometric="rgb", subfiletype=level, metadata=None)
    same(path, data[::2, ::2].transpose(2, 0, 1), 1, reader="openslide")


CORE = """
import sys
for name in ("zarr", "nibabel", "pydantic", "plotly", "rasterio", "openslide"):
    sys.modules[name] = None
import json, numpy as np, torch, mural.data
from mural.errors import DataError
folder = sys.argv[1]
data = np.arange(3 * 40 * 50, dtype=np.uint8).reshape(3, 40, 50)
np.save(f"{folder}/x.npy", data)
for name in ("x.ome.zarr", "x.tif"):
    path = mural.data.convert(f"{folder}/x.npy", f"{folder}/{name}")
    assert np.array_equal(mural.data.open(path).read().numpy(), data)
with mural.data.create(f"{folder}/y.zarr", (3, 40, 50), torch.uint8) as writer:
    writer.write([(0, 3), (0, 40), (0, 50)], torch.from_numpy(data))
assert np.array_equal(mural.data.open(f"{folder}/y.zarr").read().numpy(), data)
said = []
heads = {"a.nii": bytes(344) + b"n+1" + bytes(20), "a.svs": b"II*", "a.jp2": b"jp", "a.what": b"what"}
for name, head in heads.items():
    open(f"{folder}/{name}", "wb").write(head)
    try:
        mural.data.open(f"{folder}/{name}")
    except DataError as error:
        said.append(str(error))
print(json.dumps(said))
"""


def test_the_core_needs_no_optional_package(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CORE, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    nifti, slide, raster, unknown = json.loads(done.stdout)
    assert f'{tmp_path}/a.nii: this file needs the package nibabel: pip install "mural-train[nifti]"' in nifti
    assert 'pip install "mural-train[slides]"' in slide
    assert 'pip install "mural-train[geo]"' in raster
    assert all(f'needs pip install "mural-train[{extra}]"' in unknown for extra in ("nifti", "slides", "geo"))


def test_nothing_is_drawn_from_torch_when_files_are_made(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    mural.data.create(tmp_path / "x.zarr", (1, 8, 8), "uint8").close()
    assert torch.equal(before, torch.get_rng_state())
