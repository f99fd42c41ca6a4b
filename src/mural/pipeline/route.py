"""The route of a model through stages: its stretches, the tensors that cross between them, and who holds what."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from torch import nn

from mural.errors import PlanError
from mural.graph import Graph, Node
from mural.graph.script import Key, Script, Stretch, script_of
from mural.graph.sites import ModuleCall
from mural.pipeline.transfers import Edge

RANDOM = "random state"
"""What a stage hands on so that the next one draws the numbers that would come next; the pick is the stage's number."""
RANDOM_CALLS = frozenset([
    "rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson", "binomial", "random",
    "randint_like", "_standard_gamma", "_sample_dirichlet", "lstm", "gru", "rnn_tanh", "rnn_relu",
    "scaled_dot_product_attention", "multi_head_attention_forward", "fractional_max_pool2d", "fractional_max_pool3d",
])  # fmt: skip
"""The calls that may draw random numbers besides those whose kind says so."""


@dataclass(frozen=True)
class Route:
    """A graph cut into stages: stage s has the nodes of its stretch."""

    script: Script
    edges: tuple[Edge, ...]

    @classmethod
    def of(cls, graph: Graph, starts: Sequence[int], held: Mapping[str, frozenset[int]] | None = None) -> Route:
        """The route whose stages begin at those nodes; the first is 0. `held` says who holds what, if it is settled."""
        bounds = [*starts, len(graph)]
        check_starts(graph, bounds)
        script = script_of(graph, bounds, held)
        check_writes(graph, bounds)
        check_buffers(graph, bounds)
        check_attributes(script)
        return cls(script, (*crossings(graph, script.stretches, bounds), *random_chain(graph, bounds)))

    @property
    def graph(self) -> Graph:
        """The calls of the model."""
        return self.script.graph

    @property
    def stretches(self) -> tuple[Stretch, ...]:
        """What each stage takes and gives."""
        return self.script.stretches

    @property
    def starts(self) -> tuple[int, ...]:
        """The first node of each stage."""
        return tuple(stretch.start for stretch in self.stretches)

    def stage_of(self, node: int) -> int:
        """The stage that a node belongs to."""
        return bisect_right(self.starts, node) - 1

    def held(self, model: nn.Module) -> dict[str, frozenset[int]]:
        """For each parameter and buffer of the model, by its first name, the stages that hold it.

        A stage holds what its nodes read and what is in modules that it calls as a whole. What nobody reads stays
        with the calls around it: the stage of the innermost called module whose path begins its name.
        """
        first = {id(t): name for name, t in reversed(list(named_tensors(model)))}
        stages: dict[str, set[int]] = {name: set() for name in first.values()}
        alias = {name: first[id(t)] for name, t in named_tensors(model)}
        for node in self.graph:
            for source in node.inputs:
                if source in alias:
                    stages[alias[source]].add(self.stage_of(node.id))
        for before, node in self.graph.effects:
            for source in node.inputs:
                if source in alias:
                    stages[alias[source]].add(self.stage_of(min(before, len(self.graph) - 1)))
        for name, found in stages.items():
            if not found:
                found.add(self.stage_around(name))
        return {name: frozenset(found) for name, found in stages.items()}

    def stage_around(self, name: str) -> int:
        """The stage of the innermost called module around a name."""
        around = [c for c in self.graph.calls if c.module == "" or name.startswith(f"{c.module}.")]
        innermost = max(around, key=lambda call: len(call.module))
        return self.stage_of(min(innermost.start, len(self.graph) - 1))


def named_tensors(model: nn.Module) -> list[tuple[str, object]]:
    """All parameters and buffers of a model under all their names."""
    named: list[tuple[str, object]] = list(model.named_parameters(remove_duplicate=False))
    return [*named, *model.named_buffers(remove_duplicate=False)]


def check_starts(graph: Graph, bounds: Sequence[int]) -> None:
    """Raise unless the stages begin in order and none is empty."""
    if bounds[0] != 0 or any(a >= b for a, b in pairwise(bounds)):
        names = [graph.nodes[b].site for b in bounds[:-1] if b < len(graph)]
        raise PlanError(f"stages begin at {names}: each has to begin after the one before, the first at the beginning")


