"""Algorithms: pure functions from a number of ranks to a collective, one per file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from mural.collectives.algorithms.butterfly import butterfly
from mural.collectives.algorithms.chain import down, up
from mural.collectives.algorithms.halving import halving_doubling
from mural.collectives.algorithms.levels import two_level
from mural.collectives.algorithms.ring import gather_ring, ring, ring_blocking, scatter_ring
from mural.collectives.algorithms.server import parameter_server
from mural.collectives.algorithms.tree import climb, descend, tree
from mural.collectives.rounds import Collective, among, pipelined
from mural.errors import PlanError

Nodes = Sequence[Sequence[int]]

ALGORITHMS: Mapping[str, Callable[[Nodes], Collective]] = MappingProxyType(
    {
        "tree": lambda nodes: tree(ranks_of(nodes)),
        "butterfly": lambda nodes: butterfly(ranks_of(nodes)),
        "halving-doubling": lambda nodes: halving_doubling(ranks_of(nodes)),
        "ring": lambda nodes: ring(ranks_of(nodes)),
        "ring-blocking": lambda nodes: ring_blocking(ranks_of(nodes)),
        "two-level": two_level,
        "parameter-server": lambda nodes: parameter_server(ranks_of(nodes)),
    }
)
"""All-reduce by name, given the ranks of each node."""


def ranks_of(nodes: Nodes) -> int:
    """The total number of ranks on some nodes."""
    return sum(map(len, nodes))


def all_reduction(algorithm: str, nodes: Nodes) -> Collective:
    """The sum of all ranks on every rank, by an algorithm of that name.

    >>> print(all_reduction("butterfly", [[0, 1]]))
    butterfly: 2 ranks, 1 chunk
    round 1   0→1 +0   1→0 +0
    """
    if algorithm not in ALGORITHMS:
        raise PlanError(f"algorithm={algorithm!r} is unknown: choose {', '.join(ALGORITHMS)}, or auto")
    return ALGORITHMS[algorithm](nodes)


def broadcast(ranks: int, root: int = 0, chunks: int = 1, shape: str = "tree") -> Collective:
    """The root's values on every rank, in chunks that follow each other along a tree or a chain.

    >>> print(broadcast(3, chunks=2, shape="chain"))
    broadcast by chain: 3 ranks, 2 chunks
    round 1   0→1 =0
    round 2   1→2 =0   0→1 =1
    round 3   1→2 =1
    """
    return rooted({"tree": descend, "chain": down}, shape, ranks, root, chunks)


def reduction(ranks: int, root: int = 0, chunks: int = 1, shape: str = "tree") -> Collective:
    """The sum of all ranks on the root, in chunks that follow each other along a tree or a chain.

    The other ranks are left with partial sums.

    >>> print(reduction(3, root=1))
    reduce by tree: 3 ranks, 1 chunk
    round 1   2→1 +0
    round 2   0→1 +0
    """
    return rooted({"tree": climb, "chain": up}, shape, ranks, root, chunks)


def rooted(
    makers: Mapping[str, Callable[[int], Collective]], shape: str, ranks: int, root: int, chunks: int
) -> Collective:
    """A collective from or to a root, with ranks counted from the root."""
    if shape not in makers:
        raise PlanError(f"shape={shape!r} is unknown: choose {' or '.join(makers)}")
    if not 0 <= root < ranks:
        raise PlanError(f"root={root} is not one of {ranks} ranks: choose one from 0 to {ranks - 1}")
    return pipelined(among(makers[shape](ranks), [(root + n) % ranks for n in range(ranks)], ranks), chunks)


__all__ = [
    "ALGORITHMS",
    "all_reduction",
    "broadcast",
    "butterfly",
    "gather_ring",
    "halving_doubling",
    "parameter_server",
    "reduction",
    "ring",
    "ring_blocking",
    "scatter_ring",
    "tree",
    "two_level",
]
