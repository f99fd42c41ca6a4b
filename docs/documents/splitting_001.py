"""Document 001: hypotheses, layer times and their prediction, graphs of networks."""

from __future__ import annotations

import operator
import statistics
from collections.abc import Sequence

from documents.lookup import Among, Cell, Field, Made, gib, mean, median, only, record
from documents.row import Row, Verdict, say

TWELVE = "mural bench cost --parts twelve"
LAYERS = 12


def without_first(values: Sequence[float]) -> float:
    """The mean of all iterations but the first."""
    return statistics.fmean(values[1:])


def layer(device: str, phase: str, number: int, iteration: int | None = None) -> Field:
    """Seconds of one of the twelve convolutions: of an iteration, or the mean of all but the first."""
    file, at = f"cost/{device}.json", {} if iteration is None else iteration
    path = ("records", {"kind": "twelve"}, "seconds", phase, at, number)
    return Field(file, path, without_first if iteration is None else only)


def back_over_forward(device: str, of: str) -> Made:
    """Backward over forward of the twelve: the least, the median or the most."""
    each = tuple(layer(device, "backward", i) / layer(device, "forward", i) for i in range(LAYERS))
    return Made(lambda *ratios: {"least": min, "median": statistics.median, "most": max}[of](ratios), each)


def over_mean(device: str, phase: str, iteration: int) -> Made:
    """The median over layers of an iteration's time over the mean of all but the first."""
    each = tuple(layer(device, phase, i, iteration) / layer(device, phase, i) for i in range(LAYERS))
    return Made(lambda *ratios: statistics.median(ratios), each)


def error(device: str, predictor: str, column: str = "mean error") -> Cell:
    """How far predictions of held-out models are off."""
    return Cell("cost", device, ("time of a step", predictor), column)


def times(device: str, top: int, bottom: int) -> Made:
    """How much longer one of the twelve takes forward than another."""
    return Made(operator.truediv, (layer(device, "forward", top), layer(device, "forward", bottom)))


def cut_by(what: str, model: str) -> Made:
    """The step of 8 stages that are balanced by something over that of equal numbers of layers; cuts between layers."""
    mine, layers = (
        record("schedules/splits.json", "seconds", median, kind="split", cells=Among(f"{model}/8/layer/{by}"))
        for by in (what, "layers")
    )
    return mine / layers


POLYNOMIAL = "the same with the document's polynomial"
LARGE = {"kind": "measure", "name": "unet/stream16/bf16/frozen/100000@1536"}

