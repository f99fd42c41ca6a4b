"""A case on one rank: the model, this rank's piece of the image, and the step that all measurements run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mural
from harness.case import Case
from harness.recipes import RECIPES

Span = tuple[int, int]
ORDERS = {2: torch.channels_last, 3: torch.channels_last_3d}
# Multiples of irrational numbers: their fractional parts never repeat along a dim.
STEPS = (0.6180339887498949, 0.4142135623730951, 0.7320508075688772)


def noise(channels: int, box: Sequence[Span], device: torch.device, dtype: torch.dtype) -> Tensor:
    """The pixels (1, channels, …) of one box of an endless image: the same values, whoever makes them."""
    piece = torch.empty(1, channels, *(stop - start for start, stop in box), device=device, dtype=dtype)
    for channel in range(channels):
        piece[0, channel] = 0.37 * channel
        for dim, ((start, stop), step) in enumerate(zip(box, STEPS, strict=False)):
            phase = torch.arange(start, stop, device=device, dtype=torch.float64).mul_(step).frac_()
            piece[0, channel] += phase.to(dtype).view(-1, *(1,) * (len(box) - 1 - dim))
        piece[0, channel].mul_(7919.0).sin_().mul_(437.5).frac_()
    return piece


class Problem:
    """Model, image and target of a case on this rank; `step` is forward, cross entropy and backward."""

    def __init__(self, case: Case, device: torch.device, dtype: torch.dtype = torch.float32, dropout: bool = True):
        recipe = RECIPES[case.model]
        self.case, self.device = case, device
        torch.manual_seed(0)
        with device:
            self.model = recipe.build(**dict(case.options)).to(dtype)
        for module in self.model.modules():
            if isinstance(module, nn.Dropout) and not dropout:
                module.p = 0.0
        self.mesh = mural.init(image=case.extents) if case.sharded else None
        spans = [(0, extent) for extent in case.extents]
        if self.mesh is not None:
            at = [self.mesh.coordinates[f"spatial{dim}"] for dim in range(recipe.dims)]
            cuts = [mural.Cuts.even(e, n, recipe.align) for e, n in zip(case.extents, self.mesh.spatial, strict=True)]
            spans = [tuple(cut.interval(place)) for cut, place in zip(cuts, at, strict=True)]
        self.extents = tuple(stop - start for start, stop in spans)
        self._place(recipe.channels, spans, recipe.per_position, dtype)
        self.forward: Any = torch.compile(self.model) if case.compiled else self.model

    def _place(self, channels: int, spans: Sequence[Span], per_position: bool, dtype: torch.dtype) -> None:
        """Make this rank's piece of image and target; nobody holds the whole."""
        count, (extent, *_), ((start, stop), *others) = self.case.batch, self.case.extents, spans
        # The images of a batch lie one below the other.
        boxes = [((start + n * extent, stop + n * extent), *others) for n in range(count)]
        image = torch.cat([noise(channels, box, self.device, dtype) for box in boxes])
        mask = (image[:, 0] > 0).long() if per_position else torch.ones(count, dtype=torch.long, device=self.device)
        if self.case.precision == "bfloat16" and len(spans) in ORDERS:
            order = ORDERS[len(spans)]
            self.model, image = self.model.to(memory_format=order), image.contiguous(memory_format=order)
        self.image, self.target = image, mask
        if self.mesh is not None:
            self.image = mural.shard(image, self.mesh, box=((0, count), (0, channels), *spans))
            if per_position:
                dims = tuple(range(1, 1 + len(spans)))
                self.target = mural.shard(mask, self.mesh, dims=dims, box=((0, count), *spans))

    def loss(self) -> Tensor:
        """The loss of the whole image."""
        kind = self.device.type
        typed = torch.autocast(kind, dtype=torch.bfloat16) if self.case.precision == "bfloat16" else nullcontext()
        with typed:
            return F.cross_entropy(self.forward(self.image), self.target)

    def step(self) -> Tensor:
        """The loss, after forward and backward; gradients are this rank's own."""
        self.model.zero_grad(set_to_none=True)
        loss = self.loss()
        loss.backward()
        return loss.detach()

    def reduce(self) -> None:
        """Make the gradients those of the whole image."""
        if self.mesh is not None:
            mural.reduce_gradients(self.model, self.mesh)

    @property
    def replicated(self) -> int:
        """Bytes of parameters and their gradients: what every rank holds whole."""
        return sum(2 * p.numel() * p.element_size() for p in self.model.parameters())
