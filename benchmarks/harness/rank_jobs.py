"""Jobs on ranks: processes that form a group measure jobs, and what each found is written as soon as it is there."""

from __future__ import annotations

import gc
import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

from harness.counting import over_ranks
from harness.results import Log, Record, read, rounded, scrubbed
from mural.errors import MuralError
from mural.ranks import run_local

Settings = dict[str, Any]
Work = Callable[[int, Any, Settings], Record]
"""Measures a job on a rank; rank 0's answer is written down. Collective."""


class Job(Protocol):
    """Something to measure on some ranks."""

    @property
    def name(self) -> str:
        """What it is, in a few words: results of the same name replace each other."""
        ...

    @property
    def ranks(self) -> int:
        """How many."""
        ...

    @property
    def about(self) -> Record:
        """What a record of it begins with: its kind and its name, and what else the page asks for."""
        ...


def itself(_: int, job: Any, __: Settings) -> Record:
    """The work of a job that knows how it is measured."""
    return job.measure()


def on_ranks(
    log: Log,
    jobs: Sequence[Job],
    work: Work = itself,
    settings: Settings | None = None,
    *,
    device: str = "cpu",
    limit: float = 600.0,
    failed: str = "failure",
    line: Callable[[Record], str] = json.dumps,
) -> None:
    """Measure jobs until the log's time is up; those that follow each other on as many ranks share processes.

    One that fails is recorded with its error, and the rest goes on in new processes.
    """
    for ranks, same in groupby(jobs, lambda job: job.ranks):
        left = list(same)
        while left and log.left > 0:
            before = len(read(log.path))
            given = (str(log.path), left, work, settings or {}, time.time() + log.left, line)
            try:
                run_local(serve, ranks, *given, threads=1, device=device, timeout=limit)
                break
            except (MuralError, OSError) as error:
                done = len(read(log.path)) - before
                note_failure(log, left[done], failed, error)
                left = left[done + 1 :]


def serve(
    rank: int,
    path: str,
    jobs: Sequence[Job],
    work: Work,
    settings: Settings,
    until: float,
    line: Callable[[Record], str],
) -> None:
    """On a rank: all jobs, one after the other, until the time is up; rank 0 adds a record of each, and says so."""
    for job in jobs:
        if not over_ranks(time.time() < until)[0]:
            return
        gc.collect()
        record = job.about | work(rank, job, settings)
        if rank == 0:
            with Path(path).open("a") as file:
                file.write(json.dumps(rounded(record)) + "\n")
            print(line(record), flush=True)


def note_failure(log: Log, job: Job, kind: str, error: Exception) -> None:
    """Write that a job failed, and why."""
    log.write(**job.about | {"kind": kind, "error": scrubbed(str(error).strip())})
    log.say(f"{job.name}: {error}")


# -- several jobs at a time --------------------------------------------------------------------------------------------


class Cores:
    """Cores that jobs take while they run and give back."""

    def __init__(self, count: int) -> None:
        self.free, self.changed = count, threading.Condition()

    def take(self, count: int) -> None:
        """Wait until so many are free, and take them."""
        with self.changed:
            self.changed.wait_for(lambda: self.free >= count)
            self.free -= count

    def give(self, count: int) -> None:
        """Let others have them."""
        with self.changed:
            self.free += count
            self.changed.notify_all()


def side_by_side(
    log: Log,
    jobs: Sequence[Job],
    cores: int,
    *,
    device: str = "cpu",
    limit: float = 600.0,
    line: Callable[[Record], str] = json.dumps,
) -> None:
    """Measure jobs that know how, each in processes of its own, as many at a time as there is a core for each rank.

    They are started in their order: the longest should be first. None is started once the log's time is up.
    """
    room = Cores(cores)

    def one(job: Job, ranks: int) -> None:
        try:
            record = run_local(alone, job.ranks, job, threads=1, device=device, timeout=limit)
            log.write(**job.about | record)
            log.say(line(job.about | record))
        except (MuralError, OSError) as error:
            note_failure(log, job, "failure", error)
        finally:
            room.give(ranks)

    with ThreadPoolExecutor(max(1, len(jobs))) as threads:
        for job in jobs:
            ranks = min(job.ranks, cores)
            room.take(ranks)
            if log.left <= 0:
                return
            threads.submit(one, job, ranks)


def alone(rank: int, job: Any) -> Record | None:
    """On a rank: what a job found."""
    found = job.measure()
    return found if rank == 0 else None
