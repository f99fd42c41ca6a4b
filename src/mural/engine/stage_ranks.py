"""Which ranks run which stages of a plan: seats, their ranks and meshes, and which ranks hold a parameter."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import torch.distributed as dist

from mural.comm.groups import group_of, kept
from mural.comm.messages import Transport
from mural.errors import PlanError
from mural.pipeline.gems import gems
from mural.pipeline.schedule import Schedule, gpipe, interleaved, one_f_one_b, sequential
from mural.plans import Plan
from mural.ranks import SPATIAL, Mesh
from mural.ranks.mesh import AXES


@dataclass(frozen=True)
class StageRanks:
    """The seats of a plan on the ranks of a run: `meshes[i]` is that of seat i, as this rank sees it."""

    plan: Plan
    meshes: tuple[Mesh, ...]
    own: int

    @classmethod
    def of(cls, plan: Plan, world: Mesh) -> StageRanks:
        """The seats of a plan: the ranks of a pipeline follow each other, and so do its data replicas. Collective."""
        if len(plan.seat_grids) == 1:
            return cls(plan, (world,), 0)
        sizes, run = [prod(grid) for grid in plan.seat_grids], world.peers(AXES)
        total, own = sum(sizes), -1
        meshes: list[Mesh] = []
        for seat, grid in enumerate(plan.seat_grids):
            first = sum(sizes[:seat])
            ranks = tuple(run[d * total + first + i] for d in range(plan.data) for i in range(sizes[seat]))
            mine = world.rank in ranks
            if mine:
                own = seat
            sizes_of = (plan.data, 1, 1, 1, *grid, *(1,) * (len(SPATIAL) - len(grid)))
            own_transport = transport_of(ranks, world.transport)
            transport = own_transport if mine else world.transport
            meshes.append(Mesh(sizes_of, world.rank if mine else ranks[0], len(grid), transport, ranks))
        return cls(plan, tuple(meshes), own)

    @property
    def mesh(self) -> Mesh:
        """The mesh of this rank's seat."""
        return self.meshes[self.own]

    @property
    def alone(self) -> bool:
        """Whether there is one seat: every rank holds the whole model."""
        return len(self.meshes) == 1

    def schedule(self, microbatches: int) -> Schedule:
        """The plan's schedule for that many micro-batches."""
        plan = self.plan
        make = {
            "sequential": lambda: sequential(plan.stages, microbatches, plan.seats or None),
            "gpipe": lambda: gpipe(plan.stage, microbatches),
            "1f1b": lambda: one_f_one_b(plan.stage, microbatches),
            "interleaved": lambda: interleaved(plan.stage, plan.chunks, microbatches),
            "gems": lambda: gems(plan.stage, microbatches, plan.replications, plan.gems),
        }
        return make[plan.schedule]()

    def holders(self, stages: Iterable[int]) -> tuple[int, ...]:
        """The ranks that hold what those stages hold, in all replicas."""
        if self.alone:
            return tuple(sorted(self.ranks(0)))
        wanted = set(stages)
        seats = {seat for (_, stage), seat in self.schedule(1).seat_of.items() if stage in wanted}
        ranks = {rank for seat in seats for rank in self.ranks(seat)}
        return tuple(sorted(ranks))

    def ranks(self, seat: int) -> tuple[int, ...]:
        """The ranks of a seat."""
        mesh = self.meshes[seat]
        return mesh.ranks or tuple(range(mesh.world))

    def last_ranks(self) -> tuple[int, ...]:
        """The ranks that have the model's result, in all replicas."""
        last = self.plan.stages - 1
        return self.holders([last])

    def stages_here(self) -> frozenset[int]:
        """The stages that this rank holds, of any replica."""
        if self.alone:
            return frozenset(range(self.plan.stages))
        return frozenset(stage for (_, stage), seat in self.schedule(1).seat_of.items() if seat == self.own)


def transport_of(ranks: tuple[int, ...], world: Transport) -> Transport:
    """Messages among the ranks of a seat, in their own group: they never mix with other seats' messages. Collective."""

    def build() -> Transport:
        group = group_of(world, ranks, "seat") if len(ranks) > 1 else None
        return world.sibling(group if dist.get_rank() in ranks else None, f"seat {ranks}")

    return kept(world.group, ("messages of a seat", ranks), build)


def check_mesh(plan: Plan, mesh: Mesh) -> None:
    """Raise unless a mesh is the one that the plan asks for."""
    stages = sum(map(prod, plan.grids)) if plan.grids else plan.stage
    spatial = () if plan.grids else plan.spatial
    alike = prod(spatial) == prod(mesh.spatial) == 1 or mesh.spatial == spatial
    wanted = {"data": plan.data, "stage": stages, "channel": plan.channel, "domain": plan.domain}
    if any(mesh.size(axis) != size for axis, size in wanted.items()) or not alike:
        rare = [a for a in ("channel", "domain") if wanted[a] > 1 or mesh.size(a) > 1]
        more = "".join(f", {axis} = {wanted[axis]}" for axis in rare)
        raise PlanError(
            f"the plan wants data = {plan.data}, stage = {stages}, spatial = {spatial}{more}, but the mesh is "
            f"{mesh}: make it by mural.init with these, or leave it out"
        )
