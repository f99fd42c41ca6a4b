"""Parameters that the same ranks hold, with the buckets that sum their gradients over these ranks."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mural.comm import Transport
from mural.errors import LayoutError
from mural.gradients.bucket_sums import Rounds, Sum
from mural.gradients.buckets import Bucket, BucketMember, arrange, kind_of, mark_reduced


class Replicated:
    """Parameters that exactly the ranks of a group hold; None stands for this rank alone.

    `share` is the weight of this rank's gradients in the sum: 1 / n for the mean over n ranks.
    """

    def __init__(self, named: Sequence[tuple[str, Tensor]], group: dist.ProcessGroup | None, share: float):
        self.named, self.group, self.share = list(named), group, share
        self.state: list[Any] | None = None
        self.members: list[BucketMember] = []
        self.buckets: list[Bucket] = []
        self.expected: list[int] = []
        """How often the last backward adds to each member: with reentrant checkpoints, once for each region."""
        self.learned = self.added_up = False

    def collect(self, axes: tuple[str, ...], size: int, rounds: Rounds | None, name: str, transport: Transport) -> None:
        """Create buckets for the parameters that now require a gradient, first in reverse order. Collective if new."""
        if self.group is None:
            return
        state = [(p.requires_grad, *kind_of(p)) for _, p in self.named]
        if state == self.state:
            return
        members = [BucketMember.of(label, p) for label, p in self.named if p.requires_grad]
        check_same([m.parameter for m in members], self.group, name, transport)
        self.state, self.members, self.expected, self.learned = state, members, [1] * len(members), False
        self.axes, self.size, self.total = axes, size, Sum(self.group, self.share, rounds)
        self.fill(list(reversed(range(len(members)))))

    def fill(self, order: Sequence[int]) -> None:
        """Put the members into buckets, in that order."""
        found = arrange([(m.bytes, m.kind) for m in self.members], order, self.size)
        self.buckets = [Bucket([self.members[i] for i in indices], self.axes, self.total) for indices in found]

    def learn(self, seen: Sequence[int], fires: Sequence[int], transport: Transport) -> None:
        """After the first block, adopt the first rank's order; after each, expect the most additions seen so far."""
        if not self.learned and self.members:
            unseen = set(range(len(self.members))).difference(seen)
            order = torch.tensor([*seen, *sorted(unseen)], device=self.members[0].kind[1])
            with transport.meeting("gradients", self.group):
                dist.broadcast(order, group_src=0, group=self.group)
            self.fill(order.tolist())
        self.learned = True
        self.expected = [max(pair) for pair in zip(self.expected, fires, strict=True)]

    def mark(self, axes: tuple[str, ...]) -> None:
        """If this rank is alone, what backward produced is already the sum."""
        for _, p in self.named:
            if p.grad is not None and p.requires_grad:
                mark_reduced(p.grad, axes)

    def reopen(self) -> None:
        """Divide gradients that were already summed over their ranks again, so that the next sum counts them once.

        A mean leaves equal gradients unchanged. Other sums count them once for each stage.
        """
        if self.added_up and self.group is not None and self.share != 1 / self.group.size():
            for _, p in self.named:
                if p.grad is not None and p.requires_grad:
                    p.grad.mul_(1 / (self.share * self.group.size()))
        self.added_up = False


def check_same(tensors: Sequence[Tensor], group: dist.ProcessGroup, name: str, transport: Transport) -> None:
    """Raise on every rank of a group if the ranks have different lists of tensors."""
    code = zlib.crc32(repr([(tuple(t.shape), t.dtype) for t in tensors]).encode())
    device = tensors[0].device if tensors else torch.device("cpu")
    both = torch.tensor([code, -code, len(tensors), -len(tensors)], device=device)
    work: Any = dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group, async_op=True)
    transport.wait_for(work, name)
    if both[0] != -both[1] or both[2] != -both[3]:
        raise LayoutError(
            f"{name} got different parameters on different ranks (here {len(tensors)}, elsewhere {int(-both[3])} to "
            f"{int(both[2])}, or of other shapes): give every rank the same model"
        )
