"""The demo's two runs, in one plain process and on ranks, with the memory that each process needs."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

import mural
from mural.demo.settings import CLASSES, Settings
from mural.memory.machine_memory import peak_resident
from mural.models import UNet

# -- memory ------------------------------------------------------------------------------------------------------------


class SavedBytes(saved_tensors_hooks):
    """The bytes that autograd saves inside a `with` block, each storage once, the model's parameters left out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(self._keep, lambda saved: saved)
        self._seen = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.total = 0

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.total += storage.nbytes()
        return tensor.detach()  # the tensor itself would hold its own graph, and never be freed


# -- the training ------------------------------------------------------------------------------------------------------


Run = Literal["plain", "sharded"]
IMAGE, MASK, PREDICTION = "image.npy", "mask.npy", "prediction.npy"


@dataclass(frozen=True)
class DemoStep:
    """One training step of one process; `difference` is its largest relative gradient difference from plain."""

    run: Run
    number: int
    loss: float
    difference: float


@dataclass(frozen=True)
class Usage:
    """What one process needed: bytes of memory, and what it sent in one step."""

    run: Run
    resident: int
    activations: int
    messages: int = 0
    sent: int = 0


class Reports(Protocol):
    """The way back to the parent."""

    def put(self, obj: Any, /) -> None:
        """Send a `DemoStep` or a `Usage`."""
        ...


@dataclass(frozen=True)
class Moment:
    """The training between backward and the optimizer's step."""

    number: int
    loss: float
    scores: Tensor
    gradients: dict[str, Tensor]
    activations: int


def end_with_parent() -> None:
    """Let the SIGINT that torch sends to a process whose parent died end it, even where a shell had it ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def build(settings: Settings) -> nn.Module:
    """The model with the parameters that the seed gives, in float64."""
    torch.manual_seed(settings.seed)
    return UNet(classes=len(CLASSES), width=settings.width, depth=settings.depth, norm="batch").double()


def train(
    settings: Settings, image: Tensor, target: Tensor, reduce: Callable[[nn.Module], None] | None = None
) -> Iterator[Moment]:
    """Every step of the training; plain and sharded tensors take the same lines, but for `reduce`."""
    model = build(settings)
    # Not Adam: it divides by the gradient's size, so the rounding of entries near zero becomes whole steps.
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.learning_rate, momentum=0.9)
    for number in range(1, settings.steps + 1):
        optimizer.zero_grad()
        saved = SavedBytes(model)
        with saved:
            scores = model(image)
            loss = F.cross_entropy(scores, target)
        loss.backward()
        if reduce is not None:
            reduce(model)
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        yield Moment(number, loss.item(), scores.detach(), gradients, saved.total)
        optimizer.step()


def read(folder: Path, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
    """That box of the image (1, 3, rows, columns) and of the mask (1, rows, columns); only the box is read."""
    image: Any = np.load(folder / IMAGE, mmap_mode="r")[rows, columns]
    mask: Any = np.load(folder / MASK, mmap_mode="r")[rows, columns]
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).double() / 255
    return pixels[None].contiguous(), torch.from_numpy(np.array(mask)).long()[None]


def plain_process(rank: int, settings: Settings, folder: Path, reports: Reports) -> None:
    """Train on the whole image in this process, and leave the gradients of each step in the folder."""
    end_with_parent()
    before, activations = peak_resident(), 0
    image, target = read(folder, slice(None), slice(None))
    for moment in train(settings, image, target):
        torch.save(moment.gradients, folder / f"gradients-{moment.number}.pt")
        reports.put(DemoStep("plain", moment.number, moment.loss, 0.0))
        activations = moment.activations
    reports.put(Usage("plain", peak_resident() - before, activations))


def sharded_rank(rank: int, settings: Settings, folder: Path, reports: Reports) -> None:
    """Train on this rank's piece of the image, and compare every step with the plain one."""
    end_with_parent()
    before = peak_resident()
    mesh = mural.init(spatial=settings.grid)
    image, target = read_piece(folder, settings, mesh)
    moment: Moment | None = None
    with mesh.transport.record() as record:
        for moment in train(settings, image, target, lambda model: mural.reduce_gradients(model, mesh)):
            plain = torch.load(folder / f"gradients-{moment.number}.pt", weights_only=True)
            reports.put(DemoStep("sharded", moment.number, moment.loss, largest_difference(moment.gradients, plain)))
    if moment is None or not isinstance(moment.scores, mural.ShardedTensor):
        raise mural.LayoutError("the model returned a plain tensor for a sharded image")
    resident = peak_resident() - before
    messages, sent = record.messages // settings.steps, record.bytes // settings.steps
    reports.put(Usage("sharded", resident, moment.activations, messages, sent))
    prediction = moment.scores.full().argmax(1)[0]
    if rank == 0:
        np.save(folder / PREDICTION, prediction.numpy().astype(np.uint8))


def read_piece(folder: Path, settings: Settings, mesh: mural.Mesh) -> tuple[Tensor, Tensor]:
    """Image and mask of the whole run as sharded tensors, of which this rank read its own box alone."""
    (top, bottom), (left, right) = (
        mural.Cuts.even(settings.size, parts).bounds[mesh.coordinates[axis] :][:2]
        for parts, axis in zip(settings.grid, ("spatial0", "spatial1"), strict=True)
    )
    image, target = read(folder, slice(top, bottom), slice(left, right))
    place = [(top, bottom), (left, right)]
    return (
        mural.shard(image, mesh, box=[(0, 1), (0, 3), *place]),
        mural.shard(target, mesh, dims=(1, 2), box=[(0, 1), *place]),
    )


def largest_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference of any gradient entry, relative to the largest entry of that parameter's gradient.

    >>> largest_difference({"w": torch.tensor([1.0, 4.0])}, {"w": torch.tensor([2.0, 4.0])})
    0.25
    """
    if found.keys() != expected.keys():
        return float("inf")
    tiny = torch.finfo(torch.float64).tiny
    ratios = [(found[n] - e).abs().max() / e.abs().max().clamp_min(tiny) for n, e in expected.items()]
    return torch.stack(ratios).max().item()
