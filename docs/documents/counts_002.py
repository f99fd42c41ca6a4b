"""Document 002, BigConv at its numbers of GPUs: growth, memory, utilization, larger batches, and throughput."""

from __future__ import annotations

from documents.bigconv_002 import CAP, COMMAND, DIMS, GPU, memory, on_cpu, own_work
from documents.lookup import Field, Made, mean, record
from documents.row import Row, Verdict, say

COUNTS = "mural bench bigconv --counts --output counts.jsonl --only"
CAPS = {"CNN1D": CAP // 2, "CNN2D": CAP // 2, "CNN3D": CAP // 4, "FCN2D": CAP // 2}
"""Smaller ones, so that all ranks fit on one GPU."""
BATCH_CAP = CAP
BATCHED_AT = {"CNN2D": 2048, "FCN2D": 1024}


def limit(model: str, ranks: int) -> Field:
    """The largest extent under the smaller cap."""
    return record(GPU, "largest", kind="limit", case__model=model, case__ranks=ranks, cap=CAPS[model])


def growth(model: str, ranks: int) -> Made:
    """Positions of the largest input over those on one rank under the same cap."""
    return (limit(model, ranks) / limit(model, 1)) ** DIMS[model]


def fitted(model: str, ranks: int) -> Field:
    """The largest extent that was seen to fit under the smaller cap, where the search was not finished."""
    about = {"case__model": model, "case__ranks": ranks, "cap": CAPS[model]}
    return record(GPU, "case.extents", max, kind="measure", **about)


def small(ranks: int, field: str) -> Field:
    """A peak of CNN2D at 1K²."""
    about = {"case__model": "CNN2D", "case__ranks": ranks, "case__extents": [1024, 1024]}
    return record(GPU, field, kind="measure", cap=CAPS["CNN2D"], **about)


def busy(ranks: int, model: str = "CNN2D", side: int = 2048, dims: int = 2) -> Made:
    """The time of a rank's kernels over that of its own part of the step, the others idle: the mean of the ranks."""
    about = {"kind": "utilisation", "case.model": model, "case.ranks": ranks, "case.extents": [side] * dims}
    path = ("records", about | {"cap": CAPS[model]})
    each = tuple(Field(GPU, (*path, "kernels", n)) / Field(GPU, (*path, "wall", n)) for n in range(ranks))
    return Made(lambda *shares: mean(shares), each)


def batched(kind: str, field: str, ranks: int, images: int, model: str) -> Field:
    """A model with several images at a time; one image is not written into a case."""
    side = BATCHED_AT[model]
    about = {"case__model": model, "case__ranks": ranks, "case__extents": [side, side], "cap": BATCH_CAP}
    return record(GPU, field, max, kind=kind, case__batch=images if images > 1 else None, **about)


def saved(images: int, model: str = "CNN2D") -> Made:
    """One rank's memory over that of the largest of 4 ranks."""
    return batched("measure", "allocated", 1, images, model) / batched("measure", "allocated", 4, images, model)


def faster(images: int, model: str = "CNN2D") -> Made:
    """One rank's step over the slowest rank's own part of it on 4."""
    return batched("utilisation", "wall", 1, images, model) / batched("utilisation", "wall", 4, images, model)


def alone_over(model: str) -> Made:
    """One rank's step over the slowest rank's own part of it on 8."""
    return own_work(model, 1) / own_work(model, 8)


NUMBERS_OF_GPUS = (
    Row(
        "figure 3, 1K²",
        "CNN2D at 1K²: three times less memory on 10 GPUs than on one",
        say(
            "on 10 ranks: {tensors:.1f} times less for tensors, {device:.1f} times as nvidia-smi shows it; 2560² on 8 "
            "ranks: {large:.1f} and {large_device:.1f} times; 1280² on 10 CPU ranks: {cpu:.1f} times",
            tensors=small(1, "allocated") / small(10, "allocated"),
            device=small(1, "device") / small(10, "device"),
            large=memory("CNN2D", 1) / memory("CNN2D", 8),
            large_device=memory("CNN2D", 1, "device") / memory("CNN2D", 8, "device"),
            cpu=on_cpu("CNN2D", 1) / on_cpu("CNN2D", 10),
        ),
        f"{COUNTS} 'memory/*'",
        Verdict.REPRODUCED,
        "of larger images each of as many ranks needs a smaller share",
    ),
    Row(
        "figures 2 to 5, at the document's numbers of GPUs",
        "5, 6, 9, 10, 12 and 28 GPUs",
        say(
            "positions of the largest input over those on one rank: CNN2D {five:.1f} times on 5, {ten:.1f} on 10; "
            "CNN1D {six:.1f} on 6, {twelve:.1f} on 12; CNN3D {nine:.1f} on 9, {most:.1f} or more on 28; FCN2D "
            "{fcn:.1f} or more on 10",
            five=growth("CNN2D", 5),
            ten=growth("CNN2D", 10),
            six=growth("CNN1D", 6),
            twelve=growth("CNN1D", 12),
            nine=growth("CNN3D", 9),
            most=(fitted("CNN3D", 28) / limit("CNN3D", 1)) ** DIMS["CNN3D"],
            fcn=(fitted("FCN2D", 10) / limit("FCN2D", 1)) ** DIMS["FCN2D"],
        ),
        f"{COUNTS} 'limit/*'",
        Verdict.BETTER,
        "on all but FCN2D, whose growth is about that of the document. "
        "Caps are smaller, so that all ranks fit on one GPU; the searches on 28 ranks and of FCN2D were not finished",
    ),
    Row(
        "figures 2 to 5, utilization",
        "one GPU without RPC is better utilized than GPUs with RPC",
        say(
            "CNN2D at 2048², a rank's kernels over its own part of the step, messages served: {one:.0%} on one rank, "
            "{ten:.0%} on 10",
            one=busy(1),
            ten=busy(10),
        ),
        f"{COUNTS} 'utilisation/*'",
        Verdict.REPRODUCED,
        "for an image that one rank holds",
    ),
    Row(
        "figures 2 to 5, utilization",
        "the same image on more workers utilizes each GPU better",
        say(
            "on 1, 5 and 10 ranks, CNN2D at 2048²: {one:.0%}, {five:.0%} and {ten:.0%}; from one rank to ten, FCN2D "
            "at 1024²: {fcn:.0%} and {fcn_ten:.0%}; CNN3D at 144³ on 1 and 9 ranks: {cube:.0%} and {cube_nine:.0%}",
            one=busy(1),
            five=busy(5),
            ten=busy(10),
            fcn=busy(1, "FCN2D", 1024),
            fcn_ten=busy(10, "FCN2D", 1024),
            cube=busy(1, "CNN3D", 144, 3),
            cube_nine=busy(9, "CNN3D", 144, 3),
        ),
        f"{COUNTS} 'utilisation/*'",
        Verdict.CONTRADICTED,
        "for an image that one rank holds: the more workers share it, the smaller the part of each",
    ),
    Row(
        "section 2.2",
        "all runs have batch 1; with larger batches the gains would be more pronounced",
        say(
            "one rank over 4 ranks, with one image and with four: memory {saved:.1f} and {saved_four:.1f} times (CNN2D "
            "at 2048²), {fcn:.1f} and {fcn_four:.1f} times (FCN2D at 1024²); a rank's own part of the step "
            "{faster:.2f} and {faster_four:.2f}, {fcn_faster:.2f} and {fcn_faster_four:.2f} times",
            saved=saved(1),
            saved_four=saved(4),
            fcn=saved(1, "FCN2D"),
            fcn_four=saved(4, "FCN2D"),
            faster=faster(1),
            faster_four=faster(4),
            fcn_faster=faster(1, "FCN2D"),
            fcn_faster_four=faster(4, "FCN2D"),
        ),
        f"{COUNTS} 'batch/*'",
        Verdict.REPRODUCED,
        "in memory and in time, on 4 ranks, messages served; on 8 it was not measured",
    ),
)
THROUGHPUT = (
    Row(
        "section 2.2; section 4",
        "throughput is comparable with one GPU: messages go through the CPU",
        say(
            "one rank's step over the slowest rank's own part on 8, messages served: CNN1D {cnn1d:.2f}, CNN2D "
            "{cnn2d:.2f}, CNN3D {cnn3d:.2f}, FCN2D {fcn2d:.2f}, DenseNet-121 {densenet:.2f}",
            cnn1d=alone_over("CNN1D"),
            cnn2d=alone_over("CNN2D"),
            cnn3d=alone_over("CNN3D"),
            fcn2d=alone_over("FCN2D"),
            densenet=alone_over("DenseNet-121"),
        ),
        COMMAND,
        Verdict.NOT_COMPARABLE,
        "all ranks share one GPU: this is the speed that they would have with a GPU each and no wait for messages. "
        "Below one, cutting this input would cost more than it gains",
    ),
    Row(
        "section 2.2",
        "GPU-to-GPU messages were not available",
        "between ranks that share a GPU through its memory (CUDA IPC); between GPUs by NCCL, tested on ranks of one "
        "GPU ([backends](../reference/backends.md))",
        "python tests/gpu/run.py",
        Verdict.BETTER,
        "NVLink and several GPUs are not tested",
    ),
)
