"""The page: tables from results/*.json between the marks of README.md, and the figures beside it."""

from __future__ import annotations

from pathlib import Path

import figures
from counts_table import counts_text
from harness.case import GIB, Case, extents_text
from harness.results import read
from harness.tables import NONE, Found, environment, gib, markdown, ms, place, ratio
from published import PLANS, common_size

RANKS = (1, 2, 4, 8)
CAP = 16 * GIB


def write(folder: Path) -> None:
    """Rewrite the page and its figures from the results that are there."""
    gpu, cpu = folder / "results" / "gpu.json", folder / "results" / "cpu.json"
    readme = folder / "README.md"
    if gpu.is_file():
        records = read(gpu)
        found = Found(records)
        names = figures.draw(found, folder / "figures")
        pictures = "\n\n".join(f"![{title}](figures/{name})" for name, title in names)
        parts = [
            environment(records),
            "### The largest input",
            limit_table(found),
            "### Memory at one input, which one rank can hold",
            memory_table(found),
            "### Time at the same input",
            time_table(found),
            "### Figures",
            pictures,
        ]
        place(readme, "results", "\n\n".join(parts))
        if text := counts_text(found):
            place(readme, "counts", text)
    if cpu.is_file():
        records = read(cpu)
        place(readme, "many ranks", f"{environment(records)}\n\n{many_table(Found(records))}")


def limits(found: Found, model: str) -> dict[int, int]:
    """The largest extent by number of ranks."""
    dims = PLANS[model].dims
    every = found.of("limit", model=model, precision="float32", extents=(0,) * dims, batch=1)
    return {case.ranks: record["largest"] for case, record in every if record["cap"] == CAP and record["largest"]}


def others(found: Found, model: str) -> dict[int, str]:
    """A mark for each number of ranks whose next size failed, but not for want of memory."""
    every = found.of("limit", model=model, precision="float32", batch=1)
    return {c.ranks: "†" for c, r in every if r["cap"] == CAP and not r["above"].startswith("memory")}


def growth(largest: dict[int, int], dims: int) -> dict[int, float]:
    """Positions of the largest input over those of one rank's, by number of ranks."""
    return {n: (size / largest[1]) ** dims for n, size in sorted(largest.items())} if 1 in largest else {}


def limit_table(found: Found) -> str:
    """The largest input on each number of ranks, and its growth, beside the document's."""
    rows: list[list[str]] = []
    for model, plan in PLANS.items():
        ours, theirs = limits(found, model), plan.published
        marks = others(found, model)
        grown, published = growth(ours, plan.dims), growth(theirs, plan.dims)
        rows.append(
            [
                f"**{model}**",
                *(extents_text((ours[n],) * plan.dims) + marks.get(n, "") if n in ours else NONE for n in RANKS),
                ", ".join(f"{value:.1f} on {n}" for n, value in grown.items() if n > 1) or NONE,
                ", ".join(f"{short(size, plan.dims)} on {n}" for n, size in theirs.items()) or NONE,
                ", ".join(f"{value:.1f} on {n}" for n, value in published.items() if n > 1) or NONE,
            ]
        )
    head = ["model", *(f"{n} rank{'s' if n > 1 else ''}" for n in RANKS)]
    return markdown([*head, "growth (× the positions of one rank)", "document: largest on GPUs", "its growth"], rows)


def short(extent: int, dims: int) -> str:
    """An extent as the document writes it.

    >>> short(8_000_000, 1), short(170, 3)
    ('8M', '170³')
    """
    return f"{extent // 10**6}M" if dims == 1 else extents_text((extent,) * dims)


def at_common(found: Found, model: str) -> dict[int, Case]:
    """The case of each number of ranks at one input that all of them measured, one rank included."""
    every = found.of("measure", model=model, ranks=1, batch=1)
    size = common_size([(c.extents[0], r) for c, r in every if r["cap"] == CAP], CAP)
    return {} if size is None else {n: Case(model, (size,) * PLANS[model].dims, n) for n in RANKS}


def memory_table(found: Found) -> str:
    """Peaks a rank, and their share of one rank's."""
    rows: list[list[str]] = []
    for model in PLANS:
        cases = at_common(found, model)
        records = {n: found.one("measure", case, CAP) for n, case in cases.items()}
        one = records.get(1)
        if one is None:
            continue
        row = [f"**{model}** {extents_text(cases[1].extents)}", gib(one["replicated"])]
        for n in RANKS:
            record = records[n]
            if record is None:
                row.append(NONE)
                continue
            whole = f" ({record['allocated'] * n / one['allocated']:.2f})" if n > 1 else ""
            row.append(f"{gib(record['allocated'])}{whole} / {gib(record['device'])}")
        rows.append(row)
    head = ["model", "parameters and gradients, GiB"]
    return markdown([*head, *(f"{n} rank{'s' if n > 1 else ''}: GiB a rank" for n in RANKS)], rows)


def time_table(found: Found) -> str:
    """The time of a step: one rank, all ranks together on the one GPU, and the slowest rank's own part alone."""
    rows: list[list[str]] = []
    for model in PLANS:
        cases = at_common(found, model)
        one = found.one("busy", cases[1], CAP) if cases else None
        if one is None:
            continue
        base = max(one["seconds"])
        row = [f"**{model}** {extents_text(cases[1].extents)}", ms(one["seconds"])]
        for n in RANKS[1:]:
            together, alone = found.one("measure", cases[n], CAP), found.one("busy", cases[n], CAP)
            busy = max(alone["seconds"]) if alone else None
            row.append(
                f"{ms(together['seconds'] if together else None)} / {ms([busy] if busy else None)}"
                f" ({ratio(busy * n / base if busy else None)})"
            )
        rows.append(row)
    head = ["model", "1 rank: ms"]
    return markdown([*head, *(f"{n} ranks: ms, sum of work / slowest rank alone (×{n})" for n in RANKS[1:])], rows)


def many_table(found: Found) -> str:
    """Many ranks on the CPU, against one process."""
    rows: list[list[str]] = []
    checks = {(case.model, case.ranks): (case, record) for case, record in found.of("check")}
    singles = {case.model: record for case, record in found.of("measure", ranks=1)}
    for (model, ranks), (case, record) in sorted(checks.items(), key=lambda item: item[0][1]):
        peaks = [(c, r) for c, r in found.of("measure", model=model, ranks=ranks) if c.options == case.options]
        peak, single = peaks[-1] if peaks else (None, None), singles.get(model)
        options = ", ".join(f"{key} {value}" for key, value in case.options)
        each = peak[1]["allocated"] if peak[1] else None
        rows.append(
            [
                f"**{model}**{f' ({options})' if options else ''}",
                f"{ranks} = {' × '.join(map(str, record['grid']))}",
                f"{extents_text(case.extents)}: {record['difference']:.0e}",
                extents_text(peak[0].extents) if peak[0] else NONE,
                NONE if single is None else f"{single['allocated'] / 2**20:.0f}",
                NONE if each is None else f"{each / 2**20:.0f}",
                ratio(each * ranks / single["allocated"] if each and single else None),
            ]
        )
    head = ["model", "ranks", "largest difference from one process, float64", "input for memory, float32"]
    return markdown([*head, "one process, MiB", "largest rank, MiB", "× ranks ÷ one process"], rows)
