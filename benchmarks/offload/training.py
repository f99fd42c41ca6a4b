"""The document's training of one model in one variant: times of steps and copies, peaks, losses and accuracy."""

from __future__ import annotations

import hashlib
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

from offload.images import Faces, faces, loader
from offload.nets import built, side_of
from offload.parts import Part
from offload.settings import Settings
from offload.variants import VARIANTS, OnDevice


class StepPeaks:
    """Peaks of the device's memory in steps, without those of validation; zeros on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.counts = device.type == "cuda"
        self.allocated = self.reserved = self.between = 0

    def begin(self) -> None:
        """Count from now on."""
        if self.counts:
            torch.cuda.reset_peak_memory_stats()

    def note(self) -> None:
        """Take over the peaks since the beginning, and what is allocated now, between two steps."""
        if self.counts:
            self.allocated = max(self.allocated, torch.cuda.max_memory_allocated())
            self.reserved = max(self.reserved, torch.cuda.max_memory_reserved())
            self.between = torch.cuda.memory_allocated()


class Training:
    """The epochs of a variant; what they took is in its lists, the first steps as well."""

    def __init__(self, variant: OnDevice, found: Faces, settings: Settings) -> None:
        self.variant, self.found, self.settings = variant, found, settings
        self.peaks = StepPeaks(variant.device)
        self.loading: list[float] = []
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.accuracies: list[float] = []
        self.validating = 0.0

    def run(self) -> None:
        """All steps, with a validation after each epoch."""
        settings = self.settings
        steps = settings.epochs * settings.epoch
        pinned = self.variant.pinned_loader and self.variant.device.type == "cuda"
        batches = iter(loader(self.found, settings.batch, steps, pinned))
        for step in range(steps):
            if step == settings.dropped:
                self.peaks.begin()
            begin = time.perf_counter()
            images, labels = next(batches)
            self.loading.append(time.perf_counter() - begin)
            self.step(images, labels)
            if step >= settings.dropped:
                self.peaks.note()
            if (step + 1) % settings.epoch == 0:
                self.validate()

    def step(self, images: Tensor, labels: Tensor) -> None:
        """One step."""
        begin = time.perf_counter()
        loss = self.variant.step(images, labels)
        self.variant.wait()
        self.seconds.append(time.perf_counter() - begin)
        self.losses.append(float(loss))

    def validate(self) -> None:
        """The accuracy now."""
        begin = time.perf_counter()
        self.accuracies.append(self.variant.right(self.found.held_out, self.found.held_out_labels))
        self.validating += time.perf_counter() - begin
        self.peaks.begin()

    def record(self) -> dict[str, Any]:
        """What is written; `total` is the time of the steps that count, with loading and without validation."""
        first, variant = self.settings.dropped, self.variant
        return {
            "steps": len(self.seconds[first:]),
            "total": sum(self.seconds[first:]) + sum(self.loading[first:]),
            "loading": sum(self.loading[first:]),
            "validating": self.validating,
            "step": statistics.median(self.seconds[first:]),
            "came": spread(variant.to_device[first:]),
            "left": spread(variant.to_host[first:]),
            "first": self.seconds[:first],
            "losses": self.losses,
            "accuracy": max(self.accuracies),
            "accuracies": self.accuracies,
            "allocated": self.peaks.allocated,
            "reserved": self.peaks.reserved,
            "between": self.peaks.between,
            **facts(variant.model),
            "report": variant.report(),
            "weights": digest(variant.model),
        }


def measured(part: Part, device: torch.device, settings: Settings) -> dict[str, Any]:
    """The record of a part."""
    torch.backends.cudnn.deterministic = True
    found = faces(side_of(part.subject, settings.toy))
    variant = VARIANTS[part.way](built(part.subject, device, settings.toy), device)
    torch.manual_seed(1)  # of dropout
    training = Training(variant, found, settings)
    training.run()
    return training.record()


def spread(times: list[float]) -> list[float] | None:
    """Mean, maximum, minimum and median, as the document gives them.

    >>> spread([1.0, 2.0, 6.0])
    [3.0, 6.0, 1.0, 2.0]
    """
    return [statistics.mean(times), max(times), min(times), statistics.median(times)] if times else None


def facts(model: nn.Module) -> dict[str, Any]:
    """The model's size, and whether it rests in pinned memory."""
    parameters = list(model.parameters())
    return {
        "parameters": sum(p.numel() for p in parameters),
        "tensors": len(parameters),
        "rests_pinned": parameters[0].device.type == "cpu" and parameters[0].is_pinned(),
    }


def digest(model: nn.Module) -> str:
    """Tells weights apart: the same for the same bits."""
    told = hashlib.sha256()
    for value in model.state_dict().values():
        told.update(value.cpu().contiguous().numpy())
    return told.hexdigest()[:16]
