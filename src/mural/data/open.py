"""Opening an image: the format by its name and its first bytes, and the reader for it."""

from __future__ import annotations

import builtins
import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mural.data.formats.nifti import open_nifti
from mural.data.formats.pillow import kind, open_picture
from mural.data.formats.raster import open_raster
from mural.data.formats.slide import open_slide
from mural.data.formats.stored import FileSource, Options, Reader
from mural.data.formats.tiff import open_tiff
from mural.data.formats.uncompressed import open_npy, open_npz
from mural.data.formats.zarr import open_zarr
from mural.data.loading.pixels import Scaling, scaled
from mural.data.source import Source
from mural.errors import DISTRIBUTION, DataError, reading_hint

HEAD = 352
"""Bytes that tell what a file is."""
TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")


@dataclass(frozen=True)
class Format:
    """A kind of file: the endings of its names, what its first bytes are (None: any), its reader, what that needs."""

    name: str
    title: str
    suffixes: tuple[str, ...]
    begins: Callable[[bytes], bool] | None
    reader: Reader
    needs: tuple[str, str] | None = None
    """A package, and the extra that brings it."""


def is_nifti(head: bytes) -> bool:
    """Whether a file begins as NIfTI 1 or 2 do, or is compressed."""
    return head[344:348] == b"n+1\0" or head[4:8] == b"n+2\0" or head.startswith(b"\x1f\x8b")


FORMATS = (
    Format("tiff", "TIFF", (".tif", ".tiff", ".btf", ".tf8"), lambda head: head.startswith(TIFF), open_tiff),
    Format("zarr", "Zarr folder", (".zarr",), None, open_zarr),
    Format("nifti", "NIfTI", (".nii", ".nii.gz"), is_nifti, open_nifti, ("nibabel", "nifti")),
    Format("npy", "NumPy array", (".npy",), lambda head: head.startswith(b"\x93NUMPY"), open_npy),
    Format("npz", "NumPy archive", (".npz",), lambda head: head.startswith(b"PK"), open_npz),
    Format(
        "picture", "picture", (".png", ".jpg", ".jpeg", ".bmp", ".webp"),
        lambda head: kind(head) is not None, open_picture,
    ),
    Format(
        "openslide", "whole slide",
        (".svs", ".ndpi", ".mrxs", ".scn", ".vms", ".vmu", ".svslide", ".bif", ".czi", ".dcm"),
        None, open_slide, ("openslide", "slides"),
    ),
    Format(
        "rasterio", "raster", (".vrt", ".jp2", ".img", ".ecw", ".hgt", ".grd"), None, open_raster, ("rasterio", "geo"),
    ),
)  # fmt: skip
NAMED = {form.name: form for form in FORMATS}


def open(
    path: str | os.PathLike[str],
    *,
    axes: str | None = None,
    threads: int = 4,
    reader: str | None = None,
    series: int = 0,
    key: str | None = None,
    whole: bool = False,
    scale: Scaling = None,
    mean: Sequence[float] | float | None = None,
    std: Sequence[float] | float | None = None,
) -> Source:
    """The image in a file or Zarr folder, of which boxes can be read: (C, H, W) or (C, D, H, W).

    `axes` names each dim of the file where it does not say itself, or says wrong: C, D, H, W, or S, Z, Y, X. `threads`
    decode the tiles of one read in parallel. `reader` chooses a reader by name instead of by the file's:
    tiff, zarr, nifti, npy, npz, picture, openslide, rasterio. `series` chooses an image of a TIFF or OME-Zarr that
    holds several, `key` an array inside a Zarr folder or .npz. `whole=True` allows files of any size that can only be
    decoded all at once.

    `scale`, `mean` and `std` are those of a run's [data]: with any of them, boxes are read as training reads them, as
    floating numbers. A model takes an image of integers only so: "range" maps them to [0, 1] by the range of their
    type, a number divides them, "none" leaves them. Without, `read` gives what the file holds, as for masks.
    """
    source = open_file(path, Options(axes, threads, reader, series, key, whole))
    if scale is None and mean is None and std is None:
        return source
    return scaled(source, "range" if scale is None else scale, mean, std)


