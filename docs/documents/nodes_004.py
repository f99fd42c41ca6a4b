"""Document 004: data parallelism by a master, what its nodes do and send."""

from __future__ import annotations

from collections.abc import Sequence

from documents.lookup import Field, Made, Step, median, ms, record
from documents.row import Row, Verdict, say

CPU, CUDA = "hybrid/master-cpu.json", "hybrid/master-cuda.json"
MASTER = "mural bench hybrid --parts master --device cpu"
TRAFFIC = "mural bench hybrid --parts traffic --device cpu"
INFERENCE = "mural bench hybrid --parts inference"
PROFILE = "mural bench hybrid --parts profile --device cpu --name sixteen --output out"
PROFILES = "hybrid/profile-sixteen.json"
STEP_PARTS = 50
"""Into which the benchmark divides a step."""
WORKERS = (1, 2, 3)
FLOAT = 4
"""Bytes."""


def errors(field: str) -> Field:
    """Averaged errors instead of gradients: 2 nodes, 25 images each."""
    return record(CPU, field, kind="errors", nodes=2, images=25)


def updating(ranks: int, chunks: int, *path: Step) -> tuple[Step, ...]:
    """The path to a way of updating: by a master in some chunks, or, with 0, by an all-reduce."""
    return ("records", {"kind": "updating", "ranks": ranks}, "ways", {"chunks": chunks}, *path)


def step(ranks: int, chunks: int) -> Made:
    """Milliseconds."""
    return ms(Field(CPU, updating(ranks, chunks, "seconds"), median))


def share(what: str, chunks: int, nodes: Sequence[int]) -> Made:
    """The share of their steps that some nodes of 4 spend so."""
    spent, total = (
        [Field(CPU, updating(4, chunks, "shares", {"rank": node}, key)) for node in nodes] for key in (what, "seconds")
    )
    return Made(lambda *found: sum(found[: len(nodes)]) / sum(found[len(nodes) :]), (*spent, *total))


def sent_by_all(chunks: int) -> Made:
    """MiB that 4 ranks send in a step."""
    each = tuple(Field(CPU, updating(4, chunks, "sent", rank, 1)) for rank in range(4))
    return Made(lambda *found: sum(found) / 2**20, each)


def weights(way: str) -> Made:
    """MiB of weights on each of 4 ranks."""
    return record("hybrid/inference-cpu.json", "held", max, way=way, ranks=4, batch=1) / 2**20


def idle(model: str) -> Made:
    """The idle share of rank 0 of 4, gradients averaged during backward."""
    path = ("shares", f"{model}/data 4/overlap", 0)
    return Field("data_parallel/cpu.json", (*path, "idle")) / Field("data_parallel/cpu.json", (*path, "step"))


def evenness(values: Sequence[float]) -> float:
    """The part of a step in which most is sent over the mean of its parts; the median of the steps."""
    steps = [values[i : i + STEP_PARTS] for i in range(0, len(values), STEP_PARTS)]
    return median([max(parts) * len(parts) / sum(parts) for parts in steps if sum(parts)])


def peak_over_mean(net: str, way: str) -> Field:
    """How unevenly 4 ranks send in a step."""
    return record(PROFILES, "parts", evenness, kind="profiling", net=net, way=way, ranks=4)


