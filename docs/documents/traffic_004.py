"""Document 004: model parallelism, what it sends, and what it costs."""

from __future__ import annotations

from documents.lookup import Field, Made, median, ms, record
from documents.nodes_004 import INFERENCE, PROFILE, PROFILES, TRAFFIC
from documents.row import Row, Verdict, say

FILE = "hybrid/traffic-cpu.json"
LENET = 5
"""Layers of LeNet-5."""


def sent(net: str, way: str, what: str) -> Made:
    """Messages or values of a step with 8 images on 4 ranks, those of gradients by a ring."""
    step = {"kind": "step", "net": net, "way": way, "ranks": 4, "images": 8}
    own, ring = (Field(FILE, ("records", step, "layers", {}, key), sum) for key in (what, f"ring_{what}"))
    return own + ring


def size(net: str, what: str, **which: object) -> Field:
    """The sum of a size over the layers of a net, or over some of them."""
    return Field(FILE, ("records", {"kind": "sizes", "net": net}, "layers", which, what), sum)


def linear(net: str, what: str) -> Made:
    """The share of the linear layers."""
    return size(net, what, type="Linear") / size(net, what)


def largest_ratio(net: str, layers: int) -> Made:
    """The most values that a layer keeps for each of its parameters."""
    path = ("records", {"kind": "sizes", "net": net}, "layers")
    each = (Field(FILE, (*path, i, "kept")) / Field(FILE, (*path, i, "parameters")) for i in range(layers))
    return Made(max, tuple(each))


def scheme(way: str, images: int) -> Field:
    """Values that the document's own scheme sends on 4 ranks."""
    return record(FILE, f"{way}.values", kind="scheme", ranks=4, images=images)


def latency(device: str, way: str, ranks: int) -> Made:
    """Milliseconds of one image."""
    file = f"hybrid/inference-{device}.json"
    return ms(record(file, "seconds", median, kind="inference", way=way, ranks=ranks, batch=1))


def spent(way: str, what: str) -> Made:
    """The share of their steps that 4 ranks of AlexNet spend so."""
    path = ("records", {"kind": "profiling", "net": "alexnet", "way": way, "ranks": 4}, "shares", {})
    mine, total = (Field(PROFILES, (*path, key), sum) for key in (what, "seconds"))
    return mine / total


