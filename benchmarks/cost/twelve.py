"""The net of twelve convolutions of document `001`, layer by layer and iteration by iteration."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

CHANNELS, KERNELS = (32, 64, 128), (3, 3, 5, 7)
SIZE = 256


class Twelve(nn.Module):
    """Twelve convolutions with 32, 64 and 128 channels and kernels 3, 5, 7, then a mean and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 3
        for channels in CHANNELS:
            for kernel in KERNELS:
                layers.append(nn.Conv2d(inputs, channels, kernel, padding=kernel // 2))
                inputs = channels
        self.layers = nn.ModuleList(layers)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), nn.Linear(128, 10), nn.LogSoftmax(1))

    def forward(self, image: Tensor) -> Tensor:
        for layer in self.layers:
            image = layer(image)
        return self.head(image)


class Marks:
    """The moments at which layers begin and end, on the device's clock or the host's."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        self.at: dict[tuple[str, int, str], Any] = {}

    def mark(self, phase: str, layer: int, edge: str) -> None:
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.at[phase, layer, edge] = event
        else:
            self.at[phase, layer, edge] = time.perf_counter()

    def seconds(self, phase: str, layer: int) -> float:
        begin, end = self.at[phase, layer, "begin"], self.at[phase, layer, "end"]
        return begin.elapsed_time(end) / 1000 if self.cuda else end - begin


def watch(model: Twelve, marks: Marks) -> None:
    """Mark when each layer begins and ends, in both directions."""
    for i, layer in enumerate(model.layers):
        layer.register_forward_pre_hook(lambda *_, i=i: marks.mark("forward", i, "begin"))
        layer.register_forward_hook(lambda *_, i=i: marks.mark("forward", i, "end"))
        layer.register_full_backward_pre_hook(lambda *_, i=i: marks.mark("backward", i, "begin"))
        layer.register_full_backward_hook(lambda *_, i=i: marks.mark("backward", i, "end"))


def measure(device: str, batch: int, iterations: int, size: int = SIZE) -> dict[str, Any]:
    """Seconds of each layer in each iteration, forward and backward."""
    model = Twelve().to(device)
    marks = Marks(device)
    watch(model, marks)
    image = torch.rand((batch, 3, size, size), device=device, requires_grad=True)
    target = torch.zeros(batch, dtype=torch.int64, device=device)
    found: dict[str, list[list[float]]] = {"forward": [], "backward": []}
    for _ in range(iterations):
        model.zero_grad(set_to_none=True)
        nn.functional.nll_loss(model(image), target).backward()
        if device == "cuda":
            torch.cuda.synchronize()
        for phase, rows in found.items():
            rows.append([marks.seconds(phase, layer) for layer in range(len(model.layers))])
    names = [f"{layer.in_channels} → {layer.out_channels}, k{layer.kernel_size[0]}" for layer in model.layers]
    return {"batch": batch, "size": size, "layers": names, "seconds": found}
