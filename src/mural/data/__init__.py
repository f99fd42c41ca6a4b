"""Images on disk: read in boxes, loaded as batches, converted, and written piece by piece."""

from mural.data.augment import Augment
from mural.data.convert import convert
from mural.data.dataset import Dataset
from mural.data.loader import Batch, Loader
from mural.data.memory import ArraySource, ComputedSource
from mural.data.open import open
from mural.data.real import real
from mural.data.samples import Sample
from mural.data.source import Box, Counter, Level, Source
from mural.data.synthetic import synthetic
from mural.data.write import Writer, create
from mural.data.written import write_synthetic

__all__ = [
    "ArraySource",
    "Augment",
    "Batch",
    "Box",
    "ComputedSource",
    "Counter",
    "Dataset",
    "Level",
    "Loader",
    "Sample",
    "Source",
    "Writer",
    "convert",
    "create",
    "open",
    "real",
    "synthetic",
    "write_synthetic",
]
