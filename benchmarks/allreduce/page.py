"""The tables and the figures, from the results."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import elapsed_page
import fitted_calls
import network
import sockets_page
from digits import ALONE
from harness.plots import pyplot, save
from harness.tables import NONE, markdown, place
from rounds_figure import svg
from units import micro, sized

from mural.collectives.algorithms import ALGORITHMS, butterfly, halving_doubling, ring, tree, two_level
from mural.collectives.choose import BACKEND

COLOURS = {
    "tree": "#2f5d8a",
    "butterfly": "#3c9d9b",
    "halving-doubling": "#7a5195",
    "ring": "#e39b2d",
    "ring-blocking": "#e8bd7a",
    "two-level": "#8a8f98",
    "parameter-server": "#b3261e",
    BACKEND: "#1b1b3a",
}
DRAWN = {"tree": tree(4), "butterfly": butterfly(8), "halving-doubling": halving_doubling(4), "ring": ring(4)}
DRAWN |= {"two-level": two_level([[0, 1], [2, 3]])}
Results = dict[str, Any]


def as_json(results: Results) -> str:
    """Results as text, one record a line."""
    rest = {key: value for key, value in results.items() if key != "records"}
    rows = ",\n  ".join(json.dumps(record) for record in results["records"])
    return json.dumps(rest, indent=1)[:-2] + f',\n "records": [\n  {rows}\n ]\n}}\n'


def caption(results: Results) -> str:
    """Where the numbers come from."""
    at, load, command = results["machine"], results["load_at_start"], results["command"]
    busy = "load not recorded" if load is None else f"load {load:.1f} at the start"
    typed = f"`{command}`" if command.startswith(("mural ", "mpirun ")) else command
    return (
        f"{at['cpu']}, {at['cores']} cores, torch {results['torch']}, one thread a rank, {busy}, commit "
        f"{at['commit']}, {results['date'][:10]}. Command: {typed}. {results.get('note', '')}"
    ).strip()


# --------------------------------------------------------------------------------------------------------- measured


def by_case(results: Results) -> dict[tuple[int, int], dict[str, Results]]:
    """The records of `measured` by ranks and bytes, and by algorithm."""
    found: dict[tuple[int, int], dict[str, Results]] = {}
    for record in results["records"]:
        if "bytes" in record:
            found.setdefault((record["ranks"], record["bytes"]), {})[record["algorithm"]] = record
    return dict(sorted(found.items()))


def measured_text(results: Results) -> str:
    """For each size the backend's time, and every algorithm's divided by it; then the predictions."""
    names = list(ALGORITHMS)
    rows, errors = [], {name: [] for name in names}
    for (ranks, size), case in by_case(results).items():
        base = median(case[BACKEND]["seconds"])
        quotients = {name: median(case[name]["seconds"]) / base for name in names if name in case}
        best = min(quotients, key=lambda name: quotients[name])
        cells = [f"**{q:.2f}**" if name == best else f"{q:.2f}" for name, q in quotients.items()]
        rows.append([str(ranks), sized(size), micro(base), *cells])
        for name in names:
            if "predicted" in case[name]:
                errors[name].append(case[name]["predicted"] / median(case[name]["seconds"]))
    said = [[name, f"{median(q):.2f}", f"{100 * near(q):.0f}%"] for name, q in errors.items() if q]
    memory = [
        [name, *(memory_cell(case[name]) for (ranks, size), case in by_case(results).items() if size == 2**20)]
        for name in names
    ]
    limits = [
        [str(ranks), *(f"{100 * near(found):.0f}%" for found in fitted_calls.quotients(results["records"], ranks))]
        for ranks in sorted({ranks for ranks, _ in by_case(results)})
    ]
    heads = [f"{ranks} ranks" for ranks, size in by_case(results) if size == 2**20]
    return "\n\n".join(
        [
            caption(results),
            "The backend's own time, and each algorithm's divided by it (medians); the fastest in bold.",
            markdown(["ranks", "bytes", "backend", *names], rows),
            "Predicted over measured, of all sizes and ranks: the median, and how many are within 20%.",
            markdown(["algorithm", "predicted ÷ measured", "within 20%"], said),
            "Within 20%, from 64 KiB on: by the gauge, and by its formula with the constants that are best for the "
            "calls themselves.",
            markdown(["ranks", "by the gauge", "by the best constants"], limits),
            "Working memory of a rank for 1 MiB, the most of all ranks: by the rounds alone, and as it runs.",
            markdown(["algorithm", *heads], memory),
        ]
    )


def memory_cell(record: Results) -> str:
    """Working memory in KiB."""
    if "memory" not in record:
        return NONE
    return f"{record['memory_by_itself'] / 1024:,.0f} KiB, {record['memory'] / 1024:,.0f}"


def near(quotients: list[float]) -> float:
    """The share of quotients within 20% of one."""
    return sum(abs(q - 1) <= 0.2 for q in quotients) / len(quotients)


def draw_measured(results: Results, path: Path) -> None:
    """Time over size, a column for each number of ranks; predictions are dashed."""
    plt, cases = pyplot(), by_case(results)
    every = sorted({ranks for ranks, _ in cases})
    figure, axes = plt.subplots(1, len(every), figsize=(3.6 * len(every), 4.2), sharey=True, squeeze=False)
    for axis, ranks in zip(axes[0], every, strict=True):
        sizes = [size for r, size in cases if r == ranks]
        for name, colour in COLOURS.items():
            found = [cases[ranks, size][name] for size in sizes]
            wide = 2.2 if name == BACKEND else 1.2
            axis.plot(sizes, [median(r["seconds"]) for r in found], color=colour, marker=".", lw=wide, label=name)
            if all("predicted" in r for r in found):
                axis.plot(sizes, [r["predicted"] for r in found], color=colour, lw=0.9, ls="--")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_title(f"{ranks} ranks", fontsize=9)
        axis.set_xlabel("bytes")
        axis.set_xticks([2**10, 2**16, 2**20, 2**24, 2**28], ["1 KiB", "64 KiB", "1 MiB", "16 MiB", "256 MiB"])
        axis.tick_params(axis="x", labelrotation=40)
    axes[0][0].set_ylabel("seconds (dashed: predicted)")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    save(figure, path)


# ---------------------------------------------------------------------------------------------------------- network


def network_text(results: Results) -> str:
    """For each network all times, and where ring and tree change places."""
    parts = [caption(results)]
    for found in results["records"]:
        names, sizes = list(COLOURS), sorted({r["bytes"] for r in found["records"]})
        at = {(r["bytes"], r["algorithm"]): median(r["seconds"]) for r in found["records"]}
        rows = [[sized(size), *(f"{at[size, name] * 1e3:.1f}" for name in names)] for size in sizes]
        words = f"{found['ranks']} ranks on {found['hosts']} hosts, {found['delay'] * 1e3:g} ms between two hosts, "
        words += f"{found['bandwidth'] / 1e6:g} MB/s a link; milliseconds:"
        turns = {
            "measured": network.crossing(found),
            "by L and G as set": network.crossing(found, "by_constants"),
            "by measured rounds": network.crossing(found, "by_gauge"),
        }
        said = "; ".join(
            f"{how}: {', '.join(f'{name} from {sized(size)} on' for size, name in changes)}"
            for how, changes in turns.items()
        )
        parts += [words, markdown(["bytes", *names], rows), f"The faster of tree and ring: {said}."]
    return "\n\n".join(parts)


def draw_network(results: Results, path: Path) -> None:
    """Ring, tree and the others over size, with what L and G say."""
    plt = pyplot()
    figure, axes = plt.subplots(1, len(results["records"]), figsize=(3.6 * len(results["records"]), 4.0), squeeze=False)
    for axis, found in zip(axes[0], results["records"], strict=True):
        for name, colour in COLOURS.items():
            mine = sorted((r for r in found["records"] if r["algorithm"] == name), key=lambda r: r["bytes"])
            sizes, wide = [r["bytes"] for r in mine], 2.2 if name in ("ring", "tree") else 1.0
            axis.plot(sizes, [median(r["seconds"]) for r in mine], color=colour, marker=".", lw=wide, label=name)
            if name != BACKEND:
                axis.plot(sizes, [r["by_constants"] for r in mine], color=colour, lw=0.9, ls="--")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_title(f"{found['hosts']} hosts, {found['ranks']} ranks, {found['delay'] * 1e3:g} ms", fontsize=9)
        axis.set_xticks([2**10, 2**14, 2**18, 2**22], ["1 KiB", "16 KiB", "256 KiB", "4 MiB"])
    axes[0][0].set_ylabel("seconds (dashed: by L and G)")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    save(figure, path)


# ----------------------------------------------------------------------------------------------------------- digits


def percent(values: list[float]) -> str:
    """The mean of some shares, and how far they reach."""
    mean = 100 * sum(values) / len(values)
    return f"{mean:.1f} ({100 * min(values):.1f}–{100 * max(values):.1f})"


def digits_text(results: Results) -> str:
    """Accuracy by algorithm, a row for each number of ranks, width and kind."""
    cells: dict[tuple[str, int, int], dict[str, list[float]]] = {}
    sizes: dict[int, int] = {}
    for r in results["records"]:
        cells.setdefault((r["what"], r["ranks"], r["width"]), {})[r["algorithm"]] = r["accuracy"]
        sizes[r["width"]] = r["bytes"]
    alone = {(what, width): found[ALONE] for (what, ranks, width), found in cells.items() if ranks == 1}
    names = [*ALGORITHMS, BACKEND]
    rows = []
    for (what, ranks, width), found in sorted(
        cells.items(), key=lambda item: (item[0][0] == "gradients", *item[0][1:])
    ):
        if ranks > 1:
            by_itself = percent(alone[what, width]) if alone else NONE
            said = [percent(found[name]) for name in names]
            rows.append([what, str(ranks), f"{width} ({sizes[width] / 1024:.0f} KiB)", by_itself, *said])
    spread = max(
        abs(sum(a) / len(a) - sum(found[BACKEND]) / len(a))
        for (_, ranks, _), found in cells.items()
        if ranks > 1
        for a in found.values()
    )
    said = f"The largest difference of an algorithm's mean from the backend's, of all rows: {100 * spread:.2f} points."
    head = ["averaged", "ranks", "width (message)", ALONE, *names]
    return "\n\n".join([caption(results), "Accuracy in %, mean (least–most of the seeds):", markdown(head, rows), said])


def faults_text(results: Results) -> str:
    """Accuracy by fault, and what is lost against the correct mean."""
    parts = [caption(results)]
    for what, ranks in dict.fromkeys((r["what"], r["ranks"]) for r in results["records"]):
        mine = [r for r in results["records"] if (r["what"], r["ranks"]) == (what, ranks)]
        right = sum(mine[0]["accuracy"]) / len(mine[0]["accuracy"])
        rows = [
            [
                r["fault"],
                percent(r["accuracy"]),
                percent(r["worst"]),
                f"{100 * (sum(r['accuracy']) / len(r['accuracy']) - right):+.1f}",
            ]
            for r in mine
        ]
        head = ["average", "rank 0, %", "worst rank, %", "difference, points"]
        parts += [
            f"{what.capitalize()} averaged, {mine[0]['ranks']} ranks, width {mine[0]['width']}:",
            markdown(head, rows),
        ]
    return "\n\n".join(parts)


def elapsed_text(results: Results) -> str:
    """Seconds of the trainings."""
    return elapsed_page.text_of(results["records"])


def sockets_text(results: Results) -> str:
    """Calls over sockets and over MPI."""
    return sockets_page.text_of(results["records"])


TEXTS = {"measured": measured_text, "network": network_text, "digits": digits_text, "faults": faults_text}
TEXTS |= {"elapsed": elapsed_text, "sockets": sockets_text}
DRAWINGS = {"measured": draw_measured, "network": draw_network}


def write(here: Path) -> None:
    """Put the tables of all results into the page, and draw the figures."""
    readme, figures = here / "README.md", here / "figures"
    figures.mkdir(exist_ok=True)
    for name, collective in DRAWN.items():
        (figures / f"{name}.svg").write_text(svg(collective))
    for file in sorted((here / "results").glob("*.json")):
        part = file.stem.split("-")[-1]
        results = json.loads(file.read_text())
        place(readme, file.stem, TEXTS[part](results))
        if part in DRAWINGS:
            DRAWINGS[part](results, figures / f"{file.stem}.svg")