DATA = (
    Row(
        "data parallelism",
        "all errors are reduced to one average error; one node is enough for backward",
        say(
            "2 nodes, 25 images each: that vector differs from the gradient by {relative:.0%} of its length; accuracy "
            "after 400 iterations {errors:.1%}, with gradients {right:.1%}",
            relative=errors("relative"),
            errors=errors("accuracy.errors"),
            right=errors("accuracy.batch"),
        ),
        MASTER,
        Verdict.CONTRADICTED,
        "errors belong to the activations of their images",
    ),
    Row(
        "reduce",
        "workers are idle during reduce and backward: the biggest bottleneck",
        say(
            "4 CPU ranks, idle share of a step: workers of a master {workers:.0%}, the master {master:.0%}; "
            "all-reduce {all:.0%}",
            workers=share("idle", 1, WORKERS),
            master=share("idle", 1, (0,)),
            all=share("idle", 0, (0, *WORKERS)),
        ),
        MASTER,
        Verdict.BETTER,
        "every node runs backward on its own images; the document's bottleneck is that one node does it for all",
    ),
    Row(
        "profile of a node, figure",
        "a worker's computation, communication and idle time, without numbers",
        say(
            "4 CPU ranks, weights in one piece: {compute:.0%} computing, {communicating:.0%} communicating, "
            "{idle:.0%} idle",
            compute=share("compute", 1, WORKERS),
            communicating=share("communicating", 1, WORKERS),
            idle=share("idle", 1, WORKERS),
        ),
        MASTER,
        Verdict.NOT_COMPARABLE,
        "the figure has no numbers",
    ),
    Row(
        "profile of the master, figure",
        "the same of the master node",
        say(
            "{compute:.0%} computing, {communicating:.0%} communicating, {idle:.0%} idle",
            compute=share("compute", 1, (0,)),
            communicating=share("communicating", 1, (0,)),
            idle=share("idle", 1, (0,)),
        ),
        MASTER,
        Verdict.NOT_COMPARABLE,
        "the figure has no numbers",
    ),
    Row(
        "the same, on GPUs",
        "the same, on a GPU cluster",
        say(
            "ranks that share a GPU, a step with weights in one piece over an all-reduce: {three:.2f} on 3, {four:.2f} "
            "on 4",
            three=Field(CUDA, updating(3, 1, "seconds"), median) / Field(CUDA, updating(3, 0, "seconds"), median),
            four=Field(CUDA, updating(4, 1, "seconds"), median) / Field(CUDA, updating(4, 0, "seconds"), median),
        ),
        'mural bench hybrid --parts master --device cuda --only "master and all-reduce, 4 ranks"',
        Verdict.NOT_COMPARABLE,
        "the figure has no numbers",
    ),
    Row(
        "broadcast",
        "in chunks, in the order of layers, waiting is reduced and overlaps with computing",
        say(
            "4 CPU ranks, a step: {one:.0f} ms in one piece, {two:.0f} in 2 chunks, {four:.0f} in 4, {eight:.0f} in "
            "8; workers' idle share {idle_one:.0%} and {idle_eight:.0%}",
            one=step(4, 1),
            two=step(4, 2),
            four=step(4, 4),
            eight=step(4, 8),
            idle_one=share("idle", 1, WORKERS),
            idle_eight=share("idle", 8, WORKERS),
        ),
        MASTER,
        Verdict.CONTRADICTED,
        "less idle, but more messages: slower in all, on 2 cores that 4 ranks share",
    ),
    Row(
        "merits, 2, method 1",
        "2 · N messages of the model's size, 2 · N · size in all",
        say(
            "4 ranks by a master: {messages:.0f} messages planned, {sent:.1f} MiB sent, {models:.2f} times the model",
            messages=Field(CPU, updating(4, 1, "planned", "messages")),
            sent=sent_by_all(1),
            models=sent_by_all(1) * 2**20 / (record(CPU, "parameters", kind="updating", ranks=4) * FLOAT),
        ),
        MASTER,
        Verdict.CONTRADICTED,
        "the master sends nothing to itself: 2 · (N − 1)",
    ),
    Row(
        "merits, 2, method 2",
        "K chunks: N · (1 + K) messages of size/K, and 2 · N · size in all",
        say(
            "4 ranks, 8 chunks: {messages:.0f} messages planned",
            messages=Field(CPU, updating(4, 8, "planned", "messages")),
        ),
        MASTER,
        Verdict.CONTRADICTED,
        "by itself: its messages times their size are N · (1 + 1/K) · size. In chunks both ways there are 2 · (N − 1) "
        "· K messages. The «s» of its last line is not defined",
    ),
    Row(
        "merits, 3, against «reduce»",
        "CPU cycles are used efficiently, as one node runs backward for all",
        say(
            "every rank runs backward on its own images: idle for {resnet:.0%} (ResNet-18) and {unet:.0%} (U-Net) of "
            "a step, on 4 data ranks",
            resnet=idle("resnet18"),
            unet=idle("unet"),
        ),
        "mural bench data_parallel --device cpu --parts shares",
        Verdict.CONTRADICTED,
        "by itself: its section on reduce calls the idle nodes «the biggest bottleneck»",
    ),
    Row(
        "de-merits, 1; model parallelism, merits, 2",
        "each node of data parallelism holds the whole model; under model parallelism a node needs less memory",
        say(
            "AlexNet: {data:.0f} MiB of weights on each of 4 data ranks, {model:.0f} model-parallel, {hybrid:.0f} "
            "hybrid",
            data=weights("data"),
            model=weights("model"),
            hybrid=weights("hybrid"),
        ),
        f"{INFERENCE} --device cpu",
        Verdict.REPRODUCED,
    ),
    Row(
        "de-merits, 2 and 3; model parallelism, merits, 3 and 4",
        "data parallelism loses granularity and learns slowly; model parallelism accelerates learning",
        say(
            "in float64, data, model and hybrid on 2 ranks have the accuracy of one rank after 400 iterations: "
            "{data:.1%}, {model:.1%}, {hybrid:.1%} and {one:.1%}",
            **{
                name: record("hybrid/training-cpu.json", "accuracy", way=way, dtype="float64", iterations=400, width=8)
                for name, way in {"data": "data", "model": "model", "hybrid": "hybrid", "one": "one rank"}.items()
            },
        ),
        "mural bench hybrid --parts training --device cpu",
        Verdict.CONTRADICTED,
        "all ways take the same steps",
    ),
    Row(
        "de-merits, 5; model parallelism, merits, 1",
        "data parallelism congests the network too much or too little; model parallelism less, and evenly",
        say(
            "4 ranks, the fiftieth of a step in which most is sent over the mean: data {data:.1f}, model {model:.1f}, "
            "hybrid {hybrid:.1f} (LeNet-5); {large_data:.1f}, {large_model:.1f} and {large_hybrid:.1f} (AlexNet)",
            data=peak_over_mean("lenet5", "data"),
            model=peak_over_mean("lenet5", "model"),
            hybrid=peak_over_mean("lenet5", "hybrid"),
            large_data=peak_over_mean("alexnet", "data"),
            large_model=peak_over_mean("alexnet", "model"),
            large_hybrid=peak_over_mean("alexnet", "hybrid"),
        ),
        PROFILE,
        Verdict.CONTRADICTED,
        "model parallelism is the most even for a small network and not for a large one; it does send less",
    ),
)
