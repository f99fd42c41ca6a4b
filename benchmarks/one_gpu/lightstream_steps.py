"""lightstream's steps of a ResNet: its layers streamed over a whole image on the host, pooling and classes in memory.

lightstream 1.0.7 is pure Python and needs torch and numpy, but the first line of its package imports lightning, which
the streaming itself does not use: the package is entered without it. It finds out by a step on ones how far each layer
reaches; that fails, without a word, with channels last and with norms that hold other means than 0, so both come after.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from one_gpu.nets import Data
from one_gpu.parts import Part

LAYERS = ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4")


def constructor() -> Any:
    """The class that makes a network stream; run.py has seen that lightstream is there."""
    found = importlib.util.find_spec("lightstream")
    if "lightstream" not in sys.modules and found is not None:
        # A package that was not executed: its __init__ would import lightning.
        sys.modules["lightstream"] = importlib.util.module_from_spec(found)
    from lightstream.core.constructor import StreamingConstructor  # noqa: PLC0415 (an optional package)

    return StreamingConstructor


class Lightstream:
    """A ResNet whose layers lightstream runs tile by tile, with norms frozen and not trained, as it demands."""

    def __init__(self, part: Part, model: nn.Module, device: torch.device) -> None:
        if part.norm != "frozen":
            raise ValueError(f"lightstream freezes all norms: {part.norm} norms cannot be measured")
        self.part, self.model, self.device = part, model, device
        self.image, self.target = torch.empty(0), torch.empty(0)
        layers = nn.Sequential(*(getattr(model, name) for name in LAYERS)).to(memory_format=torch.contiguous_format)
        streaming = constructor()(
            layers, part.chosen_tile, verbose=False, deterministic=False, copy_to_gpu=False, normalize_on_gpu=False,
            add_keep_modules=[nn.BatchNorm2d],
        )  # fmt: skip
        # The step on ones runs where the model is: it takes minutes on a CPU.
        streaming.statistics_on_cpu = False
        for module in layers.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval().requires_grad_(False)
                module.reset_running_stats()  # until the values that it noted are put back
        self.net: Any = streaming.prepare_streaming_model()
        self.net.stream_module.to(memory_format=torch.channels_last)
        # Its layers are other modules from here on: the optimizer has to see those.
        for name, layer in zip(LAYERS, self.net.stream_module.children(), strict=True):
            setattr(model, name, layer)
        if part.precision == "bf16":
            self.net.dtype = torch.bfloat16

    def take(self, data: Data) -> None:
        """Read the image whole, into the host's memory: lightstream takes a tensor."""
        if not isinstance(data.target, Tensor):
            raise TypeError("lightstream is measured on classification alone: a label is needed, not a mask")
        self.image, self.target = data.image.read()[None], data.target

    def step(self) -> Tensor:
        """The loss, after forward and backward over all tiles."""
        kind = self.device.type
        typed = torch.autocast(kind, dtype=torch.bfloat16) if self.part.precision == "bf16" else nullcontext()
        with warnings.catch_warnings(), typed:
            warnings.simplefilter("ignore")  # it asks for autocast in float32
            features = self.net.forward(self.image).requires_grad_()
            with torch.enable_grad():
                scores = self.model.get_submodule("fc")(features.mean((2, 3)))
                loss = F.cross_entropy(scores, self.target)
            loss.backward()
            self.net.backward(self.image, features.grad)
        return loss.detach()

    def report(self) -> dict[str, Any]:
        """Nothing was predicted."""
        return {}
