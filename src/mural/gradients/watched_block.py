"""One block of gradients: filed as backward produces them, sent bucket by bucket in one order, awaited, written back.

Parameters that other ranks hold have another group, and NCCL may deadlock if two ranks begin collectives of two groups
in different orders. So all ranks begin theirs in the same order; each leaves out the groups that it is not in:

    rank 0   stage 0: bucket 0, bucket 1              tied: bucket 0  ┊ stage 0: last              tied: last
    rank 1                      stage 1: bucket 0     tied: bucket 0  ┊           stage 1: last    tied: last
             ──────────────── while backward runs ────────────────────┊──── at the end of the block ────────→

There is no deadlock. Of the collectives that are not complete, take the first in this order. Whatever its ranks began
before is complete, so nothing on them is ahead of it; and ranks that have not begun it will reach it, since backward
waits for no bucket. Within a group the ranks have the same buckets in the same order (`Replicated`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mural.comm import Transport
from mural.comm.backends import backend_of
from mural.comm.trace import Post
from mural.errors import PeerError
from mural.gradients.buckets import in_buckets, mark_reduced
from mural.gradients.replicated import Replicated

Final = Callable[[str], bool]
"""Whether the backward that runs now is the last one that adds to a parameter, by its name."""


class Filing:
    """What backward did for the parameters of one group, in a block.

    Additions to a gradient beyond the expected number come late, after it has been sent; they are kept apart, and
    summed at the end.
    """

    def __init__(self, held: Replicated):
        self.held, self.buckets = held, held.buckets
        self.places = {id(m): (bucket, slot) for bucket in self.buckets for slot, m in enumerate(bucket.members)}
        self.fires = [0] * len(held.members)
        """How often the last backward added to each member."""
        self.reached = [False] * len(held.members)
        self.seen: list[int] = []
        """Members in the order in which backward finished them."""
        self.late: dict[int, Tensor] = {}

    def fired(self, index: int, last: bool) -> bool:
        """Whether a gradient is complete, now that backward has added to it; then it is filed."""
        self.reached[index] = True
        self.fires[index] += last
        if not last or self.fires[index] != self.held.expected[index]:
            return False
        self.seen.append(index)
        self._file(index)
        return True

    def close(self) -> None:
        """File what is left, and set aside what came late."""
        for index, (fires, expected) in enumerate(zip(self.fires, self.held.expected, strict=True)):
            if fires < expected:
                self._file(index)
        found = ((id(m.parameter), m.parameter.grad) for m in self.held.members)
        self.late = {key: grad for key, grad in found if grad is not None}

    def _file(self, index: int) -> None:
        bucket, slot = self.places[id(self.held.members[index])]
        bucket.file(slot, self.reached[index])


class WatchedBlock:
    """What happens to gradients between the start and the end of a `watching()` block."""

    def __init__(self, every: Sequence[Replicated], transport: Transport, final: Final | None):
        self.transport, self.final = transport, final
        self.filings = [Filing(held) for held in every if held.buckets]
        self.early = [bucket for filing in self.filings for bucket in filing.buckets[:-1]]
        self.order = [*self.early, *(filing.buckets[-1] for filing in self.filings)]
        self.sent = 0
        self.needs: dict[int, list[tuple[int, Post]]] = {}
        """What the wait for a bucket needs from other ranks, if traced."""
        self.lock = threading.Lock()
        for bucket in self.order:
            bucket.begin(several=final is not None)
        self.handles = [
            member.parameter.register_post_accumulate_grad_hook(self._listener(filing, index, member.name))
            for filing in self.filings
            for index, member in enumerate(filing.held.members)
        ]

    def stop(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()

    def _listener(self, filing: Filing, index: int, name: str) -> Callable[[Tensor], None]:
        """The hook that a parameter calls when backward has added to its gradient."""

        def fired(_: Tensor) -> None:
            with self.lock:  # each device has its own thread in backward
                if filing.fired(index, self.final is None or self.final(name)):
                    while self.sent < len(self.early) and not self.early[self.sent].left:
                        self._launch()

        return fired

    def _launch(self, signals: tuple[int, int] = (0, 0)) -> None:
        """Send the next bucket."""
        bucket, begin = self.order[self.sent], time.perf_counter()
        self.sent += 1
        group = bucket.total.group
        if self.transport.traces:
            self.needs[id(bucket)] = self.transport.appointment("gradients", group)
        bucket.launch(signals)
        if backend_of(group).host_by_gloo and bucket.members[0].kind[1].type == "cpu":
            for record in self.transport.records:
                bucket.work.get_future().then(partial(note, record.events, begin))

    def finish(self, axes: tuple[str, ...]) -> None:
        """Send what is left, wait for all, and write the sums."""
        for filing in self.filings:
            filing.close()
        while self.sent < len(self.early):
            self._launch()
        # The last buckets are sent only here: they tell the others how this rank's backward ended.
        for filing in self.filings:
            self._launch((0, int(bool(filing.late))))
        with self.transport.span("bucket wait"):
            for bucket in self.order:
                self.transport.wait_for(bucket.work, "the sum of gradients", self.needs.get(id(bucket), ()))
        signals = [filing.buckets[-1].read_signals() for filing in self.filings]
        if any(raised for raised, _ in signals):
            raise PeerError("another rank raised inside its watching() block: see its log")
        for bucket in self.order:
            bucket.deliver()
        for filing, (_, late) in zip(self.filings, signals, strict=True):
            if late:
                with self.transport.meeting("gradients", filing.held.group):
                    add_late(filing.held, filing.late, axes)
            filing.held.learn(filing.seen, filing.fires, self.transport)

    def cancel(self, error: Exception) -> None:
        """Let no rank wait for this one: send what is left, marked as void, and forget what backward produced."""
        if not self.order:
            return
        self.transport.raised(error)
        with contextlib.suppress(RuntimeError):  # the end of a peer ends the waiting too
            while self.sent < len(self.order):
                self._launch((int(self.sent >= len(self.early)), 0))
            for bucket in self.order:
                self.transport.wait_for(bucket.work, "the end of a block that raised")
        for bucket in self.order:
            bucket.drop()
        if any(any(filing.reached) for filing in self.filings):
            for member in (member for filing in self.filings for member in filing.held.members):
                member.parameter.grad = None


def note(events: list[tuple[str, float, float]], begin: float, _: Any) -> None:
    """Record the time that a bucket was under way."""
    events.append(("bucket", begin, time.perf_counter()))


def add_late(held: Replicated, late: Mapping[int, Tensor], axes: tuple[str, ...]) -> None:
    """Add the sum of what backward added to gradients after they were sent."""
    parameters = [m.parameter for m in held.members]
    here = torch.tensor([int(id(p) in late) for p in parameters], device=held.members[0].kind[1])
    dist.all_reduce(here, group=held.group)
    wanted = [p for p, count in zip(parameters, here.tolist(), strict=True) if count]
    for bucket in in_buckets(wanted):
        flat = torch.cat([late.get(id(p), torch.zeros_like(p)).reshape(-1) for p in bucket]).mul_(held.share)
        dist.all_reduce(flat, group=held.group)
        for p, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            p.grad = part.view(p.shape) if p.grad is None else p.grad.add_(part.view(p.shape))
            mark_reduced(p.grad, axes)
