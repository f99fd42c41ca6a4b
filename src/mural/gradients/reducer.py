"""The reducer: gradients averaged over ranks in buckets that leave while backward still runs.

    backward      ▒▒▒ layer 3 ▒▒▒ layer 2 ▒▒▒ layer 1 ▒▒▒|
    bucket 0            └──── all-reduce ────┘           |
    bucket 1                        └──── all-reduce ────┼──┘
    bucket 2 (the last leaves at the end of the block)   └── all-reduce ──┘

Every rank sends the same buckets in the same order, on a process group that nothing else uses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mural.channel.share import share_of
from mural.collectives.choose import BACKEND
from mural.errors import LayoutError, PlanError, UnsupportedOp
from mural.gradients.block import Block
from mural.gradients.buckets import Bucket, Member, arrange
from mural.gradients.carriers import carrier_of
from mural.gradients.fibres import group_of, named_axes
from mural.gradients.reduction import check_same, mark_reduced
from mural.ranks import Mesh

BUCKET_BYTES = 25 * 2**20

_busy: dict[dist.ProcessGroup, str] = {}
"""Why a group cannot be used now."""


class Reducer:
    """Averages gradients over data × spatial (or some `axes` of these) while backward runs.

    ```python
    reducer = Reducer(model.parameters(), mesh)
    with reducer.watching():
        loss.backward()
    ```

    `algorithm` is one of `mural.comm.all_reduce`'s: "backend" for the backend's own, "auto" for the fastest.

    Behind the block every `.grad` is what `reduce_gradients` would have made of it. Backwards outside of the block
    accumulate as usual, and the next one inside averages what they added. Parameters may be frozen and unfrozen
    between blocks, on all ranks alike. After the first block, buckets follow the order in which the first rank's
    backward reached the parameters. Parameters that are split by channels need a reducer of their own, which averages
    over the ranks that hold the same shares. Making a reducer is collective, and so is the block. If a rank raises
    inside it, the others raise `PeerError` at its end, and the gradients of all are None.
    """

    def __init__(
        self,
        parameters: nn.Module | Iterable[Tensor],
        mesh: Mesh,
        axes: Sequence[str] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        algorithm: str = BACKEND,
    ):
        if bucket_bytes < 1:
            raise PlanError(f"bucket_bytes={bucket_bytes}: a bucket holds at least one byte")
        named = parameters.named_parameters() if isinstance(parameters, nn.Module) else numbered(parameters)
        self.named = list({id(p): (name, p) for name, p in named}.values())
        self.mesh, self.axes, self.bucket_bytes = holders(self.named, mesh), named_axes(axes), bucket_bytes
        for name, p in self.named:
            if p.is_complex():
                raise UnsupportedOp(f"{name} is {p.dtype}: the reducer averages real gradients; use reduce_gradients")
        self.group = group_of(self.mesh, self.axes)
        self.carrier = carrier_of(algorithm, self.group)
        self._collect()

    def _collect(self) -> None:
        """Make buckets for the parameters that require a gradient now, first in reverse order."""
        self.state = self._look()
        self.members = [Member.of(name, p) for name, p in self.named if p.requires_grad]
        self.expected = [1] * len(self.members)
        self.learned = False
        if self.group is not None:
            check_same([m.parameter for m in self.members], self.group, "Reducer")
        self._fill(list(reversed(range(len(self.members)))))

    def _look(self) -> list[Any]:
        """What the buckets depend on."""
        return [(p.requires_grad, p.dtype, p.device) for _, p in self.named]

    def _fill(self, order: Sequence[int]) -> None:
        """Put the members into buckets, in that order."""
        found = arrange([(m.bytes, m.kind) for m in self.members], order, self.bucket_bytes)
        self.buckets = [Bucket([self.members[i] for i in indices], self.axes) for indices in found]

    @contextlib.contextmanager
    def watching(self) -> Generator[None]:
        """Send gradients off as backward makes them; behind the block, all are averaged."""
        group = self.group
        if group is None:
            yield
            self._mark()
            return
        if group in _busy:
            raise LayoutError(f"watching() on {self.mesh} along {', '.join(self.axes)}: {_busy[group]}")
        if self._look() != self.state:
            self._collect()
        block = Block(self.members, self.buckets, self.expected, group, self.mesh.transport, self.carrier)
        _busy[group] = "another block is open; end it first, or give one reducer all parameters"
        try:
            try:
                yield
            finally:
                block.stop()
            block.finish(self.axes)
        except Exception as error:
            block.cancel(error)
            del _busy[group]
            raise
        except BaseException:
            _busy[group] = "a block was interrupted before all its messages were sent; start the ranks anew"
            raise
        del _busy[group]
        self._learn(block, group)

    def _mark(self) -> None:
        """Where one rank is all ranks, what backward made is the mean."""
        for _, p in self.named:
            if p.grad is not None and p.requires_grad:
                mark_reduced(p.grad, self.axes)

    def _learn(self, block: Block, group: dist.ProcessGroup) -> None:
        """After the first block, follow the first rank's order; after each, expect what a parameter ever did."""
        if not self.learned and self.members:
            unseen = set(range(len(self.members))).difference(block.seen)
            order = torch.tensor([*block.seen, *sorted(unseen)], device=self.members[0].kind[1])
            with self.mesh.transport.meeting("gradients", group):
                dist.broadcast(order, group_src=0, group=group)
            self._fill(order.tolist())
        self.learned = True
        self.expected = [max(pair) for pair in zip(self.expected, block.fires, strict=True)]


def holders(named: Sequence[tuple[str, Tensor]], mesh: Mesh) -> Mesh:
    """The mesh whose data and spatial axes are the ranks that hold the same parameters."""
    shares = [share for _, p in named if (share := share_of(p)) is not None]
    if not shares:
        return mesh.folded
    if len(shares) < len(named):
        raise PlanError(
            f"a reducer got {len(shares)} parameters that are split by channels, as {shares[0].name}, among "
            f"{len(named)}: make one reducer of those, and one of the rest"
        )
    return shares[0].mesh


def numbered(parameters: Iterable[Tensor]) -> Iterable[tuple[str, Tensor]]:
    """Parameters without names, by their numbers."""
    return ((f"parameter {i} of shape {tuple(p.shape)}", p) for i, p in enumerate(parameters))