def check_writes(graph: Graph, bounds: Sequence[int]) -> None:
    """Raise where a stage would read what another one wrote in place, in the memory of a third."""

    def stage(node: int) -> int:
        return bisect_right(bounds, node) - 1

    for node in graph:
        for source in (source for source in node.inputs if isinstance(source, int)):
            for writer in node.after:
                written = source in graph.nodes[writer].writes
                if written and stage(source) != stage(writer) != stage(node.id):
                    raise PlanError(
                        f"{node.site} reads {graph.nodes[source].site}, which {graph.nodes[writer].site} wrote to in "
                        f"place, but they are in stages {stage(node.id)}, {stage(source)} and {stage(writer)}: move a "
                        f"cut so that two of them share a stage"
                    )


def check_buffers(graph: Graph, bounds: Sequence[int]) -> None:
    """Raise where one stage writes to a buffer that another one uses: each would have its own."""
    users: dict[str, set[int]] = {}
    writers: dict[str, Node] = {}
    for position, node in (*enumerate(graph), *graph.effects):
        stage = bisect_right(bounds, min(position, len(graph) - 1)) - 1
        held = [source for source in (*node.inputs, *node.writes) if isinstance(source, str)]
        for name in held:
            users.setdefault(name, set()).add(stage)
        writers |= {str(name): node for name in node.writes if name in held}
    inputs = {value.name for value in graph.inputs}
    for name, node in writers.items():
        if name not in inputs and len(users[name]) > 1:
            raise PlanError(
                f"{node.site or node.op} writes to {name}, which stages {sorted(users[name])} use: each would have one "
                f"of its own. Move a cut so that one stage has all of these calls"
            )


def check_attributes(script: Script) -> None:
    """Raise where a call of one stage changes an attribute that other stages or open modules read: it is not sent."""
    graph = script.graph
    closed = {id(item.run): item.stage for item in script.items if isinstance(item.run, ModuleCall)}

    def stage(index: int | None) -> int | None:
        while index is not None:
            call = graph.calls[index]
            if id(call) in closed:
                return closed[id(call)]
            index = call.parent
        return None

    for (path, name), calls in graph.touched.items():
        stages = {stage(index) for index in calls}
        if len(stages) > 1:
            at = sorted(s for s in stages if s is not None)
            raise PlanError(
                f"{name!r} of module {path!r} changes in forward, and calls in several stages read or set it (stages "
                f"{at}{', and modules that a cut goes through' if None in stages else ''}): each rank would have its "
                f"own. Pass it as an argument and a result, or move the cut so that one stage has all of these calls"
            )


def crossings(graph: Graph, stretches: Sequence[Stretch], bounds: Sequence[int]) -> Iterable[Edge]:
    """The tensors that cross between stages, straight from their maker to every user."""
    users: dict[Key, list[int]] = {}
    for stage, stretch in enumerate(stretches):
        for key in stretch.takes:
            if isinstance(key[0], int):
                users.setdefault(key, []).append(stage)
    for (source, pick), stages in users.items():
        node = graph.nodes[int(source)]
        size = prod(node.output_shapes[pick]) * node.dtypes[pick].itemsize
        yield Edge((source, pick), bisect_right(bounds, node.id) - 1, tuple(stages), node.gradients[pick], size)


def draws(node: Node) -> bool:
    """Whether a call may draw random numbers."""
    return node.kind == "random" or node.op.rstrip("_") in RANDOM_CALLS


def random_chain(graph: Graph, bounds: Sequence[int]) -> Iterable[Edge]:
    """The random state from stage to stage, as far as a later one draws numbers."""
    last = max((node.id for node in graph if draws(node)), default=-1)
    for stage, start in enumerate(bounds[1:-1]):
        if start <= last:
            yield Edge((RANDOM, stage), stage, (stage + 1,), gradient=False)
