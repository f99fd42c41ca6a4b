"""Pictures (PNG, JPEG, BMP, WebP) through Pillow: no windows in the file, so decoded whole."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageFile

from mural.data.formats.axes import resolved
from mural.data.formats.dtypes import Array
from mural.data.formats.stored import OpenedFile, Options
from mural.data.formats.whole import WholeArray
from mural.errors import DataError

MAGIC = {
    b"\x89PNG\r\n\x1a\n": "PNG",
    b"\xff\xd8\xff": "JPEG",
    b"BM": "BMP",
    b"RIFF": "WEBP",
}
# Pillow's modes: the type of the pixels, and how many channels. A palette's pixels are its indices.
MODES = {
    "1": ("bool", 1), "L": ("uint8", 1), "P": ("uint8", 1), "I;16": ("uint16", 1), "I;16B": ("uint16", 1),
    "I": ("int32", 1), "F": ("float32", 1), "LA": ("uint8", 2), "RGB": ("uint8", 3), "YCbCr": ("uint8", 3),
    "RGBA": ("uint8", 4), "RGBX": ("uint8", 4), "CMYK": ("uint8", 4),
}  # fmt: skip


def kind(head: bytes) -> str | None:
    """Pillow's name of the format that a file begins like.

    >>> kind(b"BM6"), kind(b"II*")
    ('BMP', None)
    """
    return next((name for magic, name in MAGIC.items() if head.startswith(magic)), None)


def format_of(path: Path) -> str | None:
    """Pillow's name of a file's format."""
    with path.open("rb") as file:
        return kind(file.read(16))


def decoder(path: Path) -> ImageFile.ImageFile:
    """Pillow's object of a file, without its limit on the number of pixels: mural has one of its own, in bytes."""
    name = format_of(path)
    if name is None:
        raise DataError(
            f"{path}: it does not begin like any picture of {', '.join(sorted(set(MAGIC.values())))}", str(path)
        )
    Image.init()
    factory: Any = Image.OPEN[name][0]
    return factory(str(path), str(path))


def open_picture(path: Path, options: Options) -> OpenedFile:
    """A picture, as its pixels are stored: no palette, orientation or colour profile is applied."""
    with decoder(path) as picture:
        (width, height), mode = picture.size, picture.mode
    if mode not in MODES:
        raise DataError(
            f"{path}: pixels of Pillow's mode {mode!r} are not read: save it as one of {', '.join(MODES)}", str(path)
        )
    name, channels = MODES[mode]
    deep = None
    if format_of(path) == "PNG":
        check_chunks(path)
        deep = deep_channels(path)
        name, channels = ("uint16", deep) if deep else (name, channels)

    def load() -> Array:
        if deep:
            import imagecodecs  # noqa: PLC0415 (not on every machine, and only such pictures need it)

            return imagecodecs.png_decode(path.read_bytes()).reshape(height, width, channels)
        with decoder(path) as image:
            return np.asarray(image, np.dtype(name)).reshape(height, width, channels)

    whole = WholeArray(str(path), (height, width, channels), np.dtype(name), load, options.whole)
    return OpenedFile((whole,), resolved(str(path), "YXS", whole.shape, options.axes), whole.close)


def deep_channels(path: Path) -> int | None:
    """The channels of a PNG with colours of 16 bits, of which Pillow keeps only the upper half; None for any other."""
    with path.open("rb") as file:
        bits, colour = file.read(26)[24:]  # of the first chunk, after width and height
    return {2: 3, 4: 2, 6: 4}.get(colour) if bits == 16 else None


def check_chunks(path: Path) -> None:
    """Raise where a PNG ends before its last chunk does."""
    size = path.stat().st_size
    with path.open("rb") as file:
        at = file.seek(8)
        while True:
            head = file.read(8)
            at += 12 + (struct.unpack(">I", head[:4])[0] if len(head) == 8 else 0)
            if at > size:
                raise DataError(
                    f"{path}: its parts need {at} bytes or more, but the file has {size}: it is truncated; "
                    "copy or write it again",
                    str(path),
                )
            if head[4:] == b"IEND":
                return
            file.seek(at)
