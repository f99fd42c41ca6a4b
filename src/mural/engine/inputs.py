"""What a rank needs of every batch: the image, the target, both or nothing, and over which ranks they are cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from mural.engine.alignment import alignment, target_dims
from mural.errors import DataError, LayoutError
from mural.geometry import Cuts, slices
from mural.memory.readable import Readable
from mural.ranks import SPATIAL, Mesh
from mural.shard import ShardedTensor, shard
from mural.shard.place import place_on
from mural.shard.unread import Unread


@dataclass(frozen=True)
class Needs:
    """Whether a rank takes images and targets of batches that are cut over `mesh`: the run's, or that of its stages.

    Where it takes them `by_window`, it is given sources of whole images and masks, and reads of them what it needs.
    """

    mesh: Mesh
    image: bool = True
    target: bool = True
    by_window: bool = False


Image = Tensor | Unread | Readable | Sequence[Any]
"""A batch: a whole tensor (the same on every rank), a sharded one, read or unread, one or several sources, or several
inputs."""

Span = tuple[int, int]


class Inputs:
    """How the batches of one model reach it.

    `world` is the mesh of the run, `mesh` that of the ranks that share a loss: all, or those of one data coordinate.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, world: Mesh):
        self.model, self.mesh, self.world = model, mesh, world
        self.aligned: dict[tuple[int, ...], int] = {}

    def images(self, image: Image) -> tuple[Any, ...]:
        """The arguments of the model's forward; a tuple of tensors is several of them."""
        return tuple(self.one_of(image, number) for number in range(len(inputs_of(image))))

    def one_of(self, image: Image, number: int) -> Any:
        """One of these arguments; what others are is not looked at, nor read."""
        return self.taken(inputs_of(image)[number], self.align(shape_of(image)))

    def target(self, target: Any, image: Image) -> Any:
        """The target cut like the image: a mask along its dims, a label along the batch alone."""
        if isinstance(target, Unread):
            target = target.tensor()
        if isinstance(target, Mapping):
            return {key: self.target(value, image) for key, value in cast("Mapping[str, Any]", target).items()}
        if isinstance(target, (tuple, list)) and not all_readable(target):
            return type(target)(self.target(part, image) for part in cast("list[Any]", target))
        shape = shape_of(image)
        align = self.align(shape)
        if isinstance(target, Tensor) and not isinstance(target, ShardedTensor) and target.ndim:
            dims = target_dims(tuple(target.shape), shape, len(self.mesh.spatial))
            return self.cut(target, dims, align).to(self.device)
        if isinstance(target, ShardedTensor) or all_readable(target):
            return self.taken(target, align, mask=True)
        return target

    def taken(self, part: Any, align: int, mask: bool = False) -> Any:
        """One input as a sharded tensor on the model's device."""
        if isinstance(part, Unread):
            part = part.tensor()
        if isinstance(part, ShardedTensor):
            return self.adopted(part).to(self.device)
        if isinstance(part, Tensor):
            return self.cut(part, None, align).to(self.device)
        if not all_readable(part):
            raise LayoutError(f"a step takes a tensor, a sharded tensor or sources, not {type(part).__name__}")
        return self.read([part] if isinstance(part, Readable) else list(part), align, mask).to(self.device)

    def cut(self, tensor: Tensor, dims: tuple[int, ...] | None, align: int) -> ShardedTensor:
        """A whole tensor, cut; where each data rank trains alone, its own images of it."""
        if self.mesh != self.world:
            start, stop = self.own_images(len(tensor))
            tensor = tensor[start:stop]
        return place_on(tensor, self.mesh, dims=dims, align=align)  # the call compares its inputs by their names

    def own_images(self, images: int) -> Span:
        """The images of a batch that this data rank takes."""
        parts = self.world.size("data")
        if self.mesh != self.world and images < parts:
            raise LayoutError(f"a batch of {images} for {parts} data ranks that train alone: each needs an image")
        return Cuts.even(images, parts).interval(self.world.coordinates["data"])

    def adopted(self, x: ShardedTensor) -> ShardedTensor:
        """A sharded tensor as it is, or its images as a batch of their own where each data rank trains alone."""
        if x.mesh == self.mesh:
            return x
        if x.mesh.sizes != self.world.sizes:
            raise LayoutError(f"the tensor is on {x.mesh}, the model on {self.world}: shard it on the model's mesh")
        self.own_images(int(x.shape[0]))
        box = [(0, x.box[0].size), *x.box[1:]]
        return shard(x.local, self.mesh, dims=[d for d, a in enumerate(x.placement.axes) if a in SPATIAL], box=box)

    def read(self, sources: Sequence[Readable], align: int, mask: bool) -> ShardedTensor:
        """This rank's box of its images, read from the sources and nothing else.

        Integer masks of one channel become classes (N, H, W), and so do values that a source calls `flat`; everything
        else keeps its channels. All but classes take the type of the model's weights. An image of integers whose
        scaling is not said is refused: a model that was trained on [0, 1] would see 0 to 255.
        """
        kind = next((p.dtype for p in self.model.parameters() if p.is_floating_point()), torch.float32)
        sources = [converted(source, kind) for source in sources]
        shapes = sorted({tuple(s.shape) for s in sources})
        if len(shapes) != 1:
            raise LayoutError(f"the sources of one batch have shapes {shapes}: they have to be equal")
        channels, *extents = shapes[0]
        axes = zip(extents, SPATIAL[: len(self.mesh.spatial)], strict=False)
        cuts = [Cuts.even(n, self.mesh.size(a), align).interval(self.mesh.coordinates[a]) for n, a in axes]
        place: list[Span] = [*cuts, *((0, n) for n in extents[len(cuts) :])]
        taken = self.own_images(len(sources))
        rows = taken if self.mesh == self.world else (0, taken[1] - taken[0])
        pieces = [sources[i].read([(0, channels), *place]) for i in range(*taken)]
        # A rank that owns no image takes the type from a pixel, so that all ranks bring the same.
        like = pieces[0] if pieces else sources[0].read([(0, 1) for _ in shapes[0]])
        if not mask:
            check_scaled(sources[0], like.dtype)  # of a source that did not say its type before
        piece = torch.stack(pieces) if pieces else like.new_empty(0, channels, *(b - a for a, b in place))
        if mask and channels == 1 and getattr(sources[0], "flat", not like.is_floating_point()):
            values = piece[:, 0].to(kind if like.is_floating_point() else torch.int64)
            return shard(values, self.mesh, dims=range(1, 1 + len(cuts)), box=[rows, *place])
        return shard(piece.to(kind), self.mesh, box=[rows, (0, channels), *place])

    def align(self, shape: tuple[int, ...]) -> int:
        """What the cuts of an image of that shape are multiples of."""
        if shape not in self.aligned:
            self.aligned[shape] = alignment(self.model, shape, self.mesh.spatial)
        return self.aligned[shape]

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        held = (t.device for t in chain(self.model.parameters(), self.model.buffers()) if not t.is_meta)
        return next(held, torch.device("cpu"))


