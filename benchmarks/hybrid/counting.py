"""A count of what leaves a rank: every call of the backend's send, with its bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist


@dataclass
class Sent:
    """The bytes of each message that this rank sent."""

    sizes: list[int] = field(default_factory=list[int])

    @property
    def messages(self) -> int:
        """How many they are."""
        return len(self.sizes)

    @property
    def bytes(self) -> int:
        """Of all of them."""
        return sum(self.sizes)


@contextmanager
def counting() -> Iterator[Sent]:
    """Count the messages of this rank inside the block, whoever sends them.

    All point-to-point messages go through one method of the process group. What the backend's own collectives send
    does not: those are counted as mural's ring would send them.
    """
    group: Any = dist.ProcessGroup
    sent, original = Sent(), group.send
    kept = vars(group)["send"]  # as it lies in the class: what an attribute gives would not be bound again

    def send(self: Any, tensors: Any, *rest: Any, **named: Any) -> Any:
        sent.sizes.append(sum(t.numel() * t.element_size() for t in tensors))
        return original(self, tensors, *rest, **named)

    group.send = send
    try:
        yield sent
    finally:
        group.send = kept


def over_ranks(value: Any) -> list[Any]:
    """What each rank has, on every rank. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
