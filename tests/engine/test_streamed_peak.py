"""Peak resident memory of a streamed step on the CPU, in a process of its own, next to that of the plain step."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch
import mural
from mural.models import UNet

way, norm, side = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.set_num_threads(2)
torch.manual_seed(1)

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

model = UNet(in_channels=3, classes=2, width=16, depth=4, norm="batch")
if norm == "frozen":
    model.eval()
plan = mural.Plan() if way == "plain" else mural.Plan(stream=(512, 512))
pm = mural.parallelize(model, plan)
pm.step(torch.zeros(1, 3, 64, 64), torch.zeros(1, 64, 64, dtype=torch.long))  # libraries are there from now on
before = peak()
image, mask = torch.rand(1, 3, side, side), torch.zeros(1, side, side, dtype=torch.long)
pm.step(image, mask)
print(peak() - before)
"""


def megabytes(way: str, norm: str, side: int) -> float:
    """What a step adds to the peak of the process."""
    # Freed memory goes back at once, so that the peak is that of what is held.
    env = {**os.environ, "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_MMAP_THRESHOLD_": "65536"}
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, way, norm, str(side)], capture_output=True, text=True, check=True, env=env
    )
    return float(found.stdout.strip().splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["frozen", "training"])
def test_peak_of_a_streamed_step(norm: str) -> None:
    """At 2048², at most a third of the plain step's, the image and the mask included."""
    plain, ours = megabytes("plain", norm, 2048), megabytes("streamed", norm, 2048)
    assert ours <= plain / 3, f"{ours:.0f} MB streamed, {plain:.0f} MB plain"
