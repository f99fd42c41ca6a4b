"""The ways to divide a U-Net: each a plan for some ranks, with its cuts and what its ranks are predicted to need.

A plan's named cuts, where it has some, come from the graph alone: nothing is measured for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from nets import Net
from published import BLOCKS, FIGURE_7, FIGURE_8

import memory
from memory import Need, Span
from mural.engine.alignment import graph_for
from mural.engine.recompute import chosen
from mural.engine.stage_starts import stage_starts
from mural.graph import Graph
from mural.graph.cut_points import cut_name, resolve_cuts
from mural.pipeline.partition import bound, partition
from mural.plans import Plan

HEADROOM = 0.92
"""The share of a rank's memory that predictions fill: gaps between allocated blocks take the rest (one rank ended
between 0.87 and 0.94)."""


@dataclass(frozen=True)
class Way:
    """One way: `cuts` may be a function of the graph; `full` says that all sides of the table are measured."""

    name: str
    words: str
    plan: Plan | None
    cuts: Callable[[Graph, float], tuple[int, ...]] | None = None
    images: int = 1
    full: bool = False
    seconds: float = 35.0
    """Of its search for the largest side on one H200, roughly: its ranks start anew after each failure."""

    @property
    def ranks(self) -> int:
        """How many ranks it takes."""
        return 1 if self.plan is None else self.plan.devices


@dataclass(frozen=True)
class Forecast:
    """A way with its plan complete, the side that its cuts are made for, and what each rank is predicted to need."""

    way: Way
    plan: Plan | None
    aim: int
    side: int
    needs: tuple[Need, ...] = field(default=())

    def peak(self, side: int) -> float:
        """The bytes of the rank that needs most, for an image of that side."""
        return max(need.at((side / self.side) ** 2) for need in self.needs)

    def largest(self, cap: float) -> int:
        """The side of the largest image that is predicted to fit."""
        return memory.largest(self.needs, self.side, HEADROOM * cap)


# ------------------------------------------------------------------------------------------------------------- cuts


def by_blocks(firsts: tuple[int, ...]) -> Callable[[Graph, float], tuple[int, ...]]:
    """Cuts at some of 13 blocks of equal numbers of layers, counted from 1."""

    def cuts(graph: Graph, scale: float) -> tuple[int, ...]:
        starts = [0, *partition(graph, BLOCKS, "layers").cuts]
        return tuple(starts[first - 1] for first in firsts[1:])

    return cuts


def by_peak(plan: Plan, model: Callable[[], Any] | None = None) -> Callable[[Graph, float], tuple[int, ...]]:
    """The cuts under which the largest predicted peak is least."""

    def cuts(graph: Graph, scale: float) -> tuple[int, ...]:
        again = spans(graph, model()) if model is not None else []
        return memory.best(graph, [prod(grid) for grid in plan.seat_grids], scale, again)[0]

    return cuts


def levels(depth: int) -> tuple[str, ...]:
    """The cuts between the levels of a U-Net, down and up again.

    >>> levels(2)
    ('down.0', 'down.1', 'up.0', 'up.1')
    """
    return tuple(f"{way}.{level}" for way in ("down", "up") for level in range(depth))


def spans(graph: Graph, model: Any) -> list[Span]:
    """The calls of the blocks that `recompute = "all"` computes again."""
    names = {id(module): name for name, module in model.named_modules()}
    blocks = {names[id(module)] for module in chosen(model, "all")}
    return [(call.start, call.stop) for call in graph.calls if call.module in blocks]


# ------------------------------------------------------------------------------------------------------------- ways


def ways(net: Net, ranks: int = 8) -> list[Way]:
    """All ways over that many ranks; the first three are the columns of figure 9."""
    half, rest = ranks // 2, ranks - ranks // 2
    stages = Plan(stage=ranks)
    grid = Plan(spatial=(half, ranks // half))
    hybrid = Plan(stage=half, spatial=(ranks // half, 1))
    mixed = Plan(stage=3, grids=((rest - 1, 1), (1, 1), (half, 1)))
    early = 5 * ranks // 8
    pair = Plan(stage=2, grids=((early, 1), (ranks - early, 1)), recompute="all")
    seats = (*range(net.depth + 1), *reversed(range(net.depth)))
    horizontal = Plan(stage=net.depth + 1, seats=seats, cuts=levels(net.depth))
    gems = Plan(stage=ranks, schedule="gems", gems="lean", microbatches=2, batchnorm="micro")
    found = [
        Way("sequential", "one rank, plain torch", None, full=True),
        Way("naive", "stages of equal numbers of layers", replace(stages, cuts="layers"), full=True),
        Way("memory", "stages balanced by memory", stages, full=True),
        Way("optimum", "stages with the least predicted peak", stages, by_peak(stages)),
        Way("horizontal", "a rank for each level of resolution", horizontal),
        Way("figure 7", "the naive cuts of figure 7", stages, by_blocks(FIGURE_7)),
        Way("figure 8", "the memory-aware cuts of figure 8", stages, by_blocks(FIGURE_8)),
        Way("recompute stages", "memory, each stage computed again", replace(stages, recompute="stages"),
            seconds=45),
        Way("recompute blocks", "memory, blocks computed again", replace(stages, recompute="all"), seconds=45),
        Way("spatial", f"a grid of {half} × {ranks // half}", grid, seconds=75),
        Way("spatial × stages", f"{half} stages on {ranks // half} ranks each", hybrid, by_peak(hybrid),
            seconds=75),
        Way("grids", f"three stages on {rest - 1}, 1 and {half} ranks", mixed, by_peak(mixed), seconds=50),
        Way("GEMS", "memory, two replicas in opposite order", gems, images=2, seconds=70),
        Way("spatial × stages, recompute", f"two stages on {early} and {ranks - early} ranks, blocks computed again",
            pair, by_peak(pair, net.meta), seconds=100),
        Way("spatial, recompute", f"{half} × {ranks // half}, blocks computed again", replace(grid, recompute="all"),
            seconds=100),
    ]  # fmt: skip
    return [way for way in found if way.ranks <= ranks and (ranks == 8 or not way.name.startswith("figure"))]


def forecast(net: Net, way: Way, graph: Graph, cap: float) -> Forecast:
    """The way's plan with its cuts by name, made for about the largest image that fits, and the prediction."""
    if way.plan is None or not way.plan.piped:
        again = spans(graph, net.meta()) if way.plan is not None and way.plan.recompute else []
        count = 1 if way.plan is None else prod(way.plan.spatial)
        return Forecast(way, way.plan, 0, net.side, tuple(memory.needs(graph, [0], again, [count])))
    found, aim = None, net.side * 2
    for _ in range(2):  # the cuts for the side that the first cuts reach
        plan = cut_for(net, way, graph, aim)
        found = Forecast(way, plan, aim, net.side, tuple(predicted(net, plan, graph, aim)))
        aim = max(net.side, found.largest(cap) // 64 * 64)
    return found  # pyright: ignore[reportReturnType]


def cut_for(net: Net, way: Way, graph: Graph, side: int) -> Plan:
    """The plan of a way, with names where its cuts are a function of the graph."""
    if way.cuts is None or way.plan is None:
        return way.plan or Plan()
    scale = (side / net.side) ** 2
    return replace(way.plan, cuts=tuple(cut_name(graph, cut) for cut in way.cuts(graph, scale)))


def predicted(net: Net, plan: Plan, graph: Graph, side: int) -> list[Need]:
    """What each seat's ranks need under a plan."""
    if isinstance(plan.cuts, tuple):
        starts = [0, *resolve_cuts(graph, plan.cuts)]
    else:  # as `parallelize(…, image=…)` will cut
        starts = list(stage_starts(graph_for(net.meta(), (3, side, side)), plan))
    if plan.seats:
        return memory.shared_needs(graph, starts, plan.seats)
    if plan.schedule == "gems":
        return memory.opposite_needs(graph, starts)
    again = spans(graph, net.meta()) if plan.recompute == "all" else []
    return memory.needs(graph, starts, again, [prod(grid) for grid in plan.seat_grids])


def goals(net: Net, graph: Graph, stages: int, cap: float) -> dict[str, Any]:
    """The optimum over the graph's cut points and the bound, for layer cuts into that many stages."""
    least, aim = (), net.side * 2
    for _ in range(2):
        least, _peak = memory.best(graph, [1] * stages, (aim / net.side) ** 2)
        aim = memory.largest(memory.needs(graph, [0, *least]), net.side, HEADROOM * cap)
    found = bound(net.graph(aim // 64 * 64), stages)
    return {
        "optimum": aim,
        "cuts": [cut_name(graph, cut) for cut in least],
        "share": found.share,
        "bound": found.bound,
        "gain": found.optimum,
    }
