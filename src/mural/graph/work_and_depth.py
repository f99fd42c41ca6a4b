"""Work and depth of a graph: how many operations, how many in a row, and what that says about p processors.

Document `003`: one processor takes W operations' time, infinitely many take D, the average parallelism is W / D, and
Brent's theorem bounds p of them: max(W / p, D) ≤ T_p ≤ W / p + D. (The document prints min for max on the left.)
"""

from __future__ import annotations

from dataclasses import dataclass

from mural.graph.differentiable import differentiable
from mural.graph.facts import costs
from mural.graph.nodes import Graph, Node
from mural.graph.work_formulas import CallCosts, Wants, Work


@dataclass(frozen=True)
class Parallelism:
    """Work and depth of a whole computation, in operations."""

    work: int
    depth: int

    @property
    def average(self) -> float:
        """W / D: a good number of processors; 0 for nothing to do."""
        return self.work / self.depth if self.depth else 0.0

    def bounds(self, processors: int) -> tuple[float, float]:
        """The least and the largest time with this many processors, in operations of one.

        >>> Parallelism(work=1000, depth=10).bounds(50)
        (20.0, 30.0)
        """
        if processors < 1:
            raise ValueError(f"bounds got {processors} processors, but it needs at least one: give 1")
        share = self.work / processors
        return max(share, float(self.depth)), share + self.depth


@dataclass(frozen=True)
class GraphWork:
    """What each node costs, and the whole forward and backward pass."""

    nodes: tuple[CallCosts, ...]
    forward: Parallelism
    backward: Parallelism

    @property
    def training(self) -> Parallelism:
        """A forward pass and then a backward pass."""
        both = (self.forward, self.backward)
        return Parallelism(sum(p.work for p in both), sum(p.depth for p in both))


def work(graph: Graph) -> GraphWork:
    """The work and depth of each node and of the graph, forward and backward.

    The depth of a pass is that of the longest chain of calls. Backward, the gradients of parameters are not in
    the chain: each waits for the gradient of its call's result, and nothing waits for it.
    """
    nodes = node_costs(graph)
    behind = [0] * len(graph)  # the depth at which a node's result is there
    for node in graph:
        before = max((behind[source] for source in node.needs if isinstance(source, int)), default=0)
        behind[node.id] = before + nodes[node.id].result.depth
    arrival = [0] * len(graph)  # the depth at which the gradient of its result is there
    deepest = 0
    for node in reversed(graph.nodes):
        cost = nodes[node.id]
        deepest = max(deepest, arrival[node.id] + cost.backward.depth)
        for source in node.needs:
            if isinstance(source, int):
                arrival[source] = max(arrival[source], arrival[node.id] + cost.inputs.depth)
    return GraphWork(
        nodes,
        Parallelism(sum(c.result.work for c in nodes), max(behind, default=0)),
        Parallelism(sum(c.backward.work for c in nodes), deepest),
    )


def node_costs(graph: Graph) -> tuple[CallCosts, ...]:
    """What each node costs, in the order of the nodes."""
    passing = differentiable(graph)
    parameters = {value.name for value in graph.parameters}

    def of(node: Node) -> CallCosts:
        if not any(made in passing for made in node.makes):
            return costs(node)
        wants: Wants = tuple(
            None if read not in passing else "weight" if read[0] in parameters else "input" for read in node.reads
        )
        return costs(node, wants)

    return tuple(map(of, graph))


def table(graph: Graph) -> str:
    """The work–depth table: one row per operation and evaluation, summed over its calls, the deepest call's depth.

    >>> import mural, torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1))
    >>> print(table(mural.capture(net, (8, 4))))
    operator  eval.  work  depth
    linear    y       160      3
    linear    ∇w      160      4
    linear    ∇x       32      1
    relu      y        16      1
    relu      ∇x       16      1
    """
    rows: dict[tuple[str, str], Work] = {}
    for node, cost in zip(graph, node_costs(graph), strict=True):
        for name, each in (("y", cost.result), ("∇w", cost.weights), ("∇x", cost.inputs)):
            so_far = rows.get((node.op, name), Work())
            rows[node.op, name] = Work(so_far.work + each.work, max(so_far.depth, each.depth))
    shown = [("operator", "eval.", "work", "depth")]
    shown += [(op, name, f"{w.work}", f"{w.depth}") for (op, name), w in rows.items() if w.work]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    return "\n".join(
        "  ".join([a.ljust(widths[0]), b.ljust(widths[1]), c.rjust(widths[2]), d.rjust(widths[3])])
        for a, b, c, d in shown
    )
