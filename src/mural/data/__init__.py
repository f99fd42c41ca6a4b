"""Images on disk: read in boxes, converted, and written piece by piece."""

from mural.data.convert import convert
from mural.data.open import open
from mural.data.source import Box, Counter, Level, Source
from mural.data.write import Writer, create

__all__ = [
    "Box",
    "Counter",
    "Level",
    "Source",
    "Writer",
    "convert",
    "create",
    "open",
]
