"""Threads that decode: one pool for each number of threads, shared by all sources of a process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

_pools: dict[int, ThreadPoolExecutor] = {}
T = TypeVar("T")


def pool(threads: int) -> ThreadPoolExecutor:
    """The pool of that many threads. Many sources may be open, so the threads are not theirs."""
    if threads not in _pools:
        _pools[threads] = ThreadPoolExecutor(threads, thread_name_prefix=f"mural-decode-{threads}")
    return _pools[threads]


# The threads of a process do not live on in its fork.
os.register_at_fork(after_in_child=_pools.clear)


def each(work: Callable[[T], None], items: Iterable[T], threads: int) -> None:
    """Do the work for every item, on up to that many threads; raise the first error once all that began has ended."""
    todo = list(items)
    if threads <= 1 or len(todo) < 2:
        for item in todo:
            work(item)
        return
    futures: list[Future[None]] = [pool(threads).submit(work, item) for item in todo]
    error: BaseException | None = None
    for future in futures:
        if error is not None:
            future.cancel()
        if not future.cancelled():
            error = error or future.exception()
    if error is not None:
        raise error
