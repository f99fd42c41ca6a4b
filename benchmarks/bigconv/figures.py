"""The figures: memory and time against input size for each model, as in the document, and the growth of the limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.case import GIB, Case, extents_text
from harness.plots import PUBLISHED_COLOUR, RANK_COLOURS, pyplot, save
from harness.results import Record
from harness.tables import Found
from published import PLANS, Plan

CAP = 16 * GIB


def draw(found: Found, folder: Path) -> list[tuple[str, str]]:
    """The names and titles of the figures, drawn into that folder."""
    names: list[tuple[str, str]] = []
    for model, plan in PLANS.items():
        every = [(c, r) for c, r in found.of("measure", model=model, precision="float32", batch=1) if r["cap"] == CAP]
        if every:
            name = f"{model.lower()}.svg"
            save(of_model(model, plan, every, found), folder / name)
            names.append((name, f"{model}: memory and time against input size, on 1, 2, 4 and 8 ranks"))
    save(of_growth(found), folder / "growth.svg")
    return [("growth.svg", "How the largest input grows with the number of ranks, ours and the document's"), *names]


def curves(every: list[tuple[Case, Record]]) -> dict[int, list[tuple[int, Record]]]:
    """The measurements of each number of ranks, by extent."""
    found: dict[int, dict[int, Record]] = {}
    for case, record in every:
        found.setdefault(case.ranks, {})[case.extents[0]] = record
    return {ranks: sorted(records.items()) for ranks, records in sorted(found.items())}


def of_model(model: str, plan: Plan, every: list[tuple[Case, Record]], found: Found) -> Any:
    """Peak memory of a rank, and the time of its own work, against the extent of the input."""
    figure, (memory, time) = pyplot().subplots(1, 2, figsize=(8.4, 3.3))
    for ranks, points in curves(every).items():
        style: dict[str, Any] = {"color": RANK_COLOURS.get(ranks), "marker": "o", "markersize": 3.5}
        label = f"{ranks} rank{'s' if ranks > 1 else ''}"
        sizes = [size for size, _ in points]
        memory.plot(sizes, [r["allocated"] / GIB for _, r in points], label=label, **style)
        memory.plot(sizes, [r["device"] / GIB for _, r in points], color=style["color"], linestyle=":", linewidth=1)
        busy = {
            case.extents[0]: max(record["seconds"])
            for case, record in found.of("busy", model=model, ranks=ranks, precision="float32", batch=1)
            if record["cap"] == CAP
        }
        time.plot(sorted(busy), [1000 * busy[size] for size in sorted(busy)], label=label, **style)
    memory.axhline(CAP / GIB, color="#888888", linewidth=1)
    for ranks, size in plan.published.items():
        memory.plot([size], [CAP / GIB], "v", color=PUBLISHED_COLOUR, fillstyle="none", clip_on=False)
        memory.annotate(
            str(ranks), (size, CAP / GIB), (0, 5), textcoords="offset points", ha="center", color=PUBLISHED_COLOUR
        )
    label = f"extent of the input ({'length' if plan.dims == 1 else extents_text(('n',) * plan.dims)})"
    for axis, what in ((memory, "peak memory of a rank, GiB"), (time, "own work of the slowest rank, ms")):
        axis.set(xlabel=label, ylabel=what, xlim=(0, None), ylim=(0, None))
    note = f" (▽ the document, {plan.figure}: largest on that many 16 GB GPUs)" if plan.published else ""
    memory.set_title(f"{model}{note}", loc="left", fontsize=9)
    memory.legend(frameon=False, title="solid: tensors\ndotted: device")
    return figure


def of_growth(found: Found) -> Any:
    """Positions of the largest input over one rank's, against the number of ranks; the diagonal is ideal."""
    figure, axis = pyplot().subplots(figsize=(5.4, 4.2))
    axis.plot([1, 32], [1, 32], color="#888888", linewidth=1, label="ideal: as many times as ranks")
    colours = pyplot().rcParams["axes.prop_cycle"].by_key()["color"]
    for (model, plan), colour in zip(PLANS.items(), colours, strict=False):
        ours = {
            case.ranks: record["largest"]
            for case, record in found.of("limit", model=model, precision="float32", batch=1)
            if record["cap"] == CAP and record["largest"]
        }
        for sizes, shape in ((ours, "o-"), (plan.published, "v--")):
            if len(sizes) > 1 and 1 in sizes:
                times = [(size / sizes[1]) ** plan.dims for size in sizes.values()]
                name = model if shape == "o-" else f"{model}, the document"
                fill = "full" if shape == "o-" else "none"
                ordered = sorted(zip(sizes, times, strict=True))
                axis.plot(*zip(*ordered, strict=True), shape, color=colour, label=name, fillstyle=fill, markersize=4)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    ticks = [1, 2, 4, 8, 16, 32]
    axis.set_xticks(ticks, [str(t) for t in ticks])
    axis.set_yticks(ticks, [str(t) for t in ticks])
    axis.set(xlabel="ranks (GPUs)", ylabel="positions of the largest input ÷ one rank's")
    axis.legend(frameon=False, fontsize=8)
    return figure
