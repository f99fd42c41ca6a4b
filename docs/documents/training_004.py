"""Document 004: the hybrid, its tables and its conclusions."""

from __future__ import annotations

from documents.lookup import Field, Printed, median, record
from documents.row import Row, Text, Verdict, say

BATCHES = (10, 50, 100, 200, 400, 800)
CPU = "mural bench hybrid --parts training --device cpu --iterations 4000"
CUDA = "mural bench hybrid --parts training --device cuda --iterations 4000 --width 32"
OTHER = (
    "the document names neither its network nor its images; ours is like Caffe's `cifar10_quick`, on crops of "
    "photographs"
)
TOGETHER = "as above; several trainings ran on the GPU at a time, which the seconds include"


def trained(device: str, way: str, ranks: int, batch: int, iterations: int, width: int, field: str) -> Field:
    """A field of a training in float32."""
    chosen = {"way": way, "ranks": ranks, "batch": batch, "iterations": iterations, "width": width}
    path = ("records", {"kind": "training", "dtype": "float32", "nudge": 0.0, **chosen}, field)
    return Field(f"hybrid/training-{device}.json", path)


def on_cpu(batch: int, field: str, ranks: int = 2) -> Field:
    """4,000 iterations of data parallelism on the CPU."""
    return trained("cpu", "data", ranks, batch, 4000, 8, field)


def on_gpu(way: str, ranks: int, batch: int, field: str) -> Field:
    """400 iterations on the GPU."""
    return trained("cuda", way, ranks, batch, 400, 32, field)


def whole(device: str, way: str, ranks: int, batch: int) -> Text:
    """Accuracy and seconds of 4,000 iterations."""
    width = 32 if device == "cuda" else 8
    accuracy, seconds = (trained(device, way, ranks, batch, 4000, width, key) for key in ("accuracy", "seconds"))
    return Text(f"{way}: {{accuracy:.1%}} · {{seconds:.1f}} s", {"accuracy": accuracy, "seconds": seconds})


def printed(table: str, number: int, field: str) -> Printed:
    """A cell of the document's tables."""
    return Printed("hybrid", lambda module: getattr(getattr(module, table)[number], field))


def line(table: str, number: int) -> Text:
    """A line of a table: accuracy and seconds."""
    accuracy, seconds = (printed(table, number, field) for field in ("accuracy", "seconds"))
    return say("{accuracy:g}% · {seconds:g} s", accuracy=accuracy, seconds=seconds)


def on_cores(processes: int) -> Field:
    """The same with a core for each process."""
    return record("data_parallel/sixteen.json", "seconds", median, kind="processes", ranks=processes)


def scaling(processes: int) -> Field:
    """Seconds of an iteration of LeNet-5 with 200 images a process."""
    return Field("data_parallel/cpu.json", ("scaling", str(processes)), median)


