"""The reducer: gradients added up over ranks in buckets that leave while backward still runs.

    backward      ▒▒▒ layer 3 ▒▒▒ layer 2 ▒▒▒ layer 1 ▒▒▒|
    bucket 0            └──── all-reduce ────┘           |
    bucket 1                        └──── all-reduce ────┼──┘
    bucket 2 (the last leaves at the end of the block)   └── all-reduce ──┘

All ranks send the same buckets in the same order, on process groups that nothing else uses meanwhile (`WatchedBlock`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mural.channel.share import share_of
from mural.collectives.choose import BACKEND
from mural.errors import LayoutError, PlanError
from mural.gradients.bucket_sums import Rounds
from mural.gradients.buckets import is_reduced, mark_reduced
from mural.gradients.replicas import REPLICAS, group_along, named_axes
from mural.gradients.replicated import Replicated
from mural.gradients.watched_block import Final, WatchedBlock
from mural.ranks import Mesh

BUCKET_BYTES = 25 * 2**20

Named = list[tuple[str, Tensor]]

_busy: dict[dist.ProcessGroup, str] = {}
"""Why each group cannot be used now."""


class GradientSums:
    """Sums of gradients over the ranks that hold the same parameters, taken while backward runs.

    `sets` come in the same order on all ranks; each rank has those that it is part of. A smaller set comes before one
    that contains it: what fewer ranks hold need not wait for the others. `name` appears in errors. Collective.
    """

    def __init__(
        self,
        sets: Sequence[Replicated],
        mesh: Mesh,
        axes: tuple[str, ...] = REPLICAS,
        bucket_bytes: int = BUCKET_BYTES,
        algorithm: str = BACKEND,
        name: str = "Reducer",
    ):
        if bucket_bytes < 1:
            raise PlanError(f"bucket_bytes={bucket_bytes}: a bucket holds at least one byte")
        self.sets, self.mesh, self.axes, self.bucket_bytes, self.name = sets, mesh, axes, bucket_bytes, name
        self.named = [each for held in sets for each in held.named]
        self.rounds = None if algorithm == BACKEND else Rounds(algorithm)
        self._collect()

    def _collect(self) -> None:
        for held in self.sets:
            held.collect(self.axes, self.bucket_bytes, self.rounds, self.name, self.mesh.transport)

    @contextlib.contextmanager
    def watching(self, final: Final | None = None) -> Generator[None]:
        """Send gradients as backward produces them; after the block, all are added up.

        If several backwards add to a gradient, `final` says, by its parameter's name, whether the last one is running.
        """
        groups = [held.group for held in self.sets if held.group is not None]
        if busy := [_busy[group] for group in groups if group in _busy]:
            raise LayoutError(f"watching() on {self.mesh} along {', '.join(self.axes)}: {busy[0]}")
        self._collect()
        block = WatchedBlock(self.sets, self.mesh.transport, final)
        _busy.update(dict.fromkeys(groups, "another block is open; end it first, or give one reducer all parameters"))
        try:
            try:
                yield
            finally:
                block.stop()
            block.finish(self.axes)
        except Exception as error:
            block.cancel(error)
            raise
        except BaseException:
            why = "a block was interrupted before all its messages were sent; restart the ranks"
            _busy.update(dict.fromkeys(groups, why))
            groups = []
            raise
        finally:
            for group in groups:
                del _busy[group]
        for held in self.sets:
            held.added_up = True
            if held.group is None:
                held.mark(self.axes)

    def reopen(self) -> None:
        """Prepare for backwards that add to gradients that were already summed over ranks."""
        for held in self.sets:
            held.reopen()


class Reducer(GradientSums):
    """Averages gradients over data × spatial (or some of these `axes`) while backward runs.

    ```python
    reducer = Reducer(model.parameters(), mesh)
    with reducer.watching():
        loss.backward()
    ```

    `algorithm` is one of `mural.comm.all_reduce`'s: "backend" for the backend's own, "auto" for the fastest.

    After the block every `.grad` is what `reduce_gradients` would have made it. Backwards outside the block accumulate
    as usual, and the next one inside averages what they added. Parameters may be frozen and unfrozen between blocks, on
    all ranks alike. After the first block, buckets follow the order in which the first rank's backward reached the
    parameters. Parameters that are split by channels are averaged over the ranks that hold the same shares. Creating a
    reducer is collective, and so is the block. If a rank raises inside it, the others raise `PeerError` at its end, and
    the gradients are None on all ranks whose backward had begun.
    """

    def __init__(
        self,
        parameters: nn.Module | Mapping[str, Tensor] | Iterable[Tensor],
        mesh: Mesh,
        axes: Sequence[str] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        algorithm: str = BACKEND,
    ):
        along = named_axes(axes)
        whole, parts, split = by_holders(parameters, mesh)
        sets = [mean_of(parts, group_along(split, along))] if parts else []
        sets.append(mean_of(whole, group_along(mesh.folded, along)))
        super().__init__(sets, mesh, along, bucket_bytes, algorithm)


def reduce_gradients(model: nn.Module | Iterable[Tensor], mesh: Mesh) -> None:
    """Replace every parameter's `.grad` by the single-device gradient, on every rank; a second call changes nothing.

    The loss is the same number on every rank, and each rank differentiates its own copy; so the mean over
    the ranks is exact for sharded and for replicated parts of the model alike. Parameters that are split by channels
    are averaged over the ranks that hold the same share. Collective.
    """
    whole, parts, split = by_holders(model, mesh)
    group = mesh.transport.group  # nothing else is under way in it
    if group is None or group.size() != mesh.replicas:
        group = group_along(mesh.folded, REPLICAS)
    sets = [mean_of(parts, group_along(split, REPLICAS))] if parts else []
    sets.append(mean_of(whole, group))
    before = [(p, p.grad) for _, p in (*parts, *whole) if p.grad is not None and not is_reduced(p.grad)]
    with GradientSums(sets, mesh, name="reduce_gradients").watching():
        pass
    with torch.no_grad():
        for p, grad in before:  # the means go where the gradients were
            if p.grad is not None and p.grad is not grad:
                p.grad = grad.copy_(p.grad)
                mark_reduced(grad)


def by_holders(
    parameters: nn.Module | Mapping[str, Tensor] | Iterable[Tensor], mesh: Mesh
) -> tuple[Named, Named, Mesh]:
    """The parameters that are held whole, those that are split by channels, and the mesh that these are split over."""
    if isinstance(parameters, nn.Module):
        parameters = dict(parameters.named_parameters())
    if isinstance(parameters, Mapping):
        named: Iterable[tuple[str, Tensor]] = cast("Mapping[str, Tensor]", parameters).items()
    else:
        named = ((f"parameter {i} of shape {tuple(p.shape)}", p) for i, p in enumerate(parameters))
    distinct = list({id(p): (name, p) for name, p in named}.values())
    parts = [(name, p) for name, p in distinct if share_of(p) is not None]
    split = next((share.mesh for _, p in parts if (share := share_of(p)) is not None), mesh)
    return [(name, p) for name, p in distinct if share_of(p) is None], parts, split


def mean_of(named: Named, group: dist.ProcessGroup | None) -> Replicated:
    """Parameters whose gradients are averaged over a group."""
    return Replicated(named, group, 1.0 if group is None else 1 / group.size())
