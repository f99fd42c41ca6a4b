"""Whether autocast is on, and blocks without it; tensors without memory know no autocast."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def is_autocast(device: torch.device) -> bool:
    """Whether calls on that device are cast."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A block in which nothing is cast."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)
