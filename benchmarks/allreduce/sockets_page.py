"""The table of all-reduces over sockets and over MPI."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from harness.results import Record
from harness.tables import NONE, environment, markdown
from sockets import BARE, GLOO, NAMES, OPTIONS, summary
from units import micro, sized

from mural.collectives.choose import BACKEND

KINDS = ("calls",)
TITLES = {GLOO: "gloo", "mpi": "MPI", "mpi-tcp": "MPI over TCP"}


def line(record: Record) -> str:
    """A measurement in one line, for the terminal."""
    size = sized(min(map(int, record["found"])))
    return f"{record['name']}, {size}: " + ", ".join(f"{n} {micro(s)}" for n, s in summary(record).items())


def text_of(records: Sequence[Record]) -> str:
    """Where the numbers come from, and the table."""
    found = {r["name"]: r for r in records if r["kind"] in KINDS}
    runs = {(r["ranks"], r["transport"]): r["found"] for r in found.values()}
    sizes = sorted({int(size) for calls in runs.values() for size in calls})
    rows = [
        [str(ranks), sized(size), *(cell(runs, ranks, size, name) for name in (BACKEND, BARE, *NAMES))]
        for ranks in sorted({ranks for ranks, _ in runs})
        for size in sizes
    ]
    said = " · ".join([TITLES[GLOO], *(f"{TITLES[key]} (gloo ÷ it)" for key in OPTIONS if key != GLOO)])
    software = ", ".join(sorted({r["software"] for r in found.values()}))
    failed = {r["name"]: r["error"] for r in records if r["kind"] == "failure" and r["name"] not in found}
    notes = [f"{name}: {error.splitlines()[-1]}" for name, error in failed.items()]
    table = markdown(["ranks", "bytes", "the backend's own", f"{BARE} (gloo's own ÷ it)", *NAMES], rows)
    return "\n\n".join([environment(records), f"By {software}; medians: {said}", table, *notes])


def cell(runs: dict[tuple[int, str], dict[str, dict[str, list[float]]]], ranks: int, size: int, name: str) -> str:
    """One call over every transport; that of MPI itself is compared with gloo's own."""
    calls = {key: runs.get((ranks, key), {}).get(str(size), {}) for key in OPTIONS}
    times = {key: calls[key].get(name) for key in OPTIONS if name != BARE or key != GLOO}
    base, said = calls[GLOO].get(BACKEND if name == BARE else name), list[str]()
    for key, seconds in times.items():
        ratio = f" ({median(base) / median(seconds):.2f})" if base and seconds and key != GLOO else ""
        said.append(f"{micro(median(seconds))}{ratio}" if seconds else NONE)
    return " · ".join(said)
