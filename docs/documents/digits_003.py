"""Document 003: partitioning, the experiment on digits, and federated learning."""

from __future__ import annotations

from documents.all_reduce_003 import KIB, WORK, over_ring
from documents.lookup import Field, Made, mean, median, record
from documents.row import Row, Verdict, say
from documents.splitting_001 import times
from documents.survey_000 import COLLECTIVES, MIB

DIGITS = "mural bench allreduce --parts digits --ranks 2,4,8,16"
ELAPSED = "mural bench allreduce --parts elapsed --name two --output elapsed.jsonl"
FAULTS = "mural bench allreduce --parts faults"
SETTINGS = (
    *(("weights", ranks, width) for ranks in (2, 4, 8, 16) for width in (8, 32, 128)),
    *(("gradients", ranks, 32) for ranks in (2, 4, 8, 16)),
)
"""What was averaged, on how many ranks, with what width of the second hidden layer."""
CLINICS = "five of unequal size"


def accuracy(what: str, ranks: int, width: int, algorithm: str) -> Field:
    """Of the digits, mean over seeds."""
    return record("allreduce/digits.json", "accuracy", mean, what=what, ranks=ranks, width=width, algorithm=algorithm)


def largest_gap() -> Made:
    """The most by which ring and tree differ, in points."""
    each = tuple(
        accuracy(*setting, algorithm=ring) - accuracy(*setting, algorithm="tree")
        for setting in SETTINGS
        for ring in ("ring", "ring-blocking")
    )
    return Made(lambda *gaps: 100 * max(map(abs, gaps)), each)


def lost(what: str, fault: str, field: str = "accuracy") -> Made:
    """Points that a flawed ring loses on 8 ranks."""
    right, wrong = (
        record("allreduce/faults.json", f, mean, what=what, ranks=8, fault=name)
        for name, f in (("order of a tree", "accuracy"), (fault, field))
    )
    return (right - wrong) * 100


def on_digits(what: str) -> Field:
    """The accuracy of clinics of unequal size."""
    return Field("federated/cpu.json", ("ways", CLINICS, {}, what), mean)


def over_no_norm(model: str, variant: str) -> Made:
    """A step with some norm over that without norms in the same round, the median of six, on 8 ranks."""
    path = ("records", {"kind": "norms", "name": f"norms/{model}/8"}, "seconds")

    def seconds(name: str, turn: int) -> Field:
        return Field("data_parallel/sixteen.json", (*path, name, turn))

    return Made(lambda *found: median(found), tuple(seconds(variant, i) / seconds("none", i) for i in range(6)))


def exchanges(variant: str) -> Field:
    """Messages and sums of a rank in a step of ResNet-18, on 8 ranks."""
    about = {"kind": "norms", "name": "norms/resnet18/8"}
    return Field("data_parallel/sixteen.json", ("records", about, "exchanges", variant))


def elapsed(cores: str, ranks: int, width: int, algorithm: str, field: str = "seconds") -> Field:
    """Seconds of a training over gloo on two or sixteen cores, or of its averages."""
    path = ("records", {"kind": "elapsed", "name": f"gloo/{ranks}/{width}"}, "found", algorithm, field)
    return Field(f"allreduce/{cores}-elapsed.json", path)


def trained_over_ring(algorithm: str, width: int, cores: str = "two", ranks: int = 80) -> Made:
    """The seconds of a training on some processes over those by a ring."""
    return elapsed(cores, ranks, width, algorithm) / elapsed(cores, ranks, width, "ring")


def crowded(algorithm: str, cores: str = "two", each: int = 2, width: int = 512, processes: int = 80) -> Made:
    """Seconds in averages on many processes over those on as many as have a core each."""
    found = (elapsed(cores, ranks, width, algorithm, "averaging") for ranks in (processes, each))
    return next(found) / next(found)


