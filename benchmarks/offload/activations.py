"""A U-Net in bf16 on one large image: its activations in memory, computed again or on the host, by one_gpu's steps."""

from __future__ import annotations

from typing import Any

import torch
from one_gpu.nets import built, made_data
from one_gpu.parts import Part as OneGpuPart
from one_gpu.rank import Alone, Trained, gradient_norm, host_peaks
from one_gpu.ways import WAYS, InMemory, SavedOnHost
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

import mural
from offload.parts import Part
from offload.settings import Settings

DROPPED = 3
"""Steps that do not count: mural notes and times what they do."""


class Swapped(InMemory):
    """mural's offload of activations, within so much memory."""

    def __init__(self, part: OneGpuPart, model: nn.Module, device: torch.device, memory: str) -> None:
        super().__init__(part, model, device)
        plan = mural.Plan(offload=("activations",), memory=memory, precision="bfloat16")
        self.pm = mural.parallelize(model, plan, loss=F.cross_entropy)

    def step(self) -> Tensor:
        """The loss, after forward and backward."""
        return self.pm.step(self.image, self.target)

    def report(self) -> dict[str, Any]:
        """What was planned, and what moved."""
        return {} if self.pm.offloading is None else self.pm.offloading.report()


class SavedBytes:
    """Counts the bytes that autograd saves in a step: `save_on_cpu` copies each of them out and back."""

    def __init__(self) -> None:
        self.total = 0

    def counting(self) -> saved_tensors_hooks:
        """A block in which they are counted."""
        return saved_tensors_hooks(self._note, lambda tensor: tensor)

    def _note(self, tensor: Tensor) -> Tensor:
        self.total += tensor.nbytes
        return tensor


def measured(part: Part, rank: Alone, settings: Settings) -> dict[str, Any]:
    """Times, peaks, loss and moved bytes of some steps."""
    ours = part.way == "mural"
    named = OneGpuPart.parse(f"unet/{'plain' if ours else part.way}/bf16/training/{part.subject}")
    model = built(named, rank.device, settings.toy)
    memory = f"{25 * (part.cap or 0)}KB" if settings.toy else f"{part.cap}GiB"
    way = Swapped(named, model, rank.device, memory) if ours else WAYS[part.way](named, model, rank.device)
    way.take(made_data(named, named.size, rank.device))
    trained = Trained(way, model)
    for _ in range(DROPPED):
        trained.step()
    rank.meter.wait()
    base = rank.begin_counting()
    seconds, losses, _ = rank.timed(trained, settings.repeats, settings.budget)
    found: dict[str, Any] = {**rank.meter.peaks(), **host_peaks(base)}
    found |= {"seconds": seconds, "losses": losses, "gradient": gradient_norm(model), "report": way.report()}
    if isinstance(way, SavedOnHost):
        saved = SavedBytes()
        way.saving = saved.counting
        trained.step()
        found["report"] = {"to_host": saved.total, "from_host": saved.total}
    return found
