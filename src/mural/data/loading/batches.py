"""Batches: what this rank read of a step, as sharded tensors; the rest on demand; or sources to be read by window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mural.data.loading.piece_reader import MASK, NOTHING, Reader, SampleForm, placed
from mural.data.loading.read_ahead import Batched, StepRead, target_dtype, target_shape
from mural.data.loading.sample_source import SampleSource
from mural.data.loading.step_agreement import BatchOutcome
from mural.engine.inputs import shape_of
from mural.errors import DataError
from mural.geometry import Cuts
from mural.memory.pinned import Buffers, Sent
from mural.shard.layout import Layout
from mural.shard.place import layout_of
from mural.shard.tensor import ShardedTensor
from mural.shard.unread import Unread

Images = ShardedTensor | Unread | list[SampleSource]
Targets = Tensor | Unread | list[SampleSource] | None


@dataclass(frozen=True)
class Batch:
    """One step's images and targets, cut over the mesh; `Unread` where the loader was told that this rank needs none.

    `image` is (N, C, H, W) or (N, C, D, H, W); `target` a mask (N, H, W), (N, D, H, W) or with channels like the image,
    labels (N,), or None. Where they are read by window, they are N sources of whole images and N of masks, and labels
    are a plain tensor, all the same on every rank. Of several domains, `image` has those of each. `names` are those of
    all samples, on every rank, `indices` their places in the dataset; `waited` the seconds that this rank waited for
    its files; `step` the number of the batch in its epoch; `stored` the spatial extents that the images have in their
    files, before they were cropped or padded.
    """

    image: Images | tuple[Images, ...]
    target: Targets | Mapping[str, Targets]
    names: tuple[str, ...]
    waited: float
    step: int
    indices: tuple[int, ...] = ()
    stored: tuple[tuple[int, ...], ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the images, all of them: (N, C, H, W) or (N, C, D, H, W)."""
        return shape_of(self.image)

    def whole(self) -> tuple[Any, Any]:
        """Images and targets as plain tensors, all of them on every rank. Collective."""
        image = tuple(map(gathered, self.image)) if isinstance(self.image, tuple) else gathered(self.image)
        target = self.target
        if isinstance(target, Mapping):
            return image, {name: None if part is None else gathered(part) for name, part in target.items()}
        return image, None if target is None else gathered(target)


def gathered(part: Tensor | Unread | list[SampleSource]) -> Tensor:
    """The images or targets of a batch as a plain tensor. Collective."""
    if isinstance(part, list):
        return torch.stack([source.read()[0] if source.flat else source.read() for source in part])
    return part.full() if isinstance(part, (ShardedTensor, Unread)) else part


def assembled(step: StepRead, outcome: BatchOutcome, form: SampleForm, waited: float) -> Batch:
    """The batch of the samples that are good on all ranks."""
    reader, batched, kept = step.reader, step.batched, outcome.kept
    names, indices = tuple(outcome.names[p] for p in kept), tuple(batched.indices[p] for p in kept)
    if reader.needs.by_window:
        return Batch(*by_window(step, kept, form), names, waited, batched.number, indices, outcome.stored)
    mesh, pixels = reader.needs.mesh, reader.pixels
    parts = Cuts.even(len(batched.indices), mesh.size("data")).intervals()
    counts = [sum(i.start <= place < i.stop for place in kept) for i in parts]
    layout = placed(mesh, form, counts, reader.align)
    places = replace(batched, places=tuple(place for place in batched.places if place in kept))
    slots, sent = [slot for slot, place in enumerate(step.pieces) if place in kept], step.send()
    late = Late(reader, places, step.buffers)
    image: ShardedTensor | Unread = late.unread(layout, pixels.dtype, "image")
    if reader.needs.image:
        image = on_device(sent[0], slots, layout, pixels.dtype, step.buffers)
    target: ShardedTensor | Unread | None = None
    if form.target != NOTHING:
        goal, dtype = target_layout(layout, form, pixels.mask == "channels"), target_dtype(form, pixels)
        target = late.unread(goal, dtype, "target")
        if reader.needs.target:
            target = on_device(sent[1], slots, goal, dtype, step.buffers)
    return Batch(image, target, names, waited, batched.number, indices, outcome.stored)


def by_window(
    step: StepRead, kept: Sequence[int], form: SampleForm
) -> tuple[list[SampleSource], list[SampleSource] | Tensor | None]:
    """The sources of the images of a batch, and those of its masks or its labels."""
    pieces = [step.pieces[place] for place in kept]
    images = [SampleSource(step.reader, piece) for piece in pieces]
    if form.target == MASK:
        return images, [SampleSource(step.reader, piece, mask=True) for piece in pieces]
    sent = step.send()[1]
    return images, None if sent is None else sent.arrived()[[list(step.pieces).index(place) for place in kept]]


@dataclass(frozen=True)
class Late:
    """How this rank's places in a batch are read after the batch was made, should anybody ask for them."""

    reader: Reader
    batched: Batched
    buffers: Buffers

    def unread(self, layout: Layout, dtype: torch.dtype, part: str) -> Unread:
        """The batch's image or target, unread."""
        return Unread(layout.shape, dtype, lambda: self.read(layout, dtype, part))

    def read(self, layout: Layout, dtype: torch.dtype, part: str) -> ShardedTensor:
        """The batch's image or target, read now."""
        needs = replace(self.reader.needs, image=part == "image", target=part == "target")
        with ThreadPoolExecutor(1, "mural-reader") as thread:
            step = StepRead(replace(self.reader, needs=needs), self.batched, thread, self.buffers, 1)
            step.wait()
        sent = step.send()[0 if needs.image else 1]
        for failure in step.failures.values():
            raise DataError(failure.reason)
        return on_device(sent, range(len(step.pieces)), layout, dtype, self.buffers)


def on_device(
    sent: Sent | None, slots: Sequence[int], layout: Layout, dtype: torch.dtype, buffers: Buffers
) -> ShardedTensor:
    """Those samples of what this rank read, on the device; an empty piece where none of them is this rank's."""
    if sent is None or not slots:
        return ShardedTensor(torch.empty(layout.local_shape, dtype=dtype, device=buffers.device), layout)
    tensor: Tensor = sent.arrived()
    return ShardedTensor(tensor if len(slots) == len(tensor) else tensor[list(slots)], layout)


def target_layout(image: Layout, form: SampleForm, with_channels: bool) -> Layout:
    """How the targets of images are cut: masks as the images are, labels along the data axis alone."""
    shape = (image.shape[0], *target_shape(form, with_channels, form.extents))
    dims = (
        [0] if form.target != MASK else [0, 1, *range(2, image.ndim)] if with_channels else [0, *range(2, image.ndim)]
    )
    axes = {at: axis for at, dim in enumerate(dims) if (axis := image.axes[dim]) is not None}
    cuts = {at: cut for at, dim in enumerate(dims) if (cut := image.cuts[dim]) is not None}
    return layout_of(image.mesh, shape, axes, cuts)
