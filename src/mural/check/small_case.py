"""The small case of a plan: the smallest image in which it has tiles and pieces inside, and the plan for that image.

real    8192 × 8192, tiles of 2048 with a margin of 92       3 × 3 tiles of 96 in 287 × 287, of which one is inside;
small    287 × 287,  tiles of 96                             or, in less time, 287 × 33 in 3 × 1 and 33 × 287 in 1 × 3
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from torch.utils import _pytree as pytree

from mural.check.same_program import results_of, unlike_calls
from mural.check.sampled_batch import Sampled, SampledBatch, Shape, other_extents
from mural.check.subject import Subject
from mural.engine import Loss
from mural.engine.alignment import without_hooks
from mural.engine.loss_terms import LossTerms
from mural.engine.stream_program import Objective, StreamProgram
from mural.engine.streamed_batch import StreamedBatch
from mural.errors import MuralError
from mural.graph import Graph, capture
from mural.plans import Plan
from mural.ranks import SPATIAL

UNITS = (2, 4, 8, 16, 32, 64, 128)
"""Multiples that extents are rounded up to, where the model does not take odd ones."""
UNTAKEN = (MuralError, RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError, AssertionError)
"""What a model may raise for an image that it does not take."""
LITTLE = 2**14
"""So many positions of an image are little work."""
TENSOR = "a tensor"
"""What stands for a tensor of a target."""


@dataclass(frozen=True)
class SmallCase:
    """Images and targets of small shapes, and the plan that divides them as the real one divides its own."""

    plan: Plan
    shapes: tuple[Shape, ...]
    tiled: tuple[int, ...]
    """The spatial dims along which there are several tiles."""
    work: int
    """The operations of a step on one device."""

    def __str__(self) -> str:
        extents = " × ".join(map(str, self.shapes[0][2:])) or "no extents"
        tiles = f" in tiles of {' × '.join(map(str, self.plan.stream))}" if self.plan.stream else ""
        return f"{self.shapes[0][0]} of {extents}{tiles}"


@dataclass(frozen=True)
class LossOfLeaves:
    """A loss of a model's result and the tensors of a target; the rest of the target is fixed."""

    loss: Loss
    fixed: tuple[Any, ...]
    form: Any

    def __call__(self, result: Any, tensors: Sequence[Any]) -> Any:
        given = iter(tensors)
        every = [next(given) if part is TENSOR else part for part in self.fixed]
        return self.loss(result, pytree.tree_unflatten(every, self.form))


