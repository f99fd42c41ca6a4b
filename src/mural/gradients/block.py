"""One backward's gradients: filed as they come, sent bucket by bucket in one order, awaited, and handed back."""

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
from mural.comm.groups import backend_of
from mural.comm.trace import Post
from mural.errors import PeerError
from mural.gradients.buckets import Bucket, Member
from mural.gradients.carriers import Carrier
from mural.gradients.reduction import buckets as in_buckets
from mural.gradients.reduction import grad_of, mark_reduced
from mural.gradients.waiting import wait_for


class Block:
    """What happens to the members' gradients between the begin and the end of a `watching()` block.

    `expected` says how often backward adds to each member: a reentrant checkpoint does so once for each of its regions.
    What is added more often comes late, after the gradient has left; it is kept apart, and averaged at the end.
    """

    def __init__(
        self,
        members: Sequence[Member],
        buckets: Sequence[Bucket],
        expected: Sequence[int],
        group: dist.ProcessGroup,
        transport: Transport,
        carrier: Carrier,
    ):
        self.members, self.buckets, self.expected = members, buckets, expected
        self.group, self.transport = group, transport
        self.backend = backend_of(group)
        self.carrier = carrier
        self.scale = 1.0 if carrier.averages else 1.0 / dist.get_world_size(group)
        self.places = {id(m): (bucket, slot) for bucket in buckets for slot, m in enumerate(bucket.members)}
        self.fires = [0] * len(members)
        self.seen: list[int] = []
        """Members in the order in which backward was done with them."""
        self.sent = 0
        self.needs: dict[int, list[tuple[int, Post]]] = {}
        """What the wait for a bucket needs of other ranks, where that is traced."""
        self.lock = threading.Lock()
        for bucket in buckets:
            bucket.begin()
        self.handles = [
            m.parameter.register_post_accumulate_grad_hook(self._listener(i)) for i, m in enumerate(members)
        ]

    def stop(self) -> None:
        """Listen no longer."""
        for handle in self.handles:
            handle.remove()

    def _listener(self, index: int) -> Callable[[Tensor], None]:
        """What a parameter calls when backward has added to its gradient."""
        bucket, slot = self.places[id(self.members[index])]

        def fired(_: Tensor) -> None:
            with self.lock:  # each device has a thread of its own in backward
                self.fires[index] += 1
                if self.fires[index] == self.expected[index]:
                    self.seen.append(index)
                    bucket.file(slot, self.scale, fired=True)
                    self._send(len(self.buckets) - 1)

        return fired

    def _send(self, limit: int, signals: tuple[int, int] = (0, 0)) -> None:
        """Send the buckets that are full, in order, up to a number of them; the last carries the signals."""
        while self.sent < limit and not self.buckets[self.sent].left:
            self._launch(self.buckets[self.sent], signals)
            self.sent += 1

    def _launch(self, bucket: Bucket, signals: tuple[int, int]) -> None:
        begin = time.perf_counter()
        if self.transport.traces:
            self.needs[id(bucket)] = self.transport.appointment("gradients", self.group)
        bucket.launch(self.group, self.carrier, signals if bucket is self.buckets[-1] else (0, 0))
        if self.backend == "gloo" and bucket.members[0].kind[1].type == "cpu":
            for record in self.transport.records:
                bucket.work.get_future().then(partial(note, record.events, begin))

    def finish(self, axes: tuple[str, ...]) -> None:
        """Send what is left, wait for all, and write the means."""
        if not self.buckets:
            return
        for member, fires, expected in zip(self.members, self.fires, self.expected, strict=True):
            if fires < expected:
                bucket, slot = self.places[id(member)]
                bucket.file(slot, self.scale, fired=fires > 0)
        late = {id(m.parameter): m.parameter.grad for m in self.members if m.parameter.grad is not None}
        # The last bucket is sent here and not before: it tells the others how this rank's backward ended.
        self._send(len(self.buckets), (0, int(bool(late))))
        with self.transport.span("bucket wait"):
            for bucket in self.buckets:
                wait_for(bucket.work, self.transport, "the mean of gradients", self.needs.get(id(bucket), ()))
        raised, someone_late = self.buckets[-1].read_signals()
        if raised:
            raise PeerError("another rank raised inside its watching() block: see its log")
        for bucket in self.buckets:
            bucket.deliver()
        if someone_late:
            with self.transport.meeting("gradients", self.group):
                add_late(self.members, late, self.group, axes)

    def cancel(self, error: Exception) -> None:
        """Let nobody wait for this rank: send what is left, marked as void, and forget all gradients."""
        self.transport.raised(error)
        with contextlib.suppress(RuntimeError):  # the end of a peer ends the waiting too
            for bucket in self.buckets[self.sent :]:
                self._launch(bucket, (1, 0))
            for bucket in self.buckets:
                wait_for(bucket.work, self.transport, "the end of a block that raised")
        for bucket in self.buckets:
            bucket.drop()
        for member in self.members:
            member.parameter.grad = None


def note(events: list[tuple[str, float, float]], begin: float, _: Any) -> None:
    """Put the time that a bucket was under way into a record."""
    events.append(("bucket", begin, time.perf_counter()))


def add_late(
    members: Sequence[Member], late: Mapping[int, Tensor], group: dist.ProcessGroup, axes: tuple[str, ...]
) -> None:
    """Add the mean of what backward added to gradients after they had left."""
    parameters = [m.parameter for m in members]
    here = torch.tensor([int(id(p) in late) for p in parameters], device=members[0].kind[1])
    dist.all_reduce(here, group=group)
    wanted = [p for p, count in zip(parameters, here.tolist(), strict=True) if count]
    for bucket in in_buckets(wanted):
        flat = torch.cat([late.get(id(p), torch.zeros_like(p)).reshape(-1) for p in bucket])
        dist.all_reduce(flat, group=group)
        offset = 0
        for p in bucket:
            grad = grad_of(p)
            grad.add_(flat[offset : offset + p.numel()].view(p.shape), alpha=1 / dist.get_world_size(group))
            mark_reduced(grad, axes)
            offset += p.numel()