PARTITIONING = (
    Row(
        "figure 6, convolution",
        "work of a convolution: N · C_out · C_in · H′ · W′ · K_x · K_y; by this, 128 → 128 channels with kernel 7 are "
        "87 times 32 → 32 with kernel 3",
        say(
            "forward on a CPU core: {cpu:.0f} times as long; on the H200 {cuda:.0f} times",
            cpu=times("cpu", 11, 1),
            cuda=times("cuda", 11, 1),
        ),
        "mural bench cost --parts twelve",
        Verdict.REPRODUCED,
        "on a CPU; a GPU is not full with the small one",
    ),
    Row(
        "figure 6, the table",
        "work and depth of activations, linear layers, convolutions, pooling and batch norm, for result and both "
        "gradients",
        "each line, with constants instead of an O, from the shapes of a captured network",
        WORK,
        Verdict.REPRODUCED,
    ),
    Row(
        "cost of computing",
        "the work of a layer grows far faster than its depth, which is at most logarithmic",
        "of a captured U-Net, work grows as the pixels do, and depth hardly",
        WORK,
        Verdict.REPRODUCED,
    ),
    Row(
        "figure 7",
        "data parallelism, model parallelism and pipelining",
        "`data`, `channel` and `stage` of a plan; `data` together with either",
        "pytest tests/engine/test_all_reduce_plans.py tests/engine/test_channel_steps.py "
        "tests/pipeline/test_stage_law.py",
        Verdict.REPRODUCED,
    ),
    Row(
        "data parallelism",
        "batch norm needs a full synchronization under data parallelism; weight norm would need none",
        say(
            "8 ranks, a step over that without norms: weight norm {weight:.2f} (ResNet-18) and {unet_weight:.2f} "
            "(U-Net), batch norm of each rank {rank:.2f} and {unet_rank:.2f}, of the whole batch {whole:.2f} and "
            "{unet_whole:.2f}; ResNet-18 exchanges {without:.0f} times a step, and {exchanges:.0f} times with the last",
            weight=over_no_norm("resnet18", "weight norm"),
            unet_weight=over_no_norm("unet", "weight norm"),
            rank=over_no_norm("resnet18", "batch norm, rank"),
            unet_rank=over_no_norm("unet", "batch norm, rank"),
            whole=over_no_norm("resnet18", "batch norm, whole batch"),
            unet_whole=over_no_norm("unet", "batch norm, whole batch"),
            without=exchanges("weight norm"),
            exchanges=exchanges("batch norm, whole batch"),
        ),
        "mural bench data_parallel --parts norms --output sixteen.jsonl",
        Verdict.REPRODUCED,
        "weight norm sends nothing, though it is not free to compute. A benchmark of the GPU ran on other cores of the "
        "machine; the ways took turns",
    ),
    Row(
        "data parallelism",
        "micro-batches and CPU together with GPU give significant gains",
        "–",
        "",
        Verdict.NOT_COMPARABLE,
        "cited without numbers, and about a CPU that computes; mural's host holds memory and does not compute",
    ),
    Row(
        "model parallelism; pipelining",
        "both are hard to implement, depend on the architecture, and make it difficult to drop in new models",
        "a model stays as it is, under stages or channels: exact, or refused by name",
        "pytest tests/pipeline/test_live_law.py tests/engine/test_channel_steps.py",
        Verdict.BETTER,
    ),
)
EXPERIMENT = (
    Row(
        "figure 8; conclusion",
        "tree and ring diverge as messages grow: the ring scales better",
        say(
            "8 ranks, tree over ring: {small:.2f} at 64 KiB, {middle:.2f} at 1 MiB, {large:.2f} at 64 MiB, {most:.2f} "
            "at 256 MiB",
            small=over_ring("tree", 8, 64 * KIB),
            middle=over_ring("tree", 8, MIB),
            large=over_ring("tree", 8, 64 * MIB),
            most=over_ring("tree", 8, 256 * MIB),
        ),
        COLLECTIVES,
        Verdict.REPRODUCED,
        "the all-reduce alone, on 16 cores",
    ),
    Row(
        "figures 9 to 15",
        "on 80 processes the training takes longer with tree or butterfly than with either ring",
        say(
            "80 processes on 2 cores, a training over that by a ring: tree {tree:.2f}, butterfly {butterfly:.2f}, the "
            "ring that waits {waits:.2f} at width 32; {tree_wide:.2f}, {butterfly_wide:.2f} and {waits_wide:.2f} at "
            "width 4096. 80 processes on 16 cores, width 32: {sixteen:.2f}, {sixteen_butterfly:.2f} and "
            "{sixteen_waits:.2f}; 16 processes on 16 cores, tree {alone:.2f} at width 32 and {alone_wide:.2f} at "
            "width 4096, 4 processes {few:.2f} and {few_wide:.2f}. The all-reduce alone on 8 ranks of 16 cores, "
            "butterfly over ring: {small:.2f} at 8 KiB, about a message of our digits, {large:.2f} at 64 MiB",
            tree=trained_over_ring("tree", 32),
            butterfly=trained_over_ring("butterfly", 32),
            waits=trained_over_ring("ring-blocking", 32),
            tree_wide=trained_over_ring("tree", 4096),
            butterfly_wide=trained_over_ring("butterfly", 4096),
            waits_wide=trained_over_ring("ring-blocking", 4096),
            sixteen=trained_over_ring("tree", 32, "sixteen"),
            sixteen_butterfly=trained_over_ring("butterfly", 32, "sixteen"),
            sixteen_waits=trained_over_ring("ring-blocking", 32, "sixteen"),
            few=trained_over_ring("tree", 32, "sixteen", 4),
            few_wide=trained_over_ring("tree", 4096, "sixteen", 4),
            alone=trained_over_ring("tree", 32, "sixteen", 16),
            alone_wide=trained_over_ring("tree", 4096, "sixteen", 16),
            small=over_ring("butterfly", 8, 8 * KIB),
            large=over_ring("butterfly", 8, 64 * MIB),
        ),
        ELAPSED,
        Verdict.CONTRADICTED,
        "for messages of this size, which take a round's latency and no more: a ring has 2 · (N − 1) rounds. With a "
        "core for each of 80 processes it was not measured",
    ),
    Row(
        "results",
        "the ring's advantage diminishes with fewer processes",
        say(
            "64 MiB, tree over ring: {eight:.2f} on 8 ranks, {four:.2f} on 4, {two:.2f} on 2",
            eight=over_ring("tree", 8, 64 * MIB),
            four=over_ring("tree", 4, 64 * MIB),
            two=over_ring("tree", 2, 64 * MIB),
        ),
        COLLECTIVES,
        Verdict.REPRODUCED,
        "the all-reduce alone",
    ),
    Row(
        "results, blue and orange curves",
        "a synchronous and an asynchronous ring",
        say(
            "8 ranks, the ring that waits over the one that does not: {small:.2f} at 64 KiB, {large:.2f} at 64 MiB",
            small=over_ring("ring-blocking", 8, 64 * KIB),
            large=over_ring("ring-blocking", 8, 64 * MIB),
        ),
        COLLECTIVES,
        Verdict.REPRODUCED,
        "both exist, and the asynchronous one is faster; the document does not say which of its two is",
    ),
    Row(
        "results",
        "more processes than cores slow the training down, the tree more than the rings",
        say(
            "2 cores, time in averages on 80 processes over that with a core each, width 512: tree {tree:.1f}, "
            "butterfly {butterfly:.1f}, ring {ring:.1f}, the ring that waits {waits:.1f} times; 16 cores, width 32: "
            "{sixteen:.1f}, {sixteen_butterfly:.1f}, {sixteen_ring:.1f} and {sixteen_waits:.1f} times; 32 processes on "
            "16 cores, width 4096: {some:.1f}, {some_butterfly:.1f}, {some_ring:.1f} and {some_waits:.1f} times",
            tree=crowded("tree"),
            butterfly=crowded("butterfly"),
            ring=crowded("ring"),
            waits=crowded("ring-blocking"),
            some=crowded("tree", "sixteen", 16, 4096, 32),
            some_butterfly=crowded("butterfly", "sixteen", 16, 4096, 32),
            some_ring=crowded("ring", "sixteen", 16, 4096, 32),
            some_waits=crowded("ring-blocking", "sixteen", 16, 4096, 32),
            sixteen=crowded("tree", "sixteen", 16, 32),
            sixteen_butterfly=crowded("butterfly", "sixteen", 16, 32),
            sixteen_ring=crowded("ring", "sixteen", 16, 32),
            sixteen_waits=crowded("ring-blocking", "sixteen", 16, 32),
        ),
        ELAPSED,
        Verdict.CONTRADICTED,
        "they slow it down, and the rings by far the most: each of their rounds waits for every process to have its "
        "turn",
    ),
    Row(
        "results",
        "more processes than cores lose accuracy, the tree more than the rings",
        say(
            "16 ranks on 2 cores, weights averaged, width 32: tree {tree:.1%}, ring {ring:.1%}; 2 ranks "
            "{two_tree:.1%} and {two_ring:.1%}",
            tree=accuracy("weights", 16, 32, "tree"),
            ring=accuracy("weights", 16, 32, "ring"),
            two_tree=accuracy("weights", 2, 32, "tree"),
            two_ring=accuracy("weights", 2, 32, "ring"),
        ),
        DIGITS,
        Verdict.CONTRADICTED,
        "accuracy falls with the number of ranks, whose shares of the images shrink, and equally for all algorithms",
    ),
    Row(
        "figure 16",
        "the rings are 7 to 10% less accurate than tree or butterfly",
        say(
            "the largest difference of a ring from the tree, all settings of 2 to 16 ranks: {gap:.2f} points; 8 "
            "ranks, width 32: ring {ring:.1%}, tree {tree:.1%}",
            gap=largest_gap(),
            ring=accuracy("weights", 8, 32, "ring"),
            tree=accuracy("weights", 8, 32, "tree"),
        ),
        DIGITS,
        Verdict.CONTRADICTED,
        "on scikit-learn's digits, where theirs is MNIST",
    ),
    Row(
        "results; AllReduce Ring",
        "the loss comes from a flaw in the code, or from another order of summation",
        say(
            "8 ranks, points lost: {order:.1f} by a ring's order of summation; one round short {short:.1f} (weights "
            "averaged) and {gradients:.1f} (gradients); a mean at each hop {hop:.1f} and {gradients_hop:.1f}",
            order=lost("weights", "order of a ring"),
            short=lost("weights", "one round short"),
            gradients=lost("gradients", "one round short"),
            hop=lost("weights", "mean at each hop"),
            gradients_hop=lost("gradients", "mean at each hop"),
        ),
        FAULTS,
        Verdict.CONTRADICTED,
        "as far as rounding goes. A flaw could explain it; which one it had cannot be told without its code",
    ),
    Row(
        "experiment; conclusion",
        "with CUDA in the nodes, accuracy is about 10%, as good as random",
        say(
            "4 ranks over MPI with tensors on an H200, weights averaged by a ring: {accuracy:.1%}",
            accuracy=record("allreduce/mpi-digits.json", "accuracy", mean, what="weights", algorithm="ring"),
        ),
        "mpirun -n 4 python benchmarks/allreduce/digits_mpi.py cuda",
        Verdict.BETTER,
    ),
    Row(
        "application",
        "federated learning over a ring: clinics train locally and share only parameters",
        say(
            "five clinics of unequal size: {federated:.1%}, one place with all samples {central:.1%}; the same bytes "
            "leave a clinic with its samples as with noise",
            federated=on_digits("federated"),
            central=on_digits("central"),
        ),
        "mural bench federated",
        Verdict.BETTER,
        "the document imagines it",
    ),
)
