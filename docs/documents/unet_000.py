"""Document 000, its own work: a U-Net cut over GPUs, naively and by memory."""

from __future__ import annotations

from documents.lookup import Field, Made, Number, Printed, gib, median, published, record
from documents.row import Row, Text, Verdict, say

GPU = "unet_split/gpu.json"
COMMAND = "mural bench unet_split --parts measured"
AGREEMENT = "mural bench unet_split --parts agreement"
NETS = {"deep": "the deep net", "classic": "the classic net"}


def seconds(net: str, way: str, side: int) -> Field:
    """One image, forward and backward."""
    return record(GPU, "seconds", median, kind="measure", net=net, way=way, side=side)


def fits(net: str, way: str) -> Field:
    """The largest side that ran."""
    return record(GPU, "side", max, kind="measure", net=net, way=way)


def fails(net: str, way: str) -> Field:
    """The smallest side that ran out of memory."""
    return record(GPU, "side", min, kind="failure", why="memory", net=net, way=way)


def printed(column: str, side: int) -> Printed:
    """A cell of figure 9."""
    return Printed("unet_split", lambda module: module.SECONDS[column][side])


def peak(net: str, way: str, side: int, rank: int) -> Made:
    """GiB of a rank."""
    return gib(Field(GPU, ("records", {"kind": "measure", "net": net, "way": way, "side": side}, "each", rank)))


def parameters(net: str, way: str, rank: int) -> Made:
    """Millions of parameters of a rank."""
    return Field(GPU, ("records", {"kind": "divided", "net": net, "way": way}, "parameters", rank)) / 1e6


def extremes(net: str, way: str, side: int) -> Made:
    """The largest rank's peak over the smallest one's."""
    most, least = (
        record(GPU, "each", of, kind="measure", net=net, way=way, side=side) for of in (max, min)
    )  # fmt: skip
    return most / least


def agreement(what: str) -> Field:
    """The largest difference from one device, of all plans."""
    return record(GPU, what, max, kind="agrees")


# -- figure 9 -------------------------------------------------------------------------------------------------------

SECONDS_WHY = (
    "one H200 that all ranks share is not 8 V100s, and the document does not describe its net; what compares is which "
    "ways run, and by how much cutting slows a step down"
)


def theirs(side: int) -> Text:
    """A line of figure 9."""
    columns = {"sequential": "sequential", "naive": "naive", "memory": "model-aware"}
    known = [name for name in columns if side in published("unet_split").SECONDS[name]]
    words = ", ".join(f"{word} {{{name}:g}} s" if name in known else f"{word} OOM" for name, word in columns.items())
    return Text(words, {name: printed(name, side) for name in known})


def ours(side: int, alone: bool = True) -> Text:
    """The same cells of the deep net, and of the classic one where one rank holds it."""
    cells = "one rank {deep_alone:.3f} s, naive {deep_naive:.3f}, by memory {deep_memory:.3f}"
    ways = {"alone": "sequential", "naive": "naive", "memory": "memory"}
    numbers: dict[str, Number] = {
        f"{net}_{name}": seconds(net, way, side)
        for net in NETS
        for name, way in ways.items()
        if alone or (net, name) != ("deep", "alone")
    }
    if not alone:
        cells = "one rank OOM, naive {deep_naive:.3f} s, by memory {deep_memory:.3f}"
    classic = "one rank {classic_alone:.3f} s, naive {classic_naive:.3f}, by memory {classic_memory:.3f}"
    return Text(f"deep net: {cells}; classic net: {classic}", numbers)


def slowdown(net: str, way: str, side: int) -> Made:
    """A step over that of one rank."""
    return seconds(net, way, side) / seconds(net, "sequential", side)


