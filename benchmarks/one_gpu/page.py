"""The tables: the largest image of each way, times, peaks, caps and predictions, from records; and the page of them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from harness.case import extents_text
from harness.results import Record, read
from harness.tables import NONE, environment, gib, markdown, place, ratio

from one_gpu.parts import IN_MEMORY, STREAMED, Part

TITLES = {
    "plain": "in memory",
    "checkpoint": "checkpoint per block",
    "save_on_cpu": "`save_on_cpu`, pinned",
    "stream": "**streamed**",
    "file": "**streamed, from files**",
    "lightstream": "lightstream",
}
MODELS = {"unet": "U-Net", "resnet50": "ResNet-50", "unet3d": "3D U-Net"}
GOALS = {("bf16", "frozen", 0): 1.3, ("fp32", "frozen", 0): 1.5}
GOALS |= {(precision, "training", size): goal for precision in ("bf16", "fp32")
          for size, goal in ((8192, 2.0), (16384, 2.7))}  # fmt: skip
"""How many times longer than in memory streaming the U-Net may take, for every size (0) or one."""


class Results:
    """The last record about each part, and the ratios between them."""

    def __init__(self, records: Iterable[Record]) -> None:
        last = {r["name"]: r for r in records if r["kind"] in ("measure", "failure")}
        self.found = {Part.parse(name): record for name, record in last.items()}
        self.measured = {part: r for part, r in self.found.items() if r["kind"] == "measure"}
        self.failed = {part: r for part, r in self.found.items() if r["kind"] == "failure"}

    def reference(self, part: Part) -> float | None:
        """The best time for each million positions in memory without a cap, same model, precision and norms."""
        about = (part.model, part.precision, part.norm)
        times = [
            per_million(other, record)
            for other, record in self.measured.items()
            if other.way == "plain" and other.cap is None and (other.model, other.precision, other.norm) == about
        ]
        return min(times, default=None)

    def over(self, part: Part) -> float | None:
        """How many times longer than in memory a part took."""
        best = self.reference(part)
        return None if best is None or part not in self.measured else per_million(part, self.measured[part]) / best

    def same(self, part: Part) -> Record | None:
        """What was measured in memory at the same size."""
        return next(
            (
                record
                for other, record in self.measured.items()
                if other.way == "plain"
                and (other.model, other.precision, other.norm, other.size)
                == (part.model, part.precision, part.norm, part.size)
            ),
            None,
        )

    @property
    def series(self) -> dict[Part, list[Part]]:
        """The parts that differ in size alone, sizes ascending."""
        found: dict[Part, list[Part]] = {}
        for part in sorted(self.found, key=lambda p: p.size):
            found.setdefault(part.series, []).append(part)
        return dict(sorted(found.items(), key=lambda item: order(item[0])))


def order(part: Part) -> tuple[Any, ...]:
    """Where a part stands in tables."""
    caps = -(part.cap or 10**6)
    return (
        list(MODELS).index(part.model), part.precision, part.norm, caps, list(TITLES).index(part.way), part.tile,
        part.extras, part.size,
    )  # fmt: skip


def step_seconds(record: Record) -> float:
    """The median of the steps."""
    return statistics.median(record["seconds"])


def per_million(part: Part, record: Record) -> float:
    """Milliseconds for each million positions."""
    return 1000 * step_seconds(record) / part.millions


def sized(part: Part) -> str:
    """The image as people write it."""
    return extents_text((part.size,) * part.costs.dims)


def about(part: Part) -> list[str]:
    """Model, precision, norms, cap and way, in words."""
    extras = "".join(f", {extra}" for extra in part.extras)
    cap = f"{part.cap} GiB" if part.cap else NONE
    return [MODELS[part.model], part.precision, part.norm, cap, TITLES[part.way] + extras]


def short(record: Record) -> str:
    """A measurement in a line."""
    part = Part.parse(record["name"])
    took = f"{step_seconds(record):.3f} s, {per_million(part, record):.1f} ms a million"
    peaks = f"{gib(record['allocated'])} GiB allocated, {gib(record['reserved'])} reserved, host {gib(record['host'])}"
    return f"{took}, {peaks}, loss {record['losses'][0]:.6f}"


def seconds_text(seconds: float) -> str:
    """Seconds with three digits.

    >>> seconds_text(0.01234), seconds_text(123.4)
    ('0.0123', '123')
    """
    return f"{seconds:.0f}" if seconds >= 100 else f"{seconds:.3g}"


LARGEST_HEAD = ("model", "precision", "norms", "cap", "way", "largest", "step, s", "÷ in memory", "the next size")


def largest_rows(results: Results) -> list[list[str]]:
    """For each way, the largest image of which a step was taken, and what stopped the next."""
    rows: list[list[str]] = []
    for series, parts in results.series.items():
        fit = [part for part in parts if part in results.measured]
        if not fit:
            failure = results.failed[parts[0]]
            rows.append([*about(series), NONE, NONE, NONE, f"{sized(parts[0])}: {why(failure)}"])
            continue
        top = fit[-1]
        above = next((p for p in parts if p in results.failed and p.size > top.size), None)
        stopped = f"{sized(above)}: {why(results.failed[above])}" if above else "not tried"
        took = seconds_text(step_seconds(results.measured[top]))
        rows.append([*about(series), sized(top), took, ratio(results.over(top)), stopped])
    return rows


def why(failure: Record) -> str:
    """What stopped a part."""
    known = {"memory": "out of memory", "late": "no time"}
    return known.get(failure["why"]) or str(failure["message"])[:120]


TIMES_HEAD = (
    "model", "precision", "norms", "cap", "way", "image", "tile", "step, s", "ms per million", "÷ in memory",
    "allocated, GiB", "reserved, GiB", "host, GiB",
)  # fmt: skip


def times_rows(results: Results) -> list[list[str]]:
    """Time and memory of everything that was measured."""
    rows: list[list[str]] = []
    for part in sorted(results.measured, key=order):
        record = results.measured[part]
        over = ratio(results.over(part)) if (part.way, part.cap) != ("plain", None) else NONE
        if part.model == "unet" and part.way in STREAMED:
            goal = GOALS.get((part.precision, part.norm, part.size)) or GOALS.get((part.precision, part.norm, 0))
            over += f" (goal ≤ {goal})" if goal and part.cap == 16 and over != NONE else ""
        memory = [gib(record["allocated"]), gib(record["reserved"]), gib(record["host"], 1)]
        times = [seconds_text(step_seconds(record)), f"{per_million(part, record):.1f}", over]
        rows.append([*about(part), sized(part), str(record.get("tile") or NONE), *times, *memory])
    return rows


def grid(results: Results, key: str, head: str) -> str:
    """Reserved memory of streamed parts against the size of the image: a row for each way, a column for each size."""
    streamed = {s: p for s, p in results.series.items() if s.way in STREAMED and any(q in results.measured for q in p)}
    sizes = sorted({part.size for parts in streamed.values() for part in parts if part in results.measured})
    rows: list[list[str]] = []
    for series, parts in streamed.items():
        at = {part.size: results.measured[part] for part in parts if part in results.measured}
        rows.append([*about(series), *(gib(at[size][key]) if size in at else NONE for size in sizes)])
    return markdown(["model", "precision", "norms", "cap", f"{head}, GiB, at", *map(str, sizes)], rows) if rows else ""


def cap_rows(results: Results) -> tuple[list[str], list[list[str]]]:
    """Time for each million positions against the cap, where there is more than one; the best tile of each counts."""
    at: dict[tuple[str, ...], dict[int, float]] = {}
    for part, record in results.measured.items():
        if part.way == "stream" and part.cap:
            row = at.setdefault((MODELS[part.model], part.precision, part.norm, sized(part)), {})
            row[part.cap] = min(row.get(part.cap, float("inf")), per_million(part, record))
    caps = sorted({cap for row in at.values() for cap in row}, reverse=True)
    rows = [
        [*name, *(f"{row[cap]:.1f}" if cap in row else NONE for cap in caps)]
        for name, row in at.items()
        if len(row) > 1
    ]
    return ["model", "precision", "norms", "image", *(f"{cap} GiB" for cap in caps)], rows


PREDICTED_HEAD = (
    "part", "passes", "tiles", "step, s", "predicted, s", "÷", "peak, GiB", "predicted, GiB", "÷", "read, GB",
    "predicted, GB",
)  # fmt: skip


def predicted(record: Record, what: str) -> float | None:
    """A number of the report: `predicted_seconds`, or `seconds`, for "seconds"."""
    report = record.get("report") or {}
    found = report.get(f"predicted_{what}", report.get(what))
    return float(found) if isinstance(found, int | float) else None


def predicted_rows(results: Results) -> list[list[str]]:
    """What the plan's report predicted, next to what was measured."""
    rows: list[list[str]] = []
    for part in sorted(results.measured, key=order):
        record = results.measured[part]
        if not record.get("report"):
            continue
        seconds, peak, read_bytes = (predicted(record, what) for what in ("seconds", "peak", "bytes"))
        took, held = step_seconds(record), float(record["allocated"])
        rows.append([
            part.name, *(str(record["report"].get(key, NONE)) for key in ("passes", "tiles")),
            seconds_text(took), seconds_text(seconds) if seconds else NONE, ratio(took / seconds if seconds else None),
            gib(held), gib(peak), ratio(held / peak if peak else None, 3),
            f"{(record.get('bytes_read') or 0) / 1e9:.2f}", f"{read_bytes / 1e9:.2f}" if read_bytes else NONE,
        ])  # fmt: skip
    return rows


