"""Document 002: Multi-DSN, and what it concludes."""

from __future__ import annotations

from documents.bigconv_002 import CPU, MANY, growth, limit
from documents.lookup import Cell, Field, Made, Reduction, gib, mean, median, record
from documents.row import Row, Verdict, say

GPU = "multi_dsn/gpu.json"
DSN = "mural bench multi_dsn"
AGAIN = "by part, computed again"
SIDE = 768
"""Where the document's one process is full."""
ADAPTED = ("inverted", "noisy", "blurred", "textured")


def way(targets: int, placement: str) -> str:
    """A way of the benchmark."""
    return f"1 + {targets}, {placement}"


def measured(name: str, field: str, of: Reduction) -> Field:
    """A measurement at 768²."""
    return record(GPU, field, of, kind="measure", way=name, side=SIDE)


def lakes(trained_on: str) -> Cell:
    """The IoU of lakes on the test continents, mean over seeds."""
    return Cell("water", "windows", (trained_on,), "run on tiles as in training")


def memory(targets: int, placement: str) -> Made:
    """GiB of the rank that needs most, as reserved."""
    return gib(measured(way(targets, placement), "reserved", max))


def utilization(targets: int, placement: str) -> Made:
    """The share of a step in which a rank's kernels run, mean over ranks."""
    name = way(targets, placement)
    return measured(name, "computing", mean) / measured(name, "seconds", median)


def throughput(targets: int, placement: str) -> Made:
    """Images a second, of all domains."""
    name = way(targets, placement)
    return record(GPU, "images", kind="measure", way=name, side=SIDE) / measured(name, "seconds", median)


def traffic(targets: int) -> Made:
    """Megabytes a step for the sums of shared weights, by domain."""
    return measured(way(targets, "by domain"), "added", sum) / 1e6


def largest(targets: int, placement: str) -> Field:
    """The largest side with 16 GiB a rank."""
    return record(GPU, "largest", kind="limit", way=way(targets, placement))


def adapted(what: str) -> Made:
    """The mean accuracy on the four targets."""
    each = tuple(Field("adaptation/cpu.json", ("ways", {}, what, name), mean) for name in ADAPTED)
    return Made(lambda *accuracies: mean(accuracies), each)


def context(patch: int) -> Field:
    """Accuracy where the answer is far away, by the size of the training patch, over rates and seeds."""
    case = {"kind": "run", "case.question": "hilum", "case.depth": 5, "case.patch": patch, "case.rate": 0.0005}
    return Field("context/gpu.json", ("records", case, "test", "whole", "accuracy"), mean)


