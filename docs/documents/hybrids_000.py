"""Document 000, what it cites: hybrids of data and stages, HyPar-Flow and GEMS."""

from __future__ import annotations

from documents.lookup import Field, Made, Number, Printed, median, record
from documents.row import Row, Verdict, say

SIMULATED = "mural bench schedules --parts simulated"
MEASURED = "mural bench schedules --parts measured"
STRONG = f"{MEASURED} --batch 32"
HYBRIDS = (
    f"{MEASURED} --models resnet110,resnet110-64,resnet110-128,resnet1001,resnet1001-48 --known "
    "benchmarks/schedules/results/cpu.json --output hybrids.jsonl"
)


def simulated(schedule: str, microbatches: int, field: str = "makespan") -> Field:
    """Four stages on paper."""
    return record("schedules/simulated.json", field, schedule=schedule, seats=4, microbatches=microbatches)


def step(model: str, division: str, batch: int, field: str = "seconds") -> Field:
    """A step on real cores: the median of its seconds, or the largest of its ranks' peaks."""
    of = median if field == "seconds" else max
    return record("schedules/cpu.json", field, of, kind="step", model=model, division=division, batch=batch)


def speed(model: str, division: str, batch: int) -> Made:
    """Images a second."""
    images = record("schedules/cpu.json", "batch", kind="step", model=model, division=division, batch=batch)
    return images / step(model, division, batch)


def cited(name: str) -> Number:
    """A number of the schedules' published.py."""
    return Printed("schedules", lambda module: getattr(module, name))


def over_data(model: str, division: str = "data 4 × stage 4") -> Made:
    """How much faster a hybrid is than data parallelism alone, with 8 images a rank."""
    return speed(model, division, 128) / speed(model, "data 16", 128)


