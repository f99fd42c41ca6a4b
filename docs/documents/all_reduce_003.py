"""Document 003: collectives, their costs, and where a ring overtakes a tree."""

from __future__ import annotations

from documents.lookup import Field, Made, mean, median, record
from documents.row import Row, Verdict, say
from documents.survey_000 import COLLECTIVES, MIB, collective

KIB = 1024
MEASURED = "allreduce/sixteen-measured.json"
NETWORK = "mural bench allreduce --parts network"
WORK = "pytest tests/graph/test_work.py"
PRICE = "pytest tests/collectives/test_rounds_price.py"
ROUNDS = "pytest tests/collectives/test_rounds.py"
ALGORITHMS = ("tree", "butterfly", "halving-doubling", "ring", "ring-blocking", "two-level", "parameter-server")
SIZES = (KIB, 8 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
TOLERANCE = 0.2


def over_network(algorithm: str, size: int, field: str = "seconds") -> Field:
    """An all-reduce of 4 hosts with 2 ms and 25 MB/s between them: median seconds, or the formula's."""
    path = ("records", {"name": "hosts"}, "records", {"algorithm": algorithm, "bytes": size}, field)
    return Field("allreduce/network.json", path, median)


def working_memory(algorithm: str) -> Made:
    """KiB that 1 MiB needs on the rank that needs most, of 8."""
    return record(MEASURED, "memory", max, algorithm=algorithm, ranks=8, bytes=MIB) / KIB


def over_ring(algorithm: str, ranks: int, size: int) -> Made:
    """An algorithm's time over the ring's."""
    return collective(algorithm, ranks, size) / collective("ring", ranks, size)


def within(*ranks: int, least: int = 0) -> Made:
    """The share of predictions within 20%, from some size on."""
    each = tuple(
        record(MEASURED, "predicted", median, algorithm=algorithm, ranks=n, bytes=size) / collective(algorithm, n, size)
        for algorithm in ALGORITHMS
        for n in ranks
        for size in SIZES
        if size >= least
    )
    return Made(lambda *ratios: mean([abs(ratio - 1) <= TOLERANCE for ratio in ratios]), each)


THEORY = (
    Row(
        "figures 1 and 2",
        "surveys: since 2010 more GPUs and more nodes, and MPI most of all",
        "–",
        "",
        Verdict.NOT_COMPARABLE,
        "a survey of publications",
    ),
    Row(
        "DAG and average parallelism",
        "work W and depth D bound the time on p processors: min{W/p, D} ≤ T ≤ O(W/p + D); W/D is a good number of "
        "processors",
        "W, D and W/D of a captured graph, forward and backward; both bounds, the lower one as max{W/p, D}, which is "
        "sharper",
        WORK,
        Verdict.REPRODUCED,
    ),
    Row(
        "figure 3; reductions",
        "a reduction of n values as a tree: W = n − 1, D = ⌈log₂ n⌉",
        "as many rounds up the tree, and each number counts once, for every number of ranks that is tested",
        ROUNDS,
        Verdict.REPRODUCED,
    ),
    Row(
        "AllReduce, lower bounds",
        "T ≥ L log₂ P and T ≥ γmG",
        "no algorithm's price is below them",
        PRICE,
        Verdict.REPRODUCED,
    ),
    Row(
        "AllReduce, tree",
        "T = 2 log₂ P (L + γmG)",
        say(
            "the price of the rounds is the formula; 4 hosts, 2 ms, 25 MB/s: measured over formula {small:.2f} at 1 "
            "KiB, {large:.2f} at 1 MiB",
            small=over_network("tree", KIB) / over_network("tree", KIB, "by_constants"),
            large=over_network("tree", MIB) / over_network("tree", MIB, "by_constants"),
        ),
        NETWORK,
        Verdict.REPRODUCED,
    ),
    Row(
        "AllReduce, butterfly",
        "recursive halving, then recursive doubling: T = log₂ P (L + γmG)",
        say(
            "that formula is of the butterfly that sends whole buffers: measured over it {butterfly:.2f} at 1 KiB. "
            "Halving and doubling takes twice the rounds: {halving:.1f} ms, the butterfly {whole:.1f} ms",
            butterfly=over_network("butterfly", KIB) / over_network("butterfly", KIB, "by_constants"),
            halving=over_network("halving-doubling", KIB) * 1000,
            whole=over_network("butterfly", KIB) * 1000,
        ),
        NETWORK,
        Verdict.CONTRADICTED,
        "the text describes one algorithm, and the formula another; mural has both",
    ),
    Row(
        "AllReduce",
        "costs by latency and bytes predict the time of an all-reduce",
        say(
            "16 cores, all algorithms: {share:.0%} of predictions within 20% ({two:.0%} on 2 ranks, {four:.0%} on 4, "
            "{eight:.0%} on 8); from 64 KiB on {large:.0%}",
            share=within(2, 4, 8),
            two=within(2),
            four=within(4),
            eight=within(8),
            large=within(2, 4, 8, least=64 * KIB),
        ),
        "mural bench allreduce --parts measured --name sixteen --ranks 2,4,8 --seconds 3",
        Verdict.REPRODUCED,
        "with a gauge of each number of ranks on the machine itself",
    ),
    Row(
        "AllReduce",
        "the butterfly is near-optimal for small messages",
        say(
            "64 KiB on 8 ranks: butterfly {butterfly:.2f} ms, tree {tree:.2f}, halving-doubling {halving:.2f}, ring "
            "{ring:.2f}, gloo's own {backend:.2f}",
            butterfly=collective("butterfly", 8, 64 * KIB) * 1000,
            tree=collective("tree", 8, 64 * KIB) * 1000,
            halving=collective("halving-doubling", 8, 64 * KIB) * 1000,
            ring=collective("ring", 8, 64 * KIB) * 1000,
            backend=collective("backend", 8, 64 * KIB) * 1000,
        ),
        COLLECTIVES,
        Verdict.REPRODUCED,
    ),
    Row(
        "AllReduce",
        "which algorithm Open MPI uses is not clear from its documentation or source",
        "`mural.comm.all_reduce(algorithm=…)` runs the one that is named; `auto` says which it chose",
        "",
        Verdict.NOT_COMPARABLE,
        "nothing here looks into Open MPI",
    ),
    Row(
        "AllReduce Ring",
        "butterflies suffer from contention on multi-core clusters, rings do not",
        say(
            "64 MiB on the cores of one machine, butterfly over ring: {two:.2f} on 2 ranks, {four:.2f} on 4, "
            "{eight:.2f} on 8",
            two=over_ring("butterfly", 2, 64 * MIB),
            four=over_ring("butterfly", 4, 64 * MIB),
            eight=over_ring("butterfly", 8, 64 * MIB),
        ),
        COLLECTIVES,
        Verdict.REPRODUCED,
        "in time; how much of it is contention, and how much the bytes that a butterfly sends more, was not told apart",
    ),
    Row(
        "AllReduce Ring",
        "a ring needs less working memory",
        say(
            "1 MiB on 8 ranks: ring {ring:,.0f} KiB, butterfly {butterfly:,.0f}, tree {tree:,.0f}, parameter server "
            "{server:,.0f}",
            ring=working_memory("ring"),
            butterfly=working_memory("butterfly"),
            tree=working_memory("tree"),
            server=working_memory("parameter-server"),
        ),
        COLLECTIVES,
        Verdict.REPRODUCED,
    ),
    Row(
        "AllReduce Ring",
        "a ring works for numbers of nodes that are no powers of two",
        "so do mural's tree, butterfly and halving-doubling",
        ROUNDS,
        Verdict.BETTER,
    ),
    Row(
        "AllReduce Ring",
        "a ring is optimal in bandwidth and not in latency: its rounds grow with the processes",
        say(
            "4 hosts, 2 ms, 25 MB/s: ring over tree {small:.2f} at 1 KiB, {large:.2f} at 4 MiB",
            small=over_network("ring", KIB) / over_network("tree", KIB),
            large=over_network("ring", 4 * MIB) / over_network("tree", 4 * MIB),
        ),
        NETWORK,
        Verdict.REPRODUCED,
    ),
    Row(
        "figures 4 and 5",
        "pictures of tree, butterfly and ring",
        "drawn from the rounds that run: [tree](../../benchmarks/allreduce/figures/tree.svg), "
        "[butterfly](../../benchmarks/allreduce/figures/butterfly.svg), "
        "[ring](../../benchmarks/allreduce/figures/ring.svg)",
        "mural bench allreduce --page",
        Verdict.REPRODUCED,
    ),
)
