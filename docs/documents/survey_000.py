"""Document 000, what it cites: data parallelism, Horovod and GPipe."""

from __future__ import annotations

from documents.hybrids_000 import MEASURED, SIMULATED, simulated, step
from documents.lookup import Field, Made, gib, median, record
from documents.row import Row, Verdict, say

COLLECTIVES = "mural bench allreduce --parts measured --ranks 2,4,8"
MIB = 2**20


def collective(algorithm: str, ranks: int, size: int) -> Field:
    """Seconds of an all-reduce on the 16 cores."""
    return record(
        "allreduce/sixteen-measured.json", "seconds", median, algorithm=algorithm, ranks=ranks, bytes=size
    )  # fmt: skip


def sent_by(transport: str, size: int, by: str = "ring", ranks: int = 2, file: str = "two-sockets") -> Field:
    """Seconds of an all-reduce on ranks that have a core each."""
    path = ("records", {"kind": "calls", "name": f"sockets/{transport}/{ranks}"}, "found", str(size), by)
    return Field(f"allreduce/{file}.json", path, median)


def sockets_over(transport: str, size: int) -> Made:
    """The time of the same rounds over gloo's sockets and over MPI."""
    return sent_by("gloo", size) / sent_by(transport, size)


def eight_over(size: int, own: bool) -> Made:
    """The time on 8 ranks of the 16 cores over gloo's sockets and over MPI: their `own` all-reduces, or a ring."""
    ways = ("backend", "MPI itself") if own else ("ring", "ring")
    over_gloo, over_mpi = (
        sent_by(transport, size, way, 8, "sockets") for transport, way in zip(("gloo", "mpi"), ways, strict=True)
    )
    return over_gloo / over_mpi


def efficiency(model: str, way: str, ranks: int) -> Made:
    """One rank's step over that of ranks that exchange gradients so."""
    file, about = "data_parallel/sixteen.json", {"kind": "efficiency", "model": model}
    one, many = (
        Field(file, ("records", about | {"ranks": number}, "seconds", name), median)
        for number, name in ((1, "apart"), (ranks, way))
    )
    return one / many


