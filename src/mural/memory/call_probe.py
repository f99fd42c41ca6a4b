"""Which calls of a model can run on a tile, what each reads, and what it asks of all tiles: found without memory.

The captured calls run once on meta tensors, as one tile that holds everything. Each rule says what it would read of
other tiles: a windowed rule its windows, a sum or a norm that it needs a total. A call that asks for neither runs once
more on a tile from the middle, where it must not miss anything. A call that cannot run on a tile is noted with the
reason; it has to see the whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mural.errors import MuralError, UnsupportedOp
from mural.geometry import Box, Cuts, Interval, Reads, Window
from mural.graph.differentiable import carries
from mural.graph.nodes import Graph, Node, Place
from mural.graph.without_memory import META
from mural.memory.call_draws import CallDraws
from mural.memory.tile_calls import Axes, CallForm, TileCall, TileGraph, TileValue, TileWindow, made_by, tensors_in
from mural.ranks.mesh import SPATIAL, Mesh
from mural.shard.folds.regroup import Folds
from mural.shard.functions import KIND as FUNCTION
from mural.shard.layout import Layout
from mural.shard.table import writes
from mural.shard.tensor import ShardedTensor
from mural.shard.tiles import OwnMoments, Spans, cropped, spans_of, tile_mesh, tile_of, tile_run

CANNOT = (MuralError, RuntimeError, NotImplementedError, ValueError, AttributeError, TypeError)
"""What a rule raises that cannot run on a tile; the last two where it gets a tile for a parameter."""
SLICED = "it writes in place to a slice of the image, of which a tile has a copy: assign a number to it"
SHAPED = frozenset(["new_empty", "new_zeros", "new_ones", "new_full"])
"""The calls that make a tensor of a shape: what they are given says its type, device and place alone."""


@dataclass
class _Trial:
    """A run of one call on a tile that holds everything: notes what the call asks for."""

    windows: list[TileWindow] = field(default_factory=list[TileWindow])
    totals: list[Tensor] = field(default_factory=list[Tensor])
    levels: list[int] = field(default_factory=list[int])
    norm: bool = False

    def out(self, layout: Layout, dims: Sequence[Reads], name: str) -> Spans:
        """All outputs."""
        first = layout.ndim - len(dims)
        axes = [(layout.axes[d], r) for d, r in enumerate(dims, first) if layout.cuts[d] is not None]
        far = [r for _, r in axes if not isinstance(r, Window) and len(r.reads(Interval(0, 1))) > 1]
        if far or "circular" in name or name == "roll":
            raise UnsupportedOp(f"{name} reads the far side of the image: it is not local")
        self.windows.append(tuple((a, r) for a, r in axes if a is not None))
        return {a: Interval(0, r.out_extent) for a, r in axes if a is not None}

    def own(self, layout: Layout) -> Box:
        """All of it."""
        return layout.box

    def total(self, part: Tensor, axes: Sequence[str], name: str) -> Tensor:
        """A leaf of its own, so that totals that depend on it can be told."""
        self._check(axes, name)
        level = 0
        if part.requires_grad and self.totals:
            leaves = self.totals
            real = torch.view_as_real(part) if part.is_complex() else part
            found: Iterator[Any] = iter(torch.autograd.grad(real.sum(), leaves, retain_graph=True, allow_unused=True))
            level = max((1 + self.levels[i] for i, g in enumerate(found) if g is not None), default=0)
        made = torch.empty_like(part).requires_grad_(carries(part.dtype))
        if made.requires_grad:
            self.totals.append(made)
        self.levels.append(level)
        if len(self.totals) != len(self.levels):
            self.totals.append(torch.empty((), device=META, requires_grad=True))
        return made

    def statistics(self, own: Callable[[], OwnMoments], axes: Sequence[str]) -> Tensor:
        """Statistics without values."""
        self._check(axes, "a norm")
        self.levels.append(0)
        self.norm = True
        rows: Any = own()
        wide = torch.float64 if rows.values.dtype == torch.float64 else torch.float32
        groups = rows.rows.groups * (rows.rows.images if rows.rows.per_image else 1)
        return torch.zeros(2, groups, dtype=wide, device=META)

    def _check(self, axes: Sequence[str], name: str) -> None:
        missing = {a for a in SPATIAL if a in self.axes} - set(axes)
        if missing:
            raise UnsupportedOp(f"{name} adds up along {axes} and not along {sorted(missing)}: it is not local")

    axes: tuple[str, ...] = ()


def tile_graph(graph: Graph, inputs: Mapping[str, Axes]) -> TileGraph:
    """What the calls of a graph do to tiles, given the axes of its inputs."""
    # With gradients, also where nobody wants them: they tell which totals depend on others.
    with torch.inference_mode(False), torch.enable_grad():
        return _Prober(graph, inputs).probe()


class _Prober:
    """Runs the calls of one graph on meta tiles."""

    def __init__(self, graph: Graph, inputs: Mapping[str, Axes]):
        self.graph = graph
        self.made: dict[Place, Tensor] = {}
        self.values: dict[Place, TileValue] = {}
        self.copied: dict[int, str] = {}
        """The calls that write to a plain tensor what tiles say: each tile to a copy of its own."""
        self.untried: dict[Place, str] = {}
        """What comes from a call that cannot be tried on one rank: plain here, in a step in one piece perhaps not."""
        for value in graph.inputs:
            tensor = torch.empty(value.shape, dtype=value.dtype, device=META)
            tensor.requires_grad_(carries(value.dtype))
            self._enter((value.name, 0), whole_tile(tensor, inputs[value.name]))
        for value in graph.parameters:
            tensor = torch.empty(value.shape, dtype=value.dtype, device=META)
            learned = value.role == "parameter" and carries(value.dtype)
            self._enter((value.name, 0), tensor.requires_grad_(learned))

    def _enter(self, place: Place, tensor: Any) -> None:
        self.made[place] = tensor
        shape, axes, folds = tuple(tensor.shape), (), ()
        if isinstance(tensor, ShardedTensor):
            lay, folds = tensor.placement, tensor.folds
            shape = lay.shape
            axes = tuple(a if c is not None else None for a, c in zip(lay.axes, lay.cuts, strict=True))
        self.values[place] = TileValue(shape, tensor.dtype, axes, folds)

    def probe(self) -> TileGraph:
        calls = self._spread([self._call(node) for node in self.graph])
        self._check_copied([i for output in self.graph.outputs for i in output.after], "the result")
        effects = tuple(map(effect_call, (node for _, node in self.graph.effects)))
        return TileGraph(self.graph, calls, self.values, effects)

    def _spread(self, calls: Sequence[TileCall]) -> tuple[TileCall, ...]:
        """The calls; zeros that tiles only copy a part of, to write to it, take no memory."""
        readers = {source: {c.node.id for c in calls if source in c.node.inputs} for source in range(len(calls))}
        return tuple(
            replace(c, spread=bool(readers[c.node.id]) and readers[c.node.id] <= self.copied.keys())
            if c.plain and c.node.op == "zeros"
            else c
            for c in calls
        )

    def _check_copied(self, after: Iterable[int], what: str) -> None:
        """Raise for what reads memory that tiles wrote to copies of."""
        found = next((self.copied[i] for i in after if i in self.copied), None)
        if found is not None:
            raise UnsupportedOp(
                f"{what} reads, through another tensor, memory that {found} writes to in place, which each tile of a "
                f"streamed step does in a copy of its own: read the result of that call"
            )

    def _call(self, node: Node) -> TileCall:
        check_generator(node)
        self._check_copied(node.after, f"{node.op} at {node.site!r}")
        given = [self.made[place] for place in node.reads]
        if not any(isinstance(t, ShardedTensor) for t in given):
            with CallDraws() as draws:
                self._results(node, CallForm.of(node).call(given, META))
            self._check_tried(node, draws)
            return TileCall(node, plain=True, keys=draws.keys)
        trial = _Trial(axes=tuple(dict.fromkeys(a for t in given for a in axes_of(t))))
        try:
            if node.kind == FUNCTION:
                raise UnsupportedOp(f"{node.op}, a custom autograd.Function, may look at more than a tile")
            with tile_run(trial), CallDraws() as draws:
                result = CallForm.of(node).call(given, META)
            if draws.keys is None and trial.axes:
                raise UnsupportedOp("it draws random numbers that differ from tile to tile")
            if not trial.levels and node.op not in SHAPED:
                check_axes(given, tensors_in(result))
            if not trial.windows and not trial.levels:
                check_local(node, given)
            if trial.levels and not trial.norm:
                check_total(tensors_in(result))
        except CANNOT as error:
            return self._whole(node, given, reason(error))
        self._results(node, result)
        made = tensors_in(result)  # nothing where a call has written to its argument and returns None
        if made and writes(node.op) and not any(one is other for one in made for other in given):
            self.copied[node.id] = f"{node.op} at {node.site!r}"
        beside, shaped = 1 < len(node.makes) == len(trial.windows), node.op in SHAPED
        windows, levels = tuple(trial.windows), tuple(trial.levels)
        return TileCall(node, windows, levels, trial.norm, draws.keys, beside=beside, shaped=shaped)

    def _whole(self, node: Node, given: Sequence[Tensor], why: str) -> TileCall:
        """A call that sees whole tensors: what it makes, as on one rank."""
        draws = CallDraws()
        try:
            with draws:
                result = CallForm.of(node).call([on_one_rank(t) for t in given], META)
            made = [from_one_rank(t) for t in tensors_in(result)] or self._returned(node)
        except CANNOT:
            draws = draws_of(node)
            self.untried |= dict.fromkeys(node.makes, f"{node.op} at {node.site!r}")
            shapes = zip(node.output_shapes, node.dtypes, node.gradients, strict=True)
            made = [torch.empty(s, dtype=d, device=META).requires_grad_(g) for s, d, g in shapes]
        if draws.keys != 0 and getattr(node.func, "__module__", "") == "torch.nn.init":
            raise UnsupportedOp(f"{node.op} at {node.site!r}, a function of torch.nn.init, {why}: draw by x.normal_()")
        for place, tensor in zip(node.makes, made, strict=True):
            self._enter(place, tensor)
        return TileCall(node, keys=draws.keys, refused=f"{node.op} at {node.site!r}: {why}")

    def _check_tried(self, node: Node, draws: CallDraws) -> None:
        """Raise for a call that draws, if a step in one piece may have another kind of tensors there, and draw others.

        What is computed from such tensors may be of another kind, too.
        """
        found = [self.untried[place] for place in node.reads if place in self.untried]
        if found and draws.keys != 0:
            raise UnsupportedOp(
                f"{node.op} at {node.site!r} draws random numbers for what comes from {found[0]}, which cannot be "
                f"tried without memory: a step in one piece may draw others. Draw before that call, or do not stream"
            )
        if found:
            self.untried |= dict.fromkeys(node.makes, found[0])

    def _returned(self, node: Node) -> list[Tensor]:
        """The arguments that a call has written to and that stand for its results, as it returns nothing."""
        return [self.made[node.reads[i]] for i in node.returns]

    def _results(self, node: Node, result: Any) -> None:
        for place, tensor in made_by(node, result, [self.made[place] for place in node.reads]).items():
            tensor = tensor.detach() if node.detached and not node.writes else tensor
            self._enter(place, tensor)


def reason(error: Exception) -> str:
    """Why a call cannot run on a tile, in a few words."""
    why = str(error).split("\n")[0]
    return SLICED if "is being modified inplace" in why else why


def effect_call(node: Node) -> TileCall:
    """A call outside the dataflow, which sees no tiles."""
    check_generator(node)
    return TileCall(node, plain=True, keys=draws_of(node).keys)


def draws_of(node: Node) -> CallDraws:
    """What a call draws on plain tensors."""
    shapes = zip(node.input_shapes, node.input_dtypes, strict=True)
    with CallDraws() as draws:
        CallForm.of(node).call([torch.empty(shape, dtype=dtype, device=META) for shape, dtype in shapes], META)
    return draws


def check_axes(given: Sequence[Any], made: Sequence[Any]) -> None:
    """Raise unless results are cut along all axes of the image that arguments are cut along."""
    axes = {axis for t in given for axis in axes_of(t)} & {*SPATIAL}
    if any(isinstance(t, ShardedTensor) and not axes.issubset(axes_of(t)) for t in made):
        raise UnsupportedOp("its result is not cut like the image: it is not local")


def check_total(made: Sequence[Any]) -> None:
    """Raise for a call that makes tiles of a total: a pass that knows the total gives it no tile to apply it to."""
    if any(axis in SPATIAL for t in made for axis in axes_of(t)):
        raise UnsupportedOp("it needs a total over all tiles, and then every tile again")


def check_local(node: Node, given: Sequence[Any]) -> None:
    """Raise unless a call on tiles from the middle of their tensors gives tiles at the same places."""
    parts = [cropped(t, middle(t), written=True) if isinstance(t, ShardedTensor) else t for t in given]
    extents = {pair for t in given if isinstance(t, ShardedTensor) for pair in extents_of(t).items()}
    state = torch.get_rng_state()
    with torch.no_grad(), tile_run(_Trial()):
        made = tensors_in(CallForm.of(node).call(parts, META))
    torch.set_rng_state(state)
    for tensor in made:
        if not isinstance(tensor, ShardedTensor):
            continue
        if not extents_of(tensor).items() <= extents or spans_of(tensor.placement) != middle(tensor):
            raise UnsupportedOp("it moves positions of the image to other places: it is not local")


def extents_of(tensor: ShardedTensor) -> dict[str, int]:
    """The extent along each axis that cuts a tile."""
    return {a: n for a, n in zip(tensor.placement.axes, tensor.placement.shape, strict=True) if a in axes_of(tensor)}


def middle(tensor: ShardedTensor) -> dict[str, Interval]:
    """An interval inside a tensor along each axis; of two positions the second."""
    return {a: Interval(n // 2 if n < 3 else 1, n if n < 3 else n - 1) for a, n in extents_of(tensor).items()}


def check_generator(node: Node) -> None:
    """Raise for a call that draws from another generator than torch's: tiles cannot set it back."""
    if any(isinstance(leaf, torch.Generator) for leaf in pytree.tree_leaves((node.args, dict(node.kwargs)))):
        raise UnsupportedOp(
            f"{node.op} at {node.site!r} draws from a generator of the model's own, from which each tile of a streamed "
            f"step would draw other numbers: use torch's default generator"
        )


