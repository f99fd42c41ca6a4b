"""Where the parts of a separation network sit: its calls, named in order, and a seat for each.

A placement is a plan of stages. Calls of one domain follow each other, so domain d of D, cut into S stages, is S stages
of the plan, and the head is the last one. Several stages may share a seat:

    by_domain, D = 2, S = 1     private.a shared reconstruction | private.b shared@2 reconstruction@2 | head
                                seat 0                            seat 1                                seat 0

    by_part, D = 2              private.a | shared | reconstruction | private.b | shared@2 | reconstruction@2 | head
                                seat 0      1        4                2           3          4                  5

Stages that need nothing of each other run at the same time: the seats of all domains, forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from mural.domain.separation_network import SeparationNetwork
from mural.errors import PlanError
from mural.geometry import Cuts
from mural.graph import Graph
from mural.graph.cut_points import cut_name
from mural.plans import Plan


class Branch(nn.Module):
    """What one domain takes of a separation network, by itself: the calls among which its stages are balanced."""

    def __init__(self, network: SeparationNetwork, number: int):
        super().__init__()
        self.private, self.shared = network.private[network.domains[number]], network.shared
        self.reconstruction, self.difference = network.reconstruction, network.difference
        self.similarity, self.number = network.similarity, number

    def forward(self, image: Tensor) -> list[Tensor]:
        """The terms of the domain; a code that would come from the source has the shape of its own."""
        private = self.private(image)
        code = self.shared(image)
        terms = [self.reconstruction(code, private, image), self.difference(code, private)]
        if not self.similarity.across:
            return [*terms, self.similarity(code, self.number)]
        return [*terms, self.similarity(code, code)] if self.number else terms


def by_domain(network: SeparationNetwork, graph: Graph, plan: Plan, starts: Sequence[Sequence[int]]) -> Plan:
    """The stages of a plan with a domain axis: `starts` are those of each domain's branch, as nodes of it from 0.

    The domains are divided evenly over the axis. The head is with the last stage of the source.
    """
    count = len(network.domains)
    if plan.domain > count:
        raise PlanError(f"domain = {plan.domain}, but the network has {count} domains {network.domains}: set {count}")
    firsts = [first_of(graph, f"private.{name}") for name in network.domains]
    nodes = [first + start for first, branch in zip(firsts, starts, strict=True) for start in branch]
    groups = [group for group, some in enumerate(Cuts.even(count, plan.domain).intervals()) for _ in range(some.size)]
    seats = [stage * plan.domain + group for group in groups for stage in range(plan.stage)]
    return replace(
        plan,
        domain=1,
        stage=plan.domain * plan.stage,
        cuts=tuple(cut_name(graph, node) for node in (*nodes[1:], first_of(graph, "head"))),
        seats=(*seats, (plan.stage - 1) * plan.domain),
    )


def check_statistics(network: SeparationNetwork) -> None:
    """Raise for running statistics that the calls of several domains move, on ranks that each would have their own."""
    for path, module in network.named_modules():
        shared = path.partition(".")[0] not in ("private", "head")
        if shared and isinstance(module, _NormBase) and module.training and module.running_mean is not None:
            raise PlanError(
                f"batch norm {path} has running statistics that every domain moves, one after the other: domains on "
                f"ranks of their own would each have others. Use a group norm, track_running_stats=False, or eval()"
            )


def first_of(graph: Graph, module: str) -> int:
    """The first node of a module's first call."""
    return next(call.start for call in graph.calls if call.module == module)


def by_part(network: SeparationNetwork, plan: Plan | None = None, head_apart: bool = True) -> Plan:
    """The placement of Multi-DSN: a seat for each private encoder and each call of the shared one, one for all
    reconstructions and one for the head: 2 D + 2 seats for D domains; 2 D + 1 with the head not apart.

    `plan` has the other axes: every seat is a grid of `spatial` ranks, times `data`.

    >>> from mural.domain import classification_network
    >>> plan = by_part(classification_network(["a", "b"], classes=2, image=(1, 8, 8)))
    >>> plan.devices, plan.seats
    (6, (0, 1, 4, 2, 3, 4, 5))
    """
    plan = Plan() if plan is None else plan
    if plan.domain * plan.stage > 1:
        raise PlanError(
            f"domain = {plan.domain}, stage = {plan.stage}: the placement by part sets both; leave them out"
        )
    count = len(network.domains)
    cuts: list[str] = []
    seats: list[int] = []
    for number, name in enumerate(network.domains):
        call = "" if number == 0 else f"@{number + 1}"
        cuts += (f"private.{name}", f"shared{call}", f"reconstruction{call}")
        seats += (2 * number, 2 * number + 1, 2 * count)
    last = 2 * count + head_apart
    return replace(plan, stage=last + 1, cuts=(*cuts[1:], "head"), seats=(*seats, last))
