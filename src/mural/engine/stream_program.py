"""The program of a streamed step: the calls of model and loss, which of them run on tiles, and in which passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mural.engine.alignment import target_dims
from mural.engine.batch_pass import check_result
from mural.engine.opened_results import opened
from mural.errors import PlanError, UnsupportedOp
from mural.graph import Graph, capture
from mural.memory.call_probe import tile_graph
from mural.memory.choice import Kept, KeptChoice, Room, whole_calls
from mural.memory.passes import Passes, passes_of
from mural.memory.recorded_tiles import RecordedTiles
from mural.memory.tile_calls import Axes, TileGraph
from mural.memory.tile_needs import Needs, TileGrid
from mural.ranks import SPATIAL

Loss = Callable[[Any, Any], Any]
Given = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of an input."""


CALL = (
    "func", "args", "kwargs", "inputs", "picks", "after", "output_shapes", "dtypes", "writes", "returns", "detached",
    "casts",
)  # fmt: skip
"""What two captures of a call have in common if they are the same."""


LEARNING = ("batch_norm", "instance_norm")
"""Calls that write their running statistics."""


class Objective(nn.Module):
    """Model and loss as one: takes the images and the tensors of the target, gives the loss; or the result alone."""

    def __init__(self, model: nn.Module, terms: nn.Module, images: int, loss: Loss | None = None, form: Any = None):
        super().__init__()
        self.model, self.loss = model, terms
        self.loss_call, self.form, self.images = loss, form, images
        self.both = False
        """Whether the result is given next to the loss."""
        self.wanted: tuple[bool, ...] = ()
        """Of which inputs the gradient is wanted."""

    def forward(self, *given: Any) -> Any:
        """The loss, the model's result, or both."""
        result = self.model(*given[: self.images])
        if self.loss_call is None:
            return seen(result)
        loss = self.loss_call(result, pytree.tree_unflatten(list(given[self.images :]), self.form))
        return (loss, seen(result)) if self.both else loss


def seen(result: Any) -> Any:
    """A result with all its tensors where they can be seen; raises where it holds others."""
    found = opened(result)
    check_result(found)
    return found


@dataclass(eq=False)
class StreamProgram:
    """What a streamed step runs, for inputs of some shapes."""

    tiles: TileGraph
    passes: Passes
    kept: Kept
    names: tuple[str, ...]
    """The inputs of the graph, in order."""
    constants: dict[str, Tensor]
    """The tensors that the model holds and that are neither parameters nor buffers, as they were found last."""
    recorded: RecordedTiles = field(default_factory=RecordedTiles)
    """Tiles of earlier steps that can be run again."""
    settled: bool = False
    """Whether the device's memory for what is kept on the host was reckoned from all the rest."""
    needs: Needs | None = None
    """What the tiles of the last step needed."""
    whole: frozenset[int] = frozenset()
    """The calls that run on whole tensors."""
    follows: bool = False
    """Whether it follows another program's choices, as a small case does; then all its tiles have one size."""

    def needs_of(self, grid: TileGrid, grids: Mapping[int, TileGrid]) -> Needs:
        """What tiles need: the same object from step to step, which remembers it, as long as tiles lie in one place."""
        if self.needs is None or (self.needs.grid, self.needs.grids) != (grid, grids):
            self.needs = Needs(self.passes, grid, grids)
        return self.needs

    def update(self, found: Mapping[str, Tensor]) -> bool:
        """Take constants that were found now; whether they are others."""
        same = same_constants(self.constants, found)
        self.constants.update(found)
        return not same

    @property
    def graph(self) -> Graph:
        """The captured calls."""
        return self.tiles.graph


def input_axes(shapes: Sequence[tuple[int, ...]], images: int) -> list[Axes]:
    """The axes of each input: those of the first image, and of all others along the dims that are the image's."""
    image = shapes[0]
    dims = len(image) - 2
    found: list[Axes] = []
    for number, shape in enumerate(shapes):
        lead = 2 if number < images else next(iter(target_dims(shape, image, dims)), None)
        if not shape:
            found.append(())
        elif lead is None or len(shape) - lead != dims:
            found.append(("data", *(None,) * (len(shape) - 1)))
        else:
            found.append(("data", *(None,) * (lead - 1), *SPATIAL[:dims]))
    return found


def stream_program(
    objective: Objective, given: Sequence[Given], tile: Sequence[int], room: Room, keep: str | None = None,
    delivered: bool = False, like: StreamProgram | None = None,
) -> StreamProgram:  # fmt: skip
    """The program for inputs of these shapes and types; results that are delivered tile by tile are not kept.

    It keeps what the program `like` it keeps, if there is one of as many calls.
    """
    graph = captured(objective, given, repeated=True)
    check_effects(graph)
    axes = input_axes([shape for shape, _ in given], objective.images)
    names = tuple(value.name for value in graph.inputs)
    tiles = tile_graph(graph, dict(zip(names, axes, strict=True)))
    check_draws(tiles)
    follows = like is not None and len(like.tiles.calls) == len(tiles.calls)
    whole = like.whole if like is not None and follows else whole_calls(tiles, tile)
    choice = KeptChoice(tiles, whole, room, delivered)
    if like is not None and follows:
        kept = replace(like.kept, values=like.kept.values | choice.needed)
    else:
        kept = choice.choose(keep)
    passes = passes_of(tiles, kept.values, whole)
    if not passes.passes:
        raise UnsupportedOp("nothing is computed from the image: there is nothing to stream")
    return StreamProgram(tiles, passes, kept, names, dict(graph.held), whole=whole, follows=follows)