SAME_HEAD = ("part", "loss", "in memory", "relative difference", "gradients' norm", "in memory", "relative difference",
             "equal when repeated")  # fmt: skip


def same_rows(results: Results) -> list[list[str]]:
    """Loss and gradients of what was also run in memory, at the same size; and whether steps repeat to the bit."""
    rows: list[list[str]] = []
    for part in sorted(results.measured, key=order):
        record, plain = results.measured[part], results.same(part)
        if plain is None or part.way in IN_MEMORY:
            continue
        cells: list[str] = []
        for ours, theirs in ((record["losses"][0], plain["losses"][0]), (record["gradient"], plain["gradient"])):
            cells += [f"{ours:.6g}", f"{theirs:.6g}", f"{abs(ours - theirs) / abs(theirs):.1e}"]
        losses = record["losses"]
        rows.append([part.name, *cells, NONE if len(losses) < 2 else "yes" if len(set(losses)) == 1 else "no"])
    return rows


def table(records: Sequence[Record]) -> str:
    """All tables as Markdown; those without a row are left out."""
    results = Results(records)
    cap_head, caps = cap_rows(results)
    parts = [
        ("Largest image", markdown(LARGEST_HEAD, rows) if (rows := largest_rows(results)) else ""),
        ("Time and memory", markdown(TIMES_HEAD, rows) if (rows := times_rows(results)) else ""),
        ("Peak against size", grid(results, "reserved", "reserved")),
        ("Time against cap, ms per million positions", markdown(cap_head, caps) if caps else ""),
        ("Predicted and measured", markdown(PREDICTED_HEAD, rows) if (rows := predicted_rows(results)) else ""),
        ("The same result", markdown(SAME_HEAD, rows) if (rows := same_rows(results)) else ""),
    ]
    return "\n\n".join(f"### {title}\n\n{text}" for title, text in parts if text)


def write(folder: Path) -> None:
    """Write the tables into README.md."""
    source = folder / "results" / "gpu.json"
    if not source.is_file():
        raise SystemExit("results/gpu.json does not exist: run the benchmark first, then --collect its files")
    records = read(source)
    place(folder / "README.md", "results", f"{environment(records)}\n\n{table(records)}")
