"""Document 002: BigConv, images cut over GPUs."""

from __future__ import annotations

from documents.lookup import Field, Made, Printed, Reduction, gib, median, ms, record
from documents.row import Row, Text, Verdict, say

GPU, CPU = "bigconv/gpu.json", "bigconv/cpu.json"
DIMS = {"CNN1D": 1, "CNN2D": 2, "CNN3D": 3, "FCN2D": 2, "DenseNet-121": 2, "UNet3D": 3}
COMMON = {"CNN1D": 8 * 2**20, "CNN2D": 2560, "CNN3D": 256, "FCN2D": 1280, "DenseNet-121": 1280, "UNet3D": 128}
"""The input at which numbers of ranks are compared: one rank holds it."""
CAP = 16 * 2**30
COMMAND = "mural bench bigconv --device cuda"
MANY = "mural bench bigconv --many"
THEIR_NET = "the document gives no layers for its net, so only growth compares"


def limit(model: str, ranks: int) -> Field:
    """The largest extent on so many ranks of 16 GiB."""
    return record(GPU, "largest", kind="limit", case__model=model, case__ranks=ranks, cap=CAP)


def growth(model: str, ranks: int) -> Made:
    """Positions of the largest input over those on one rank."""
    return (limit(model, ranks) / limit(model, 1)) ** DIMS[model]


def printed(model: str, ranks: int) -> Printed:
    """The document's largest extent."""
    return Printed("bigconv", lambda module: module.PLANS[model].published[ranks])


def printed_growth(model: str, ranks: int) -> Made:
    """The same of the document."""
    return (printed(model, ranks) / printed(model, 1)) ** DIMS[model]


def at_common(kind: str, model: str, ranks: int, field: str, of: Reduction) -> Field:
    """A measurement at the common input."""
    extents = [COMMON[model]] * DIMS[model]
    return record(GPU, field, of, kind=kind, case__model=model, case__ranks=ranks, case__extents=extents, cap=CAP)


def memory(model: str, ranks: int, field: str = "allocated") -> Made:
    """GiB of the largest rank at the common input: tensors, or what nvidia-smi would show (device)."""
    return gib(at_common("measure", model, ranks, field, max))


def own_work(model: str, ranks: int) -> Made:
    """Milliseconds of the slowest rank's part of a step, the others idle."""
    return ms(at_common("busy", model, ranks, "seconds", max))


def on_cpu(model: str, ranks: int) -> Field:
    """Bytes of the largest of many CPU ranks."""
    return record(CPU, "allocated", kind="measure", case__model=model, case__ranks=ranks)


def grown(model: str) -> Text:
    """How the limit grows on 2, 4 and 8 ranks."""
    return say(
        "{two:.1f} times on 2 ranks, {four:.1f} on 4, {eight:.1f} on 8",
        two=growth(model, 2),
        four=growth(model, 4),
        eight=growth(model, 8),
    )


