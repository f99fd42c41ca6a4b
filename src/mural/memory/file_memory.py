"""Host memory in files: for what has no room in the host's own."""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

import torch

from mural.errors import PlanError


class FileMemory:
    """Memory in a file without a name: the system keeps what it can, writes the rest, and frees it with the process."""

    def __init__(self, size: int, folder: Path):
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                os.posix_fallocate(file.fileno(), 0, size)  # a full disk is found here, not while bytes are written
                area = mmap.mmap(file.fileno(), size)
        except OSError as error:
            raise PlanError(
                f"offload_folder = {str(folder)!r}: no file of {size:,} bytes can be made there ({error.strerror}); "
                f"name a folder that exists and has room"
            ) from error
        with torch.inference_mode(False):
            self.memory = torch.frombuffer(area, dtype=torch.uint8)
