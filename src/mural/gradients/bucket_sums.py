"""Sums of gradient buckets over the ranks of a group, which run while backward continues."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch import Tensor

from mural.collectives import all_reduce
from mural.comm.backends import backend_of


class Rounds:
    """mural's own rounds, in a thread that takes one bucket after the other, in the order of their launch."""

    def __init__(self, algorithm: str):
        self.algorithm = algorithm
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="mural gradients")

    def launch(self, buffer: Tensor, group: dist.ProcessGroup) -> Underway:
        """What to wait for."""
        return Underway(self.thread.submit(all_reduce, buffer, self.algorithm, group))


class Underway:
    """A call in another thread, with the interface of torch's pending collectives."""

    def __init__(self, future: Future[Tensor]):
        self.future = future

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait for its end, or raise what it raised; like gloo's, a wait that is too short raises."""
        try:
            self.future.result(None if timeout is None else timeout.total_seconds())
        except TimeoutError as error:
            raise RuntimeError("Operation timed out!") from error

    def get_future(self) -> Underway:
        """Itself: it has `then`."""
        return self

    def then(self, called: Callable[[Any], None]) -> None:
        """Call a function at its end."""
        self.future.add_done_callback(called)


@dataclass(frozen=True)
class Sum:
    """A sum over the ranks of a group, with this rank's values multiplied by its `share`.

    A mean over n ranks is the sum with a share of 1 / n on each. Where stages share a parameter, its gradient is the
    sum over stages of the means over each one's ranks: the share is 1 / n for the n ranks of this rank's own stage.
    Without `rounds` the backend adds up.
    """

    group: dist.ProcessGroup
    share: float
    rounds: Rounds | None

    @cached_property
    def averages(self) -> bool:
        """Whether it is a mean that the backend computes by itself."""
        return self.rounds is None and self.share == 1 / self.group.size() and backend_of(self.group).averages

    @property
    def scale(self) -> float:
        """The factor to multiply this rank's values with beforehand."""
        return 1.0 if self.averages else self.share

    def launch(self, buffer: Tensor) -> Any:
        """The pending sum; once it is done, the buffer holds the sum."""
        if self.rounds is not None:
            return self.rounds.launch(buffer, self.group)
        op = dist.ReduceOp.AVG if self.averages else dist.ReduceOp.SUM
        return dist.all_reduce(buffer, op=op, group=self.group, async_op=True)