GPU_ROWS = tuple(
    Row(
        f"first table, GPU, 2 processes, batch {batch}",
        line("ROWS", number),
        whole("cuda", "data", 2, batch),
        f'{CUDA} --cores 8 --only "data on 2, batch {batch},"',
        Verdict.NOT_COMPARABLE,
        f"{OTHER}; several trainings ran on the GPU at a time" if number == 0 else TOGETHER,
    )
    for number, batch in enumerate(BATCHES)
)
CPU_ROWS = tuple(
    Row(
        f"second table, CPU, 2 processes, batch {batch}",
        line("ROWS", 6 + number),
        say(
            "data: {accuracy:.1%} · {seconds:.1f} s",
            accuracy=on_cpu(batch, "accuracy"),
            seconds=on_cpu(batch, "seconds"),
        ),
        f'{CPU} --only "data on 2, batch {batch},"',
        Verdict.NOT_COMPARABLE,
        OTHER if number == 0 else "as above",
    )
    for number, batch in enumerate(BATCHES[:4])
)
PROCESS_ROWS = tuple(
    Row(
        f"third table, GPU, {ranks} process{'es' if ranks > 1 else ''}, batch 200",
        line("RANKS", ranks - 1),
        whole("cuda", "data" if ranks > 1 else "one rank", ranks, 200),
        f'{CUDA} --cores 8 --only "on {ranks}, batch 200,"',
        Verdict.NOT_COMPARABLE,
        TOGETHER,
    )
    for ranks in (1, 2, 3, 4)
)
TABLES = (
    *GPU_ROWS,
    *CPU_ROWS,
    Row(
        "second table, CPU, 2 processes, batch 400",
        Text("{accuracy:g}% · {seconds:g} s, «Failed»", line("ROWS", 10).numbers),
        say("data: {accuracy:.1%} · {seconds:.1f} s", accuracy=on_cpu(400, "accuracy"), seconds=on_cpu(400, "seconds")),
        f'{CPU} --only "data on 2, batch 400,"',
        Verdict.BETTER,
        "it ends",
    ),
    *PROCESS_ROWS,
    Row(
        "first table against the third",
        say(
            "the same setting, 2 processes and batch 200: {first:g}% · {first_seconds:g} s, and {third:g}% · "
            "{third_seconds:g} s",
            first=printed("ROWS", 3, "accuracy"),
            first_seconds=printed("ROWS", 3, "seconds"),
            third=printed("RANKS", 1, "accuracy"),
            third_seconds=printed("RANKS", 1, "seconds"),
        ),
        say(
            "first weights that are changed as rounding may end {gap:.1f} points apart after 400 iterations at batch "
            "10",
            gap=(
                record("hybrid/training-cpu.json", "accuracy", nudge=1e-7)
                - trained("cpu", "one rank", 1, 10, 400, 8, "accuracy")
            )
            * 100,
        ),
        "mural bench hybrid --parts training --device cpu",
        Verdict.CONTRADICTED,
        "by itself: its numbers vary by as much as it compares",
    ),
    Row(
        "figures, performance against batch sizes; CPU against GPU",
        "seconds and accuracy over the batch",
        "[drawn](../../benchmarks/hybrid/figures/training.svg) for data, model and hybrid",
        "mural bench hybrid --page",
        Verdict.NOT_COMPARABLE,
        "another network and other images, see above",
    ),
    Row(
        "third table, growth",
        say(
            "4 processes take {four:.2f} times as long as one, each with a batch of 200",
            four=printed("RANKS", 3, "seconds") / printed("RANKS", 0, "seconds"),
        ),
        say(
            "16 cores: {two:.2f} times on 2 processes, {four:.2f} on 4; two cores: {both:.2f} on 2",
            two=on_cores(2) / on_cores(1),
            four=on_cores(4) / on_cores(1),
            both=scaling(2) / scaling(1),
        ),
        "mural bench data_parallel --parts processes --output sixteen.jsonl",
        Verdict.NOT_COMPARABLE,
        "its processes have a GPU each, ours a CPU core. Ten cores were free; a benchmark of the GPU ran on the others",
    ),
    Row(
        "tables, other ways",
        "conventional and data-parallel only",
        say(
            "4,000 iterations on 2 GPU ranks, batch 200: model {model:.1%} · {model_seconds:.1f} s, hybrid "
            "{hybrid:.1%} · {hybrid_seconds:.1f} s",
            model=trained("cuda", "model", 2, 200, 4000, 32, "accuracy"),
            model_seconds=trained("cuda", "model", 2, 200, 4000, 32, "seconds"),
            hybrid=trained("cuda", "hybrid", 2, 200, 4000, 32, "accuracy"),
            hybrid_seconds=trained("cuda", "hybrid", 2, 200, 4000, 32, "seconds"),
        ),
        f'{CUDA} --cores 8 --only "model on 2, batch 200," "hybrid on 2, batch 200,"',
        Verdict.BETTER,
        "both train; several trainings ran on the GPU at a time",
    ),
    Row(
        "tables, CPU",
        "2 processes only",
        say(
            "2 cores, 4,000 iterations, batch 200: one rank {one:.1%} · {one_seconds:.1f} s; data {three:.1%} · "
            "{three_seconds:.1f} s on 3 ranks, {four:.1%} · {four_seconds:.1f} s on 4. A core for each rank: data "
            "{two_apart:.1f} s on 2 ranks, {three_apart:.1f} s on 3, {four_apart:.1f} s on 4",
            one=trained("cpu", "one rank", 1, 200, 4000, 8, "accuracy"),
            one_seconds=trained("cpu", "one rank", 1, 200, 4000, 8, "seconds"),
            three=on_cpu(200, "accuracy", 3),
            three_seconds=on_cpu(200, "seconds", 3),
            four=on_cpu(200, "accuracy", 4),
            four_seconds=on_cpu(200, "seconds", 4),
            two_apart=trained("sixteen", "data", 2, 200, 4000, 8, "seconds"),
            three_apart=trained("sixteen", "data", 3, 200, 4000, 8, "seconds"),
            four_apart=trained("sixteen", "data", 4, 200, 4000, 8, "seconds"),
        ),
        f'{CPU} --only "on 1, batch 200," "data on 3, batch 200," "data on 4, batch 200,"',
        Verdict.BETTER,
        "any number of ranks trains; more than two share the cores of the first machine",
    ),
    Row(
        "tables, CPU, other ways",
        "conventional and data-parallel only",
        say(
            "2 cores, 4,000 iterations: at batch 10 model {few:.1%} · {few_seconds:.1f} s, hybrid {both:.1%} · "
            "{both_seconds:.1f} s; at batch 200 model {many:.1%} · {many_seconds:.1f} s, hybrid {all:.1%} · "
            "{all_seconds:.1f} s",
            few=trained("cpu", "model", 2, 10, 4000, 8, "accuracy"),
            few_seconds=trained("cpu", "model", 2, 10, 4000, 8, "seconds"),
            both=trained("cpu", "hybrid", 2, 10, 4000, 8, "accuracy"),
            both_seconds=trained("cpu", "hybrid", 2, 10, 4000, 8, "seconds"),
            many=trained("cpu", "model", 2, 200, 4000, 8, "accuracy"),
            many_seconds=trained("cpu", "model", 2, 200, 4000, 8, "seconds"),
            all=trained("cpu", "hybrid", 2, 200, 4000, 8, "accuracy"),
            all_seconds=trained("cpu", "hybrid", 2, 200, 4000, 8, "seconds"),
        ),
        f'{CPU} --only "model on 2, batch" "hybrid on 2, batch"',
        Verdict.BETTER,
        "both train; model parallelism takes longer than data parallelism",
    ),
)
