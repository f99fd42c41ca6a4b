"""Threads that decode: one pool for each number of threads, shared by all sources of a process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")
_pools: dict[int, ThreadPoolExecutor] = {}
_lock = threading.Lock()


def pool(threads: int) -> ThreadPoolExecutor:
    """The pool of that many threads. Many sources may be open, so the threads are not theirs."""
    with _lock:
        if threads not in _pools:
            _pools[threads] = ThreadPoolExecutor(threads, thread_name_prefix=f"mural-decode-{threads}")
        return _pools[threads]


def _forget() -> None:
    """Begin anew in a fork: the threads of a process do not live on in it, and who held the lock is gone."""
    global _lock
    _pools.clear()
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


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
