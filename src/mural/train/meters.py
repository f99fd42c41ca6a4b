"""Meters: what a stretch of training took, on every rank, and the line that says so."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from mural.memory.machine_memory import peak_resident
from mural.ranks import Mesh
from mural.report.words import bytes_in_words, seconds_in_words


@dataclass(frozen=True)
class Reading:
    """A stretch of training in numbers; shares are parts of the time, means over the ranks."""

    step: int
    epoch: int
    loss: float
    lr: float
    step_seconds: float
    images_per_second: float
    megapixels_per_second: float
    communication: float
    """The share of the time in which ranks did nothing but wait for messages."""
    data_wait: float
    """The share of the time in which ranks waited for images."""
    peak_memory: tuple[int, ...]
    """The largest memory of each rank so far, in bytes: the allocator's on a GPU, the resident size on a CPU."""
    gradient_norm: float | None = None

    def values(self) -> dict[str, Any]:
        """All numbers by name, as JSON takes them; the step is not among them."""
        return {name: value for name, value in asdict(self).items() if name != "step"}

    def scalars(self) -> dict[str, float]:
        """The single numbers."""
        found: dict[str, Any] = asdict(self)
        return {k: float(v) for k, v in found.items() if isinstance(v, (int, float)) and k not in ("step", "epoch")}

    def words(self) -> Mapping[str, str]:
        """The numbers as a person reads them."""
        return {
            "loss": f"{self.loss:.4f}",
            "step": seconds_in_words(self.step_seconds),
            "img/s": f"{self.images_per_second:.3g}",
            "Mpx/s": f"{self.megapixels_per_second:.3g}",
            "memory": bytes_in_words(max(self.peak_memory)),
            "messages": f"{self.communication:.0%}",
            "data": f"{self.data_wait:.0%}",
        }


class Meter:
    """Counts what happens between two readings."""

    def __init__(self, mesh: Mesh, device: torch.device):
        self.mesh, self.device = mesh, device
        self.recording = mesh.transport.record()
        self.record = self.recording.__enter__()
        self.clear()

    def clear(self) -> None:
        """Begin a new stretch."""
        self.started = time.perf_counter()
        self.messages_before = self.record.waited
        self.losses: list[torch.Tensor] = []
        self.weights: list[float] = []
        self.images = self.pixels = self.updates = 0
        self.data = 0.0
        self.record.events.clear()

    def add(self, shape: Sequence[int], loss: torch.Tensor, weight: float, data_wait: float) -> None:
        """Count a batch of that shape; the loss is not read yet, so a GPU is not waited for."""
        self.losses.append(loss)
        self.weights.append(weight)
        self.images += shape[0]
        self.pixels += shape[0] * prod(shape[2:])
        self.data += data_wait

    def read(self, step: int, epoch: int, lr: float, norm: float | None) -> Reading:
        """The reading of the stretch that ends here. Collective."""
        total = sum(w * float(loss) for w, loss in zip(self.weights, self.losses, strict=True))
        elapsed = max(time.perf_counter() - self.started, 1e-9)
        waited = self.record.waited - self.messages_before
        rows = gathered(self.mesh, [elapsed, waited, self.data, float(peak_memory(self.device))])
        updates = max(1, self.updates)
        slowest = max(row[0] for row in rows)
        return Reading(
            step=step,
            epoch=epoch,
            loss=total / max(sum(self.weights), 1e-12),
            lr=lr,
            step_seconds=slowest / updates,
            images_per_second=self.images / slowest,
            megapixels_per_second=self.pixels / slowest / 1e6,
            communication=sum(row[1] / row[0] for row in rows) / len(rows),
            data_wait=sum(row[2] / row[0] for row in rows) / len(rows),
            peak_memory=tuple(int(row[3]) for row in rows),
            gradient_norm=norm,
        )

    def close(self) -> None:
        """Stop counting messages."""
        self.recording.__exit__(None, None, None)


def gathered(mesh: Mesh, values: list[float]) -> list[list[float]]:
    """These values of every rank, in the order of ranks. Collective."""
    mine = torch.tensor(values, dtype=torch.float64)
    if mesh.world == 1:
        return [values]
    mine = mesh.transport.outbound(mine)
    rows = [torch.empty_like(mine) for _ in range(mesh.world)]
    dist.all_gather(rows, mine, group=mesh.transport.group)
    return [row.tolist() for row in rows]


def peak_memory(device: torch.device) -> int:
    """The most memory that this process had so far, in bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_resident()