def inputs_of(image: Image) -> tuple[Any, ...]:
    """The inputs of a model: those of a tuple of tensors, read or unread; anything else is one."""
    if isinstance(image, tuple) and any(isinstance(part, (Tensor, Unread)) for part in image):
        return image
    return (image,)


def on_seat(x: ShardedTensor | Unread, world: Mesh, inputs: Inputs) -> ShardedTensor | Unread:
    """What is on the run's mesh, moved to the mesh of a stage; what was not read stays unread."""
    return x.then(lambda read: seated(read, world, inputs)) if isinstance(x, Unread) else seated(x, world, inputs)


def seated(x: ShardedTensor, world: Mesh, inputs: Inputs) -> ShardedTensor:
    """A tensor on the run's mesh as one on the mesh of a stage: the same piece, or the part of it that is cut there."""
    if x.mesh == inputs.mesh:
        return x
    if x.mesh != world:
        raise LayoutError(f"the tensor is on {x.mesh}, the model on {world}: shard it on the model's mesh")
    mesh, layout = inputs.mesh, x.placement
    dims = [d for d, axis in enumerate(layout.axes) if axis in SPATIAL]
    if world.spatial == mesh.spatial:
        return shard(x.local, mesh, dims=dims, box=[(i.start, i.stop) for i in x.box])
    count = len(mesh.spatial)
    dims = list(range(x.ndim - count, x.ndim)) if x.ndim > count else []
    place = list(x.box)
    for dim, axis in zip(dims, SPATIAL, strict=False):
        place[dim] = Cuts.even(x.shape[dim], mesh.size(axis)).interval(mesh.coordinates[axis])
    return shard(x.local[slices(place, x.box)].contiguous(), mesh, dims=dims, box=place)


def converted(source: Readable, dtype: torch.dtype) -> Readable:
    """A source that is scaled as it is read, in the type of the model; any other as it is."""
    convert = getattr(source, "converted", None)
    return source if convert is None else convert(dtype)


def check_image(image: Image) -> None:
    """Raise for a batch that no rank can run, on all ranks: one without images, or of unscaled integers."""
    check_filled(image)
    several: Any = image if isinstance(image, (tuple, list)) else [image]
    for source in several if all_readable(image) else ():
        if isinstance(getattr(source, "dtype", None), torch.dtype):
            check_scaled(source, source.dtype)


def check_scaled(source: Readable, dtype: torch.dtype) -> None:
    """Raise for an image of integers, of which nobody said what a model takes for them."""
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        return
    name = str(getattr(source, "name", "the source"))
    raise DataError(
        f"{name}: the image holds integers ({dtype}), and nothing says which numbers the model takes for them: open it "
        f'by mural.open(…, scale="range") for [0, 1] by the range of the type, as training does by default; a number '
        f'divides, "none" takes them as they are, mean= and std= follow. mural.data.scaled(source, …) does it to any '
        f"source, and mural.train.Config.load(RUN/config.toml).data.scaled(source) as that run did",
        name,
    )


def all_readable(part: Any) -> bool:
    """Whether this is a source, or several and nothing else."""
    if isinstance(part, Tensor):
        return False
    several: Any = part if isinstance(part, (tuple, list)) else [part]
    return bool(several) and all(isinstance(s, Readable) and not isinstance(s, Tensor) for s in several)


def check_filled(image: Image) -> None:
    """Raise for a batch without images, which has no loss that could be a mean over it."""
    shape = shape_of(image)
    if 0 in shape:
        raise LayoutError(
            f"the batch has the shape {shape}, and nothing in it to learn from or to rate: leave such batches out on "
            f"all ranks, as by drop_last=True or `if len(image)`"
        )


def shape_of(image: Image) -> tuple[int, ...]:
    """The shape of the batch's first input."""
    if isinstance(image, (Tensor, Unread)):
        return tuple(image.shape)
    several: Any = image if isinstance(image, (tuple, list)) else [image]
    if not several:
        return (0,)
    if not hasattr(several[0], "shape"):
        raise LayoutError(f"a step takes a tensor, a sharded tensor or sources, not {type(image).__name__}")
    first: Any = several[0]
    return tuple(first.shape) if isinstance(first, (Tensor, Unread)) else (len(several), *first.shape)
