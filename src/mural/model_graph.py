"""`mural.capture`: the graph of a model, and what can be asked of it: blocks, work, bytes, cuts, stages, drawings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from torch import nn

from mural.engine.stage_starts import stage_starts
from mural.graph import blocks as neighbours
from mural.graph import capture as calls
from mural.graph.blocks import Block, Branch, Level, blocks, tree
from mural.graph.bytes import Bytes, bytes_in
from mural.graph.capture import Dtypes, Shapes
from mural.graph.cut_points import cut_points, resolve_cuts
from mural.graph.liveness import CrossingValue, Flow, alive, edges
from mural.graph.nodes import Graph
from mural.graph.stage_modules import StageModule, split
from mural.graph.work_and_depth import GraphWork, table, work
from mural.plans import Plan
from mural.report.graph_drawing.draw import draw
from mural.report.graph_drawing.stages import Stages


@dataclass(frozen=True, repr=False)
class ModelGraph(Graph):
    """What `capture` returns: the nodes of one forward pass, and the model that made it.

    >>> graph = capture(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 1)), (1, 3, 16, 16))
    >>> graph.adjacency("layer")
    {'0': [], '1': ['0'], '2': ['1']}
    >>> [flow.shape for flow in graph.alive("2")]
    [(1, 8, 14, 14)]
    """

    model: nn.Module = field(default_factory=nn.Module, compare=False)

    @classmethod
    def of(cls, graph: Graph, model: nn.Module) -> ModelGraph:
        """The graph with its model."""
        return cls(**{part.name: getattr(graph, part.name) for part in fields(graph)}, model=model)

    def blocks(self, level: Level = "block") -> tuple[Block, ...]:
        """The blocks of a level ("module", "block", "layer") in the order in which they ran."""
        return blocks(self, level)

    def tree(self) -> tuple[Branch, ...]:
        """The blocks as they are nested, down to layers."""
        return tree(self)

    def adjacency(self, level: Level = "block", direction: neighbours.Direction = "from") -> dict[str, list[str]]:
        """For each block those that it takes tensors "from", or gives tensors "to"."""
        return neighbours.adjacency(self, level, direction)

    def work(self) -> GraphWork:
        """Operations and depth of every call and of the whole, forward and backward."""
        return work(self)

    def work_table(self) -> str:
        """Work, depth and average parallelism of every call, as text."""
        return table(self)

    def bytes(self, start: int = 0, stop: int | None = None) -> Bytes:
        """Bytes of parameters, buffers, activations and of what backward keeps, of all nodes or of some."""
        return bytes_in(self, start, stop)

    def alive(self, cut: str | int) -> tuple[Flow, ...]:
        """The tensors alive at a cut, named by what begins there: made before it and read after it."""
        return alive(self, self._node(cut))

    def cut_points(self, level: Level = "layer") -> tuple[int, ...]:
        """The nodes at which a stage may begin."""
        return cut_points(self, level)

    def edges(self, cuts: Sequence[str | int]) -> tuple[CrossingValue, ...]:
        """The tensors that go from stage to stage, for stages that begin at these cuts."""
        return edges(self, [self._node(cut) for cut in cuts])

    def split(self, cuts: Sequence[str | int]) -> tuple[StageModule, ...]:
        """The stages as modules; they share the model's own."""
        return split(self, self.model, cuts)

    def draw(
        self, path: str | Path | None = None, stages: Stages | Plan | None = None, level: Level | None = None
    ) -> str:
        """The drawing of the graph, written to a file where one is given: .html, .dot or .txt.

        Stages have colours: those of a plan, as it would run, or those that begin at given nodes, or a number of them.
        """
        if isinstance(stages, Plan):
            stages = stage_starts(self, stages) if stages.stages > 1 else None
        return draw(self, path, stages, level)

    def _node(self, cut: str | int) -> int:
        return cut if isinstance(cut, int) else resolve_cuts(self, [cut])[0]


def capture(model: nn.Module, shape: Shapes, dtype: Dtypes = None) -> ModelGraph:
    """The graph of the calls that a model makes for an input of this shape, or for inputs of these shapes.

    Nothing is allocated and the model does not change, so any size will do. The dtype, one for all inputs or one for
    each, is that of the parameters unless given.

    >>> capture(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), (1, 3, 131072, 131072))
    Graph(2 nodes, input (1, 3, 131072, 131072) -> output (1, 8, 131070, 131070))
    """
    return ModelGraph.of(calls(model, shape, dtype), model)
