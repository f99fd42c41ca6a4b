"""The tables and the figure of the U-Net on a shared GPU, from results/gpu.json, for README.md."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from harness.case import GIB
from harness.plots import RANK_COLOURS, pyplot, save
from harness.results import read
from harness.tables import NONE, Found, environment, gib, markdown, ms, place, ratio

CAP = 16 * GIB
MEMORY_GOAL, SPEED_GOAL, SHARD_GOAL = 1.10, 1.03, 1.10
SPEED_WORDS = (
    "«GPU busy» adds up the durations of all kernels of one step. Where it is lower than the ratio of times, the GPU "
    "waited for Python: a step of a shard makes about twice as many launches as one of plain torch, so small pieces "
    "leave it idle, and large ones do not. In float32 the difference is batch norm: torch's kernels for statistics "
    "over ranks take about 1.7 times as long as cuDNN's, which know one device alone."
)
RANKS = (1, 2, 4, 8)
PRECISIONS = {"float32": "float32", "bfloat16": "bfloat16 autocast, channels-last"}
# From our study of the peers, on another day and with another script: one H200, plain torch.
STUDY = {("float32", 4096): "785 ms, 90 GiB", ("bfloat16", 4096): "293 ms, 49.6 GiB"}


def write(folder: Path) -> None:
    """Put the tables into the page, and draw the figure."""
    records = read(folder / "results" / "gpu.json")
    found = Found(records)
    parts = [
        environment(records),
        "#### One process, the whole GPU",
        single_table(found),
        "#### Memory of ranks with 16 GiB each",
        memory_table(found),
        train_text(found),
        "#### Speed",
        speed_table(found),
        "#### The largest square image",
        limit_table(found),
    ]
    if any(r["largest"] for _, r in found.of("limit", model="UNet2D")):
        save(figure(found), folder / "figures" / "unet-limits.svg")
        parts.append("![The largest image against the number of ranks](figures/unet-limits.svg)")
    place(folder / "README.md", "U-Net results", "\n\n".join(part for part in parts if part))


def single_table(found: Found) -> str:
    """Peak and time of plain torch at each size."""
    rows: list[list[str]] = []
    for case, record in found.of("measure", model="UNet2D", sharded=False):
        if record["cap"] is None:
            before = STUDY.get((case.precision, case.extents[0]), NONE)
            size = f"{case.extents[0]}²"
            rows.append([size, PRECISIONS[case.precision], gib(record["allocated"], 1), ms(record["seconds"]), before])
    head = ["image", "precision", "peak of tensors, GiB", "step, ms", "measured before, elsewhere"]
    return markdown(head, rows)


def memory_table(found: Found) -> str:
    """Peaks of ranks under the cap, against an equal share of one process's peak."""
    rows: list[list[str]] = []
    singles = {
        (case.extents, case.precision): record
        for case, record in found.of("measure", model="UNet2D", sharded=False)
        if record["cap"] is None
    }
    for case, record in found.of("measure", model="UNet2D", sharded=True):
        single = singles.get((case.extents, case.precision))
        if record["cap"] != CAP or case.ranks == 1 or single is None or not record["seconds"]:
            continue
        share, fixed = single["allocated"] / case.ranks, record["replicated"]
        sharded = (record["allocated"] - fixed) / ((single["allocated"] - fixed) / case.ranks)
        rows.append(
            [
                f"{case.ranks} × {case.extents[0]}²",
                PRECISIONS[case.precision],
                gib(single["allocated"], 1),
                gib(share),
                gib(record["allocated"]),
                f"**{record['allocated'] / share:.3f}**",
                ratio(sharded, 3),
                f"{gib(record['reserved'])} / {gib(record['device'])}",
                ms(record["seconds"]),
            ]
        )
    head = ["ranks × image", "precision", "one process, GiB", "÷ ranks", "largest rank, GiB"]
    head += [f"ratio (goal ≤ {MEMORY_GOAL})", "without parameters and gradients", "allocator / device, GiB"]
    return markdown([*head, "all ranks together on the one GPU (sum of work), ms"], rows)


