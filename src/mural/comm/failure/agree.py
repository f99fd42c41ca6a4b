"""Agreement: what fails on one rank raises on every rank, so that no rank waits for one that will not come.

    rank 0   work ──── all well? ── no ── what was it? ── raises what rank 1 met
    rank 1   work ✗ ── all well? ── no ── what was it? ── raises its own error

The ranks of a mesh tell each other through its transport, whose alarm ends the wait for a rank that raised elsewhere;
those of a process group use its own collectives. Without either (None), this process agrees with itself.
"""

from __future__ import annotations

import pickle
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mural.comm.channels import Channels
from mural.comm.exchange import stack
from mural.comm.failure.connections import abort_all, ended, hang_up, reason
from mural.comm.failure.shared_fate import ANEW
from mural.comm.groups import kept, leave
from mural.comm.messages import Transfer, Transport
from mural.errors import MuralError, PeerError

T = TypeVar("T")


class MeshLike(Protocol):
    """The ranks of a mesh, as this one of them sees them."""

    @property
    def rank(self) -> int:
        """This rank's number in the run."""
        ...

    @property
    def world(self) -> int:
        """How many ranks there are."""
        ...

    @property
    def transport(self) -> Transport:
        """The transport of their messages."""
        ...

    @property
    def everyone(self) -> tuple[int, ...]:
        """All of them, in order."""
        ...

    @property
    def lines(self) -> tuple[tuple[int, ...], ...]:
        """Those in line with this one, for each axis along which there are several."""
        ...


class Met(NamedTuple):
    """A failure as other ranks see it: its class if it is one of mural's errors, and its text."""

    kind: type[MuralError] | None
    text: str

    @classmethod
    def of(cls, failure: Exception | None) -> Met | None:
        """The failure of this rank; None if it did not fail."""
        kind = type(failure) if isinstance(failure, MuralError) else None
        return None if failure is None else cls(kind, describe(failure))


@contextmanager
def together(
    among: MeshLike | dist.ProcessGroup | None, what: str = "", kind: type[MuralError] = PeerError, same: bool = False
) -> Generator[None]:
    """A block without communication, which every rank leaves alike: if one raises, the others raise too. Collective.

    The rank that failed raises its own error; the others raise one that quotes it, of the same kind where that is one
    of mural's, else of `kind`. With `same`, all raise the same text, as an error of `kind`.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    mine = Met.of(failure)
    try:
        if not isinstance(among, dist.ProcessGroup) and not any_rank(among, mine is not None)[0]:
            return
        met = joined(gather(among, mine, what))
    except PeerError:  # a peer is gone: this rank's own failure tells more
        if failure is not None:
            raise failure from None
        raise
    if met is None:
        return
    if failure is not None and not same:
        raise failure
    found = kind if same else met.kind or kind
    raise found(f"{what} failed {met.text}" if what else met.text) from failure


def joined(told: Mapping[int, Met | None]) -> Met | None:
    """The failures of all ranks in one text, with the class of the first one; None if no rank failed."""
    met = {rank: each for rank, each in told.items() if each is not None}
    if not met:
        return None
    return Met(next(iter(met.values())).kind, by_rank({rank: each.text for rank, each in met.items()}, len(told)))


def describe(error: BaseException) -> str:
    """An error as text: mural's own messages unchanged, others with their type."""
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
    """For each statement, whether it holds on any rank. Collective."""
    return tuple(greatest(mesh, torch.tensor(mine, dtype=torch.uint8, device="cpu"), "agreement").bool().tolist())


def greatest(mesh: MeshLike | None, values: Tensor, name: str) -> Tensor:
    """The elementwise maximum of all ranks' numbers, the same on every rank. Collective."""
    if mesh is not None:
        for line in mesh.lines:
            values = stack(values, line, mesh.rank, mesh.transport, name).amax(0)
    return values


def said(mesh: MeshLike | None, texts: Sequence[str], name: str) -> list[str]:
    """For each position, the text of the first rank whose text is not empty. Collective.

    >>> said(None, ["a", ""], "names")
    ['a', '']
    """
    brought = gather(mesh, list(texts), name).values()
    return [next(filter(None, of_place), "") for of_place in zip(*brought, strict=True)]


