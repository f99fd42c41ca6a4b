"""A program: what one rank does in a collective, step by step, over a buffer of a given size.

Large chunks travel in segments, so that a segment is added while the next one travels, and goes on to the next rank
while others arrive. A step is one segment of one round:

    round 1, segment 1   send, receive, add       segments do not depend on each other;
    round 1, segment 2   send, receive, add       the rounds of one segment do
    round 2, segment 1   send, receive, add
    round 2, segment 2   send, receive, add

A send leaves as soon as what it reads is complete, even before its step: while a segment is added, the next one is
already on its way. Data to be added arrives in scratch memory: one area for each step ahead, reused. Data that replaces
goes straight to its place, as soon as nothing before it needs what is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from mural.collectives.rounds import ChunkSend, Collective, by_pair, divided

SEGMENT_BYTES = 2**21
"""The upper limit of a segment's size. Measured on 16 cores: for two ranks, half of this costs more than it hides."""
AHEAD = 2
"""How many steps ahead receives are posted."""

Key = tuple[int, int]
"""A place and a segment of it."""


@dataclass(frozen=True)
class BufferPart:
    """An interval of the buffer (spare 0) or of one of its spare copies, and what it covers."""

    spare: int
    start: int
    stop: int
    keys: tuple[Key, ...]


@dataclass(frozen=True)
class Message:
    """A part that is sent to a peer, or that a message from a peer is added to or replaces."""

    peer: int
    part: BufferPart
    reduce: bool
    slot: int = -1
    """Where in the scratch memory it arrives, in values; -1 for directly in its place."""


@dataclass(frozen=True)
class Local:
    """Values that are added to others on the same rank, or replace them."""

    source: BufferPart
    target: BufferPart
    reduce: bool


@dataclass(frozen=True)
class ProgramStep:
    """What a rank does in one segment of one round."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    locals: tuple[Local, ...]
    ready: int = 0
    """The step from which its receives may be posted: nothing needs the parts that they replace any more."""
    leave: int = 0
    """The step from which its sends may leave: what they read has its final value."""


@dataclass(frozen=True)
class RankProgram:
    """The steps of one rank, and what they need: scratch and spare memory in values, and steps ahead."""

    steps: tuple[ProgramStep, ...]
    scratch: int
    spares: int
    ahead: int


def segments_of(collective: Collective, values: int, size: int) -> int:
    """Into how many segments chunks are divided, for so many values of that size in bytes; the same on every rank.

    >>> [segments_of(Collective("ring", 2, 2, ()), 2**n, 4) for n in (19, 20, 21)]
    [1, 2, 3]
    """
    return 1 + values // collective.chunks * size // SEGMENT_BYTES


@lru_cache(maxsize=256)
def program(collective: Collective, rank: int, values: int, segments: int = 1, ahead: int = AHEAD) -> RankProgram:
    """What a rank does, with chunks in so many segments and receives posted so many steps ahead."""
    cut = [[(a + x, a + y) for x, y in divided(b - a, segments)] for a, b in collective.bounds(values)]

    def part(places: Sequence[int], segment: int) -> BufferPart:
        spare, first = divmod(places[0], collective.chunks)
        start, stop = cut[first][segment][0], cut[places[-1] % collective.chunks][segment][1]
        return BufferPart(spare, start, stop, tuple((place, segment) for place in places))

    steps: list[ProgramStep] = []
    for sends in collective.rounds:
        begun = len(steps) if collective.blocking else 0
        pairs = {
            pair: list(runs(between, collective.chunks if segments == 1 else 0))
            for pair, between in by_pair(sends).items()
            if rank in pair
        }
        stay = [s for s in sends if s.local and s.source == rank]
        for segment in range(segments):
            leave = [
                Message(to, part([s.chunk for s in run], segment), run[0].reduce)
                for (source, to), found in pairs.items()
                if source == rank
                for run in found
            ]
            arrive = [
                Message(source, part([s.place for s in run], segment), run[0].reduce)
                for (source, to), found in pairs.items()
                if to == rank
                for run in found
            ]
            here = [Local(part([s.chunk], segment), part([s.place], segment), s.reduce) for s in stay]
            step = ProgramStep(
                filled(leave), filled(arrive), tuple(h for h in here if h.target.stop > h.target.start), 0, begun
            )
            if step.sends or step.receives or step.locals:
                steps.append(step)
    return placed(steps, ahead, collective, values)


def runs(sends: Sequence[ChunkSend], chunks: int) -> Iterator[list[ChunkSend]]:
    """The sends between two ranks, grouped into messages: sends of consecutive chunks can be one message.

    `chunks` is how many chunks a buffer has; 0 gives messages of one chunk each.
    """
    run: list[ChunkSend] = []
    for send in sends:
        if run and not (chunks and follows(run[-1], send, chunks)):
            yield run
            run = []
        run.append(send)
    yield run


def follows(before: ChunkSend, send: ChunkSend, chunks: int) -> bool:
    """Whether a send is another one's for the next chunk, in the same copy: the next place may begin a spare copy.

    >>> a, b, c = (ChunkSend(0, 1, place, False) for place in range(3))
    >>> follows(a, b, 2), follows(b, c, 2)
    (True, False)
    """
    next_one = (send.chunk, send.place, send.reduce) == (before.chunk + 1, before.place + 1, before.reduce)
    return next_one and send.chunk % chunks > 0  # and so place % chunks: a chunk moves to its own places


def filled(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages that have values: a buffer may have fewer values than chunks."""
    return tuple(message for message in messages if message.part.stop > message.part.start)


def placed(steps: Sequence[ProgramStep], ahead: int, collective: Collective, values: int) -> RankProgram:
    """The program of some steps, with a place in memory for each receive."""
    sizes = [sum(m.part.stop - m.part.start for m in step.receives if through_scratch(m, step)) for step in steps]
    area = max(sizes, default=0)
    touched, written = dict[Key, int](), dict[Key, int]()
    found: list[ProgramStep] = []
    for index, step in enumerate(steps):
        leave = max([step.leave, *(written.get(key, -1) + 1 for send in step.sends for key in send.part.keys)])
        slot, ready, receives = index % (ahead + 1) * area, 0, list[Message]()
        for message in step.receives:
            if through_scratch(message, step):
                receives.append(replace(message, slot=slot))
                slot += message.part.stop - message.part.start
            else:
                receives.append(message)
                ready = max([ready, *(touched.get(key, -1) + 1 for key in message.part.keys)])
        found.append(replace(step, receives=tuple(receives), ready=ready, leave=leave))
        changed = [*(m.part for m in step.receives), *(local.target for local in step.locals)]
        written |= dict.fromkeys((key for part in changed for key in part.keys), index)
        read = [*(m.part for m in step.sends), *(local.source for local in step.locals)]
        touched |= dict.fromkeys((key for part in (*changed, *read) for key in part.keys), index)
    return RankProgram(tuple(found), area * min(ahead + 1, len(steps)), collective.spares * values, ahead)


def through_scratch(message: Message, step: ProgramStep) -> bool:
    """Whether what arrives is added, or replaces what the same step sends."""
    leaving = {key for send in step.sends for key in send.part.keys}
    return message.reduce or not leaving.isdisjoint(message.part.keys)
