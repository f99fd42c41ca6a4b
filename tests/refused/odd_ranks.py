"""Models and losses that fail on one rank alone."""

from __future__ import annotations

import os
import signal

import torch.nn.functional as F
from torch import Tensor, nn

calls = 0


def raising_on_one() -> nn.Module:
    if os.environ["RANK"] == "1":
        raise RuntimeError("rank 1 has no licence")
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1))


def ending_one(output: Tensor, target: Tensor) -> Tensor:
    """The second call ends rank 1."""
    global calls
    calls += 1
    if calls == 2 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return F.cross_entropy(output, target)


def raising_in_a_step(output: Tensor, target: Tensor) -> Tensor:
    raise ValueError("this step fails")
