"""Two levels: a butterfly inside each node, a ring between the nodes' first ranks, a broadcast inside.

    nodes {0, 1} {2, 3}, 2 chunks        round 1   0→1 +0 +1   1→0 +0 +1   2→3 +0 +1   3→2 +0 +1
                                         round 2   0→2 +1   2→0 +0
                                         round 3   0→2 =0   2→0 =1
                                         round 4   0→1 =0 =1   2→3 =0 =1

One rank of each node talks to the other nodes, so a slow network carries as little as it can.
Order of summation: inside a node that of the butterfly, between nodes that of the ring.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mural.collectives.algorithms.butterfly import butterfly
from mural.collectives.algorithms.ring import ring
from mural.collectives.algorithms.tree import descend
from mural.collectives.rounds import Collective, among, joined, simultaneous, whole
from mural.errors import PlanError


def two_level(nodes: Sequence[Sequence[int]]) -> Collective:
    """All-reduce over ranks that share nodes; a node may have any number of them."""
    ranks = sum(map(len, nodes))
    if sorted(rank for node in nodes for rank in node) != list(range(ranks)) or not all(nodes):
        raise PlanError(f"nodes={[list(n) for n in nodes]}: name each rank from 0 on once, and leave no node empty")
    between = among(ring(len(nodes)), [node[0] for node in nodes], ranks)

    def inside(name: str, make: Callable[[int], Collective]) -> Collective:
        return simultaneous(name, [whole(among(make(len(node)), node, ranks), len(nodes)) for node in nodes])

    return joined("two-level", inside("inside", butterfly), between, inside("back", descend))
