"""The table of trainings over MPI, with the losses by which ways and transports can be compared."""

from __future__ import annotations

from collections.abc import Sequence

from harness.results import Record
from harness.tables import markdown


def mpi_text(runs: Sequence[Record]) -> str:
    """A row for each way, batch and number of ranks."""
    rows = [
        [
            r["way"],
            str(r["ranks"]),
            str(r["batch"]),
            f"{r['iterations']:,}",
            f"{100 * r['accuracy']:.1f}% · {r['seconds']:.1f}",
            ", ".join(f"{loss:.5g}" for loss in r["losses"]),
        ]
        for r in sorted(runs, key=lambda r: (r["ranks"], r["batch"], r["way"]))
    ]
    width = ", ".join(sorted({str(r["width"]) for r in runs}))
    head = ["way", "ranks", "batch", "iterations", "accuracy · seconds", "losses on the way, after each quarter"]
    return f"Width {width}.\n\n" + markdown(head, rows)