def gather(among: MeshLike | dist.ProcessGroup | None, value: T, name: str) -> dict[int, T]:
    """Every rank's value by rank, in rank order. Collective."""
    if among is None:
        return {0: value}
    if isinstance(among, dist.ProcessGroup):
        return _gathered(among, value, name)
    others = [rank for rank in among.everyone if rank != among.rank]
    if not others:
        return {among.rank: value}
    mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    length = torch.tensor([mine.numel()], device="cpu")
    lengths = Transfer(among.transport, name, dict.fromkeys(others, length), dict.fromkeys(others, 1), length).wait()
    sizes = {rank: int(n) for rank, n in lengths.items()}
    found = Transfer(among.transport, name, dict.fromkeys(others, mine), sizes, mine).wait()
    told = {rank: pickle.loads(buffer.numpy().tobytes()) for rank, buffer in found.items()}
    return {rank: told.get(rank, value) for rank in among.everyone}


def _gathered(group: dist.ProcessGroup, value: T, name: str) -> dict[int, T]:
    found: list[Any] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(found, value, group=group)
    except RuntimeError as error:
        raise PeerError(f"{name}: a rank left while the ranks agreed: {reason(error)}: see its log") from error
    return dict(zip(dist.get_process_group_ranks(group), found, strict=True))


class AgreedSteps:
    """The steps of a model in stages, each of which ends alike on all ranks; `seat` has this rank's stages.

        rank 0   prepare ── run ── (waits for rank 1's message) ─ PeerError ──┐
        rank 1   prepare ── run ✗ rings every alarm that a rank may wait by ──┤ agree: all raise
        rank 2   prepare ── run, to its end ──────────────────────────────────┘

    Without the agreement rank 2 would go on to add up gradients, and wait there for ranks that do not come.
    """

    def __init__(self, world: Transport, seat: Transport, channels: Channels | None):
        self.world, self.seat, self.channels = world, seat, channels
        # A separate alarm: what ranks heard in a step does not keep them from agreeing after it.
        self.ends = kept(world.group, "ends of steps", lambda: world.fork("ends of steps"))
        self.broken = ""
        """What ended a step in which messages were under way; no step can follow it."""
        self.running = False

    @contextmanager
    def step(self) -> Generator[None]:
        """A block in which ranks may wait for each other, and which they leave alike. Collective."""
        if self.broken:
            again = ANEW if self.seat is self.world else "parallelize the model again"
            raise PeerError(f"an earlier step failed ({self.broken}): {again}")
        self.running = False
        if self.channels is not None:
            self.channels.begin()
        failure: Exception | None = None
        try:
            yield
        except BaseException as error:
            self._ring(error)
            if not isinstance(error, Exception):
                raise
            failure = error
        self._agree(failure)

    def begin(self) -> None:
        """Note that messages are sent from here on."""
        self.running = True

    def _ring(self, error: BaseException) -> None:
        """End the waits of others for this rank, between stages and within its own."""
        transport = self.seat
        every = [self.world, transport, *(self.channels.transports if self.channels is not None else ())]
        if ended(error, *(t.alarm.heard for t in every[1:] if t.alarm is not None)):
            for each in every:
                hang_up(each.group)
        if self.channels is not None:
            self.channels.raised(error)
        if transport.alarm is not None:
            with suppress(RuntimeError):  # the others still receive what was posted before
                transport.flush()
            transport.alarm.ring(transport.serial, error)

    def _agree(self, failure: Exception | None) -> None:
        """Raise on all ranks if one failed."""
        group = self.world.group
        if group is None:
            if failure is not None:
                raise failure
            return
        try:
            failed, began = self._counted(failure is not None, failure is not None and self.running)
            if not failed:
                return
            if began or failed < dist.get_world_size(group):
                self._give_up("on another rank")
            met = joined(gather(group, Met.of(failure), "the step"))
        except RuntimeError as error:  # the group was ended with the wait for a rank that failed
            self._give_up(str(error).splitlines()[0])
            self.ends.raised(error)
            raise failure or PeerError(f"the step failed on another rank: {error}") from error
        if failure is not None:
            self.broken = self.broken and f"{type(failure).__name__}: {failure}".splitlines()[0]
            raise failure
        raise PeerError(f"the step failed {met.text if met else ''}")

    def _give_up(self, reason: str) -> None:
        """Send nothing more over the transports of this step: its messages may still be under way."""
        self.broken = reason
        leave(self.world.group)
        abort_all(f"a step failed ({reason})")
        if self.seat.alarm is not None:
            self.seat.alarm.heard = self.seat.alarm.heard or f"a step failed ({reason})"

    def _counted(self, *mine: bool) -> list[int]:
        """On how many ranks each statement holds."""
        transport = self.ends
        counts = transport.outbound(torch.tensor(mine, dtype=torch.float32))
        group = transport.group
        needs = transport.appointment("agreement", group) if transport.traces and group is not None else ()
        work = dist.all_reduce(counts, group=group, async_op=True)
        transport.wait_for(work, "the end of a step", needs, kind="agreement", on_host=True)
        return [round(count) for count in counts.tolist()]