SMALL = tuple(
    Row(f"figure 9, {side}²", theirs(side), ours(side), COMMAND, Verdict.NOT_COMPARABLE, why)
    for side, why in ((64, SECONDS_WHY), (128, "as above"), (256, "as above"), (512, "as above"))
)
FIGURE_9 = (
    *SMALL,
    Row(
        "figure 9, 640²",
        theirs(640),
        ours(640, alone=False),
        COMMAND,
        Verdict.REPRODUCED,
        "which ways run, on the deep net, whose width was chosen so that one rank first fails here; seconds do not "
        "compare",
    ),
    Row("figure 9, 768²", theirs(768), ours(768, alone=False), COMMAND, Verdict.REPRODUCED, "as above"),
    Row(
        "figure 9, 1024²",
        theirs(1024),
        ours(1024, alone=False),
        COMMAND,
        Verdict.CONTRADICTED,
        say("naive cuts by layers run here on our net, up to {fits:.0f}²", fits=fits("deep", "naive")),
    ),
    Row(
        "figure 9, 2048²",
        theirs(2048),
        say(
            "deep net: OOM, from {alone:.0f}² on one rank, {naive:.0f}² naive, {memory:.0f}² by memory; classic net: "
            "one rank OOM, naive {classic:.3f} s, by memory {aware:.3f}",
            alone=fails("deep", "sequential"),
            naive=fails("deep", "naive"),
            memory=fails("deep", "memory"),
            classic=seconds("classic", "naive", 2048),
            aware=seconds("classic", "memory", 2048),
        ),
        COMMAND,
        Verdict.REPRODUCED,
        "on the deep net",
    ),
)

# -- the text -------------------------------------------------------------------------------------------------------