HYPOTHESES = (
    Row(
        "motivation",
        "pathology images have 100k × 100k pixels; models on them do not fit on one GPU",
        say(
            "U-Net, forward, backward and update on 100,000² pixels within 16 GiB of one GPU: {seconds:.0f} s a step, "
            "{memory:.2f} GiB reserved",
            seconds=Field("one_gpu/gpu.json", ("records", LARGE, "seconds"), mean),
            memory=gib(Field("one_gpu/gpu.json", ("records", LARGE, "reserved"))),
        ),
        "mural bench one_gpu --only unet/stream16/bf16/frozen/100000@1536",
        Verdict.BETTER,
        "streamed, in bfloat16, with frozen norms",
    ),
    Row(
        "hypothesis 1; future work, 1",
        "an analytical model of layer times finds efficient splits over GPUs; splits at block, layer and module level",
        say(
            "8 stages cut by fitted and by measured time, steps over those of equal numbers of layers: U-Net "
            "{unet:.2f} and {unet_measured:.2f}, ResNet-50 {resnet:.2f} and {resnet_measured:.2f}, DenseNet-121 "
            "{dense:.2f} and {dense_measured:.2f}, AmoebaNet-18 {amoeba:.2f} and {amoeba_measured:.2f}",
            unet=cut_by("time", "unet"),
            unet_measured=cut_by("measured", "unet"),
            resnet=cut_by("time", "resnet50"),
            resnet_measured=cut_by("measured", "resnet50"),
            dense=cut_by("time", "densenet121"),
            dense_measured=cut_by("measured", "densenet121"),
            amoeba=cut_by("time", "amoebanet18"),
            amoeba_measured=cut_by("measured", "amoebanet18"),
        ),
        "mural bench schedules --parts splits --output splits.jsonl",
        Verdict.REPRODUCED,
        "on CPU cores, at the level of layers: there, cuts by fitted times are faster in most cases. At the level of "
        "blocks and modules they often are not, above all in two stages, where few cuts are left to choose from. "
        "Measured times help no more than fitted ones",
    ),
    Row(
        "hypothesis 2",
        "torch.jit.trace shows the data flow of a model, so that it can be split without the user's help",
        say(
            "mural records the calls of the model on tensors without memory; a U-Net that is split so has gradients "
            "within {gradients:.1g} of one device",
            gradients=record("unet_split/gpu.json", "gradients", max, kind="agrees"),
        ),
        "mural bench unet_split --parts agreement",
        Verdict.BETTER,
        "without torch.jit, which loses Python's control flow",
    ),
    Row(
        "hypothesis 3",
        "offload to the CPU improves GEMS",
        say(
            "GEMS of a U-Net in two stages of 16 GiB: up to 2048² without offload ({small:.2f} s a step), 2560² with "
            "it ({seconds:.2f} s, {peak:.2f} GiB)",
            small=record("offload/gpu.json", "step", kind="measure", name="stages/2048/gems2"),
            seconds=record("offload/gpu.json", "step", kind="measure", name="stages/2560/gems2offload"),
            peak=gib(record("offload/gpu.json", "allocated", kind="measure", name="stages/2560/gems2offload")),
        ),
        "mural bench offload --only 'stages/2048/gems2*' 'stages/2560/gems2*'",
        Verdict.REPRODUCED,
        "in the size of the image; where all fits without offload, nothing leaves",
    ),
)
LAYER_TIMES = (
    Row(
        "background, on [1]",
        "the time of a convolution depends on sizes, on the kind of operation and on its kernel",
        say(
            "32 → 32 channels, kernel 7 over kernel 3: {cuda:.2f} times on the H200, {cpu:.2f} times on a CPU core",
            cuda=times("cuda", 3, 1),
            cpu=times("cpu", 3, 1),
        ),
        TWELVE,
        Verdict.REPRODUCED,
    ),
    Row(
        "layer times",
        "high maximums from the first iterations",
        say(
            "the first forward takes {cuda:.2f} times the mean of the others on the H200, {cpu:.2f} times on a CPU "
            "core (median of 12 layers)",
            cuda=over_mean("cuda", "forward", 0),
            cpu=over_mean("cpu", "forward", 0),
        ),
        TWELVE,
        Verdict.REPRODUCED,
        "on the GPU",
    ),
    Row(
        "layer times",
        "high maximums from the last iterations",
        say(
            "the last forward takes {cuda:.2f} times the mean on the H200, {cpu:.2f} times on a CPU core",
            cuda=over_mean("cuda", "forward", -1),
            cpu=over_mean("cpu", "forward", -1),
        ),
        TWELVE,
        Verdict.CONTRADICTED,
    ),
    Row(
        "layer times",
        "backward often takes twice as long as forward",
        say(
            "backward over forward of the 12 convolutions: median {cuda:.2f} on the H200 ({cuda_least:.2f} to "
            "{cuda_most:.2f}), {cpu:.2f} on a CPU core ({cpu_least:.2f} to {cpu_most:.2f})",
            cuda=back_over_forward("cuda", "median"),
            cuda_least=back_over_forward("cuda", "least"),
            cuda_most=back_over_forward("cuda", "most"),
            cpu=back_over_forward("cpu", "median"),
            cpu_least=back_over_forward("cpu", "least"),
            cpu_most=back_over_forward("cpu", "most"),
        ),
        TWELVE,
        Verdict.REPRODUCED,
    ),
    Row(
        "layer times",
        "at equal kernels, channels change the time",
        say(
            "kernel 3, 128 → 128 channels over 32 → 32: {cuda:.2f} times on the H200, {cpu:.2f} times on a CPU core",
            cuda=times("cuda", 9, 1),
            cpu=times("cpu", 9, 1),
        ),
        TWELVE,
        Verdict.REPRODUCED,
    ),
    Row(
        "layer time prediction, figure",
        "a polynomial over channels, image size and kernel (scikit-learn's PolynomialFeatures) predicts layer times; "
        "no error is given",
        say(
            "steps of models that no fit has seen, mean error: by the document's polynomial {cuda:.0%} on the H200 and "
            "{cpu:.0%} on a CPU core; by mural's fit {cuda_ours:.1%} and {cpu_ours:.1%}",
            cuda=error("cuda", POLYNOMIAL),
            cpu=error("cpu", POLYNOMIAL),
            cuda_ours=error("cuda", "**fitted**"),
            cpu_ours=error("cpu", "**fitted**"),
        ),
        "mural bench cost",
        Verdict.BETTER,
        say(
            "the polynomial was made for 12 layers of one size; mural's largest errors are {cuda:.1%} and {cpu:.1%}",
            cuda=error("cuda", "**fitted**", "largest"),
            cpu=error("cpu", "**fitted**", "largest"),
        ),
    ),
)
BLOCKS = "pytest tests/graph/test_blocks.py"
DRAWN = "pytest tests/report/test_draw.py tests/report/test_draw_page.py"
GRAPHS = (
    Row(
        "network representation, TheModelClass",
        "an adjacency list from the parsed forward: conv1 → pool1 → conv2 → pool2 → fc1 → fc2 → fc3",
        "the same list, entry by entry",
        BLOCKS,
        Verdict.REPRODUCED,
    ),
    Row(
        "network representation, Basic CNN",
        "the graph of a small network with dropout",
        "conv1 → conv2 → conv2_drop → fc1 → fc2 by blocks; functions (relu, pooling, softmax) are nodes by layers",
        BLOCKS,
        Verdict.REPRODUCED,
    ),
    Row(
        "network representation, interconnected models",
        "graphs of models whose layers have several inputs",
        "each edge goes from its origin to its readers; a module that is called twice is two boxes",
        DRAWN,
        Verdict.REPRODUCED,
    ),
    Row(
        "network representation, AmoebaNet",
        "TorchViz: no mapping to layers, nodes for weights and biases, the backward graph, no blocks",
        "[a page](../how-to/see-the-graph.md) with a node for each block or layer, forward; parameters are numbers on "
        "them",
        DRAWN,
        Verdict.BETTER,
    ),
    Row(
        "network representation, AmoebaNet 6 and 18",
        "block-level graphs of AmoebaNets with 6 and 18 layers",
        "the adjacency of both, and [a picture](../images/graph-amoebanet18.png) of the second",
        BLOCKS,
        Verdict.REPRODUCED,
    ),
    Row(
        "network representation, note",
        "each block can be extended to a full graph, recursively",
        "blocks open in the page; the levels nest and cover every call",
        BLOCKS,
        Verdict.REPRODUCED,
    ),
    Row(
        "network representation",
        "PyTorch has no direct method to find how layers connect",
        "torch.fx and torch.export have come since; mural uses neither, so that Python's control flow just runs",
        "pytest tests/graph/test_capture.py",
        Verdict.NOT_COMPARABLE,
        "a statement about its time",
    ),
)
ROWS = (*HYPOTHESES, *LAYER_TIMES, *GRAPHS)
