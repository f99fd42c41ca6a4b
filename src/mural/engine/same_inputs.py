"""Same inputs: a plain tensor given to a call of a model has to be the same on every rank, and the ranks check it.

They compare checksums of all values in the first calls, and then less and less often: in calls 4, 8, 16, …
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any, NamedTuple, cast

from torch import Tensor

from mural.comm.failure.agree import gather
from mural.errors import LayoutError
from mural.memory.readable import Readable
from mural.ranks import Mesh
from mural.shard import ShardedTensor
from mural.shard.checksum import checksum
from mural.shard.tensor_agreement import SAMPLERS
from mural.shard.unread import Unread

UNREAD = "not read"
"""What a part is on a rank that does not take it: whatever the others have, it agrees."""
FIRST = 3
"""How many calls of each kind are compared without a gap."""


class GivenTensor(NamedTuple):
    """One tensor or source of what a rank gave: its name in the call, what it is in words, and its checksum."""

    name: str
    words: str
    sum: int


class SameInputs:
    """Compares what the ranks of a run give to the calls of one model."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.calls: Counter[str] = Counter()

    def check(self, call: str, **given: Any) -> None:
        """Raise on every rank where ranks gave different tensors. Collective in the calls that are compared."""
        number = self.calls[call]
        self.calls[call] += 1
        if self.mesh.world == 1 or not due(number):
            return
        mine = [part for name, value in given.items() for part in parts_of(name, value)]
        compare(call, gather(self.mesh, mine, "inputs"))


def due(number: int) -> bool:
    """Whether the call of that number is compared, counted from 0.

    >>> [n for n in range(100) if due(n)]
    [0, 1, 2, 4, 8, 16, 32, 64]
    """
    return number < FIRST or number & (number - 1) == 0


def parts_of(name: str, value: Any) -> Iterator[GivenTensor]:
    """The tensors and sources of an input or target; of pieces that a rank has for itself, that they are there."""
    if isinstance(value, ShardedTensor):
        yield GivenTensor(name, "a sharded tensor", 0)
    elif isinstance(value, Tensor):
        yield GivenTensor(name, f"a tensor of shape {tuple(value.shape)}, {value.dtype}", checksum(value))
    elif isinstance(value, Unread):
        yield GivenTensor(name, UNREAD, 0)
    elif isinstance(value, Readable):
        yield GivenTensor(
            name, f"the source {PurePath(str(getattr(value, 'name', ''))).name} of {tuple(value.shape)}", 0
        )
    elif isinstance(value, Mapping):
        for key, each in cast("Mapping[Any, Any]", value).items():
            yield from parts_of(f"{name}[{key!r}]", each)
    elif isinstance(value, (tuple, list)):
        for number, each in enumerate(cast("list[Any]", value)):
            yield from parts_of(f"{name}[{number}]", each)


def compare(call: str, given: Mapping[int, list[GivenTensor]]) -> None:
    """Raise if the ranks did not give the same; those that have not read a part are not asked for it."""
    by_rank = {rank: {part.name: part for part in parts} for rank, parts in given.items()}
    for name in dict.fromkeys(part.name for parts in given.values() for part in parts):
        found = {rank: parts.get(name) for rank, parts in by_rank.items()}
        have = {rank: part for rank, part in found.items() if part is None or part.words != UNREAD}
        first = min(have, default=0)
        if others := [rank for rank, part in have.items() if part != have[first]]:
            raise LayoutError(f"{call}: {difference(name, first, have[first], others, have[others[0]])}. {SAMPLERS}")


def difference(name: str, first: int, here: GivenTensor | None, others: list[int], there: GivenTensor | None) -> str:
    """How what some ranks gave differs from what the first one did."""
    ranks = f"rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}"
    if here is not None and there is not None and here.words == there.words:
        return f"{name} has other values on {ranks} than on rank {first}, on all of which it is {here.words}"
    what, other = (part.words if part is not None else "nothing" for part in (here, there))
    return f"{name} is {what} on rank {first}, but {other} on {ranks}"
