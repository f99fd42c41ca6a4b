"""Threads of `mural.data`: those that read ahead for a loader, and those that decode the tiles of one read."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from functools import cache
from typing import TypeVar
from weakref import WeakSet

import torch

T = TypeVar("T")
R = TypeVar("R")
_reading: WeakSet[ThreadPoolExecutor] = WeakSet()


def readers(count: int) -> ThreadPoolExecutor:
    """Threads that read ahead. `shutdown(cancel_futures=True)` drops what is queued and waits for what has begun.

    Decoders and torch let other Python threads run meanwhile. Each thread computes alone: the other cores have other
    readers, or the training, to run.
    """
    cores, started = torch.get_num_threads(), threading.Barrier(count + 1)
    found = ThreadPoolExecutor(count, "mural-reader", initializer=torch.set_num_threads, initargs=(1,))
    for _ in range(count):
        found.submit(started.wait)
    started.wait()
    torch.set_num_threads(cores)  # a thread's own number is also what threads that start later would take
    _reading.add(found)
    return found


def _end() -> None:
    """Drop what is queued when the program ends in the middle of an epoch; the pools would still do all of it."""
    for pool in list(_reading):
        pool.shutdown(cancel_futures=True)


threading._register_atexit(_end)  # type: ignore[attr-defined]  # `atexit` is too late: pools wait for threads before


@cache
def decoders(threads: int) -> ThreadPoolExecutor:
    """The pool of that many threads. Many sources may be open, so the threads are not theirs."""
    return ThreadPoolExecutor(threads, f"mural-decode-{threads}")


if hasattr(os, "register_at_fork"):  # the threads of a process do not live on in its fork
    os.register_at_fork(after_in_child=decoders.cache_clear)


def each(
    work: Callable[[T], R], items: Iterable[T], executor: Executor, done: Callable[[R], None] = lambda _: None
) -> None:
    """Do the work for every item on the executor's threads, and hand each result to `done` in this one.

    The first error is raised once all that had begun has ended, so nobody writes into what the caller gives up.
    """
    futures: list[Future[R]] = [executor.submit(work, item) for item in items]
    try:
        for future in as_completed(futures):
            done(future.result())
    except BaseException:
        begun = [future for future in futures if not future.cancel()]
        for future in begun:
            future.exception()
        raise
