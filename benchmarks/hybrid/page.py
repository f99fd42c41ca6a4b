"""The tables of the page, from the results."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import figures
import published
from accuracy_table import agreement_text, conclusions, plain, training_text
from harness.results import Record, read
from harness.tables import NONE, commands_of, markdown, ms, place
from mpi_table import mpi_text
from profiles_table import profile_text
from traffic_table import counted_text, crossover_text, formulas_text, sizes_text

NAMES = ("cpu", "cuda", "sixteen")
"""What stands in the names of files after the part: devices, and a CPU with 16 cores."""


def line(record: Record) -> str:
    """A measurement in one line, for the terminal."""
    told = [record["name"]]
    if record["kind"] == "updating":
        told += [f"K = {way['chunks']}: {ms(way['seconds'])} ms" for way in record["ways"]]
    if "seconds" in record:
        seconds = record["seconds"]
        told.append(f"{seconds:.1f} s" if isinstance(seconds, float) else f"{ms(seconds)} ms")
    if record["kind"] == "training":
        told.append(f"accuracy {100 * record['accuracy']:.1f}%")
    if record["kind"] == "step":
        told.append(f"{record['sent_messages']} messages")
    if record["kind"] == "profiling":
        told.append(f"{1e3 * record['shares'][0]['seconds']:.1f} ms")
    if record["kind"] == "errors":
        told.append(f"{100 * record['relative']:.0f}% off, cosine {record['cosine']:.2f}")
    return " · ".join(told)


class Results:
    """The records of one file, without those of runs that nothing is left of."""

    def __init__(self, path: Path) -> None:
        records = read(path)
        self.records = [r for r in records if "part" in r and r["kind"] != "failure"]
        done = {r["name"] for r in self.records}
        self.failures = [r for r in records if r["kind"] == "failure" and r["name"] not in done]
        used = {r["run"] for r in self.records}
        self.headers = [r for r in records if r["kind"] == "header" and r["date"] in used]
        self.versions = [r for r in records if r["kind"] == "versions" and r["name"] in used]
        self.shared = {v["name"] for v in self.versions if v.get("cores")}
        """Runs in which several measurements went on at a time."""

    def of(self, kind: str) -> list[Record]:
        """The records of a kind."""
        return [r for r in self.records if r["kind"] == kind]

    def caption(self) -> str:
        """Where the numbers come from, and what failed."""
        at, last = self.headers[-1]["machine"], self.versions[-1]
        commits = ", ".join(sorted({h["machine"]["commit"] for h in self.headers}))
        loads = [v["load"] for v in self.versions]
        text = (
            f"{last['device']}; {at['cpu']}, {at['cores']} cores, load {min(loads):.1f} to {max(loads):.1f} before; "
            f"torch {last['torch']}, Python {at['python']}, commit {commits}, {self.headers[-1]['date'][:10]}."
        )
        if self.shared:
            where = "" if last["device"].startswith("CPU") else ", on one GPU"
            text += f" With `--cores`, several ran at a time{where}, each rank on a core of its own."
        if max(loads) > at["cores"]:
            text += " **The machine was busy before, with other work or with the part before this one.**"
        failed = [f"\n\nFailed: {r['name']}: {r['error'].splitlines()[-1]}" for r in self.failures]
        return f"{text}{commands_of(self.headers)}{''.join(failed)}"


# ------------------------------------------------------------------------------------------------- master and workers


def master_text(results: Results) -> str:
    """A row for each number of chunks and ranks, with the shares of the master and of its workers."""
    head = [
        "ranks", "way", "chunks", "step, ms", "÷ all-reduce", "messages", "by the rounds", "by the document", "MiB",
        "MiB by the document: said", "messages × their size", "master sends, MiB",
        "master: compute · communication · idle", "workers, mean: compute · communication · idle",
    ]  # fmt: skip
    rows: list[list[str]] = []
    for about, record in [(job, way) for job in results.of("updating") for way in job["ways"]]:
        way = f"master, K = {record['chunks']}" if record["chunks"] else "all-reduce"
        planned, sent = record["planned"], record["sent"]
        size, said = 4 * about["parameters"] / 2**20, document(about["ranks"], record["chunks"])
        plain = next((way["seconds"] for way in about["ways"] if not way["chunks"]), [])
        quotients = [a / b for a, b in zip(record["seconds"], plain, strict=False)]
        rows.append(
            [
                str(about["ranks"]),
                way,
                str(planned["chunks"]) if record["chunks"] else NONE,
                ms(record["seconds"]),
                f"{statistics.median(quotients):.2f}" if quotients else NONE,
                str(sum(messages for messages, _ in sent)),
                str(planned["messages"]),
                str(said[0]) if said else NONE,
                mib(sent),
                *((f"{said[1] * size:.1f}", f"{said[2] * size:.1f}") if said else (NONE, NONE)),
                f"{sent[0][1] / 2**20:.1f}",
                split(record["shares"][:1]),
                split(record["shares"][1:]),
            ]
        )
    some = results.of("updating")[0]
    words = (
        f"Eight convolutions of width {some['width']}, {some['parameters']:,} parameters, {some['images']} images of "
        f"32² for each rank. The ways take turns of {some['steps']} steps; median of {some['rounds']} turns, and "
        f"quotients of turns that follow each other; shares of all steps. An all-reduce is the backend's own; its "
        f"messages are those of mural's ring, counted. Large chunks travel in segments, each a message."
    )
    return "\n\n".join([results.caption(), words, markdown(head, rows)])


def document(ranks: int, chunks: int) -> tuple[int, int, float] | None:
    """Of the document, for a master: messages, and payload in models, as it says and as its factors multiply.

    >>> document(4, 2), document(4, 0)
    ((12, 8, 6.0), None)
    """
    messages = 2 * ranks if chunks == 1 else ranks * (1 + chunks)
    return (messages, 2 * ranks, messages / chunks) if chunks else None


def mib(sent: Sequence[Sequence[int]]) -> str:
    """What all ranks sent."""
    return f"{sum(size for _, size in sent) / 2**20:.1f}"


def split(shares: Sequence[Record]) -> str:
    """The mean shares of some ranks, in percent of their steps."""
    total = sum(s["seconds"] for s in shares)
    parts = [sum(s[key] for s in shares) / total for key in ("compute", "communicating", "idle")]
    return " · ".join(f"{100 * part:.0f}%" for part in parts)


def errors_text(results: Results) -> str:
    """How far a gradient from averaged errors is from the batch's, and what training with it gives."""
    head = ["nodes", "images each", "difference ÷ gradient", "cosine", "difference, same images on all nodes"]
    found = results.of("errors")
    rows = [
        [
            str(r["nodes"]),
            str(r["images"]),
            f"{100 * r['relative']:.0f}%",
            f"{r['cosine']:.2f}",
            f"{r['same_images']:.0e}",
            f"{100 * r['accuracy']['batch']:.1f}%",
            f"{100 * r['accuracy']['errors']:.1f}%",
        ]
        for r in found
    ]
    iterations = ", ".join(sorted({str(r["iterations"]) for r in found}))
    return markdown([*head, f"accuracy after {iterations} iterations: gradients", "averaged errors"], rows)


