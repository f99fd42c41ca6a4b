"""Images on disk: read in boxes, loaded as batches, converted, and written piece by piece."""

from mural.data.image_sample import Sample
from mural.data.loading.augment import Augment
from mural.data.loading.batches import Batch
from mural.data.loading.image_sampler import ImageSampler
from mural.data.loading.loader import Loader
from mural.data.loading.pixels import scaled
from mural.data.open import open
from mural.data.sets.dataset import Dataset
from mural.data.sets.memory_sources import ArraySource, ComputedSource
from mural.data.sets.real_images import real
from mural.data.sets.synthetic import synthetic, write_synthetic
from mural.data.source import Box, Counter, Level, Source
from mural.data.writing.convert import convert
from mural.data.writing.write import Writer, create

__all__ = [
    "ArraySource",
    "Augment",
    "Batch",
    "Box",
    "ComputedSource",
    "Counter",
    "Dataset",
    "ImageSampler",
    "Level",
    "Loader",
    "Sample",
    "Source",
    "Writer",
    "convert",
    "create",
    "open",
    "real",
    "scaled",
    "synthetic",
    "write_synthetic",
]
