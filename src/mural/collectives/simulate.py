"""The simulation of a collective: its rounds in one process, on plain values."""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from copy import deepcopy
from typing import Any, TypeVar

from mural.collectives.rounds import Collective, by_pair
from mural.errors import PlanError

Values = TypeVar("Values", bound=Sequence[Any])


def simulate(collective: Collective, values: Sequence[Values]) -> list[Values]:
    """What each rank holds at the end, from what each starts with: lists of anything that adds, flat arrays or tensors.

    The additions and their order are those of a real run, so the bits are too. The inputs do not change.

    >>> from mural.collectives.algorithms import ring
    >>> simulate(ring(3), [["a", "a", "a"], ["b", "b", "b"], ["c", "c", "c"]])[0]
    ['acb', 'bac', 'cba']
    """
    if len(values) != collective.ranks or len({len(each) for each in values}) != 1:
        raise PlanError(
            f"{collective.name} has {collective.ranks} ranks, but values of lengths {[len(v) for v in values]} were "
            "given: bring as many on every rank"
        )
    bounds = collective.bounds(len(values[0]))
    held: list[dict[int, Any]] = [{c: mine[a:b] for c, (a, b) in enumerate(bounds)} for mine in values]
    for sends in collective.rounds:
        arriving = [(s, held[s.source][s.chunk]) for between in by_pair(sends).values() for s in between]
        for send, piece in arriving:
            at = held[send.destination]
            at[send.place] = added(at[send.place], piece) if send.reduce else piece
        for send in (s for s in sends if s.local):
            at = held[send.source]
            at[send.place] = added(at[send.place], at[send.chunk]) if send.reduce else at[send.chunk]
    found = [deepcopy(mine) for mine in values]
    for mine, pieces in zip(found, held, strict=True):
        for chunk, (a, b) in enumerate(bounds):
            target: Any = mine
            target[a:b] = pieces[chunk]
    return found


def added(own: Any, arrived: Any) -> Any:
    """The sums of two pieces, in a new one."""
    if isinstance(own, MutableSequence):
        return [a + b for a, b in zip(own, arrived, strict=True)]
    return own + arrived
