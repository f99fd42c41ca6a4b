"""Prefetch: the steps that are read while the training computes, a bounded number of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from mural.data.loading.steps import Step
from mural.data.loading.workers import Workers


class Ahead:
    """The steps from `start` to `stop`; while one is used, the `prefetch` steps behind it are read.

    used   read ahead (prefetch = 2)
    [ 4 ]  [ 5 ][ 6 ]                  7, 8, … are not begun
    """

    def __init__(self, begin: Callable[[int], Step], workers: Workers, start: int, stop: int, prefetch: int):
        self.begin, self.workers, self.prefetch = begin, workers, prefetch
        self.begun, self.stop = start, stop
        self.steps: deque[Step] = deque()

    def next(self) -> tuple[Step, float]:
        """The next step, complete, and the seconds that it was waited for."""
        while self.begun < self.stop and len(self.steps) <= self.prefetch:
            self.steps.append(self.begin(self.begun))
            self.begun += 1
        step = self.steps[0]
        waited = step.wait()
        self.steps.popleft()
        if self.steps and self.steps[0].done.is_set():
            self.steps[0].send()  # it travels to the device while this step is computed
        return step, waited

    def close(self) -> None:
        """End the reading at once."""
        self.workers.close()
        for step in self.steps:
            step.abandon()
        self.steps.clear()