ROWS = (
    Row(
        "section 1; section 2, on Horovod",
        "data parallelism does not need less memory than one image does; models must fit on each device",
        say(
            "ResNet-1001, 8 images a rank: {alone:.2f} GiB on one rank, {many:.2f} on each of 16 data ranks",
            alone=gib(step("resnet1001", "one rank", 8, "peaks")),
            many=gib(step("resnet1001", "data 16", 128, "peaks")),
        ),
        MEASURED,
        Verdict.REPRODUCED,
    ),
    Row(
        "figure 1",
        "data parallelism: each device runs standard backward on its images, gradients are averaged by all-reduce",
        say(
            "the largest distance of gradients from DistributedDataParallel's, relative: {resnet:.1g} (ResNet-18), "
            "{unet:.1g} (U-Net), in float32 on 2 ranks",
            resnet=Field("data_parallel/cpu.json", ("pairs", "resnet18", {}, "differences", "mural"), max),
            unet=Field("data_parallel/cpu.json", ("pairs", "unet", {}, "differences", "mural"), max),
        ),
        "mural bench data_parallel --device cpu --parts pairs",
        Verdict.REPRODUCED,
    ),
    Row(
        "section 2, on [1]",
        "MPI greatly reduces the overhead of communication, compared with sockets",
        say(
            "2 ranks of 2 cores, a ring over gloo's sockets over the same ring by MPI: {small:.2f} times the time at "
            "1 KiB, {large:.2f} at 16 MiB; with MPI's messages through TCP {small_tcp:.2f} and {large_tcp:.2f}. 8 "
            "ranks of 16 cores, gloo's own all-reduce over MPI's: {eight:.0f} and {eight_large:.2f} times; "
            "mural's ring over gloo over the same by MPI: {eight_ring:.2f} and {eight_ring_large:.2f}",
            eight=eight_over(1024, own=True),
            eight_large=eight_over(16 * MIB, own=True),
            eight_ring=eight_over(1024, own=False),
            eight_ring_large=eight_over(16 * MIB, own=False),
            small=sockets_over("mpi", 1024),
            large=sockets_over("mpi", 16 * MIB),
            small_tcp=sockets_over("mpi-tcp", 1024),
            large_tcp=sockets_over("mpi-tcp", 16 * MIB),
        ),
        "mural bench allreduce --parts sockets --name two --only 'sockets/*/2' --output sockets.jsonl",
        Verdict.REPRODUCED,
        "inside a node, where MPI uses shared memory, and for small messages through TCP, too; on 16 cores by MPI's "
        "own all-reduce alone: mural's rounds take longer over MPI there, which is not explained",
    ),
    Row(
        "section 2, on [8]",
        "a ring sends less than a parameter server does, and so replaces it",
        say(
            "one all-reduce of 64 MiB on 2, 4 and 8 ranks: the server takes {two:.2f}, {four:.2f} and {eight:.2f} "
            "times as long as the ring",
            two=collective("parameter-server", 2, 64 * MIB) / collective("ring", 2, 64 * MIB),
            four=collective("parameter-server", 4, 64 * MIB) / collective("ring", 4, 64 * MIB),
            eight=collective("parameter-server", 8, 64 * MIB) / collective("ring", 8, 64 * MIB),
        ),
        COLLECTIVES,
        Verdict.REPRODUCED,
        "from 4 ranks on; on 2 there is no difference to speak of",
    ),
    Row(
        "figure 2",
        "training over more GPUs stays more efficient with a ring than with a parameter server",
        say(
            "one rank's step over that of ranks with as many images each: ResNet-18 on 16 ranks {ring:.0%} with a "
            "ring, {server:.0%} with a parameter server, on 8 ranks {eight_ring:.0%} and {eight_server:.0%}; a narrow "
            "VGG-16 on 16 ranks {narrow_ring:.0%} and {narrow_server:.0%}, on 8 {narrow_eight:.0%} and "
            "{narrow_eight_server:.0%}, on 2 {two_ring:.0%} and {two_server:.0%}. Without messages, 16 ranks reach "
            "{apart:.0%} and {narrow_apart:.0%}",
            ring=efficiency("resnet18", "ring", 16),
            server=efficiency("resnet18", "parameter-server", 16),
            eight_ring=efficiency("resnet18", "ring", 8),
            eight_server=efficiency("resnet18", "parameter-server", 8),
            narrow_ring=efficiency("vgg16", "ring", 16),
            narrow_server=efficiency("vgg16", "parameter-server", 16),
            narrow_eight=efficiency("vgg16", "ring", 8),
            narrow_eight_server=efficiency("vgg16", "parameter-server", 8),
            two_ring=efficiency("vgg16", "ring", 2),
            two_server=efficiency("vgg16", "parameter-server", 2),
            apart=efficiency("resnet18", "apart", 16),
            narrow_apart=efficiency("vgg16", "apart", 16),
        ),
        "mural bench data_parallel --parts servers --output sixteen.jsonl",
        Verdict.REPRODUCED,
        "on the cores of one machine, where gradients are large for what is computed",
    ),
    Row(
        "figure 3",
        "under traditional model parallelism one device computes at a time, and the others wait",
        say(
            "4 stages, 8 micro-batches: {units:.0f} units of time, and a stage is idle for {idle:.0%} of them",
            units=simulated("sequential", 8),
            idle=simulated("sequential", 8, "bubble"),
        ),
        SIMULATED,
        Verdict.REPRODUCED,
    ),
    Row(
        "figure 4",
        "GPipe's micro-batches use the devices better",
        say(
            "the same work by GPipe: {units:.0f} units, idle for {idle:.0%}",
            units=simulated("GPipe", 8),
            idle=simulated("GPipe", 8, "bubble"),
        ),
        SIMULATED,
        Verdict.REPRODUCED,
    ),
    Row(
        "section 2, on [9]",
        "a model trained by GPipe reaches a top-1 accuracy of 84.4% on ImageNet-2012",
        say(
            "gradients of a U-Net in 2 to 4 stages under GPipe are within {gradients:.1g} of one device's, in float64",
            gradients=Made(
                max,
                tuple(
                    record("unet_split/gpu.json", "gradients", kind="agrees", name=f"{stages} stages, gpipe")
                    for stages in (2, 3, 4)
                ),
            ),
        ),
        "mural bench unet_split --parts agreement",
        Verdict.NOT_COMPARABLE,
        "ImageNet is not here",
    ),
    Row(
        "section 2, on [9]",
        "GPipe was not shown to train ResNets on HPC systems, and has no hybrid of data and stages",
        say(
            "ResNet-1001 in 4 stages: {stages:.2f} s a step of 32 images; by data 4 × stage 4 on 16 ranks "
            "{hybrid:.2f} s a step of {images:.0f}",
            stages=step("resnet1001", "stage 4", 32),
            hybrid=step("resnet1001", "data 4 × stage 4", 128),
            images=step("resnet1001", "data 4 × stage 4", 128, "batch"),
        ),
        f"{MEASURED} --models resnet1001",
        Verdict.BETTER,
        "the ranks are cores of one machine, not an HPC system",
    ),
)
