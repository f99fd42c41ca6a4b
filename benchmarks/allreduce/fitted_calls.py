"""How well the gauge's formula can predict at all: its constants, fitted to the measured calls themselves.

A gauge knows other rounds than those of the calls that it predicts, and they were measured at another time. What is
left when the constants are the best for the calls is the formula's own error.
"""

from __future__ import annotations

from statistics import median
from typing import Any

import numpy as np

from mural.collectives.choose import BACKEND, rounds_of
from mural.collectives.link_costs import asked, fitted
from mural.collectives.price import loads

LEAST = 2**16
"""The bytes from which calls count."""


def needs(algorithm: str, ranks: int, size: int) -> list[float]:
    """How often a call over that many ranks of one host needs each constant."""
    nodes = (tuple(range(ranks)),)
    every = [asked(load) for load in loads(rounds_of(algorithm, nodes, False), size, nodes)]
    return [1.0, *map(sum, zip(*every, strict=True))]


def quotients(records: list[dict[str, Any]], ranks: int) -> tuple[list[float], list[float]]:
    """Predicted over measured, from 64 KiB on: by the gauge, and by the constants that are best for all sizes."""
    calls = [r for r in records if r.get("ranks") == ranks and "predicted" in r and r["algorithm"] != BACKEND]
    rows = np.array([needs(r["algorithm"], ranks, r["bytes"]) for r in calls])
    seconds = np.array([median(r["seconds"]) for r in calls])
    best = rows @ fitted(rows, seconds) / seconds
    large = [place for place, r in enumerate(calls) if r["bytes"] >= LEAST]
    return [calls[place]["predicted"] / seconds[place] for place in large], [float(best[place]) for place in large]