def train_text(found: Found) -> str:
    """The losses of a few steps, by plain torch and by ranks."""
    lines = [
        f"- {'plain torch, whole GPU' if not case.sharded else f'{case.ranks} ranks of 16 GiB'}, "
        f"{case.extents[0]}² {case.precision}: {' → '.join(f'{loss:.5f}' for loss in record['losses'])}"
        for case, record in found.of("train", model="UNet2D")
    ]
    return (
        "\n".join(["Losses of the first steps of SGD, the same image and the same start:", "", *lines]) if lines else ""
    )


def paired(answer: dict[str, Any]) -> str:
    """The median ratio of the pairs of one rank, with the quartiles."""
    low, middle, high = statistics.quantiles(
        [m / p for m, p in zip(answer["mural"], answer["plain"], strict=True)], n=4, method="inclusive"
    )
    return f"**{middle:.3f}** ({low:.3f} to {high:.3f})"


def speed_table(found: Found) -> str:
    """Plain torch and one rank's own work, on the same extents, in alternating pairs."""
    rows: list[list[str]] = []
    for case, record in found.of("pairs", model="UNet2D"):
        for rank, answer in enumerate(record["ranks"]):
            what = "a mesh of one rank" if case.ranks == 1 else f"rank {rank} of {case.ranks}, alone, messages replayed"
            rows.append(
                [
                    f"{what}{', compiled' if case.compiled else ''}",
                    "×".join(map(str, answer["extents"])),
                    PRECISIONS[case.precision],
                    ms(answer["plain"]),
                    ms(answer["mural"]),
                    paired(answer),
                    f"{answer['computing']['mural'] / answer['computing']['plain']:.3f}",
                ]
            )
    goal = f"÷ plain, median of pairs (goal ≤ {SPEED_GOAL} for one rank)"
    busy = f"GPU busy ÷ plain (goal ≤ {SHARD_GOAL} for a shard)"
    table = markdown(["what", "extents", "precision", "plain torch, ms", "mural, ms", goal, busy], rows)
    return f"{table}\n\n{SPEED_WORDS}"


def largest(found: Found, precision: str, sharded: bool) -> dict[int, int]:
    """The largest size by number of ranks."""
    every = found.of("limit", model="UNet2D", precision=precision, sharded=sharded)
    return {case.ranks: record["largest"] for case, record in every if record["cap"] == CAP and record["largest"]}


def limit_table(found: Found) -> str:
    """The largest square image that trains under the cap."""
    rows: list[list[str]] = []
    for precision, title in PRECISIONS.items():
        plain, ours = largest(found, precision, False), largest(found, precision, True)
        cells = [
            f"{ours[n]}²{f' ({(ours[n] / ours[1]) ** 2:.1f}×)' if n > 1 and 1 in ours else ''}" if n in ours else NONE
            for n in RANKS
        ]
        rows.append([title, f"{plain[1]}²" if plain else NONE, *cells])
    head = ["precision", "plain torch, one process", *(f"mural, {n} rank{'s' if n > 1 else ''}" for n in RANKS)]
    return markdown(head, rows)


def figure(found: Found) -> Any:
    """The largest size against the number of ranks, with the ideal: as many times the pixels as ranks."""
    drawing, axis = pyplot().subplots(figsize=(5.0, 3.4))
    for (precision, title), colour in zip(PRECISIONS.items(), (RANK_COLOURS[2], RANK_COLOURS[8]), strict=True):
        sizes = sorted(largest(found, precision, True).items())
        if sizes:
            axis.plot(*zip(*sizes, strict=True), "o-", color=colour, label=title)
            if sizes[0][0] == 1:
                ideal = [sizes[0][1] * n**0.5 for n in RANKS]
                axis.plot(RANKS, ideal, ":", color=colour, linewidth=1)
    axis.set(
        xlabel="ranks of 16 GiB (dotted: pixels of one rank × ranks)", ylabel="largest square image, pixels a side"
    )
    axis.set_xscale("log", base=2)
    axis.set_xticks(RANKS, [str(n) for n in RANKS])
    axis.set_ylim(0, None)
    axis.legend(frameon=False)
    return drawing
