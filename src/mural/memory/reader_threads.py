"""Threads that read ahead of what a run computes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakSet

import torch

_reading: WeakSet[ThreadPoolExecutor] = WeakSet()


def readers(count: int) -> ThreadPoolExecutor:
    """Threads that read ahead. `shutdown(cancel_futures=True)` drops what is queued and waits for what has begun.

    Decoders and torch let other Python threads run meanwhile. Each thread computes alone: the other cores have other
    readers, or the training, to run.
    """
    cores, started = torch.get_num_threads(), threading.Barrier(count + 1)
    found = ThreadPoolExecutor(count, "mural-reader", initializer=compute_alone)
    for _ in range(count):
        found.submit(started.wait)
    started.wait()
    torch.set_num_threads(cores)  # a thread's own number is also what threads that start later would take
    _reading.add(found)
    return found


def compute_alone() -> None:
    """Let torch use no other thread on behalf of this one."""
    torch.get_num_threads()  # the first call in a thread sets the run's number there: not after the next line
    torch.set_num_threads(1)


def _end() -> None:
    """Drop what is queued when the program ends in the middle of an epoch; the pools would still do all of it."""
    for pool in list(_reading):
        pool.shutdown(cancel_futures=True)


threading._register_atexit(_end)  # type: ignore[attr-defined]  # `atexit` is too late: pools wait for threads before