LIBRARY = (
    Row(
        "abstract; section 4",
        "spatial decomposition trains on images that one GPU cannot hold",
        say(
            "DenseNet-121, 16 GiB a rank: {one:.0f}² on one rank, {eight:.0f}² on 8",
            one=limit("DenseNet-121", 1),
            eight=limit("DenseNet-121", 8),
        ),
        COMMAND,
        Verdict.REPRODUCED,
    ),
    Row(
        "section 1",
        "unlike data parallelism, model parallelism does not change what is trained: no new hyper-parameters",
        say(
            "U-Net, 4096², three steps on 8 ranks and on one: the last losses {eight:.4f} and {one:.4f}, in TF32",
            eight=Field("peers/gpu.json", ("records", {"kind": "train", "case.ranks": 8}, "losses", 2)),
            one=Field("peers/gpu.json", ("records", {"kind": "train", "case.ranks": 1}, "losses", 2)),
        ),
        "mural bench peers --unet --device cuda",
        Verdict.REPRODUCED,
        "the law behind it is tested in float64 (`pytest tests/shard/test_rank_law.py`)",
    ),
    Row(
        "section 2",
        "a GPU of 16 GB holds DenseNet121 up to about 1024²",
        say("{one:.0f}² on one rank of 16 GiB, batch 1", one=limit("DenseNet-121", 1)),
        f"{COMMAND} --models DenseNet-121",
        Verdict.NOT_COMPARABLE,
        "the document does not give the batch; the CUDA context is not part of our cap",
    ),
    Row(
        "section 2",
        "images of 10⁵ × 10⁵ pixels do not fit even on a small cluster",
        say(
            "a streamed U-Net trains on 100,000² pixels with {memory:.2f} GiB reserved on one GPU",
            memory=gib(record("one_gpu/gpu.json", "reserved", name="unet/stream16/bf16/frozen/100000@1536")),
        ),
        "mural bench one_gpu --only unet/stream16/bf16/frozen/100000@1536",
        Verdict.BETTER,
        "one after the other instead of over GPUs; bfloat16, frozen norms",
    ),
    Row(
        "section 2.1",
        "identical predictions and gradients on one GPU and on many, for CNN1D, CNN2D, CNN3D and FCN2D",
        say(
            "largest difference of loss and gradients in float64: CNN1D {cnn1d:.1g} on 12 ranks, CNN2D {cnn2d:.1g} on "
            "10, CNN3D {cnn3d:.1g} on 28, FCN2D {fcn2d:.1g} on 10",
            cnn1d=record(CPU, "difference", kind="check", case__model="CNN1D", case__ranks=12),
            cnn2d=record(CPU, "difference", kind="check", case__model="CNN2D", case__ranks=10),
            cnn3d=record(CPU, "difference", kind="check", case__model="CNN3D", case__ranks=28),
            fcn2d=record(CPU, "difference", kind="check", case__model="FCN2D", case__ranks=10),
        ),
        MANY,
        Verdict.REPRODUCED,
    ),
    Row(
        "figure 1; section 2.1",
        "halos by asynchronous RPC; autograd over RPC carries gradients across nodes",
        say(
            "one exchange of strips of 64 KiB on two CPU ranks: RPC {rpc:.0f} µs, mural's messages {ours:.0f} µs "
            "(medians)",
            rpc=Field("peers/cpu.json", ("exchange", "rpc"), median) * 1e6,
            ours=Field("peers/cpu.json", ("exchange", "transport"), median) * 1e6,
        ),
        "mural bench peers --device cpu",
        Verdict.NOT_COMPARABLE,
        "mural uses no RPC, and its gradients cross ranks all the same. RPC is faster in this trial, where ranks and "
        "threads share two cores; why mural sends messages is a "
        "[decision](../decisions/0002-point-to-point-autograd-instead-of-rpc.md)",
    ),
    Row(
        "section 2.2",
        "12 GPUs on two nodes show that node barriers can be broken",
        "training over two hosts (network namespaces), by torchrun and by mpirun, equals one process",
        "pytest tests/ranks/test_two_hosts.py",
        Verdict.REPRODUCED,
        "over TCP; not on a cluster's network",
    ),
)
FIGURES = (
    Row(
        "figure 2, one GPU",
        "CNN1D: vectors up to 8M",
        say("{one:,.0f} samples on one rank of 16 GiB", one=limit("CNN1D", 1)),
        f"{COMMAND} --models CNN1D",
        Verdict.NOT_COMPARABLE,
        THEIR_NET,
    ),
    Row(
        "figure 2, 6 GPUs",
        say("CNN1D: twice as much on 6 GPUs ({six:.1f} times)", six=printed_growth("CNN1D", 6)),
        grown("CNN1D"),
        f"{COMMAND} --models CNN1D",
        Verdict.BETTER,
        "2 ranks already reach what theirs do on 6",
    ),
    Row(
        "figure 3, one GPU",
        "CNN2D: 2200²",
        say("{one:.0f}²", one=limit("CNN2D", 1)),
        f"{COMMAND} --models CNN2D",
        Verdict.NOT_COMPARABLE,
        THEIR_NET,
    ),
    Row(
        "figure 3, 5 and 10 GPUs",
        say(
            "CNN2D: 4K² on 5, 6K² on 10 ({five:.1f} and {ten:.1f} times)",
            five=printed_growth("CNN2D", 5),
            ten=printed_growth("CNN2D", 10),
        ),
        grown("CNN2D"),
        f"{COMMAND} --models CNN2D",
        Verdict.BETTER,
        "more on 4 ranks than theirs on 5, and on 8 than theirs on 10",
    ),
    Row(
        "figure 4, one GPU",
        "CNN3D: 170³",
        say("{one:.0f}³", one=limit("CNN3D", 1)),
        f"{COMMAND} --models CNN3D",
        Verdict.NOT_COMPARABLE,
        THEIR_NET,
    ),
    Row(
        "figure 4, 9 and 28 GPUs",
        say(
            "CNN3D: 300³ on 9, 400³ on 28 ({nine:.1f} and {most:.1f} times)",
            nine=printed_growth("CNN3D", 9),
            most=printed_growth("CNN3D", 28),
        ),
        grown("CNN3D"),
        f"{COMMAND} --models CNN3D",
        Verdict.BETTER,
        "more on 8 ranks than theirs on 9; as many ranks as theirs are in a row below, under a smaller cap",
    ),
    Row(
        "figure 5, one GPU",
        "FCN2D: 1500²",
        say("{one:.0f}²", one=limit("FCN2D", 1)),
        f"{COMMAND} --models FCN2D",
        Verdict.NOT_COMPARABLE,
        THEIR_NET,
    ),
    Row(
        "figure 5, 10 GPUs",
        say("FCN2D: 4500² on 10 ({ten:.1f} times)", ten=printed_growth("FCN2D", 10)),
        grown("FCN2D"),
        f"{COMMAND} --models FCN2D",
        Verdict.REPRODUCED,
        say(
            "as a share of the ranks: theirs {theirs:.0%} of 10, ours {ours:.0%} of 8",
            theirs=printed_growth("FCN2D", 10) / 10,
            ours=growth("FCN2D", 8) / 8,
        ),
    ),
    Row(
        "figure 5",
        "FCN2D: cutting lowers memory less than for the small nets, since the net itself is expensive",
        say(
            "1280² on one rank and on 8: {one:.2f} and {eight:.2f} GiB, {own:.2f} of which are parameters and "
            "gradients; CNN2D at 2560² {small_one:.2f} and {small:.2f}",
            one=memory("FCN2D", 1),
            eight=memory("FCN2D", 8),
            own=memory("FCN2D", 8, "replicated"),
            small_one=memory("CNN2D", 1),
            small=memory("CNN2D", 8),
        ),
        f"{COMMAND} --models FCN2D",
        Verdict.REPRODUCED,
    ),
)
