"""The ways of taking a step: in memory, with blocks computed again, with saved tensors on the host, and streamed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mural
from one_gpu.lightstream_steps import Lightstream
from one_gpu.nets import NETS, ORDERS, Data, blocks
from one_gpu.parts import PRECISIONS, Part


class Way(Protocol):
    """How a model takes steps on an image."""

    def take(self, data: Data) -> None:
        """Get ready for steps on an image: this is not timed."""
        ...

    def step(self) -> Tensor:
        """The loss, after forward and backward: gradients are added to those of the model's parameters."""
        ...

    def report(self) -> dict[str, Any]:
        """What was predicted for the last step."""
        ...


class InMemory:
    """Plain torch on the whole image; `saving` is a block in which forward and backward run."""

    saving: Callable[[], AbstractContextManager[Any]] = nullcontext

    def __init__(self, part: Part, model: nn.Module, device: torch.device) -> None:
        self.part, self.model, self.device = part, model, device
        self.image = self.target = torch.empty(0)

    def take(self, data: Data) -> None:
        """Put the image and its target on the device, whole."""
        order = ORDERS[NETS[self.part.model].dims]
        self.image = data.image.read()[None].to(self.device).contiguous(memory_format=order)
        self.target = data.target if isinstance(data.target, Tensor) else data.target.read().long().to(self.device)

    def step(self) -> Tensor:
        """The loss, after forward and backward."""
        kind = self.device.type
        typed = torch.autocast(kind, dtype=torch.bfloat16) if self.part.precision == "bf16" else nullcontext()
        with self.saving():
            with typed:
                loss = F.cross_entropy(self.model(self.image), self.target)
            loss.backward()
        return loss.detach()

    def report(self) -> dict[str, Any]:
        """Nothing was predicted."""
        return {}


class Checkpointed(InMemory):
    """Every block's activations are computed again in backward, by torch's own checkpoint."""

    def __init__(self, part: Part, model: nn.Module, device: torch.device) -> None:
        super().__init__(part, model, device)
        for block in blocks(model):
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)


class SavedOnHost(InMemory):
    """What backward needs waits in the host's pinned memory."""

    def saving(self) -> AbstractContextManager[Any]:
        """The block in which tensors are saved on the host."""
        return torch.autograd.graph.save_on_cpu(pin_memory=self.device.type == "cuda")


class Streamed:
    """mural's streaming: the image is read tile by tile."""

    def __init__(self, part: Part, model: nn.Module, device: torch.device) -> None:
        plan = mural.Plan(
            stream=(part.chosen_tile,) * NETS[part.model].dims,
            precision="bfloat16" if PRECISIONS[part.precision] == "bfloat16" else "float32",
            recompute="all" if "recompute" in part.extras else (),
        )
        self.pm = mural.parallelize(model, plan, loss=F.cross_entropy)
        self.data: Data | None = None

    def take(self, data: Data) -> None:
        """Note the sources: nothing is read before the step."""
        self.data = data

    def step(self) -> Tensor:
        """The loss, after forward and backward, reading included."""
        if self.data is None:
            raise RuntimeError("a step before any image was taken: call take first")
        target = self.data.target
        return self.pm.step([self.data.image], target if isinstance(target, Tensor) else [target])

    def report(self) -> dict[str, Any]:
        """What the way says of its last step: passes, tiles, predicted seconds, bytes and peak."""
        told: Any = getattr(self.pm.way, "report", None)
        return {} if told is None else dict(told())


WAYS: Mapping[str, Callable[[Part, nn.Module, torch.device], Way]] = {
    "plain": InMemory,
    "checkpoint": Checkpointed,
    "save_on_cpu": SavedOnHost,
    "stream": Streamed,
    "file": Streamed,
    "lightstream": Lightstream,
}