CUTS = (
    Row(
        "section 3, B; section 4, C",
        "long skips: a block's output goes to the next block and across the U, forward and backward, over several GPUs",
        say(
            "{plans:.0f} plans of a U-Net: loss within {loss:.1g} of one device, gradients within {gradients:.1g}, in "
            "float64",
            plans=record(GPU, "loss", len, kind="agrees"),
            loss=agreement("loss"),
            gradients=agreement("gradients"),
        ),
        AGREEMENT,
        Verdict.BETTER,
        "the document does not say that it compared results",
    ),
    Row(
        "section 3, A",
        "deep learning frameworks have no distributed backward pass",
        "torch has stages of its own since; mural's run the model's own forward and autograd ([decision]"
        "(../decisions/0024-stages-run-the-models-own-forward.md))",
        "pytest tests/pipeline/test_stage_law.py",
        Verdict.NOT_COMPARABLE,
        "a statement about its time",
    ),
    Row(
        "section 3, C",
        "balance must be flexible: by memory, by compute, or as the user says",
        '`cuts = "layers"`, `"time"`, `"memory"`, or the names of blocks',
        "pytest tests/pipeline/test_partition.py",
        Verdict.BETTER,
        "the document has cuts by layers and by memory; whether cuts by time are good cuts is a row of document `001`",
    ),
    Row(
        "figure 6, A to C",
        "a sequence is cut by layers, ResNet by blocks around its skips, U-Net vertically",
        say(
            "cuts at points of the captured graph, with long skips; ResNet-1001 and U-Net in 4 stages: "
            "{resnet:.2f} and {unet:.2f} s a step of 32 images",
            resnet=record("schedules/cpu.json", "seconds", median, model="resnet1001", division="stage 4", batch=32),
            unet=record("schedules/cpu.json", "seconds", median, model="unet", division="stage 4", batch=32),
        ),
        "mural bench schedules --parts measured --batch 32",
        Verdict.REPRODUCED,
    ),
    Row(
        "section 4, A",
        "cut horizontally, some GPUs would need far more memory than cut vertically",
        say(
            "a rank for each level reaches {classic:.0f}² on the classic net and {deep:.0f}² on the deep one; "
            "vertical naive cuts {classic_naive:.0f}² and {deep_naive:.0f}²",
            classic=fits("classic", "horizontal"),
            deep=fits("deep", "horizontal"),
            classic_naive=fits("classic", "naive"),
            deep_naive=fits("deep", "naive"),
        ),
        f"{COMMAND} --ways horizontal",
        Verdict.REPRODUCED,
        "with 5 and 4 ranks, since there are no more levels, against 8",
    ),
    Row(
        "section 4, A",
        "vertical cuts give each GPU roughly the same memory",
        say(
            "naive cuts, largest rank over smallest: {classic:.1f} times (classic net, 2048²), {deep:.1f} times (deep "
            "net, 1024²); balanced by memory {classic_memory:.1f} and {deep_memory:.1f}",
            classic=extremes("classic", "naive", 2048),
            deep=extremes("deep", "naive", 1024),
            classic_memory=extremes("classic", "memory", 2048),
            deep_memory=extremes("deep", "memory", 1024),
        ),
        COMMAND,
        Verdict.CONTRADICTED,
        "its own section 4, C says so, too: naive cuts put «a huge memory pressure on a single GPU»",
    ),
    Row(
        "section 4, C",
        "sends that do not wait (MPI_Isend, MPI_Irecv) overlap with computing, and are faster",
        say(
            "messages of a fifth of a unit add {waiting:.1%} to 1F1B with 8 stages and 32 micro-batches, {ahead:.1%} "
            "if sent ahead (simulated); a ring of 64 MiB on 8 ranks takes {blocking:.2f} times as long with sends "
            "that wait",
            waiting=record(
                "schedules/simulated.json", "makespan_with_messages", schedule="1F1B", seats=8, microbatches=32
            )
            / record("schedules/simulated.json", "makespan", schedule="1F1B", seats=8, microbatches=32)
            - 1,
            ahead=record(
                "schedules/simulated.json", "makespan_with_messages", schedule="1F1B eager", seats=8, microbatches=32
            )
            / record("schedules/simulated.json", "makespan", schedule="1F1B eager", seats=8, microbatches=32)
            - 1,
            blocking=record(
                "allreduce/sixteen-measured.json", "seconds", median, algorithm="ring-blocking", ranks=8, bytes=2**26
            )
            / record("allreduce/sixteen-measured.json", "seconds", median, algorithm="ring", ranks=8, bytes=2**26),
        ),
        "mural bench schedules --parts simulated",
        Verdict.REPRODUCED,
    ),
    Row(
        "section 4, C",
        "a U-Net's parameters are at its first and last layers, and the memory of these GPUs with them",
        say(
            "naive cuts, classic net: {first:.2f} M parameters on the first rank, {middle:.2f} M on the fifth, "
            "{last:.2f} M on the last; their peaks at 2048² {first_peak:.2f}, {middle_peak:.2f} and {last_peak:.2f} "
            "GiB",
            first=parameters("classic", "naive", 0),
            middle=parameters("classic", "naive", 4),
            last=parameters("classic", "naive", 7),
            first_peak=peak("classic", "naive", 2048, 0),
            middle_peak=peak("classic", "naive", 2048, 4),
            last_peak=peak("classic", "naive", 2048, 7),
        ),
        COMMAND,
        Verdict.CONTRADICTED,
        "parameters are in the middle; the memory at both ends is that of activations",
    ),
    Row(
        "section 5",
        "a U-Net's first layers need more memory than its last ones",
        say(
            "naive cuts, first and last rank: {first:.2f} and {last:.2f} GiB (classic net, 2048²), {deep_first:.2f} "
            "and {deep_last:.2f} (deep net, 1024²)",
            first=peak("classic", "naive", 2048, 0),
            last=peak("classic", "naive", 2048, 7),
            deep_first=peak("deep", "naive", 1024, 0),
            deep_last=peak("deep", "naive", 1024, 7),
        ),
        COMMAND,
        Verdict.CONTRADICTED,
        "both ends are heavy: more at the end of the classic net, and a little less at the end of the deep one",
    ),
)
