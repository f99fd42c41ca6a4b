"""One rank of a team: makes the U-Net parallel as a way says, and runs steps on images of some side."""

from __future__ import annotations

import faulthandler
import gc
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from agreement import difference
from harness.problem import noise
from harness.worker import Rank
from nets import NETS
from torch import Tensor

import mural
from mural.plans import Plan

CHANNELS = 3
PATIENCE = 40.0
"""Seconds after which steps that are not done print where they are."""


class Picture:
    """An endless image, or its mask, of some side, made on the device piece by piece; a rank keeps what it took."""

    def __init__(self, side: int, device: torch.device, mask: bool = False) -> None:
        self.device, self.mask = device, mask
        self.shape = (1 if mask else CHANNELS, side, side)
        self.taken: dict[Any, Tensor] = {}

    def read(self, box: Any) -> Tensor:
        """That box."""
        place = tuple(tuple(span) for span in box)
        if place not in self.taken:
            found = noise(place[0][1], place[1:], self.device, torch.float32)[0]
            self.taken[place] = (found > 0).long() if self.mask else found
        return self.taken[place]


class Splitter(Rank):
    """A rank whose model is divided; `pm` is None where it runs as plain torch."""

    def divide(self, net: str, plan: dict[str, Any] | None, aim: int) -> dict[str, Any]:
        """Make the model ready; what this rank holds of it."""
        self.pm = self.model = None
        self.meter.reset()
        with self.device:
            self.model = NETS[net].build()
        if plan is not None:
            image = (CHANNELS, aim, aim) if aim else None
            self.pm = mural.parallelize(self.model, Plan(**plan), loss=F.cross_entropy, image=image)
        held: Any = self.pm if self.pm is not None else self.model
        sites = list(self.pm.division.sites) if hasattr(self.pm, "division") else []
        words = self.pm.world_mesh.transport.describe() if self.pm is not None else "plain torch"
        return {"parameters": sum(p.numel() for p in held.parameters()), "sites": sites, "messages": words}

    def steps(self, side: int, images: int, repeats: int, budget: float) -> dict[str, Any]:
        """Peaks of memory of the second step on images of that side, and the times of some more, for each image."""
        pictures = [Picture(side, self.device) for _ in range(images)]
        masks = [Picture(side, self.device, mask=True) for _ in range(images)]
        self.meter.reset()
        faulthandler.dump_traceback_later(PATIENCE, file=sys.stderr)
        try:
            warm = self.timed(pictures, masks)
            self.note(f"the first step at {side}² took {warm:.2f} s")
            self.meter.reset()
            loss = float(self.step(pictures, masks))
            found = {**self.meter.peaks(), "loss": loss}
            self.note("the second step is done")
            first = self.timed(pictures, masks) if repeats else 0.0
            more = self.agreed(min(repeats - 1, int((budget - first) / first))) if repeats else 0
            seconds = [first, *(self.timed(pictures, masks) for _ in range(more))] if repeats else []
        finally:
            faulthandler.cancel_dump_traceback_later()
        return found | {"seconds": [s / images for s in seconds], "retries": self.retries()}

    def note(self, words: str) -> None:
        """Write to this rank's log, which is read when it does not answer."""
        print(f"{words}; the allocator came to its limit {self.retries()} times", file=sys.stderr, flush=True)

    def retries(self) -> int:
        """How often the allocator of this rank had to give back what it kept, since no room was left."""
        return torch.cuda.memory_stats().get("num_alloc_retries", 0) if self.device.type == "cuda" else 0

    def step(self, pictures: list[Picture], masks: list[Picture]) -> Tensor:
        """The loss, after forward and backward."""
        if self.pm is not None:
            self.pm.zero_grad()
            return self.pm.step(pictures, masks)
        self.model.zero_grad(set_to_none=True)
        whole = [(0, extent) for extent in pictures[0].shape]
        images, goals = (
            torch.stack([p.read([(0, p.shape[0]), *whole[1:]]) for p in each]) for each in (pictures, masks)
        )
        loss = F.cross_entropy(self.model(images), goals[:, 0])
        loss.backward()
        return loss.detach()

    def timed(self, pictures: list[Picture], masks: list[Picture]) -> float:
        """Seconds of one step by the clock, all ranks beginning together, without collecting garbage."""
        gc.disable()
        if self.ranks > 1:
            dist.barrier()
        begin = time.perf_counter()
        self.step(pictures, masks)
        self.meter.wait()
        took = time.perf_counter() - begin
        gc.enable()
        return took

    def agrees(self, plan: dict[str, Any], side: int) -> dict[str, Any]:
        """The largest relative differences from one device, in float64."""
        return difference(Plan(**plan), self.device, side)
