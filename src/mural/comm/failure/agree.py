"""Agreement: what fails on one rank raises on every rank, instead of a wait for a rank that will not come.

    rank 0   work ──── all well? ── no ── what was it? ── raises what rank 1 met
    rank 1   work ✗ ── all well? ── no ── what was it? ── raises its own error

The ranks of a mesh tell each other by its transport, whose alarm ends the wait for a rank that raised elsewhere.
Without a mesh (None), this process agrees with itself.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from mural.comm.exchange import stack
from mural.comm.messages import Transfer, Transport
from mural.errors import MuralError, PeerError

T = TypeVar("T")


class MeshLike(Protocol):
    """What ranks need of a mesh to act together: who they are, and what carries their messages."""

    @property
    def rank(self) -> int:
        """This rank."""
        ...

    @property
    def world(self) -> int:
        """How many ranks there are."""
        ...

    @property
    def transport(self) -> Transport:
        """What carries their messages."""
        ...

    @property
    def members(self) -> tuple[int, ...]:
        """All ranks of the mesh."""
        ...

    def rows(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that differ from this one along one axis alone, for each axis that has several."""
        ...


class Met(NamedTuple):
    """A failure as other ranks hear of it: the kind of mural's errors that it is, if it is one, and its words."""

    kind: type[MuralError] | None
    text: str


@contextmanager
def together(mesh: MeshLike | None, what: str, kind: type[MuralError] = PeerError) -> Generator[None]:
    """A block without communication, which every rank leaves alike: where one raised, the others raise too. Collective.

    The rank that failed raises its own error; the others raise one that quotes it, of the same kind where that is one
    of mural's, else of `kind`.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error

    def tell(mine: Met | None) -> dict[int, Met | None]:
        return gather(mesh, mine, what) if any_rank(mesh, mine is not None)[0] else {}

    met = share_failure(failure, tell)
    if failure is not None:
        raise failure
    if met is not None:
        raise (met.kind or kind)(f"{what} failed {met.text}")


def share_failure(failure: Exception | None, tell: Callable[[Met | None], Mapping[int, Met | None]]) -> Met | None:
    """What any ranks met, in one text, with the first one's kind; None where all is well.

    `tell` gives every rank's, by rank. Where it raises, since a peer is gone, this rank's own failure says more.
    """
    kind = type(failure) if isinstance(failure, MuralError) else None
    try:
        told = tell(None if failure is None else Met(kind, describe(failure)))
    except PeerError:
        if failure is not None:
            raise failure from None
        raise
    met = {rank: each for rank, each in told.items() if each is not None}
    if not met:
        return None
    return Met(next(iter(met.values())).kind, by_rank({rank: each.text for rank, each in met.items()}, len(told)))


def describe(error: BaseException) -> str:
    """An error in words: mural's own messages as they are, others with their type."""
    return str(error) if isinstance(error, MuralError) else f"{type(error).__name__}: {error}"


def by_rank(texts: Mapping[int, str], world: int) -> str:
    """What failed on which ranks, in one text; a failure common to all needs no rank.

    >>> by_rank({1: "the disk is full"}, 2)
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


def any_rank(mesh: MeshLike | None, *mine: bool) -> tuple[bool, ...]:
    """For each statement whether it holds on any rank. Collective."""
    return tuple(greatest(mesh, torch.tensor(mine, dtype=torch.uint8, device="cpu"), "agreement").bool().tolist())


def greatest(mesh: MeshLike | None, values: Tensor, name: str) -> Tensor:
    """The largest of all ranks' numbers, place by place, the same on every rank. Collective."""
    if mesh is not None:
        for peers in mesh.rows():
            values = stack(values, peers, mesh.rank, mesh.transport, name).amax(0)
    return values


def said(mesh: MeshLike | None, texts: Sequence[str], name: str) -> list[str]:
    """The texts that ranks brought, place by place: that of the first rank which does not bring "". Collective.

    >>> said(None, ["a", ""], "names")
    ['a', '']
    """
    brought = gather(mesh, list(texts), name).values()
    return [next(filter(None, of_place), "") for of_place in zip(*brought, strict=True)]


def gather(mesh: MeshLike | None, value: T, name: str) -> dict[int, T]:
    """Every rank's value, by rank and in their order. Collective."""
    if mesh is None:
        return {0: value}
    ranks = mesh.members
    others = [rank for rank in ranks if rank != mesh.rank]
    if not others:
        return {mesh.rank: value}
    mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    length = torch.tensor([mine.numel()], device="cpu")
    lengths = Transfer(mesh.transport, name, dict.fromkeys(others, length), dict.fromkeys(others, 1), length).wait()
    sizes = {rank: int(n) for rank, n in lengths.items()}
    found = Transfer(mesh.transport, name, dict.fromkeys(others, mine), sizes, mine).wait()
    return {rank: value if rank == mesh.rank else pickle.loads(found[rank].numpy().tobytes()) for rank in ranks}
