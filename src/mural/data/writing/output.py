"""An output that is written next to its final place, and moved there only when it is complete."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

from mural.data.formats.zarr import short
from mural.errors import WRITING, DataError, reason_of

ZARR, TIFF, NIFTI = (".zarr",), (".tif", ".tiff", ".btf", ".tf8"), (".nii",)


def kind_of(path: Path) -> str:
    """What a path names as an output: "zarr", "tiff" or "nifti", by its ending."""
    name = path.name.lower()
    if name.endswith(ZARR):
        return "zarr"
    if name.endswith(TIFF):
        return "tiff"
    if name.endswith(NIFTI):
        return "nifti"
    raise DataError(
        f"{path}: what is to be written is not known by its name: end it in .ome.zarr or in .tif, or a volume in .nii",
        str(path),
    )


def unwritable(path: Path, error: Exception, what: str = "it", box: object = None) -> DataError:
    """The error of an output that cannot be written, with the remedy where the system gave a reason that has one."""
    remedy = WRITING.get(reason_of(error), "")
    reason = short(error).rstrip(".")
    return DataError(f"{path}: {what} cannot be written: {reason}{remedy and f': {remedy}'}", str(path), box)


class Output:
    """A file or folder under way: `partial` until `finish` gives it its name.

    Whatever ends the process before, nothing is there that looks complete: a name that begins with a dot and ends in
    `.partial`, which no reader takes for an image.
    """

    def __init__(self, path: Path, overwrite: bool, token: str | None = None) -> None:
        self.path, self.overwrite = path, overwrite
        self.token = token or secrets.token_hex(4)
        self.partial = path.with_name(f".{path.name}.{self.token}.partial")
        self.ended = False

    def begin(self) -> None:
        """Check that the place is free."""
        if self.path.exists() and not self.overwrite:
            raise DataError(f"{self.path}: it exists: choose another name, or pass overwrite=True", str(self.path))
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def finish(self) -> None:
        """Give the output its name, in place of what was there before."""
        if self.ended:
            return
        self.ended = True
        if self.path.is_dir():
            # A folder cannot be replaced in one step, so the old one is renamed first.
            old = self.path.with_name(f".{self.path.name}.{self.token}.old.partial")
            os.rename(self.path, old)
            os.rename(self.partial, self.path)
            shutil.rmtree(old)
        else:
            os.replace(self.partial, self.path)

    def abandon(self) -> None:
        """Remove what was written, unless it was finished."""
        if self.ended:
            return
        self.ended = True
        if self.partial.is_dir():
            shutil.rmtree(self.partial, ignore_errors=True)
        elif self.partial.exists():
            self.partial.unlink()
