"""Speed and memory of a run in tables, measured next to what is predicted for its plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from statistics import median

from mural.report.run_page import TextTable
from mural.report.words import bytes_in_words, seconds_in_words
from mural.run_report.predicted_step import Prediction
from mural.run_report.run_history import Line, RunHistory

SHARES = {"communication": "waiting for messages", "data_wait": "waiting for images"}
PACES = {
    "step_seconds": "a step",
    "images_per_second": "images a second",
    "megapixels_per_second": "megapixels a second",
}
RANKS = 16
"""Ranks that have a row of their own."""


def tables(run: RunHistory, predicted: Prediction | None) -> list[TextTable]:
    """Paces and shares over the readings, and the memory of each rank."""
    lines = run.of("train")
    if not lines:
        return [TextTable("", (), [("speed", "no step was logged")])]
    since = run.resumed[-1] if run.resumed else 0
    last = [line for line in lines if line["step"] > since]
    return [paces(last or lines, since if last else 0, predicted), memory(run, lines[-1], predicted)]


def paces(lines: Sequence[Line], since: int, predicted: Prediction | None) -> TextTable:
    """How fast steps were: the first reading, in which everything begins, is left out where there are others."""
    kept = lines[1:] if len(lines) > 2 else lines
    foreseen = predicted.seconds if predicted is not None else None
    head = ["", "median", "lowest", "highest", *(["predicted"] if foreseen else [])]
    rows: list[list[str]] = []
    for key, name in {**PACES, **SHARES}.items():
        values = [float(line[key]) for line in kept if isinstance(line.get(key), (int, float))]
        values = [value for value in values if isfinite(value)]
        if values:
            told = written_as(key)
            more = [seconds_in_words(foreseen) if key == "step_seconds" else ""] if foreseen else []
            rows.append([name, told(median(values)), told(min(values)), told(max(values)), *more])
    out = f" since step {since}" * bool(since) + ", without the first" * (kept is not lines)
    remarks = [
        f"Of {len(kept)} reading{'s' * (len(kept) > 1)}{out}. Validations and saves count in them. "
        f"Waiting is a share of the time, the mean over the ranks."
    ]
    return TextTable("", head, rows, remarks)


def written_as(key: str) -> Callable[[float], str]:
    """How the values of a reading are written."""
    if key in SHARES:
        return lambda value: f"{value:.1%}"
    return seconds_in_words if key == "step_seconds" else lambda value: f"{value:.3g}"


def memory(run: RunHistory, last: Line, predicted: Prediction | None) -> TextTable:
    """The largest memory of each rank, next to what it had before its first step, and to what is predicted."""
    peaks = [int(peak) for peak in last.get("peak_memory", ())]
    start = run.starts[-1] if run.starts and len(run.starts[-1].memory) == len(peaks) else None
    head = ["rank", *(["computes on", "before the first step"] if start else []), "peak"]
    head += ["rise", "predicted for a step"] if predicted and start else ["predicted for a step"] if predicted else []
    rows: list[list[str]] = []
    for rank, peak in enumerate(peaks):
        row = [str(rank)]
        if start is not None:
            row += [f"{start.devices[rank]} ({start.hosts[rank]})", bytes_in_words(start.memory[rank])]
        row.append(bytes_in_words(peak))
        if predicted is not None:
            row += [bytes_in_words(max(0, peak - start.memory[rank]))] if start is not None else []
            row.append(bytes_in_words(predicted.peak))
        rows.append(row)
    if len(rows) > RANKS:
        rows = sorted(rows, key=lambda row: -peaks[int(row[0])])[:RANKS]
    remarks = [f"The {RANKS} ranks of {len(peaks)} with the highest peaks."] if len(peaks) > RANKS else []
    on_host = start is None or start.devices[0].startswith("CPU")
    remarks.append(
        "Of a CPU: the memory of the whole process, with Python, its packages and the images that were read ahead."
        if on_host
        else "Of a GPU: what torch's allocator had given out."
    )
    if predicted is not None:
        remarks.append(predicted.words)
    return TextTable("", head, rows, remarks)
