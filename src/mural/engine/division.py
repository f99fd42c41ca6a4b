"""The division of a model into stages: where they begin, what each rank holds of the model, and who else holds it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mural.comm.groups import group_of
from mural.engine.loss_terms import LOSS, LossTerms
from mural.engine.stage_ranks import StageRanks
from mural.errors import PlanError
from mural.gradients.replicated import Replicated
from mural.graph import Graph
from mural.pipeline.route import Route, named_tensors
from mural.ranks import Mesh


@dataclass(frozen=True)
class Division:
    """A model divided: the call-sites at which stages begin, and for each parameter and buffer its stages and ranks.

    The ranks of a parameter's stages hold it. A rank whose stages read no parameter that is trained holds a copy of
    the model's smallest such one too, as if its stages shared it: so an optimizer can be built on every rank, and the
    copies get the same gradient and take the same steps. `homes` are the stages around the modules, by path, and
    `takers` for each input of the model those that take it.
    """

    stage_ranks: StageRanks
    sites: tuple[str, ...]
    stages: Mapping[str, frozenset[int]]
    holders: Mapping[str, tuple[int, ...]]
    homes: Mapping[str, int]
    takers: tuple[frozenset[int], ...]

    @classmethod
    def of(cls, model: nn.Module, route: Route, stage_ranks: StageRanks) -> Division:
        """The division that a route makes of a model."""
        stages = route.held(model)
        sites = tuple(route.graph.nodes[start].site for start in route.starts)
        holders = {name: stage_ranks.holders(found) for name, found in stages.items()}
        homes = {path: route.stage_around(f"{path}." if path else "") for path, _ in model.named_modules()}
        takers = tuple(
            frozenset(stage for stage, stretch in enumerate(route.stretches) if (value.name, 0) in stretch.takes)
            for value in route.graph.inputs
        )
        return cls(stage_ranks, sites, stages, with_trained(model, holders, stage_ranks), homes, takers)

    @classmethod
    def whole(cls, model: nn.Module, stage_ranks: StageRanks) -> Division:
        """The division of a model in one stage."""
        stages = {name: frozenset([0]) for name in dict.fromkeys(first_names(model).values())}
        holders = dict.fromkeys(stages, stage_ranks.holders([0]))
        homes = {path: 0 for path, _ in model.named_modules()}
        return cls(stage_ranks, ("",), stages, holders, homes, ())

    def with_loss(self, terms: LossTerms) -> Division:
        """The same with what the loss brings along, on the ranks of the last stage."""
        names = [name for name, _ in (*terms.named_parameters(), *terms.named_buffers())]
        last = self.stage_ranks.plan.stages - 1
        with terms.alone() as root:
            homes = {f"{LOSS}.{path}" if path else LOSS: last for path, _ in root.named_modules()} if terms else {}
        return replace(
            self,
            stages={**self.stages, **dict.fromkeys(names, frozenset([last]))},
            holders={**self.holders, **dict.fromkeys(names, self.stage_ranks.last_ranks())},
            homes={**self.homes, **homes},
        )

    def holds(self, name: str) -> bool:
        """Whether this rank holds a parameter or buffer; one that a module made later is where the module runs."""
        return name not in self.holders or self.stage_ranks.mesh.rank in self.holders[name]

    def owner(self, name: str) -> int:
        """The first rank whose stages use a parameter or buffer."""
        return self.stage_ranks.holders(self.stages[name])[0]

    def keeper(self, path: str) -> int:
        """The rank whose extra state of a module counts: the first that calls it, or what is around it."""
        return self.stage_ranks.holders([self.homes[path]])[0]

    def route(self, graph: Graph) -> Route:
        """The route of another capture of the model (other shapes, evaluation) through the same stages."""
        known = {node.site: node.id for node in graph}
        starts = [0]
        for stage, site in enumerate(self.sites[1:], 1):
            starts.append(known[site] if site in known else self.first_of(stage, graph))
        route = Route.of(graph, starts, self.stages)
        for node in graph:
            for name in node.inputs:
                stage = route.stage_of(node.id)
                if name in self.stages and stage not in self.stages[str(name)]:
                    raise PlanError(
                        f"for an input of shape {graph.inputs[0].shape}, {node.site} of stage {stage} reads {name}, "
                        f"which stage {sorted(self.stages[str(name)])} holds, as the stages were cut for another "
                        f"shape: give parallelize(…, image=…) the shape of the images"
                    )
        return route

    def first_of(self, stage: int, graph: Graph) -> int:
        """The first call that reads a parameter which only this stage or later ones hold."""
        for node in graph:
            found = [self.stages[str(name)] for name in node.inputs if name in self.stages]
            if any(min(stages) >= stage for stages in found):
                return node.id
        raise PlanError(
            f"stage {stage} begins at {self.sites[stage]}, which an input of shape {graph.inputs[0].shape} does not "
            f"reach: name other cuts"
        )


def first_names(model: nn.Module) -> dict[int, str]:
    """The first name of each parameter and buffer, by `id`."""
    return {id(t): name for name, t in reversed(named_tensors(model))}


def with_trained(
    model: nn.Module, holders: Mapping[str, tuple[int, ...]], stage_ranks: StageRanks
) -> dict[str, tuple[int, ...]]:
    """The ranks that hold each tensor, with the model's smallest trained parameter on those that would train none."""
    trained = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    found, busy = dict(holders), {rank for name in trained for rank in holders[name]}
    every = {rank for seat in range(len(stage_ranks.meshes)) for rank in stage_ranks.ranks(seat)}
    if trained and every - busy:
        smallest = min(trained, key=lambda name: trained[name])
        found[smallest] = tuple(sorted({*found[smallest], *(every - busy)}))
    return found


def release(model: nn.Module, division: Division) -> None:
    """Release the parameters and buffers that other ranks hold; names and shapes stay."""
    first = first_names(model)
    swapped: dict[int, Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for key, tensor in held.items():
                if tensor is None or division.holds(first[id(tensor)]):
                    continue
                if id(tensor) not in swapped:
                    empty = torch.empty_like(tensor, device="meta")
                    trains = tensor.requires_grad
                    swapped[id(tensor)] = nn.Parameter(empty, trains) if isinstance(tensor, nn.Parameter) else empty
                held[key] = swapped[id(tensor)]  # type: ignore[assignment]


class Holders:
    """The sets of ranks that hold the same parameters and buffers, and a process group for each of several ranks.

    The ranks of one seat hold all, and need none. Sets come in one order on all ranks, a set before those that contain
    it. Collective.
    """

    def __init__(self, division: Division, world: Mesh):
        self.division, self.world = division, world
        self.groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        for ranks in sorted(set(division.holders.values()), key=lambda ranks: (len(ranks), ranks)):
            apart = len(ranks) > 1 and not division.stage_ranks.alone
            self.groups[ranks] = group_of(world.transport, ranks, "parameters") if apart else None

    def sets(self, named: Iterable[tuple[str, Tensor]], share: float) -> list[Replicated]:
        """Parameters by the ranks that hold them; a rank's gradients count times its share in the sum over these."""
        found: dict[tuple[int, ...], list[tuple[str, Tensor]]] = {ranks: [] for ranks in self.groups}
        for name, p in named:
            found[self.division.holders[name]].append((name, p))
        return [Replicated(each, self.groups[ranks], share) for ranks, each in found.items() if each]
