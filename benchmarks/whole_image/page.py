"""README.md's tables from the files of results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness.case import extents_text
from harness.results import Record, read
from harness.tables import NONE, environment, gib, markdown, place

from whole_image.parts import Part

PLANS = {"stream": "streamed", "ranks4": "4 ranks", "ranks4+stream": "4 ranks, streamed"}
FILES = {"gpu": "results", "cpu": "results on a CPU"}
"""The files of results, and the marks of the page for each."""
Parts = list[tuple[Part, Record]]


def write(folder: Path) -> None:
    """Put the tables into the page, of each file of results that is there."""
    found = {name: folder / "results" / f"{name}.json" for name in FILES}
    if not any(file.is_file() for file in found.values()):
        raise SystemExit("there are no results yet: run it, and then `mural bench whole_image --collect FILE.jsonl`")
    for name, file in found.items():
        if file.is_file():
            records = read(file)
            place(folder / "README.md", FILES[name], f"{environment(records)}\n\n{tables(records)}")


def tables(records: Sequence[Record]) -> str:
    """All tables; those without a row are left out."""
    last = {record["name"]: record for record in records if record["kind"] == "measure"}
    parts = [(Part.parse(name), record) for name, record in last.items()]

    def of(*kinds: str) -> Parts:
        return [(part, record) for part, record in parts if part.kind in kinds]

    found = [
        ("Whole images", predicted_table(of("predict"))),
        ("The same labels under other plans", same_table(of("same", "cpu"))),
        ("A sliding window", sliding_table(of("sliding"))),
    ]
    return "\n\n".join(f"### {title}\n\n{text}" for title, text in found if text)


def per_gigapixel(part: Part, seconds: float) -> str:
    """Seconds for a billion pixels, with three digits or as many as it has."""
    found = seconds / part.side**2 * 1e9
    return f"{found:,.0f}" if found >= 100 else f"{found:.3g}"


def counted(part: Part, count: int) -> str:
    """How many pixels of an image, and which share of them.

    >>> counted(Part.parse("cpu/1000/float32/stream"), 1500), counted(Part.parse("cpu/10/float32/stream"), 0)
    ('1,500 (0.15%)', '0')
    """
    return f"{count:,} ({100 * count / part.side**2:.2g}%)" if count else "0"


def percent(share: float) -> str:
    """A share of right labels."""
    return f"{100 * share:.2f}%"


def predicted_table(parts: Parts) -> str:
    """Time and memory of label maps under a cap."""
    head = ("image", "precision", "cap", "tile", "seconds", "s per gigapixel", "allocated, GiB", "reserved, GiB",
            "host's growth, GiB", "right")  # fmt: skip
    rows = [
        [
            extents_text((part.side,) * 2), part.precision, f"{part.option} GiB", str(r["tile"]), f"{r['seconds']:.1f}",
            per_gigapixel(part, r["seconds"]), gib(r["allocated"]), gib(r["reserved"]), gib(r["host_grown"]),
            percent(r["right"]),
        ]
        for part, r in parts
    ]  # fmt: skip
    return markdown(head, rows) if rows else ""


def same_table(parts: Parts) -> str:
    """Labels that a plan gives otherwise than one rank."""
    head = ("image", "device", "precision", "plan", "labels that differ from one rank's", "seconds", "one rank")
    rows = [
        [
            extents_text((part.side,) * 2), "CPU" if part.kind == "cpu" else "GPU", part.precision, PLANS[part.option],
            counted(part, r["differ"]), f"{r['seconds']:.1f}", f"{r['whole_seconds']:.1f}",
        ]
        for part, r in parts
    ]  # fmt: skip
    return markdown(head, rows) if rows else ""


def sliding_table(parts: Parts) -> str:
    """A window that slides, and the whole image."""
    head = ("image", "precision", "window", "overlap", "labels that differ from the whole image's", "right",
            "s per gigapixel", "reserved, GiB")  # fmt: skip
    rows: list[list[str]] = []
    for part, r in parts:
        about = [extents_text((part.side,) * 2), part.precision]
        window = [f"{r['window']}²", f"{100 * float(part.option):.0f}%"]
        whole = [NONE, NONE, NONE, percent(r["whole_right"]), per_gigapixel(part, r["whole_seconds"]), NONE]
        rows += [[*about, *whole]] if not rows else []
        rows.append([
            *about, *window, counted(part, r["differ"]), percent(r["right"]), per_gigapixel(part, r["seconds"]),
            gib(r["reserved"]),
        ])  # fmt: skip
    return markdown(head, rows) if rows else ""


def short(record: Record) -> str:
    """A measurement in a line."""
    part = Part.parse(record["name"])
    words = [f"{record['seconds']:.1f} s, {per_gigapixel(part, record['seconds'])} s per gigapixel"]
    words += [f"{gib(record['reserved'])} GiB reserved"] if "reserved" in record else []
    words += [f"host + {gib(record['host_grown'])} GiB"] if "host_grown" in record else []
    words += [f"{counted(part, record['differ'])} labels differ"] if "differ" in record else []
    words += [f"{percent(record['right'])} right"] if "right" in record else []
    return ", ".join(words)