@dataclass
class Sizes:
    """Which sizes a model takes: found by captures of model and loss, each once; `graphs` are those that are known."""

    subject: Subject
    batch: SampledBatch
    graphs: dict[Shape, Graph | None] = field(default_factory=dict[Shape, Graph | None])
    with_loss: bool = True
    """Whether the loss can be captured, too."""
    refused: str = ""
    """What the model last raised for an image that it does not take."""

    @property
    def image(self) -> Shape:
        """The real images' shape."""
        return self.batch.images[0].shape

    def shapes(self, image: Shape) -> tuple[Shape, ...]:
        """The shapes of a batch with images of that shape."""
        real, wanted = self.image[2:], [part.shape for part in self.batch.targets if isinstance(part, Sampled)]
        ends: Mapping[Shape, Shape] = {}
        if any(len(shape) > len(real) and shape[-len(real) :] != real for shape in wanted):
            there, here = self.tried(self.captured, self.image), self.tried(self.captured, image)
            ends = results_of(there, here) if there is not None and here is not None else {}
        return tuple(other_extents(shape, self.image, image, ends) for shape in self.batch.shapes)

    def graph(self, image: Shape) -> Graph | None:
        """The calls of model and loss, or of the model, for images of that shape; None if they cannot be captured."""
        if image not in self.graphs:
            self.graphs[image] = self.tried(self.captured_loss, image) if self.with_loss else None
            if self.graphs[image] is None:
                self.graphs[image] = self.tried(self.captured, image)
                if image == self.image and self.graphs[image] is not None:
                    self.with_loss = False
        return self.graphs[image]

    def tried(self, capturing: Callable[[Shape], Graph], image: Shape) -> Graph | None:
        """What a capture gives; None if the model, or the loss, does not take such an image."""
        try:
            return capturing(image)
        except UNTAKEN as error:
            self.refused = f"{type(error).__name__}: {error}".splitlines()[0]
        return None

    def captured(self, image: Shape) -> Graph:
        """The calls of the model for images of that shape."""
        shapes = [other_extents(part.shape, self.image, image, {}) for part in self.batch.images]
        with without_hooks(self.subject.model):
            return capture(self.subject.model, shapes, [part.dtype for part in self.batch.images])

    def captured_loss(self, image: Shape) -> Graph:
        """The calls of model and loss for images of that shape."""
        terms = LossTerms.of(self.subject.loss, self.subject.model)
        fixed = tuple(TENSOR if isinstance(part, Sampled) else part for part in self.batch.targets)
        loss = LossOfLeaves(self.subject.loss, fixed, self.batch.form)
        tensors = [part for part in self.batch.targets if isinstance(part, Sampled)]
        form = pytree.tree_structure([0] * len(tensors))
        whole = Objective(self.subject.model, terms.root, len(self.batch.images), loss, form)
        with without_hooks(whole):
            return capture(whole, list(self.shapes(image)), self.batch.dtypes)

    def stride(self) -> int:
        """By how much the model divides the extents of the real image."""
        graph, extents, found = self.graph(self.image), self.image[2:], 1
        for node in graph or ():
            for shape in node.output_shapes if node.kind == "windowed" else ():
                ratios = [e / n for e, n in zip(extents, shape[2:], strict=False) if n > 1]
                found = max(found, round(max(ratios, default=1)))
        return min(found, max(1, max(extents, default=1) // 2))

    def fitting(self, images: int, wanted: Sequence[int]) -> Shape | None:
        """A shape of at least these extents that the model takes, None if it takes none.

        It is the first for which the model makes the calls that it makes for the real one: odd if it can be. An extent
        that is the real one stays; the real extents are tried last.
        """
        real = self.graph(self.image)
        if real is None:  # no capture says what the model takes
            extents = [min(e, -(-n // 32) * 32) for n, e in zip(wanted, self.image[2:], strict=True)]
            return (images, self.image[1], *extents)
        first: Shape | None = None
        some = prod(self.image[2:]) > LITTLE  # the real size is proved if nothing else is like it, and it is small
        tried = [*candidates(wanted, self.image[2:])]
        several = min(2 * images, self.image[0])  # a batch norm over a single value raises
        for count, extents in [(n, e) for n in dict.fromkeys((images, several)) for e in tried]:
            if count > images and first is not None:
                break
            shape = (count, self.image[1], *extents)
            graph = self.graph(shape)
            if graph is not None and not unlike_calls(real, graph) and not (some and extents == self.image[2:]):
                return shape
            first = shape if first is None and graph is not None else first
        return first


def candidates(wanted: Sequence[int], real: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Extents to try for an image of at least these: odd ones, then multiples.

    >>> [*candidates((9, 64), (512, 64))][:3]
    [(9, 64), (10, 64), (12, 64)]
    """
    tried = dict.fromkeys([tuple(n if n >= e else min(e, n | 1) for n, e in zip(wanted, real, strict=True))])
    for unit in UNITS:
        tried[tuple(e if n >= e else min(e, -(-n // unit) * unit) for n, e in zip(wanted, real, strict=True))] = None
    tried[tuple(real)] = None
    yield from tried


def images_for(plan: Plan, images: int) -> int:
    """The images of a small batch: one for each place, and one more where the real ones do not come out even."""
    places = plan.data * plan.channel * plan.microbatches
    return images if images <= places else places + bool(images % places)


def provable(plan: Plan) -> Plan:
    """The plan without what changes results by intention, and without a limit of memory that nothing small meets."""
    norms = {"rank": "global", "micro-rank": "micro"}.get(plan.batchnorm, plan.batchnorm)
    return replace(plan, average=0, batchnorm=norms, precision="float32", memory="")


def ranked(plan: Plan, dims: int) -> list[int]:
    """The most ranks along each spatial dim, in any stage."""
    grids = [(*grid, *(1,) * dims)[:dims] for grid in plan.seat_grids]
    return [max(grid[dim] for grid in grids) for dim in range(dims)]


def small_cases(plan: Plan, sizes: Sizes, batch: StreamedBatch | None) -> Iterator[tuple[SmallCase, ...]]:
    """Small cases that together exercise a plan, the most thorough first; `batch` is the real one, as it is streamed.

    Tiles along several dims are also exercised one dim at a time.
    """
    tiles = {} if batch is None else tiles_inside(batch, sizes.stride())
    yield tuple(filter(None, [small_case(plan, sizes, tiles, tuple(tiles))]))
    if len(tiles) > 1:
        yield tuple(filter(None, [small_case(plan, sizes, tiles, (dim,)) for dim in tiles]))


def small_case(plan: Plan, sizes: Sizes, tiles: Mapping[int, int], tiled: tuple[int, ...]) -> SmallCase | None:
    """The case with several tiles along some dims, if the model takes an image for it."""
    real, dims = sizes.image, len(sizes.image) - 2
    cuts, least = ranked(plan, dims), max(2 * sizes.stride(), 8)
    wanted = [3 * tiles[d] * cuts[d] - 1 if d in tiled else cuts[d] * least + 1 for d in range(dims)]
    shape = sizes.fitting(images_for(plan, real[0]), wanted)
    if shape is None:
        return None
    stream = plan.stream and tuple(tiles[d] if d in tiled else shape[2 + d] for d in range(dims))
    return SmallCase(replace(plan, stream=stream), sizes.shapes(shape), tiled, work_of(sizes.graph(shape)))


def work_of(graph: Graph | None) -> int:
    """About how many operations a step takes: those of the products in its convolutions and linear layers."""
    if graph is None:
        return 0
    given = graph.given
    total = 0
    for node in graph:
        taps = [
            given[str(s)].shape
            for s in node.inputs
            if isinstance(s, str) and s in given and given[s].role == "parameter"
        ]
        weight = max((prod(shape[1:]) for shape in taps if len(shape) > 1), default=1)
        total += 2 * weight * sum(prod(shape) for shape in node.output_shapes)
    return 3 * total


def tiles_inside(batch: StreamedBatch, stride: int) -> dict[int, int]:
    """For each spatial dim that the real image has tiles along, the extent of a tile that its margins fit around."""
    found: dict[int, int] = {}
    for dim, axis in enumerate(SPATIAL):
        grid = batch.needs.grid
        if axis in grid.cuts and len(grid.cuts[axis].intervals()) > 1:
            margin = margin_along(batch, axis)
            # Where the model divides an odd extent it rounds down: a stride more leaves the last tile its margin.
            found[dim] = stride * max(-(-(margin + stride) // stride), -(-4 // stride))
    return found


def margin_along(batch: StreamedBatch, axis: str) -> int:
    """How far beyond its own positions a tile in the middle reads, in positions of the image."""
    needs, most = batch.needs, 0
    whole = batch.program.tiles.values[batch.program.names[0], 0].extents[axis]
    for one in batch.program.passes.passes:
        if one.whole:
            continue
        grid = needs.grid_of(one)
        at = grid.coordinates(axis)
        for c in sorted({at[0], at[len(at) // 2], at[-1]}):
            for place in one.reads:
                value = batch.program.tiles.values[place]
                span = needs.along(one, axis, c).values.get(place)
                if axis not in value.extents or span is None:
                    continue
                extent = value.extents[axis]
                own = grid.own(axis, extent, c)
                beyond = max(own.start - span.start, span.stop - own.stop)
                most = max(most, -(-beyond * whole // extent))
    return most


def has_tile_inside(program: StreamProgram, dims: Sequence[int]) -> bool:
    """Whether along each of these dims some tile of the last step touched no border, in every pass."""
    needs, values = program.needs, program.tiles.values
    for axis in (SPATIAL[dim] for dim in dims):
        for one in program.passes.passes if needs is not None else ():
            places = [p for p in one.reads if axis in values[p].extents]
            if needs is None or one.whole or not places:
                continue
            spans = [
                [(values[p].extents[axis], needs.along(one, axis, c).values.get(p)) for p in places]
                for c in needs.grid_of(one).coordinates(axis)
            ]
            if not any(all(s is None or (s.start > 0 and s.stop < n) for n, s in each) for each in spans):
                return False
    return True
