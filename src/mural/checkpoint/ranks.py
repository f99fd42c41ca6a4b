"""The ranks that share a checkpoint: what they try succeeds on all of them, or raises the same error on all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch.distributed as dist

from mural.comm.failure.agree import share_failure
from mural.errors import CheckpointError, PeerError
from mural.ranks import Mesh

T = TypeVar("T")

WAIT = timedelta(hours=2)
"""How long ranks wait for the slowest one's disk. A rank that dies ends the wait at once."""

_groups: dict[int, tuple[Any, dist.ProcessGroup]] = {}
"""The group beside each world; the world is kept, so that no other gets its identity."""


@dataclass(frozen=True)
class Ranks:
    """The ranks that share a checkpoint, joined by a group whose messages never meet those of the training."""

    rank: int = 0
    world: int = 1
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, mesh: Mesh) -> Ranks:
        """All ranks of a mesh, over gloo whatever the training uses; collective."""
        if mesh.world == 1:
            return cls()
        key = id(dist.group.WORLD)
        if key not in _groups:
            _groups.clear()
            group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=WAIT))
            _groups[key] = (dist.group.WORLD, group)
        return cls(mesh.rank, mesh.world, _groups[key][1])

    def gather(self, value: T) -> list[T]:
        """Every rank's value, on every rank."""
        if self.group is None:
            return [value]
        found: list[Any] = [None] * self.world
        try:
            dist.all_gather_object(found, value, group=self.group)
        except RuntimeError as error:
            raise PeerError(f"a rank left while the ranks agreed on a checkpoint: {error}") from error
        return found

    def agree(self, attempt: Callable[[], T]) -> T:
        """What `attempt` returned on this rank; where it raised on any rank, a `CheckpointError` on all."""
        result: T | None = None
        failure: Exception | None = None
        try:
            result = attempt()
        except Exception as error:
            failure = error
        self.raise_any(failure)
        return cast(T, result)

    def on_first(self, attempt: Callable[[], T]) -> T:
        """What `attempt` returned on rank 0, on all ranks; where it raised, a `CheckpointError` on all."""
        return cast(T, self.gather(self.agree(lambda: attempt() if self.rank == 0 else None))[0])

    def raise_any(self, failure: Exception | None) -> None:
        """Raise on all ranks what any of them met."""
        met = share_failure(failure, lambda mine: dict(enumerate(self.gather(mine))))
        if met is not None:
            raise CheckpointError(met.text) from failure