def axes_of(tensor: Any) -> tuple[str, ...]:
    """The axes that cut a tile; none for other tensors."""
    return tuple(spans_of(tensor.placement)) if isinstance(tensor, ShardedTensor) else ()


def whole_tile(tensor: Tensor, axes: Axes, folds: Folds = ()) -> Tensor:
    """A tensor as a tile that holds all of it; a plain one, without axes, as it is."""
    if not axes:
        return tensor
    spans = {a: Interval(0, n) for a, n in zip(axes, tensor.shape, strict=True) if a is not None}
    return tile_of(tensor, tuple(tensor.shape), axes, spans, folds)


ALONE = Mesh((1,) * 7, 0, 3, tile_mesh().transport)


def on_one_rank(tensor: Any) -> Any:
    """A tile that holds everything as the piece of one rank."""
    if not isinstance(tensor, ShardedTensor):
        return tensor
    lay = tensor.placement
    cuts = tuple(None if c is None else Cuts.of((0, n)) for c, n in zip(lay.cuts, lay.shape, strict=True))
    images = tuple((a, c) for a, c in zip(lay.axes, cuts, strict=True) if a and c)
    return ShardedTensor(tensor.local, Layout(ALONE, lay.shape, lay.axes, cuts, images), tensor.aliased, tensor.folds)


def from_one_rank(tensor: Tensor) -> Tensor:
    """The piece of one rank as a tile that holds everything; a plain tensor as it is."""
    if not isinstance(tensor, ShardedTensor):
        return tensor
    lay = tensor.placement
    axes = tuple(a if c is not None else None for a, c in zip(lay.axes, lay.cuts, strict=True))
    return whole_tile(tensor.local, axes, tensor.folds)
