"""Threads that decode the tiles of one read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from functools import cache
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


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
