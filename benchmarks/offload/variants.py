"""The variants of the document's training: where the model rests between steps, and how it moves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import mural
from mural.engine.offloaded_updates import TENSORS
from mural.engine.offloading import Offloading
from offload.nets import loss_of

KINDS = ("parameters", "optimizer")
ALL_KINDS = ("activations", *KINDS)
SHARE, FIRST, TOY_PEAK = 0.75, 3, 2**20
"""The part of its memory that a model is left with, and the step from which on; before, its peak is looked at."""
RATE, MOMENTUM = 1e-3, 0.9


class OnDevice:
    """The baseline: everything stays on the device, and batches are copied to it."""

    non_blocking = False
    pinned_loader = False

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device
        self.optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
        self.to_device: list[float] = []
        self.to_host: list[float] = []
        """Seconds in which the model moved, before and after each step; empty where it does not move."""

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        """The loss, after forward, backward and update; the model is back where it rests."""
        self.arrive(self.to_device)
        images, labels = (batch.to(self.device, non_blocking=self.non_blocking) for batch in (images, labels))
        self.optimizer.zero_grad()
        loss = self.backward(images, labels)
        self.optimizer.step()
        self.leave(self.to_host)
        return loss

    def backward(self, images: Tensor, labels: Tensor) -> Tensor:
        """The loss, after forward and backward."""
        loss = loss_of(self.model(images), labels)
        loss.backward()
        return loss.detach()

    def right(self, images: Tensor, labels: Tensor) -> float:
        """The part of images whose class is found."""
        self.arrive([])
        self.model.eval()
        with torch.no_grad():
            scores = self.scores(images.to(self.device))
        self.model.train()
        found = float((scores.argmax(1).cpu() == labels).double().mean())
        self.leave([])
        return found

    def scores(self, images: Tensor) -> Tensor:
        """The model's results."""
        return self.model(images)

    def arrive(self, times: list[float]) -> None:
        """Bring the model to the device."""

    def leave(self, times: list[float]) -> None:
        """Send the model to where it rests."""

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def timed(self, work: Callable[[], Any], times: list[float]) -> None:
        """Do something, and note its seconds; the device has nothing else to do."""
        self.wait()
        begin = time.perf_counter()
        work()
        self.wait()
        times.append(time.perf_counter() - begin)

    def slots(self) -> Iterator[tuple[str, Tensor]]:
        """What moves with a model: parameters with their gradients, and buffers."""
        for name, p in self.model.named_parameters():
            yield name, p
            if p.grad is not None:
                yield f"{name}.grad", p.grad
        yield from self.model.named_buffers()

    def report(self) -> dict[str, Any]:
        """The bytes that left in the last step and came back."""
        moved = sum(tensor.nbytes for _, tensor in self.slots()) if self.to_host else 0
        return {"to_host": moved, "from_host": moved}


class Moved(OnDevice):
    """The document's offload: the model is on the device for the length of a step, by `model.to`."""

    def __init__(
        self, model: nn.Module, device: torch.device, pinned_loader: bool = False, non_blocking: bool = False
    ) -> None:
        super().__init__(model, device)
        self.pinned_loader, self.non_blocking = pinned_loader, non_blocking
        self.leave([])

    def arrive(self, times: list[float]) -> None:
        """`model.to(device)`."""
        self.timed(lambda: self.model.to(self.device, non_blocking=self.non_blocking), times)

    def leave(self, times: list[float]) -> None:
        """`model.to("cpu")`: every tensor in new memory."""
        self.timed(lambda: self.model.to("cpu", non_blocking=self.non_blocking), times)


class Buffered(OnDevice):
    """The model rests in pinned memory that is taken once."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__(model, device)
        self.host: dict[str, Tensor] = {}
        self.leave([])

    def arrive(self, times: list[float]) -> None:
        """All tensors from their buffers, without waiting in between."""
        self.timed(self._arrive, times)

    def _arrive(self) -> None:
        for _, tensor in self.slots():
            tensor.data = tensor.detach().to(self.device, non_blocking=True, copy=True)

    def leave(self, times: list[float]) -> None:
        """All tensors into their buffers, without waiting in between."""
        # The first gradients have no buffers yet: taking those is not copying.
        for name, tensor in self.slots():
            if name not in self.host:
                self.host[name] = torch.empty_like(tensor, device="cpu", pin_memory=self.device.type == "cuda")
        self.timed(self._leave, times)
        for name, tensor in self.slots():
            tensor.data = self.host[name]

    def _leave(self) -> None:
        for name, tensor in self.slots():
            self.host[name].copy_(tensor.detach(), non_blocking=True)


class Offloaded(OnDevice):
    """mural's offload around a step of plain torch."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__(model, device)
        self.offloading = Offloading(KINDS, [model], device)

    def backward(self, images: Tensor, labels: Tensor) -> Tensor:
        """The loss, after forward and backward, between which memory leaves and comes."""
        with self.offloading.step(images, labels):
            return super().backward(images, labels)

    def report(self) -> dict[str, Any]:
        """What was planned, and what moved."""
        return self.offloading.report()


class Tight(OnDevice):
    """mural's offload within three quarters of the memory that the first steps take."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__(model, device)
        self.offloading: Offloading | None = None
        self.steps = 0

    def backward(self, images: Tensor, labels: Tensor) -> Tensor:
        """The loss, after forward and backward; what leaves lets them stay within the limit."""
        self.steps += 1
        if self.steps == FIRST:
            peak = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else TOY_PEAK
            self.offloading = Offloading(ALL_KINDS, [self.model], self.device, int(SHARE * peak / TENSORS))
        if self.offloading is None:
            return super().backward(images, labels)
        with self.offloading.step(images, labels):
            return super().backward(images, labels)

    def report(self) -> dict[str, Any]:
        """What was planned, and what moved."""
        return super().report() if self.offloading is None else self.offloading.report()


class Planned(OnDevice):
    """mural's public calls, with a plan that offloads or not."""

    def __init__(self, model: nn.Module, device: torch.device, plan: mural.Plan) -> None:
        super().__init__(model, device)
        self.pm = mural.parallelize(model, plan, loss=loss_of)

    def backward(self, images: Tensor, labels: Tensor) -> Tensor:
        """The loss, after forward and backward."""
        return self.pm.step(images, labels)

    def scores(self, images: Tensor) -> Tensor:
        """The model's results, by its plan."""
        return self.pm(images)

    def report(self) -> dict[str, Any]:
        """What was planned, and what moved."""
        return super().report() if self.pm.offloading is None else self.pm.offloading.report()


VARIANTS: Mapping[str, Callable[[nn.Module, torch.device], OnDevice]] = {
    "baseline": OnDevice,
    "naive": Moved,
    "pinned": partial(Moved, pinned_loader=True),
    "nonblocking": partial(Moved, non_blocking=True),
    "both": partial(Moved, pinned_loader=True, non_blocking=True),
    "pinned_buffers": Buffered,
    "mural": Offloaded,
    "mural_tight": Tight,
    "plan": partial(Planned, plan=mural.Plan()),
    "mural_plan": partial(Planned, plan=mural.Plan(offload=KINDS)),
}