def captured(objective: Objective, given: Sequence[Given], repeated: bool = False) -> Graph:
    """The calls of model and loss; raises if they read tensors whose gradients would be lost."""
    shapes, dtypes = [shape for shape, _ in given], [dtype for _, dtype in given]
    graph = capture(objective, shapes, dtypes, repeated, objective.wanted, values=True)
    hidden = [name for name, tensor in graph.held.items() if tensor.requires_grad]
    if hidden:
        raise UnsupportedOp(
            f"the model reads tensors that have a gradient and are no parameters of it ({hidden[:3]}): a streamed step "
            f"would lose their gradients. Register them as parameters"
        )
    if graph.besides:
        raise UnsupportedOp(
            f"the forward {graph.besides[0]}: a streamed step makes the calls of a forward tile by tile, and this "
            f"would be lost. Do it after the step, or do not stream"
        )
    return graph


def check_draws(tiles: TileGraph) -> None:
    """Raise if the model sets torch's generator and draws after that."""
    since = tiles.graph.reseeded
    late = [] if since is None else [call.node for call in tiles.in_order if call.random and call.node.time >= since]
    if late:
        raise UnsupportedOp(
            f"the forward sets torch's generator (manual_seed, set_rng_state or fork_rng) before {late[0].op} draws "
            f"from it: a streamed step, which makes its calls in another order, would draw others. Seed between steps"
        )


def check_effects(graph: Graph) -> None:
    """Raise if the model leaves something for the next step, other than the statistics of norms."""
    if graph.carried:
        raise UnsupportedOp(
            f"the forward rebinds, draws from or counts on {list(graph.carried)}, but a streamed step makes its calls "
            f"without running it: change them between steps, and draw by torch"
        )
    inputs = {value.name for value in graph.inputs}
    for node in (*graph, *(effect for _, effect in graph.effects)):
        names = [s for s in node.writes if isinstance(s, str) and s not in inputs]
        alone = node.op in LEARNING or not any(isinstance(source, int) for source in node.inputs)
        if names and (node.repeated < 0 or (node.repeated and not alone)):
            raise UnsupportedOp(
                f"{node.op} in module {node.module!r} writes {names} inside torch's checkpoint, which runs it again in "
                f"backward: a streamed step would write once. It keeps no activations anyway: turn checkpointing off"
            )
    for node in graph:
        names = [s for s in node.writes if isinstance(s, str) and s not in inputs]
        if names and node.op not in LEARNING:
            raise UnsupportedOp(
                f"{node.op} at {node.site!r} writes {names} while tiles are computed, so more than once in a step: let "
                f"the forward leave its buffers alone, and update them after the step"
            )
    learned = {source for node in graph if node.op in LEARNING for source in node.writes}
    for node in graph:
        read = [source for source in node.inputs if source in learned]
        if read and not node.writes:
            raise UnsupportedOp(
                f"{node.op} at {node.site!r} reads {read}, which a norm in training mode moves in the same step: a "
                f"streamed step reads them for each tile, before and after. Run that norm in one mode alone"
            )


def same_calls(one: Graph, other: Graph) -> bool:
    """Whether two captures recorded the same calls with the same arguments."""
    values = (one.inputs, one.parameters, one.outputs) == (other.inputs, other.parameters, other.outputs)
    if not values or len(one) != len(other) or len(one.effects) != len(other.effects):
        return False
    beside = zip(one.effects, other.effects, strict=True)
    pairs = [*zip(one.nodes, other.nodes, strict=True), *((a, b) for (_, a), (_, b) in beside)]
    try:
        return all(getattr(a, name) == getattr(b, name) for a, b in pairs for name in CALL)
    except (RuntimeError, ValueError):
        return False


def same_constants(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether calls read the same constants, or new ones with the same numbers."""

    def same(a: Tensor, b: Tensor) -> bool:
        alike = (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
        return a is b or (alike and torch.equal(a, b))

    return one.keys() == other.keys() and all(same(a, other[name]) for name, a in one.items())


def check_stream(plan_stream: Sequence[int], image: Sequence[int]) -> None:
    """Raise unless the tile fits the image's dims."""
    if len(plan_stream) != len(image) - 2:
        raise PlanError(
            f"stream = {tuple(plan_stream)} for images of shape {tuple(image)}: give the tile's extent along each of "
            f"the {len(image) - 2} dims"
        )