MODEL = (
    Row(
        "model parallelism",
        "more and smaller messages than data parallelism",
        say(
            "LeNet-5, 4 ranks, 8 images: {data_messages:,.0f} messages with {data:,.0f} values (data), "
            "{model_messages:,.0f} with {model:,.0f} (model)",
            data_messages=sent("lenet5", "data", "messages"),
            data=sent("lenet5", "data", "values"),
            model_messages=sent("lenet5", "model", "messages"),
            model=sent("lenet5", "model", "values"),
        ),
        TRAFFIC,
        Verdict.REPRODUCED,
    ),
    Row(
        "model parallelism",
        "in production, model parallelism is more advantageous than data parallelism",
        say(
            "AlexNet, one image on 4 ranks: data {cpu_data:.1f} ms, model {cpu:.1f} ms on 2 CPU cores; "
            "{cuda_data:.1f} and {cuda:.1f} ms on one H200; on one rank {cpu_one:.1f} and {cuda_one:.1f} ms",
            cpu_data=latency("cpu", "data", 4),
            cpu=latency("cpu", "model", 4),
            cuda_data=latency("cuda", "data", 4),
            cuda=latency("cuda", "model", 4),
            cpu_one=latency("cpu", "one rank", 1),
            cuda_one=latency("cuda", "one rank", 1),
        ),
        INFERENCE,
        Verdict.CONTRADICTED,
        "in latency; it does need less memory (row above)",
    ),
    Row(
        "figure, model and data parallelism on 4 GPUs",
        "both can be combined",
        say(
            "AlexNet, one image on 4 CPU ranks: {groups:.1f} ms in two groups, {hybrid:.1f} ms as a hybrid of all "
            "four; on 4 GPU ranks {cuda:.1f} and {cuda_hybrid:.1f} ms",
            groups=latency("cpu", "hybrid, in two groups", 4),
            hybrid=latency("cpu", "hybrid", 4),
            cuda=latency("cuda", "hybrid, in two groups", 4),
            cuda_hybrid=latency("cuda", "hybrid", 4),
        ),
        f'{INFERENCE} --device cuda --only "in two groups"',
        Verdict.REPRODUCED,
        "and two groups answer sooner than one hybrid of four",
    ),
    Row(
        "profile of a node under model parallelism, figure",
        "computation, communication and idle time, without numbers",
        say(
            "AlexNet on 4 ranks: {compute:.0%} computing, {messages:.0%} communicating, {idle:.0%} idle under model "
            "parallelism; {hybrid:.0%}, {hybrid_messages:.0%} and {hybrid_idle:.0%} as a hybrid",
            compute=spent("model", "compute"),
            messages=spent("model", "communicating"),
            idle=spent("model", "idle"),
            hybrid=spent("hybrid", "compute"),
            hybrid_messages=spent("hybrid", "communicating"),
            hybrid_idle=spent("hybrid", "idle"),
        ),
        PROFILE,
        Verdict.NOT_COMPARABLE,
        "the figure has no numbers",
    ),
    Row(
        "figures, flow of data forward and backward",
        "which node sends what at which layer",
        "counted layer by layer, for data, model, hybrid and two groups",
        TRAFFIC,
        Verdict.REPRODUCED,
    ),
    Row(
        "figure, LeNet 5",
        "total data size = 1790",
        say("{kept:.0f} values are kept between layers", kept=size("lenet5", "kept")),
        TRAFFIC,
        Verdict.REPRODUCED,
    ),
    Row(
        "figures, sizes of data and model by layer",
        "from convolutions to fully connected layers the model grows and data shrink",
        say(
            "linear layers have {lenet:.1%} of the parameters and {lenet_kept:.1%} of the values of LeNet-5, "
            "{alexnet:.1%} and {alexnet_kept:.1%} of AlexNet",
            lenet=linear("lenet5", "parameters"),
            lenet_kept=linear("lenet5", "kept"),
            alexnet=linear("alexnet", "parameters"),
            alexnet_kept=linear("alexnet", "kept"),
        ),
        TRAFFIC,
        Verdict.REPRODUCED,
    ),
    Row(
        "dynamism",
        "data are always far less than the model, at most two times as much",
        say(
            "one image, values over parameters: {lenet:.3f} (LeNet-5) and {vgg:.3f} (VGG-19) for whole networks, "
            "{layer:.1f} for LeNet-5's first layer",
            lenet=size("lenet5", "kept") / size("lenet5", "parameters"),
            vgg=size("vgg19", "kept") / size("vgg19", "parameters"),
            layer=largest_ratio("lenet5", LENET),
        ),
        TRAFFIC,
        Verdict.CONTRADICTED,
        "for single layers; and data grow with the batch, which the model does not",
    ),
    Row(
        "merits, 5",
        "2 · N · layers messages, 2 · N · data values: 40 and 114,560 for LeNet 5 on 4 nodes with 8 images",
        say(
            "{messages:,.0f} messages with {values:,.0f} values",
            messages=sent("lenet5", "model", "messages"),
            values=sent("lenet5", "model", "values"),
        ),
        TRAFFIC,
        Verdict.CONTRADICTED,
        "values are reduced and broadcast forward, and errors backward: four collectives for a layer, where it counts "
        "two; a divided convolution sends its result before the pool",
    ),
    Row(
        "merits, 6",
        "the whole traffic is a small fraction of data parallelism's",
        say(
            "4 ranks, 8 images, model over data: LeNet-5 {lenet:.2f}, AlexNet {alexnet:.2f}, VGG-19 {vgg:.2f}",
            lenet=sent("lenet5", "model", "values") / sent("lenet5", "data", "values"),
            alexnet=sent("alexnet", "model", "values") / sent("alexnet", "data", "values"),
            vgg=sent("vgg19", "model", "values") / sent("vgg19", "data", "values"),
        ),
        TRAFFIC,
        Verdict.REPRODUCED,
        "for AlexNet, but hardly for LeNet-5: it depends on the images of a step, see the next row. Networks of "
        "reduced width",
    ),
    Row(
        "merits, 6",
        "LeNet 5: model parallelism sends less for N ≤ 35 nodes",
        say(
            "its scheme on 4 ranks: {model:,.0f} values against {data:,.0f} with 34 images, {more:,.0f} with 35; "
            "parameters over values are {crossover:.1f}",
            model=scheme("model", 34),
            data=scheme("data", 34),
            more=scheme("model", 35),
            crossover=size("lenet5", "parameters") / size("lenet5", "kept"),
        ),
        TRAFFIC,
        Verdict.CONTRADICTED,
        "the number is right, and counts images of a step: nodes cancel out, unless each has one image",
    ),
)
