"""Running statistics under GEMS: two replicas moved them, each with its own micro-batches, and they become one again.

A norm's buffers move by r ← (1 - m) r + m s with each micro-batch, so what two replicas made of the same beginning r₀
can be put together as if one had seen all micro-batches, the first replica's first:

    r = (1 - m)ᵇ rA + rB - (1 - m)ᵇ r₀         b = how often replica B moved it

and without a momentum, as the mean over n₀ earlier ones, a of A and b of B: ((n₀ + a) rA + (n₀ + b) rB - n₀ r₀) / n.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from mural.engine.division import Division, Holders
from mural.errors import PlanError
from mural.graph import Graph
from mural.pipeline.schedule import Schedule


@dataclass(frozen=True)
class Moved:
    """A norm whose buffers this rank's replica moves, `calls` times with each micro-batch."""

    name: str
    module: Any
    stage: int
    calls: int
    before: tuple[Tensor, ...]


class Statistics:
    """The running statistics of the stages that two replicas hold on different ranks."""

    def __init__(self, model: nn.Module, division: Division, graph: Graph | None, schedule: Schedule):
        self.division, self.schedule = division, schedule
        self.moved = list(self._find(model, graph)) if schedule.replicas == 2 and graph is not None else []
        self.beside: dict[int, list[tuple[Moved, list[Tensor]]]] = {}
        for moved in self.moved:
            if schedule.seat_of[0, moved.stage] == schedule.seat_of[1, moved.stage]:
                copies = [t.clone() for t in moved.before]
                self.beside.setdefault(moved.stage, []).append((moved, copies))

    def _find(self, model: nn.Module, graph: Graph) -> Iterator[Moved]:
        modules, route = dict(model.named_modules()), self.division
        names = {name for name, _ in model.named_buffers()}
        calls: dict[str, int] = {}
        for node in (*graph, *(effect for _, effect in graph.effects)):
            written = [str(source) for source in node.writes if source in names]
            if written and not isinstance(modules.get(node.module), _NormBase):
                raise PlanError(
                    f"{node.site or node.op} writes to {written[0]}: under GEMS two replicas would each write their "
                    f"own, and mural can put together the running statistics of norms alone; use another schedule"
                )
            if written and node.id < len(graph):  # not what counts batches outside the dataflow
                calls[node.module] = calls.get(node.module, 0) + 1
        for path, count in calls.items():
            module: Any = modules[path]
            if module.running_mean is not None and route.holds(f"{path}.running_mean"):
                (stage,) = route.stages[f"{path}.running_mean"]
                before = tuple(t.detach().clone() for t in (module.running_mean, module.running_var))
                yield Moved(path, module, stage, count, before)

    def aside(self, replica: int, stage: int) -> list[tuple[Tensor, Tensor]]:
        """Buffers, and those that a replica uses instead: where both replicas of a stage are on one rank."""
        found = self.beside.get(stage, []) if replica == 1 else []
        return [pair for moved, copies in found for pair in zip(buffers_of(moved), copies, strict=True)]

    def merge(self, holders: Holders) -> None:
        """Make the buffers what one replica with all micro-batches would have left. Collective."""
        alone = [pair for found in self.beside.values() for pair in found]
        for moved, copies in alone:
            self._merge_here(moved, copies)
        names = {moved.name for moved, _ in alone}
        for moved in self.moved:
            if moved.name not in names:
                self._merge(moved, holders)

    def _parts(self, moved: Moved) -> list[int]:
        """How often each replica moved the buffers."""
        return [self.schedule.replica_of.count(replica) * moved.calls for replica in (0, 1)]

    def _merge_here(self, moved: Moved, copies: Sequence[Tensor]) -> None:
        parts, counted = self._parts(moved), moved.module.num_batches_tracked
        n0 = int(counted) - sum(parts) if counted is not None else 0
        first, second = factors(moved.module.momentum, n0, *parts)
        for buffer, copy, r0 in zip(buffers_of(moved), copies, moved.before, strict=True):
            buffer.copy_(buffer * first[0] + copy * second[0] - r0 * second[1])

    def _merge(self, moved: Moved, holders: Holders) -> None:
        parts = self._parts(moved)
        seats = [self.schedule.seat_of[replica, moved.stage] for replica in (0, 1)]
        own, ranks = self.division.stage_ranks.own, self.division.holders[f"{moved.name}.running_mean"]
        counted = moved.module.num_batches_tracked
        n0 = int(counted) - (parts[0] if own == seats[0] else parts[1]) if counted is not None else 0
        share = 1 / len(self.division.stage_ranks.ranks(own))
        for buffer, r0 in zip(buffers_of(moved), moved.before, strict=True):
            first, second = factors(moved.module.momentum, n0, *parts)
            mine = buffer * first[0] if own == seats[0] else buffer * second[0] - r0 * second[1]
            mine = (mine * share).contiguous()
            with holders.world.transport.meeting("statistics", holders.groups[ranks]):
                dist.all_reduce(mine, group=holders.groups[ranks])
            buffer.copy_(mine)
        if counted is not None:
            counted.fill_(n0 + sum(parts))


def buffers_of(moved: Moved) -> tuple[Tensor, Tensor]:
    """The running statistics themselves."""
    return moved.module.running_mean, moved.module.running_var


def factors(momentum: float | None, n0: int, a: int, b: int) -> tuple[tuple[float], tuple[float, float]]:
    """The weight of A's buffers, and that of B's and the first ones in B's part."""
    if momentum is not None:
        kept = (1 - momentum) ** b
        return (kept,), (1.0, kept)
    total = n0 + a + b
    return ((n0 + a) / total,), ((n0 + b) / total, n0 / total)