MULTI_DSN = (
    Row(
        "section 3; figure 7",
        "DSN, batch 2, with a very small encoder: one V100 of 16 GB holds 768² and no more",
        say("{side:.0f}² in one process of 16 GiB", side=largest(1, "one process")),
        DSN,
        Verdict.NOT_COMPARABLE,
        "the document does not give its encoders; ours are those of the paper on domain separation networks",
    ),
    Row(
        "figure 6; section 3.1",
        "a worker for each encoder, shared weights by all-reduce, reconstruction and classification on workers of "
        "their own",
        "by part as in the document, or by domain: loss, gradients and weights after steps equal one process, in "
        "float64",
        "pytest tests/domain/test_domain_law.py",
        Verdict.REPRODUCED,
    ),
    Row(
        "figure 7, one source, one target on 6 GPUs",
        "memory is «reduced by few GBs» against one GPU",
        say(
            "at 768²: {one:.2f} GiB in one process, {part:.2f} on each of 6 ranks by part, {domain:.2f} on each of 2 "
            "by domain",
            one=memory(1, "one process"),
            part=memory(1, "by part"),
            domain=memory(1, "by domain"),
        ),
        DSN,
        Verdict.REPRODUCED,
        say(
            "by {part:.2f} GiB, {times:.1f} times less; GiB do not compare, as the nets differ",
            part=memory(1, "one process") - memory(1, "by part"),
            times=memory(1, "one process") / memory(1, "by part"),
        ),
    ),
    Row(
        "figure 7, four and seven targets",
        "memory stays flat for 1, 4 and 7 targets",
        say(
            "by domain, at 768²: {one:.2f}, {four:.2f} and {seven:.2f} GiB",
            one=memory(1, "by domain"),
            four=memory(4, "by domain"),
            seven=memory(7, "by domain"),
        ),
        DSN,
        Verdict.REPRODUCED,
        "by domain, a placement that the document does not have",
    ),
    Row(
        "figure 7, in the document's placement",
        "the same, a worker for each encoder",
        say(
            "by part, at 768²: {one:.2f}, {four:.2f} and {seven:.2f} GiB with 1, 4 and 7 targets; with the "
            "reconstruction computed again {one_again:.2f}, {four_again:.2f} and {seven_again:.2f}",
            one=memory(1, "by part"),
            four=memory(4, "by part"),
            seven=memory(7, "by part"),
            one_again=memory(1, AGAIN),
            four_again=memory(4, AGAIN),
            seven_again=memory(7, AGAIN),
        ),
        DSN,
        Verdict.REPRODUCED,
        "with the reconstruction computed again; otherwise the rank that reconstructs keeps all domains' activations",
    ),
    Row(
        "figure 7, utilization",
        "one GPU without RPC is better utilized",
        say(
            "at 768², the time in which a rank's kernels run over that of a step: {one:.0%} in one process, "
            "{domain:.0%} on 2 ranks by domain, {part:.0%} on 6 by part",
            one=utilization(1, "one process"),
            domain=utilization(1, "by domain"),
            part=utilization(1, "by part"),
        ),
        DSN,
        Verdict.REPRODUCED,
        "ranks share one GPU, and kernels are timed by torch's profiler in a step of their own",
    ),
    Row(
        "figure 7, utilization",
        "utilization is flat and very low as domains are added",
        say(
            "at 768², with 1, 4 and 7 targets: by part {part:.0%}, {part_four:.0%} and {part_seven:.0%}; by domain "
            "{one:.0%}, {four:.0%} and {seven:.0%}",
            part=utilization(1, "by part"),
            part_four=utilization(4, "by part"),
            part_seven=utilization(7, "by part"),
            one=utilization(1, "by domain"),
            four=utilization(4, "by domain"),
            seven=utilization(7, "by domain"),
        ),
        DSN,
        Verdict.REPRODUCED,
        "by part, as the document places them; by domain it is flat and not low",
    ),
    Row(
        "section 3.2",
        "more domains can be added until communication, mostly of the shared weights, takes over",
        say(
            "shared weights a step, by domain: {one:.1f}, {four:.1f} and {seven:.1f} MB with 1, 4 and 7 targets",
            one=traffic(1),
            four=traffic(4),
            seven=traffic(7),
        ),
        DSN,
        Verdict.REPRODUCED,
        say(
            "codes are {codes:.3f} MB with 7 targets",
            codes=measured(way(7, "by domain"), "bytes", sum) / 1e6,
        ),
    ),
    Row(
        "section 4, on Multi-DSN",
        "throughput is comparable with one GPU",
        say(
            "at 768², images a second of all domains over those of one process: {one:.2f}, {four:.2f} and {seven:.2f} "
            "with 1, 4 and 7 targets by domain",
            one=throughput(1, "by domain") / throughput(1, "one process"),
            four=throughput(4, "by domain") / throughput(1, "one process"),
            seven=throughput(7, "by domain") / throughput(1, "one process"),
        ),
        DSN,
        Verdict.REPRODUCED,
        "on one GPU that all ranks share; theirs had a GPU each",
    ),
)
CONCLUSION = (
    Row(
        "section 4",
        "spatial, domain, data and pipeline parallelism are orthogonal, and can run at the same time, on 3D images",
        "domain 2 × stage 2 × spatial 2 × 1 × 1 × data 2 on volumes, 16 ranks: equal to one process, in float64",
        "pytest tests/domain/test_domain_law.py -m slow",
        Verdict.BETTER,
        "the document describes it, and did not run it",
    ),
    Row(
        "section 4, announced",
        "models for UNet3D and DenseNet",
        say(
            "UNet3D: {unet:.0f}³ on one rank, {unet_growth:.1f} times the voxels on 8, exact to {unet_exact:.1g} on "
            "16 ranks; DenseNet-121: {dense_growth:.1f} times the pixels on 8, exact to {dense_exact:.1g} on 12",
            unet=limit("UNet3D", 1),
            unet_growth=growth("UNet3D", 8),
            unet_exact=record(CPU, "difference", kind="check", case__model="UNet3D"),
            dense_growth=growth("DenseNet-121", 8),
            dense_exact=record(CPU, "difference", kind="check", case__model="DenseNet-121"),
        ),
        MANY,
        Verdict.BETTER,
    ),
    Row(
        "section 4, next step",
        "whether whole images and larger receptive fields give better accuracy",
        say(
            "the answer far away, a U-Net that sees {reach:.0f} pixels far: {whole:.3f} trained on whole images of "
            "512², {half:.3f} on patches of 256², {small:.3f} on patches of 64² (mean of the seeds, run whole)",
            reach=Field("context/gpu.json", ("records", {"kind": "settings"}, "reach", "5")),
            whole=context(512),
            half=context(256),
            small=context(64),
        ),
        "mural bench context",
        Verdict.BETTER,
        "on made images, at one learning rate; where the answer is near, patches do as well",
    ),
    Row(
        "section 4, next step",
        "the same on a real application",
        say(
            "lakes in a world map, IoU: {whole:.3f} from whole windows of 2048², {small:.3f}, {quarter:.3f} and "
            "{large:.3f} from patches of 64², 256² and 512²",
            whole=lakes("2048²"),
            small=lakes("64²"),
            quarter=lakes("256²"),
            large=lakes("512²"),
        ),
        "mural bench water --mask lsmask_1.25min_f.bin --device cuda --output water.jsonl",
        Verdict.CONTRADICTED,
        "whole windows gain nothing over small patches on this map, with this network and so many steps: none of them "
        "finds lakes far from land, as the middle of the Caspian Sea",
    ),
    Row(
        "section 4",
        "as far as its authors can tell, the first spatial decomposition in PyTorch",
        say(
            "there are others since: on two CPU ranks, over two halves without any exchange, PhysicsNeMo takes "
            "{peer:.2f} times the time and is exact, too; mural takes {ours:.2f} times",
            peer=Cell("peers", "results", ("PhysicsNeMo",), "÷ plain"),
            ours=Cell("peers", "results", ("**mural**",), "÷ plain"),
        ),
        "mural bench peers --device cpu",
        Verdict.NOT_COMPARABLE,
        "a statement about its time",
    ),
    Row(
        "section 4",
        "training with few labels and several unlabelled domains can be studied for its accuracy",
        say(
            "digits in four unlabelled domains: {source:.1%} from the source alone, {separation:.1%} with a "
            "separation network, {labels:.1%} with the targets' labels",
            source=adapted("source only"),
            separation=adapted("separation"),
            labels=adapted("target labels"),
        ),
        "mural bench adaptation",
        Verdict.BETTER,
        "one of the four targets, inverted digits, is not learned",
    ),
    Row(
        "section 4",
        "the same principles serve other encoders and tasks, such as segmentation or detection",
        "segmentation over ranks; a detector with a loss of its own, in one process",
        "pytest tests/domain/test_separation_network.py tests/domain/test_domain_law.py",
        Verdict.BETTER,
    ),
)
ROWS = (*MULTI_DSN, *CONCLUSION)
