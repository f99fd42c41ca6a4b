"""Images on disk: read in boxes, converted, and written piece by piece."""

from mural.data.open import open
from mural.data.source import Box, Counter, Level, Source

__all__ = [
    "Box",
    "Counter",
    "Level",
    "Source",
    "open",
]
