"""Which line of a user's code runs, and whether an error is in torch's words or the user's."""

from __future__ import annotations

import linecache
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch

from mural.errors import MuralError
from mural.shard import functions, scripted

OUTSIDE = (str(Path(torch.__file__).parent), str(Path(__file__).parent), scripted.__file__, functions.__file__)
"""The folders of code that is not the user's."""


def frames_of_torch() -> Iterator[FrameType]:
    """The frames from here up to the first that is the user's, which comes last."""
    frame = sys._getframe(1)
    yield frame
    while frame.f_back is not None and frame.f_code.co_filename.startswith(OUTSIDE):
        frame = frame.f_back
        yield frame


def raised_by_torch(error: Exception) -> bool:
    """Whether an error is in torch's words: raised in its folder or by its C++, not by a `raise` of the user's."""
    if not isinstance(error, RuntimeError) or isinstance(error, MuralError):
        return False
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    file = frame.f_code.co_filename
    return file.startswith(OUTSIDE) or not linecache.getline(file, line).strip().startswith("raise")
