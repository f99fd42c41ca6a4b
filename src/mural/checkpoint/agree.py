"""Agreement: what is tried on every rank succeeds on all of them, or raises the same error on all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch.distributed as dist

from mural.comm import Mesh
from mural.errors import CheckpointError, MuralError, PeerError

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
        result, failure = attempted(attempt)
        self.raise_any(failure)
        return cast(T, result)

    def on_first(self, attempt: Callable[[], T]) -> T:
        """What `attempt` returned on rank 0, on all ranks; where it raised, a `CheckpointError` on all."""
        return cast(T, self.gather(self.agree(lambda: attempt() if self.rank == 0 else None))[0])

    def raise_any(self, failure: Exception | None) -> None:
        """Raise on all ranks what any of them met."""
        try:
            texts = {rank: text for rank, text in enumerate(self.gather(describe(failure))) if text}
        except PeerError:
            if failure is not None:
                raise failure from None  # this rank knows more than that a peer is gone
            raise
        if texts:
            raise CheckpointError(told(texts, self.world)) from failure


def attempted(attempt: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """What a call returned, or what it raised."""
    try:
        return attempt(), None
    except Exception as error:
        return None, error


def describe(error: BaseException | None) -> str:
    """An error in words: mural's own messages as they are, others with their type."""
    if error is None:
        return ""
    return str(error) if isinstance(error, MuralError) else f"{type(error).__name__}: {error}"


def told(texts: Mapping[int, str], world: int) -> str:
    """What failed on which ranks, in one text; a failure common to all needs no rank.

    >>> told({1: "the disk is full"}, 2)
    'on rank 1: the disk is full'
    """
    by_text: dict[str, list[int]] = {}
    for rank, text in texts.items():
        by_text.setdefault(text, []).append(rank)
    parts: list[str] = []
    for text, ranks in by_text.items():
        where = f"on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: "
        parts.append(text if len(ranks) == world else where + text)
    return "; ".join(parts)