# ---------------------------------------------------------------------------------------------------------- inference


def inference_text(results: Results) -> str:
    """A row for each way: latency at each batch, and what a rank holds and sends."""
    found = results.of("inference")
    batches = sorted({r["batch"] for r in found})
    cells = {(r["way"], r["ranks"], r["batch"]): r for r in found}
    rows: list[list[str]] = []
    for way, ranks in dict.fromkeys((r["way"], r["ranks"]) for r in found):
        mine = [cells.get((way, ranks, batch)) for batch in batches]
        there = [r for r in mine if r is not None]
        rows.append(
            [
                way,
                str(ranks),
                f"{max(there[0]['held']) / 2**20:.0f}",
                *(f"{ms(r['seconds'])} ({quartiles(r['seconds'])})" if r else NONE for r in mine),
                *(sends(r) if r else NONE for r in mine),
                f"{max(r['difference'] for r in there):.0e}",
            ]
        )  # fmt: skip
    head = ["way", "ranks", "weights of a rank, MiB", *(f"batch {b}, ms (quartiles)" for b in batches)]
    head += [*(f"messages · MiB, batch {b}" for b in batches), "difference to one device"]
    about = found[0]
    words = f"AlexNet of width {about['width']}, {about['side']}²; median of {about['rounds']} on the slowest rank."
    return "\n\n".join([results.caption(), words, markdown(head, rows)])


def sends(record: Record) -> str:
    """Messages and MiB of all ranks."""
    return f"{sum(m for m, _ in record['sent'])} · {sum(b for _, b in record['sent']) / 2**20:.2f}"


def quartiles(seconds: Sequence[float]) -> str:
    """The quartiles in milliseconds."""
    if len(seconds) < 2:
        return NONE
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return f"{1000 * low:.3g} to {1000 * high:.3g}"


# ---------------------------------------------------------------------------------------------------------------------


def write(here: Path) -> None:
    """Put the tables of all results into the page, and draw the figures."""
    readme, folder, drawn = here / "README.md", here / "results", here / "figures"
    there = {path.stem: Results(path) for path in sorted(folder.glob("*-*.json"))}
    if "traffic-cpu" in there:
        results = there["traffic-cpu"]
        place(readme, "sizes", sizes_text(results.of("sizes")))
        place(readme, "formulas", formulas_text(results.of("step")))
        place(readme, "crossover", crossover_text(results.of("scheme"), results.of("step"), results.of("sizes")))
        place(readme, "traffic", "\n\n".join([results.caption(), counted_text(results.of("step"))]))
        figures.draw_sizes(results.of("sizes"), drawn / "sizes.svg")
    texts = {"master": master_text, "inference": inference_text, "profile": profiled, "mpi": over_mpi}
    for part, text in texts.items():
        for name in NAMES:
            mark = f"{part}-{name}"
            if mark in there and there[mark].records:
                if f"<!-- {mark}:" in readme.read_text():
                    place(readme, mark, text(there[mark]))
                else:
                    print(f"README.md has no place for {mark}.json")
    if "master-cpu" in there and there["master-cpu"].of("errors"):
        place(readme, "errors", errors_text(there["master-cpu"]))
    runs = {name: there[f"training-{name}"] for name in NAMES if f"training-{name}" in there}
    for name, results in runs.items():
        found = results.of("training")
        texts_of_it = [results.caption(), training_text(plain(found)), agreement_text(found)]
        place(readme, f"training-{name}", "\n\n".join(text for text in texts_of_it if text))
    if runs:
        trained = {name: plain(results.of("training")) for name, results in runs.items()}
        alone = {name: [r for r in found if r["run"] not in runs[name].shared] for name, found in trained.items()}
        place(readme, "conclusions", conclusions(trained, alone))
        figures.draw_training(trained, published.ROWS, drawn / "training.svg")


def profiled(results: Results) -> str:
    """Where the numbers come from, and the table of the profiles."""
    return "\n\n".join([results.caption(), profile_text(results.of("profiling"))])


def over_mpi(results: Results) -> str:
    """Where the numbers come from, and trainings over MPI."""
    return "\n\n".join([results.caption(), mpi_text(results.of("training"))])


def results_of(here: Path) -> list[Record]:
    """All trainings that are in the results."""
    return [r for path in sorted((here / "results").glob("training-*.json")) for r in read(path)]
