"""A count of what leaves a rank: every call of the backend's send and all-reduce, with its bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch.distributed as dist


@dataclass
class Sent:
    """The bytes of each message that this rank sent, and of each tensor that it added up with so many ranks."""

    sizes: list[int] = field(default_factory=list[int])
    times: list[float] = field(default_factory=list[float])
    """When each of these messages was given to the backend, by `time.perf_counter`."""
    added: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    @property
    def messages(self) -> int:
        """How many they are."""
        return len(self.sizes)

    @property
    def bytes(self) -> int:
        """Of all of them."""
        return sum(self.sizes)

    @property
    def by_rings(self) -> float:
        """The bytes that a ring sends from this rank to add up what the backend's all-reduce added up."""
        return sum(2 * (ranks - 1) / ranks * size for size, ranks in self.added)


@contextmanager
def counting() -> Iterator[Sent]:
    """Count the messages and sums of this rank inside the block, whoever asks for them.

    Each goes through one method of the process group. How a backend sends what it adds up is not seen: see `by_rings`.
    """
    group: Any = dist.ProcessGroup
    sent, send, all_reduce = Sent(), group.send, group.allreduce
    # As they lie in the class: what an attribute gives would not be bound again.
    kept = {name: vars(group)[name] for name in ("send", "allreduce")}

    def counted_send(self: Any, tensors: Any, *rest: Any, **named: Any) -> Any:
        sent.times.append(perf_counter())
        sent.sizes.append(sum(t.nbytes for t in tensors))
        return send(self, tensors, *rest, **named)

    def counted_sum(self: Any, tensors: Any, *rest: Any, **named: Any) -> Any:
        sent.added.append((sum(t.nbytes for t in tensors), self.size()))
        return all_reduce(self, tensors, *rest, **named)

    group.send, group.allreduce = counted_send, counted_sum
    try:
        yield sent
    finally:
        for name, method in kept.items():
            setattr(group, name, method)


def over_ranks(value: Any) -> list[Any]:
    """What each rank has, on every rank. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
