"""Preflight: every file of a dataset is opened before a run, so that the run does not lose work to what was wrong before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mural.comm import Mesh
from mural.data.agree import greatest, said
from mural.data.pixels import Pixels
from mural.data.reading import sources_of
from mural.data.samples import Samples, name_at, sample_at
from mural.data.shelf import Shelf
from mural.data.source import level_of
from mural.data.types import BadSample
from mural.errors import DataError

SHOWN = 10