def open_file(path: str | os.PathLike[str], options: Options) -> Source:
    """The image in a file, as the file holds it."""
    where = Path(path).expanduser()
    if options.threads < 1:
        raise DataError(f"{where}: threads={options.threads}: at least one thread has to decode", str(where))
    form = chosen(where, options.reader)
    try:
        return FileSource(where, options, form.reader)
    except DataError as error:
        if error.name:
            raise
        raise DataError(f"{where}: {error}", str(where)) from error.__cause__
    except Exception as error:  # whatever a library raises on a file that is not what it should be
        what = f"{where}: it cannot be opened as {form.title}: {str(error).rstrip('.') or type(error).__name__}"
        hint = reading_hint(error, "it is truncated or damaged: copy or write it again")
        raise DataError(f"{what}{hint and f'. {hint[0].upper()}{hint[1:]}'}", str(where)) from error


def chosen(path: Path, reader: str | None) -> Format:
    """The format of a file; an error where there is none that can be read."""
    if reader is not None and reader not in NAMED:
        raise DataError(f"{path}: there is no reader {reader!r}: choose one of {', '.join(NAMED)}", str(path))
    try:
        there = path.exists()
    except OSError as error:  # a folder above may not be entered
        raise DataError(f"{path}: it cannot be reached: {error.strerror}. Change the permissions", str(path)) from error
    if not there:
        raise DataError(f"{path}: there is no such file or folder", str(path))
    if path.is_dir():
        return folder_format(path, reader)
    head = first_bytes(path)
    if reader is not None:
        return NAMED[reader]
    lower = path.name.lower()
    by_name = next((form for form in FORMATS if lower.endswith(form.suffixes)), None)
    by_head = next((form for form in FORMATS if form.begins is not None and form.begins(head)), None)
    if by_name is None and by_head is not None and not head.startswith((b"PK", b"\x1f\x8b")):
        return by_head
    if by_name is None:
        raise DataError(f"{path}: what it holds is not known by its name or first bytes. {readable()}", str(path))
    if by_name.begins is not None and not by_name.begins(head):
        like = (
            f"it begins like a {by_head.title}: rename it, or pass reader={by_head.name!r}"
            if by_head
            else "it is damaged; or name it after what it is"
        )
        raise DataError(f"{path}: by its name it is a {by_name.title}, but its first bytes are not: {like}", str(path))
    if by_name.name == "zarr":
        raise DataError(f"{path}: a Zarr is a folder, but this is a file", str(path))
    return by_name


def folder_format(path: Path, reader: str | None) -> Format:
    """The format of a folder: Zarr, the only one that is a folder."""
    if reader not in (None, "zarr"):
        raise DataError(f"{path}: it is a folder, which the reader {reader!r} cannot read", str(path))
    return NAMED["zarr"]


def first_bytes(path: Path) -> bytes:
    """The first bytes of a file, or an error where it has none or may not be read."""
    try:
        with builtins.open(path, "rb") as file:
            head = file.read(HEAD)
    except OSError as error:
        raise DataError(
            f"{path}: it cannot be read: {error.strerror}. Change its permissions, or copy it", str(path)
        ) from error
    if not head:
        raise DataError(f"{path}: the file is empty: copy or write it again", str(path))
    return head


def readable() -> str:
    """What can be read here, and what could be with which extra, in one sentence each."""
    here = [form for form in FORMATS if form.needs is None or importlib.util.find_spec(form.needs[0]) is not None]
    titles = {form: f"{form.title} ({', '.join(form.suffixes)})" for form in FORMATS}
    lines = [f"Can be read: {'; '.join(titles[form] for form in here)}."]
    for form in FORMATS:
        if form not in here and form.needs is not None:
            lines.append(f'{titles[form]} needs pip install "{DISTRIBUTION}[{form.needs[1]}]".')
    return " ".join(lines)
