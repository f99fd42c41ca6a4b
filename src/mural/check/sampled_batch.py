"""A batch as a proof takes it: shapes, types and some of its values, from which batches of other sizes are drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mural.check.subject import sampled
from mural.comm.failure.agree import gather
from mural.engine.inputs import all_readable, converted, inputs_of
from mural.memory.readable import Readable
from mural.ranks import Mesh
from mural.shard import ShardedTensor
from mural.shard.unread import Unread

VALUES = 2**15
"""How many values of a tensor are looked at."""
CENTRE = 96
"""The extent of the box in the middle of a source that is read for its values."""
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Sampled:
    """A tensor's shape and type, and some of its values."""

    shape: Shape
    dtype: torch.dtype
    values: Tensor

    def drawn(self, shape: Shape, draws: torch.Generator, double: bool) -> Tensor:
        """A tensor of another shape with such values; of whole numbers, every second from all that occur alike."""
        dtype = torch.float64 if double and self.dtype.is_floating_point else self.dtype
        values = self.values if len(self.values) else torch.zeros(1, dtype=self.dtype)
        found = values[torch.randint(len(values), shape, generator=draws)]
        if self.dtype.is_floating_point:
            if len(self.values) == 0 or float(values.min()) == float(values.max()):
                found = torch.rand(shape, generator=draws, dtype=torch.float64)
        elif not self.dtype.is_complex:
            every = values.unique()
            alike = every[torch.randint(len(every), shape, generator=draws)]
            found = torch.where(torch.rand(shape, generator=draws) < 0.5, found, alike)
        return found.to(dtype)


@dataclass(frozen=True)
class SampledBatch:
    """The inputs of a model, and its target; what of the target is no tensor stays as it is."""

    images: tuple[Sampled, ...]
    alone: bool
    """Whether the model takes one input, and not a tuple of some."""
    targets: tuple[Any, ...]
    form: Any

    @classmethod
    def of(cls, image: Any, target: Any, kind: torch.dtype, mesh: Mesh) -> SampledBatch:
        """That of a batch for a model of a type, with values that some rank has; the same on all ranks. Collective."""
        images = inputs_of(image)
        leaves, form = pytree.tree_flatten(target, is_leaf=lambda leaf: isinstance(leaf, Unread) or all_readable(leaf))
        mine = [sample(part, kind, mask=False) for part in images] + [sample(part, kind, mask=True) for part in leaves]
        told = gather(mesh, mine, "the batch of a proof").values()
        found = [first_with_values(parts) for parts in zip(*told, strict=True)]
        return cls(tuple(found[: len(images)]), images is not image, tuple(found[len(images) :]), form)

    @property
    def shapes(self) -> list[Shape]:
        """The shapes of the inputs and of the target's tensors."""
        return [part.shape for part in (*self.images, *self.targets) if isinstance(part, Sampled)]

    @property
    def dtypes(self) -> list[torch.dtype]:
        """Their types."""
        return [part.dtype for part in (*self.images, *self.targets) if isinstance(part, Sampled)]

    def drawn(self, shapes: Sequence[Shape], device: torch.device, double: bool) -> tuple[Any, Any]:
        """An image and a target of other shapes, in the order of `shapes`."""
        draws, given = torch.Generator().manual_seed(22), iter(shapes)
        every = [
            part.drawn(next(given), draws, double).to(device) if isinstance(part, Sampled) else part
            for part in (*self.images, *self.targets)
        ]
        count = len(self.images)
        return every[0] if self.alone else tuple(every[:count]), pytree.tree_unflatten(every[count:], self.form)

    def constant_targets(self) -> list[float]:
        """The only value of each target that has one alone."""
        parts = [part for part in self.targets if isinstance(part, Sampled) and len(part.values) > 1]
        return [float(part.values[0]) for part in parts if bool((part.values == part.values[0]).all())]


def first_with_values(parts: Sequence[Any]) -> Any:
    """Of what ranks have of one part of a batch, the first that has values."""
    return next((part for part in parts if isinstance(part, Sampled) and len(part.values)), parts[0])


def sample(part: Any, kind: torch.dtype, mask: bool) -> Any:
    """A part of a batch as far as this rank has it; a value that is no tensor as it is."""
    if isinstance(part, Unread):
        return Sampled(tuple(part.shape), part.dtype, torch.zeros(0, dtype=part.dtype))
    if isinstance(part, ShardedTensor):
        return Sampled(tuple(part.shape), part.dtype, sampled(part.local, VALUES))
    if isinstance(part, Tensor):
        return Sampled(tuple(part.shape), part.dtype, sampled(part, VALUES))
    if all_readable(part):
        sources: list[Readable] = list(part) if isinstance(part, (tuple, list)) else [part]
        return of_sources(sources, kind, mask)
    return part


def of_sources(sources: Sequence[Readable], kind: torch.dtype, mask: bool) -> Sampled:
    """Sources of a batch: a mask of one channel of whole numbers, or of values that are `flat`, has no channel dim."""
    first = sources[0] if mask else converted(sources[0], kind)
    extents = tuple(first.shape)
    starts = [max(0, (n - CENTRE) // 2) for n in extents[1:]]
    box = [(0, extents[0]), *((s, min(n, s + CENTRE)) for s, n in zip(starts, extents[1:], strict=True))]
    values = first.read(box)
    flat = mask and extents[0] == 1 and bool(getattr(first, "flat", not values.is_floating_point()))
    whole = flat and not values.is_floating_point()
    found = Sampled((len(sources), *extents), torch.int64 if whole else kind, sampled(values.to(kind), VALUES))
    found = replace(found, values=found.values.to(found.dtype))
    return replace(found, shape=(len(sources), *extents[1:])) if flat else found


def other_extents(shape: Shape, image: Shape, small: Shape, results: Mapping[Shape, Shape]) -> Shape:
    """The shape of a part of a batch for a small image: extents of the image, or of one of the model's results.

    >>> other_extents((4, 512, 512), (4, 3, 512, 512), (1, 3, 47, 45), {})
    (1, 47, 45)
    >>> other_extents((4, 2, 128, 128), (4, 3, 512, 512), (1, 3, 47, 45), {(128, 128): (12, 12)})
    (1, 2, 12, 12)
    >>> other_extents((4, 10), (4, 3, 512, 512), (1, 3, 47, 45), {})
    (1, 10)
    """
    dims = len(image) - 2
    tail = {**results, image[2:]: small[2:]}
    found = tail.get(shape[-dims:] if dims else (), shape[-dims:] if dims else ()) if len(shape) > dims else ()
    lead = list(shape[: len(shape) - len(found)])
    if lead and lead[0] == image[0]:
        lead[0] = small[0]
    return (*lead, *found)
