"""The estimate of a graph on some hardware: times of its nodes and steps, and peaks of its stages, worked out once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from mural.cost.cache import Cache
from mural.cost.call_features import CallFeatures, work_of
from mural.cost.fitted_model import Model, load
from mural.cost.hardware import Hardware
from mural.cost.measured_blocks import MeasuredBlock
from mural.cost.memory_effects import Effect, effects
from mural.cost.memory_tally import ROUNDED
from mural.cost.memory_walk import Peak, Walk
from mural.cost.predict import Times, times
from mural.errors import PlanError
from mural.graph import Graph, Node
from mural.graph.differentiable import differentiable
from mural.graph.nodes import Place


@dataclass(frozen=True)
class Seconds:
    """The time of one node."""

    forward: float
    backward: float


@dataclass(frozen=True, eq=False)
class Estimate:
    """What a graph takes on some hardware. `image` says that its inputs have gradients too, as those of a stage do.

    `cache` holds what was measured on this very device; it takes precedence over any prediction.
    """

    graph: Graph
    hardware: Hardware
    image: bool = False
    cache: Cache | None = None

    @cached_property
    def model(self) -> Model:
        """The fitted model, at the rates of this hardware."""
        return replace(load(self.hardware.model), rates=self.hardware.rates)

    @cached_property
    def wanted(self) -> frozenset[Place]:
        """The tensors that have gradients."""
        return differentiable(self.graph, image=self.image)

    @cached_property
    def effects(self) -> tuple[Effect, ...]:
        """What each node does to memory."""
        return effects(self.graph, self.wanted, self.hardware.kind)

    @cached_property
    def works(self) -> tuple[CallFeatures, ...]:
        """The work of each node."""
        return tuple(work_of(node, self.wanted) for node in self.graph.nodes)

    @cached_property
    def times(self) -> Times:
        """Seconds of each node on the device: measured where its like was measured, else predicted."""
        found = times(self.graph, self.model, self.wanted, self.effects)
        if self.cache is None or not len(self.cache):
            return found
        ahead, back = list(found.forward), list(found.backward)
        for node in self.graph.nodes:
            known = self.cache.get(MeasuredBlock(self.graph, node.id, node.id + 1, self.wanted).signature())
            if known is not None:
                ahead[node.id], back[node.id] = known.forward, known.backward
        return replace(found, forward=tuple(ahead), backward=tuple(back))

    def seconds(self) -> tuple[Seconds, ...]:
        """The share of each node in a step by the clock: a device that waits for the host waits at some node."""
        ahead, back = self.times.shares()
        return tuple(Seconds(f, b) for f, b in zip(ahead, back, strict=True))

    def step(self) -> Seconds:
        """The time of forward and backward of the whole graph."""
        return Seconds(*self.times.step())

    @cached_property
    def workspaces(self) -> dict[str, list[int]]:
        """The bytes that the kernels of each node take for themselves."""
        found = {
            "forward": self.model.workspace(self.works, "forward"),
            "backward": self.model.workspace(self.works, "backward"),
        }
        rounded = ROUNDED[self.hardware.kind]
        return {phase: [rounded(size) for size in sizes] for phase, sizes in found.items()}

    def walk(self, start: int = 0, stop: int | None = None) -> Walk:
        """The walk over nodes `start` to `stop` - 1."""
        stop = len(self.graph.nodes) if stop is None else stop
        if not 0 <= start < stop <= len(self.graph.nodes):
            raise PlanError(f"nodes {start} to {stop} are not a stage of a graph of {len(self.graph.nodes)} nodes")

        def workspace(node: Node, phase: str) -> int:
            return self.workspaces[phase][node.id]

        return Walk(self.graph, self.effects, self.wanted, start, stop, workspace, self.hardware.kind)

    def peak(
        self,
        start: int = 0,
        stop: int | None = None,
        *,
        training: bool = True,
        optimizer: float = 0.0,
        early: bool = False,
    ) -> Peak:
        """The peak memory of a step of nodes `start` to `stop` - 1; see `Walk.peak`."""
        return self.walk(start, stop).peak(training, optimizer, early)


class HeldGraph:
    """A graph that is compared by identity, not by its content."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HeldGraph) and other.graph is self.graph

    def __hash__(self) -> int:
        return id(self.graph)


@lru_cache(maxsize=16)
def remembered(graph: HeldGraph, hardware: Hardware, image: bool) -> Estimate:
    """The estimate of a graph; a second call returns the first one's."""
    return Estimate(graph.graph, hardware, image)


def estimate(graph: Graph, device: str | Hardware = "h200", *, image: bool = False) -> Estimate:
    """The estimate of a graph on known hardware ("h200", "cpu"), on that at hand ("here"), or on one described."""
    hardware = device if isinstance(device, Hardware) else Hardware.named(device)
    return remembered(HeldGraph(graph), hardware, image)


def seconds(graph: Graph, device: str | Hardware = "h200", *, image: bool = False) -> tuple[Seconds, ...]:
    """The time of each node of a graph, forward and backward."""
    return estimate(graph, device, image=image).seconds()


def peak(
    graph: Graph,
    start: int = 0,
    stop: int | None = None,
    device: str | Hardware = "h200",
    *,
    training: bool = True,
    optimizer: float = 0.0,
    image: bool = False,
) -> int:
    """The peak memory in bytes of a step of a model, or of its nodes `start` to `stop` - 1.

    Parameters, buffers, inputs, the gradients of parameters and outputs are in it; `optimizer` is how many numbers the
    optimizer keeps for each parameter (Adam 2, momentum 1).
    """
    found = estimate(graph, device, image=image).peak(start, stop, training=training, optimizer=optimizer)
    return found.bytes
