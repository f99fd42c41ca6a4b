"""Images, masks and tables of them that are refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import tifffile
from PIL import Image

from refusals import Bad, Made, content, cut_off, edited, refused, several

SIDE = 32
TABLE = "train --folder run --data.table t.csv --launch.device cpu --log.tensorboard off"
DATASET = "train --folder run --data.dataset own.py:make --launch.device cpu --log.tensorboard off"
ZYX = {"photometric": "minisblack", "metadata": {"axes": "ZYX"}}


def stored(name: str, *shape: int, value: float = 0, dtype: Any = np.uint8, **options: Any) -> Made:
    """A TIFF of one value."""
    return lambda folder: tifffile.imwrite(folder / name, np.full(shape, value, dtype), **options)


def mask(value: float, dtype: Any = np.uint8, *shape: int) -> Made:
    """The second mask, of one value."""
    return stored("masks/1.tif", *(shape or (SIDE, SIDE)), value=value, dtype=dtype)


def pictures(*modes: str) -> Made:
    """Pictures instead of images."""

    def made(folder: Path) -> None:
        shutil.rmtree(folder / "images")
        (folder / "images").mkdir()
        for number, mode in enumerate(modes):
            Image.new(mode, (SIDE, SIDE)).save(folder / f"images/{number}.png")

    return made


def with_one_bad_value(value: float) -> Made:
    """Floating images, of which one holds a bad value."""
    draw = np.random.default_rng(0)

    def made(folder: Path) -> None:
        for number in range(2):
            pixels = draw.random((SIDE, SIDE, 3), np.float32)
            pixels[3, 4, 1] = value if number else 0.5
            tifffile.imwrite(folder / f"images/{number}.tif", pixels, photometric="rgb")

    return made


def of_huge_extents(folder: Path) -> None:
    """An image whose header claims a million rows and columns."""
    with tifffile.TiffFile(folder / "images/1.tif", mode="r+b") as file:
        for tag in ("ImageWidth", "ImageLength"):
            file.pages[0].tags[tag].overwrite(1_000_000)


def linked(to: str) -> Made:
    """A link instead of an image."""

    def made(folder: Path) -> None:
        (folder / "images/1.tif").unlink()
        (folder / "images/1.tif").symlink_to(to)

    return made


def scan(folder: Path) -> None:
    """Half of a compressed NIfTI."""
    volume = np.random.default_rng(0).integers(0, 255, (16, 16, 16)).astype(np.uint8)
    nibabel.save(nibabel.Nifti1Image(volume, np.eye(4)), folder / "a.nii.gz")
    cut_off("a.nii.gz")(folder)


def repeated(folder: Path) -> None:
    """Two images of one name."""
    (folder / "more").mkdir()
    shutil.copy(folder / "images/0.tif", folder / "more/0.tif")


def renamed(old: str, new: str) -> Made:
    return lambda folder: (folder / old).rename(folder / new)


def folder(name: str) -> Made:
    return lambda folder: (folder / name).mkdir()


def table(text: str) -> Made:
    return content("t.csv", text)


def own(text: str) -> Made:
    return content("own.py", text)


EMPTY = several(stored("masks/0.tif", SIDE, SIDE), mask(0))
BOTH = '["masks/0.tif", "masks/1.tif"]'

IMAGES = [
    Bad("no file matches", "--data.images 'slides/*.tif'", "the folder 'slides' does not exist"),
    Bad("another ending", "--data.images 'images/*.tiff'", "look into 'images' and correct the pattern"),
    Bad("a glob of several that matches nothing", "--data.images '[\"images/*.tif\", \"x/*.tif\"]'", "'x/*.tif'"),
    Bad("a file of several that is not there", "--data.images '[\"images/0.tif\", \"x.tif\"]'", "x.tif: there is no"),
    Bad("an empty list", "--data.images '[]' --data.masks '[]'", "needs at least one sample"),
    Bad("a truncated TIFF", "", ("images/1.tif", "but the file has", "it is truncated"), cut_off("images/1.tif")),
    Bad("an empty image", "", "images/1.tif: the file is empty: copy", content("images/1.tif", b"")),
    Bad("a text", "", "by its name it is a TIFF, but its first bytes are not", content("images/1.tif", "text")),
    Bad("an alpha channel", "--data.images 'images/*.png'", "1.png: has 4 channels", pictures("RGB", "RGBA")),
    Bad(
        "sizes that differ", "", "set data.batch = 1, or cut all to one size by data.crop = [32, 32]",
        several(stored("images/1.tif", 48, 48, 3, photometric="rgb"), stored("masks/1.tif", 48, 48)),
    ),
    Bad("dims that differ", "", ("(32, 32)", "(5, 32, 32)"), stored("images/1.tif", 5, SIDE, SIDE, **ZYX)),
    Bad("another type", "", "uint16", stored("images/1.tif", SIDE, SIDE, 3, dtype=np.uint16, photometric="rgb")),
    Bad("not a number", "", "the image was the first that is not finite", with_one_bad_value(np.nan), begun=True),
    Bad("an infinite value", "", ("images/1.tif", "the image was the first"), with_one_bad_value(np.inf), begun=True),
    Bad("huge extents in a header", "", ("images/1.tif", "it is truncated"), of_huge_extents),
    Bad("a folder", "", "no image for the masks '1'", several(renamed("images/1.tif", "x"), folder("images/1.tif"))),
    Bad("an empty folder", "--data.images empty", "nothing matches 'empty'", folder("empty")),
    Bad("a link to itself", "", "'images/1.tif' is a link to '1.tif', which leads nowhere", linked("1.tif")),
    Bad("a link to nothing", "", "'images/1.tif' is a link to 'x.tif', which leads nowhere", linked("x.tif")),
    Bad("a compressed NIfTI", "--data.images a.nii.gz --data.masks a.nii.gz", "run `mural convert a.nii.gz", scan),
    Bad("half a NIfTI", "convert a.nii.gz a.ome.zarr", ("a.nii.gz", "cannot be unpacked"), scan),
    Bad("an empty Zarr", "--data.images a.zarr --data.masks a.zarr", "is a folder, but no Zarr", folder("a.zarr")),
    Bad("a level that there is not", "--data.level 3", "level 3 was asked for, but the levels are 0 to 0"),
    Bad("a name twice", "--data.images '[\"images/*.tif\", \"more/*.tif\"]'", "images are called '0'", repeated),
]  # fmt: skip

TABLES = [
    Bad("a table that is not there", TABLE, "t.csv: the CSV file cannot be read (No such file or directory)"),
    Bad("a binary table", TABLE, "it is not a text in UTF-8, at byte 0", content("t.csv", b"\xff\xfe")),
    Bad("a table without lines", TABLE, "write at least one line", table("image,mask\n")),
    Bad("another column", TABLE, "no column 'image' among ['picture']", table("picture\na.tif\n")),
    Bad("an image that is not there", TABLE, "x.tif: there is no such file", table("image,label\nx.tif,1\n")),
    Bad("a label that is a word", TABLE, ("line 2: the label 'cat'", "data.classes"), table("image,label\na,cat\n")),
    Bad("a dataset that is a number", DATASET, "gave a int: return something with len()", own("make = int")),
    Bad("an empty dataset", DATASET, "there is nothing to train on", own("make = list")),
    Bad("a dataset that raises", DATASET, "division by zero (own.py, line 2)", own("def make():\n    1 / 0\n")),
    Bad("a sample of another kind", DATASET, "sample 0 of list is of type int", own("def make():\n    return [1]\n")),
]  # fmt: skip

MASKS = [
    Bad("none", "", "set data.masks", edited('masks = "masks/*.tif"', "")),
    Bad("none of held-out images", "--validation.images 'images/*.tif'", "the images have no masks and no labels"),
    Bad("one is missing", "", "no mask for the images '1'", lambda f: (f / "masks/1.tif").unlink()),
    Bad("one too many", "", "no image for the masks '2'", stored("masks/2.tif", SIDE, SIDE)),
    Bad("one of another name", "", "no image for the masks 'one'", renamed("masks/1.tif", "masks/one.tif")),
    Bad("two for one image", f"--data.images '[\"images/0.tif\"]' --data.masks '{BOTH}'", "1 images were given with 2"),
    Bad("another size", "", "the mask has the spatial extents (16, 32)", mask(0, np.uint8, 16, 32)),
    Bad("a class too many", "", ("the mask holds the value 5", "give the model 6 classes"), mask(5), begun=True),
    Bad("a negative class", "", ("the mask holds the value -1", "ignore_index = -1"), mask(-1, np.int16), begun=True),
    Bad("fractions", "", "the mask holds fractions, which are not classes", mask(0.5, np.float32), begun=True),
    Bad("0 and 255", "", "data.labels = {255 = 1}", mask(255), begun=True),
    Bad("three channels", "", "the mask has 3 channels", stored("masks/1.tif", SIDE, SIDE, 3, photometric="rgb")),
    Bad("all is ignored", "--loss.arguments 'ignore_index = 0'", "no position counts: all masks", EMPTY, begun=True),
    Bad("without images", "train --data.masks 'masks/*.tif'", "data.masks were given without data.images: set these"),
    Bad("half a mask", "", ("masks/1.tif", "it is truncated"), cut_off("masks/1.tif")),
    Bad("classes for values", "--loss.name mse", 'masks need 2 channels, with data.mask = "channels"'),
    Bad("values for classes", "--data.mask values", 'set data.mask = "classes"'),
    Bad("labels for a segmenter", TABLE, "give masks (data.masks), or", table("image,label\nimages/0.tif,1\n")),
    Bad(
        "padding that counts", "--data.multiple 64 --loss.name own.py:loss", "the loss would count the padding",
        own("def loss(output, target): return (output[:, 1] - target).abs().mean()\n"), begun=True,
    ),
]  # fmt: skip


@pytest.mark.parametrize("bad", IMAGES, ids=str)
def test_an_image_is_refused(bad: Bad, tmp_path: Path) -> None:
    refused(bad, tmp_path)


@pytest.mark.parametrize("bad", TABLES, ids=str)
def test_a_table_of_images_is_refused(bad: Bad, tmp_path: Path) -> None:
    refused(bad, tmp_path)


@pytest.mark.parametrize("bad", MASKS, ids=str)
def test_a_mask_is_refused(bad: Bad, tmp_path: Path) -> None:
    refused(bad, tmp_path)