ROWS = (
    Row(
        "section 2, on [10]",
        say(
            "HyPar-Flow's hybrid of data and stages is up to {best:.1f} times as fast as data parallelism alone",
            best=cited("HYBRID_OVER_DATA"),
        ),
        say(
            "U-Net, 32 images on 16 ranks: data 4 × stage 4 is {stages:.2f} times as fast as data 16, data 4 × GEMS 4 "
            "{gems:.2f} times",
            stages=speed("unet", "data 4 × stage 4", 32) / speed("unet", "data 16", 32),
            gems=speed("unet", "data 4 × GEMS 4", 32) / speed("unet", "data 16", 32),
        ),
        f"{STRONG} --models unet",
        Verdict.CONTRADICTED,
        "on 16 cores that share one memory, where summing gradients costs little; theirs are CPU nodes in a network, "
        "and ResNets",
    ),
    Row(
        "the same, for its ResNets",
        say("{best:.1f} times; by the cited paper for ResNet-1001 on CPU nodes", best=cited("HYBRID_OVER_DATA")),
        say(
            "8 images for each of 16 ranks, data 4 × stage 4 over data 16: ResNet-110 {small:.2f} times as fast on "
            "32², {wide:.2f} on 64², {widest:.2f} on 128²; ResNet-1001 {large:.2f} on 32², {larger:.2f} on 48². With "
            "data 4 × GEMS 4, ResNet-110 {gems:.2f}, {wide_gems:.2f} and {widest_gems:.2f}, ResNet-1001 "
            "{large_gems:.2f} and {larger_gems:.2f}",
            small=over_data("resnet110"),
            wide=over_data("resnet110-64"),
            widest=over_data("resnet110-128"),
            large=over_data("resnet1001"),
            larger=over_data("resnet1001-48"),
            gems=over_data("resnet110", "data 4 × GEMS 4"),
            wide_gems=over_data("resnet110-64", "data 4 × GEMS 4"),
            widest_gems=over_data("resnet110-128", "data 4 × GEMS 4"),
            large_gems=over_data("resnet1001", "data 4 × GEMS 4"),
            larger_gems=over_data("resnet1001-48", "data 4 × GEMS 4"),
        ),
        HYBRIDS,
        Verdict.CONTRADICTED,
        'with `batchnorm = "micro-rank"`, which normalizes as theirs does, on 16 cores that share one memory; the gap '
        "closes as images grow. Larger images of ResNet-1001 need more memory than that machine has",
    ),
    Row(
        "section 2, on HyPar-Flow",
        "it works on CPUs and not on GPUs",
        say(
            "stages run on a GPU: U-Net on 8 ranks of an H200, {side:.0f}² and less",
            side=record("unet_split/gpu.json", "side", max, kind="measure", net="classic", way="memory"),
        ),
        "mural bench unet_split --parts measured",
        Verdict.BETTER,
    ),
    Row(
        "section 2, on HyPar-Flow",
        "pipelines are slower than data parallelism",
        say(
            "4 ranks, 32 images, stage 4 over data 4: U-Net {unet:.2f} times as fast, ResNet-110 {small:.2f}, "
            "ResNet-1001 {large:.2f}",
            unet=speed("unet", "stage 4", 32) / speed("unet", "data 4", 32),
            small=speed("resnet110", "stage 4", 32) / speed("resnet110", "data 4", 32),
            large=speed("resnet1001", "stage 4", 32) / speed("resnet1001", "data 4", 32),
        ),
        STRONG,
        Verdict.REPRODUCED,
        "stages wait at the beginning and at the end of each step, and are not equally long",
    ),
    Row(
        "section 2, on HyPar-Flow",
        "the length of a pipeline is limited by the size of the batch",
        say(
            "4 stages under 1F1B are idle for {one:.0%} of the time with 1 micro-batch, {eight:.0%} with 8, "
            "{most:.0%} with 32",
            one=simulated("1F1B", 1, "bubble"),
            eight=simulated("1F1B", 8, "bubble"),
            most=simulated("1F1B", 32, "bubble"),
        ),
        SIMULATED,
        Verdict.REPRODUCED,
    ),
    Row(
        "figure 5",
        "GEMS trains a second, inverted replica in the free memory and time of the first",
        say(
            "4 stages, 2 images: {one:.0f} units in one direction, {lean:.0f} in the order of MPI4DL, {both:.0f} "
            "interleaved; measured against 1F1B on 4 ranks {unet:.2f} (U-Net), {small:.2f} (ResNet-110), {large:.2f} "
            "times as fast (ResNet-1001)",
            one=simulated("sequential", 2),
            lean=simulated("GEMS lean", 2),
            both=simulated("GEMS interleaved", 2),
            unet=speed("unet", "GEMS 4", 32) / speed("unet", "stage 4", 32),
            small=speed("resnet110", "GEMS 4", 32) / speed("resnet110", "stage 4", 32),
            large=speed("resnet1001", "GEMS 4", 32) / speed("resnet1001", "stage 4", 32),
        ),
        STRONG,
        Verdict.REPRODUCED,
    ),
    Row(
        "section 2, on [5]",
        say(
            "GEMS with data parallelism: {best:.2%} scaling efficiency for a ResNet-1k; by the cited paper on 1,024 "
            "GPUs",
            best=cited("SCALING_EFFICIENCY"),
        ),
        say(
            "U-Net, 8 images for each of 16 ranks, data 4 × GEMS 4: {gems:.1%} of four times GEMS 4, {own:.1%} of 16 "
            "ranks. 16 ranks that train apart, without a message, reach {apart:.1%} of 16 ranks: of what they reach, "
            "the hybrid has {left:.1%}, data 16 {data:.1%}",
            gems=speed("unet", "data 4 × GEMS 4", 128) / (speed("unet", "GEMS 4", 32) * 4),
            own=speed("unet", "data 4 × GEMS 4", 128) / (speed("unet", "one rank", 8) * 16),
            apart=speed("unet", "16 apart", 128) / (speed("unet", "one rank", 8) * 16),
            left=speed("unet", "data 4 × GEMS 4", 128) / speed("unet", "16 apart", 128),
            data=speed("unet", "data 16", 128) / speed("unet", "16 apart", 128),
        ),
        f"{MEASURED} --models unet",
        Verdict.CONTRADICTED,
        "on 16 cores of one machine: what holds many ranks back there is not messages, but what cores share, as "
        "caches and the memory's bandwidth. More images for each rank help; twice the micro-batches do on 4 ranks, not "
        "on 16 ranks",
    ),
    Row(
        "the same, for ResNet-1k",
        say("{best:.2%}", best=cited("SCALING_EFFICIENCY")),
        say(
            "8 images a rank: ResNet-1001, data 4 × stage 4 {stages:.1%} of four times stage 4, data 4 × GEMS 4 "
            "{both:.1%} of four times GEMS 4, data 16 alone {data:.1%} of 16 ranks, and 16 ranks without a message "
            "{apart:.1%}; ResNet-110, data 4 × GEMS 4 {gems:.1%}, {wide:.1%} and {widest:.1%} of four times GEMS 4 on "
            "32², 64² and 128²",
            apart=speed("resnet1001", "16 apart", 128) / (speed("resnet1001", "one rank", 8) * 16),
            wide=speed("resnet110-64", "data 4 × GEMS 4", 128) / (speed("resnet110-64", "GEMS 4", 32) * 4),
            widest=speed("resnet110-128", "data 4 × GEMS 4", 128) / (speed("resnet110-128", "GEMS 4", 32) * 4),
            both=speed("resnet1001", "data 4 × GEMS 4", 128) / (speed("resnet1001", "GEMS 4", 32) * 4),
            stages=speed("resnet1001", "data 4 × stage 4", 128) / (speed("resnet1001", "stage 4", 32) * 4),
            data=speed("resnet1001", "data 16", 128) / (speed("resnet1001", "one rank", 8) * 16),
            gems=speed("resnet110", "data 4 × GEMS 4", 128) / (speed("resnet110", "GEMS 4", 32) * 4),
        ),
        HYBRIDS,
        Verdict.CONTRADICTED,
        "on 16 cores of one machine: what cores share takes a part, messages and bubbles the rest. The hybrids and "
        "what they are divided by were measured on different days",
    ),
    Row(
        "section 2, on [5]",
        say(
            "GEMS trains ResNet-110 in 28 minutes instead of {hours:.0f} hours: {gain:.0f} times as fast",
            hours=cited("HOURS_BEFORE"),
            gain=cited("SPEEDUP"),
        ),
        say(
            "data 4 × GEMS 4 on 16 ranks over one: U-Net {unet:.2f} times; ResNet-110, 8 images a rank, {resnet:.2f} "
            "times on 32², {wide:.2f} on 64², {widest:.2f} on 128²",
            unet=speed("unet", "data 4 × GEMS 4", 32) / speed("unet", "one rank", 32),
            resnet=speed("resnet110", "data 4 × GEMS 4", 128) / speed("resnet110", "one rank", 8),
            wide=speed("resnet110-64", "data 4 × GEMS 4", 128) / speed("resnet110-64", "one rank", 8),
            widest=speed("resnet110-128", "data 4 × GEMS 4", 128) / speed("resnet110-128", "one rank", 8),
        ),
        HYBRIDS,
        Verdict.NOT_COMPARABLE,
        "the gain depends on how many devices they had, which the document does not say; by the cited paper, images "
        "were tiles of 1024². Ours grows with the images",
    ),
)
