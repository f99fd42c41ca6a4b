"""How long a job takes, by what jobs like it took before: for lists, and to start the longest first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.results import Record
from profiles import STEP, WARMUP

START, STEPS_OF_A_TURN = 6.0, 4
"""Seconds until a job's ranks are there; steps of each way in a turn of `master`."""
UNKNOWN = 10.0
SLOWER = {"cpu": 0.08, "cuda": 0.025}
"""Seconds of an iteration, or of a step of a master, where nothing like it is known."""


def expected(job: Any, known: Sequence[Record]) -> float:
    """Seconds of a job on the machine whose results are known, roughly."""
    kind = type(job).__name__
    if kind == "Training":
        return START + job.iterations * iteration(job, known)
    if kind == "Updating":
        return START + job.rounds * STEPS_OF_A_TURN * len(job.counts) * SLOWER[job.device] * job.ranks / 2
    if kind == "Profiling":
        return START / 2 + STEP[job.net] * (job.steps + WARMUP)
    return UNKNOWN


def iteration(job: Any, known: Sequence[Record]) -> float:
    """Seconds of an iteration of a training: those of the run that is most like it."""
    same = [
        r
        for r in known
        if r["kind"] == "training" and (r["device"], r["width"], r["ranks"]) == (job.device, job.width, job.ranks)
    ]
    mine = [r for r in same if r["way"] == job.way and r.get("dtype", "float32") == job.dtype] or same
    if not mine:
        return SLOWER[job.device]
    near = min(mine, key=lambda r: (abs(r["batch"] - job.batch), r["seconds"] / r["iterations"]))
    return near["seconds"] / near["iterations"]
