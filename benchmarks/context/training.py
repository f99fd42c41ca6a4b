"""One training, in steps that stay on the device: the same lines whatever the patch, a captured graph on a GPU."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mural
from context.cases import Run, Settings
from context.scene import CLASSES, Scene
from mural.models import UNet

WARM = 3
"""Steps before the capture: real ones, of which the optimizer and cuDNN need a few to settle."""
WEIGHT = (0.25, 1.0, 1.0)
"""Of the classes in the loss: nine pixels of ten show no nucleus."""


def build(settings: Settings, depth: int, seed: int) -> nn.Module:
    """The model with the parameters that the seed gives."""
    torch.manual_seed(seed)
    return UNet(classes=CLASSES, width=settings.width, depth=depth, norm="batch")


def schedule(steps: int, rate: float) -> Tensor:
    """The learning rate of each step: up over a twentieth, then down along a cosine to zero.

    >>> [round(float(r), 2) for r in schedule(5, 1.0)]
    [1.0, 0.9, 0.65, 0.35, 0.1]
    """
    rise = max(1, steps // 20)
    at = torch.arange(steps, dtype=torch.float64)
    fall = 0.5 * (1 + torch.cos(math.pi * (at - rise + 1).clamp_min(0) / max(1, steps - rise + 1)))
    return rate * torch.where(at < rise, (at + 1) / rise, fall)


def picks(settings: Settings, run: Run) -> Tensor:
    """Which image of the pool each patch of each step comes from, and where it begins: (steps, patches, 3).

    A patch may come from any image, so a step on small patches sees more images than a step on whole ones.
    """
    draw = torch.Generator().manual_seed(7919 * (run.seed + 1))
    patches = settings.images * (settings.size // run.patch) ** 2
    # A permutation, so that no whole image comes twice before all came once.
    rounds = -(-settings.steps * patches // settings.pool)
    order = torch.cat([torch.randperm(settings.pool, generator=draw) for _ in range(rounds)])
    image = order[: settings.steps * patches].view(settings.steps, patches)
    corner = torch.randint(settings.size - run.patch + 1, (2, settings.steps, patches), generator=draw)
    return torch.stack([image, *corner], -1)


def cut(values: Tensor, pick: Tensor, patch: int) -> Tensor:
    """The patches of these images (N, S, S, …) that were picked: (patches, patch, patch, …)."""
    along = torch.arange(patch, device=values.device)
    rows, columns = pick[:, 1, None] + along, pick[:, 2, None] + along
    return values[pick[:, 0, None, None], rows[:, :, None], columns[:, None, :]]


def pixels(image: Tensor) -> Tensor:
    """Images of bytes, channels last, as a model takes them: (N, 3, H, W), channels last in memory, about −1 to 1."""
    return image.permute(0, 3, 1, 2).float() / 64 - 2.5


@dataclass(frozen=True)
class Engine:
    """How steps are taken: precision, mesh (none: plain torch), and whether they are replayed from a captured graph."""

    dtype: torch.dtype = torch.float32
    autocast: bool = False
    capture: bool = False
    mesh: mural.Mesh | None = None


class Training:
    """A model, its optimizer and everything that its steps need, on the device of the images."""

    def __init__(self, settings: Settings, run: Run, scene: Scene, engine: Engine) -> None:
        device = scene.image.device
        self.run, self.engine, self.device = run, engine, device
        self.images, self.labels = scene.image, scene.answer(run.question)
        model = build(settings, run.depth, run.seed).to(device, engine.dtype)
        self.model = model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        self.picks = picks(settings, run).to(device)
        self.rates = schedule(settings.steps, run.rate).to(device)
        self.weight = torch.tensor(WEIGHT, dtype=engine.dtype, device=device)
        # A tensor, so that a replayed step reads what the schedule wrote.
        self.rate = torch.tensor(run.rate, dtype=torch.float32, device=device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=self.rate, weight_decay=1e-4, capturable=device.type == "cuda"
        )
        self.number = torch.zeros(1, dtype=torch.long, device=device)
        self.losses = torch.zeros(settings.steps, dtype=engine.dtype, device=device)

    def step(self) -> None:
        """One step; what it reads and writes stays in place, so that it can be replayed."""
        pick = self.picks[self.number][0]
        x = pixels(cut(self.images, pick, self.run.patch)).to(self.engine.dtype)
        y = cut(self.labels, pick, self.run.patch).long()
        mesh = self.engine.mesh
        if mesh is not None:
            x, y = mural.shard(x, mesh), mural.shard(y, mesh, dims=(1, 2))
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.engine.autocast, cache_enabled=False):
            loss = F.cross_entropy(self.model(x), y, weight=self.weight)
        loss.backward()
        if mesh is not None:
            mural.reduce_gradients(self.model, mesh)
        self.rate.copy_(self.rates[self.number][0])
        self.optimizer.step()
        self.losses[self.number] = loss.detach().to(self.losses.dtype)
        self.number += 1

    def ready(self) -> Callable[[], None]:
        """A call that takes one step. With capture, the first few are taken here, and the call replays one."""
        self.model.train()
        if not self.engine.capture:
            return self.step
        for _ in range(WARM):
            self.step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            self.step()
        return graph.replay


def take(trainings: Sequence[Training], steps: int) -> float:
    """Take all steps of some trainings side by side, each on a stream of its own; the seconds that they took."""
    begin = time.perf_counter()
    if not trainings[0].engine.capture:
        for training in trainings:
            step = training.ready()
            for _ in range(steps):
                step()
        return time.perf_counter() - begin
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in trainings]
    ready: list[Callable[[], None]] = []
    for training, stream in zip(trainings, streams, strict=True):
        with torch.cuda.stream(stream):
            ready.append(training.ready())
    for _ in range(steps - WARM):
        for step, stream in zip(ready, streams, strict=True):
            with torch.cuda.stream(stream):
                step()
    torch.cuda.synchronize()
    return time.perf_counter() - begin
