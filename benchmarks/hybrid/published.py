"""What document `004` printed: its three tables, and what it concluded."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """4,000 iterations; accuracy in percent."""

    device: str
    ranks: int
    batch: int
    accuracy: float
    seconds: float
    failed: bool = False


ITERATIONS = 4000
ROWS = (
    Row("cuda", 2, 10, 42, 17),
    Row("cuda", 2, 50, 66, 30),
    Row("cuda", 2, 100, 70, 42),
    Row("cuda", 2, 200, 71, 81),
    Row("cuda", 2, 400, 74, 150),
    Row("cuda", 2, 800, 76, 315),
    Row("cpu", 2, 10, 43, 106),
    Row("cpu", 2, 50, 69, 483),
    Row("cpu", 2, 100, 72, 1018),
    Row("cpu", 2, 200, 71, 2018),
    Row("cpu", 2, 400, 74, 5740, failed=True),
)
"""Batches on two processes; the last on the CPU «failed»."""
RANKS = (
    Row("cuda", 1, 200, 71, 75.042),
    Row("cuda", 2, 200, 74, 75.71),
    Row("cuda", 3, 200, 74, 81.68),
    Row("cuda", 4, 200, 70.85, 82.67),
)
"""One to four processes, on the GPU."""
GAIN = 30
CROSSOVER = 35


def gains() -> dict[int, float]:
    """How much faster its GPU was than its CPU, by batch.

    >>> {batch: round(gain, 1) for batch, gain in gains().items()}
    {10: 6.2, 50: 16.1, 100: 24.2, 200: 24.9}
    """
    cpu = {row.batch: row.seconds for row in ROWS if row.device == "cpu" and not row.failed}
    return {row.batch: cpu[row.batch] / row.seconds for row in ROWS if row.device == "cuda" and row.batch in cpu}
