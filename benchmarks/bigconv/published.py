"""The numbers of the document (section 2.2, figures 2 to 5): the largest input that fits, by number of GPUs.

Tsaris and Hinkle, "Distributed Training for High Resolution Images: A Domain and Spatial Decomposition Approach",
Oak Ridge National Laboratory, August 2021. NVIDIA V100 of 16 GB, batch 1, memory as nvidia-smi shows it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from harness.session import ROOMY


@dataclass(frozen=True)
class Plan:
    """How a model is measured, beside what was published for it."""

    dims: int
    step: int
    """Extents are tried in multiples of this."""
    guess: int
    """An extent that should fit on one rank of 16 GiB."""
    toy: int
    """An extent for trying things out."""
    published: dict[int, int]
    """GPUs → largest extent."""
    figure: str = ""

    def steps(self, ranks: int) -> int:
        """The step for that many ranks: a signal grows by as much on each."""
        return self.step * ranks if self.dims == 1 else self.step


MI = 2**20
PLANS = {
    "CNN2D": Plan(2, 256, 5120, 64, {1: 2200, 5: 4000, 10: 6000}, "figure 3"),
    "FCN2D": Plan(2, 128, 2560, 64, {1: 1500, 10: 4500}, "figure 5"),
    "CNN1D": Plan(1, MI, 14 * MI, 4096, {1: 8_000_000, 6: 16_000_000}, "figure 2"),
    "CNN3D": Plan(3, 16, 256, 16, {1: 170, 9: 300, 28: 400}, "figure 4"),
    "DenseNet-121": Plan(2, 128, 1280, 64, {1: 1024}, "section 2"),
    "UNet3D": Plan(3, 16, 128, 16, {}, "announced"),
}


def common_size(measured: Iterable[tuple[int, dict[str, Any]]], cap: int) -> int | None:
    """The extent at which numbers of ranks are compared: the largest that one rank holds with room to spare.

    At the very limit the allocator gives memory back and asks for it again, which takes time that a step does not need.

    >>> common_size([(256, {"reserved": 5}), (512, {"reserved": 8}), (768, {"reserved": 10})], 10)
    512
    """
    return max((size for size, record in measured if record["reserved"] < ROOMY * cap), default=None)
