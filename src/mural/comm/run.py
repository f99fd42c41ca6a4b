"""The run of a collective: a rank's program over a process group, on a flat tensor in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mural.comm.program import Key, Local, Message, Part, Program, program, segments_of
from mural.comm.rounds import Collective
from mural.comm.team import Call, Team
from mural.errors import PlanError


def run(collective: Collective, flat: Tensor, team: Team) -> Tensor:
    """The tensor, which holds at the end what the collective leaves on this rank. Collective.

    It is flat and contiguous, of the same size and type on every rank; CUDA tensors go through pinned memory where
    the backend sends from host memory alone.
    """
    if collective.ranks != team.size:
        raise PlanError(f"{collective.name} has {collective.ranks} ranks, but the group {team.size}")
    words = f"{collective.name} of {flat.numel()} values of {str(flat.dtype).removeprefix('torch.')}"
    if team.staged(flat):
        host = team.host_copy(flat.numel(), flat)
        host.copy_(flat)
        carry_out(collective, host, team, words)
        flat.copy_(host)
    else:
        carry_out(collective, flat, team, words)
    return flat


def carry_out(collective: Collective, flat: Tensor, team: Team, words: str) -> None:
    """Make the call, over memory that the backend can send from."""
    with team.calling(words) as call:
        if not flat.numel() and team.watch is not None:
            team.watch.tell(call)  # others may have values, and wait for this rank's
        segments = segments_of(collective, flat.numel(), flat.element_size()) if team.eager else 1
        steps = program(collective, team.rank, flat.numel(), segments)
        scratch = team.scratch(steps.scratch, flat, "scratch")
        spares = team.scratch(steps.spares, flat, "spares")
        buffers = Buffers((flat, *spares.split(flat.numel())) if steps.spares else (flat,), scratch)
        (one_by_one if team.eager else round_by_round)(steps, buffers, team, call)


class Buffers:
    """A tensor, its spare copies, and scratch memory."""

    def __init__(self, copies: Sequence[Tensor], scratch: Tensor):
        self.copies, self.scratch = copies, scratch

    def part(self, part: Part) -> Tensor:
        """A part of the tensor or of a spare copy."""
        return self.copies[part.spare][part.start : part.stop]

    def target(self, message: Message) -> Tensor:
        """Where a message arrives."""
        if message.slot < 0:
            return self.part(message.part)
        return self.scratch[message.slot : message.slot + message.part.stop - message.part.start]

    def settle(self, message: Message, arrived: Tensor) -> None:
        """Bring what arrived in scratch memory where it belongs."""
        if message.slot >= 0:
            self.combine(self.part(message.part), arrived, message.reduce)

    def local(self, step: Local) -> None:
        """Add or copy inside this rank."""
        self.combine(self.part(step.target), self.part(step.source), step.reduce)

    @staticmethod
    def combine(target: Tensor, source: Tensor, reduce: bool) -> None:
        """Add to the target, or replace it."""
        if reduce:
            torch.add(target, source, out=target)
        else:
            target.copy_(source)


def one_by_one(steps: Program, buffers: Buffers, team: Team, call: Call) -> None:
    """The steps over a backend whose messages are independent of each other."""
    group: Any = team.group
    tag, rows, last = call.tag, steps.steps, len(steps.steps)
    leaving: dict[Key, list[list[Any]]] = {}
    arriving: list[list[tuple[Message, Tensor, Any]]] = []

    def free(keys: Sequence[Key]) -> None:
        """Wait until what was sent from these places has left: a buffer is not reused before its send completes."""
        for key in keys:
            for ticket in leaving.pop(key, ()):
                if ticket:  # gloo would wait for another message the second time
                    ticket.pop().wait()

    def post(now: int) -> None:
        while len(arriving) < last and len(arriving) <= now + steps.ahead and rows[len(arriving)].ready <= now:
            posted: list[tuple[Message, Tensor, Any]] = []
            for message in rows[len(arriving)].receives:
                target = buffers.target(message)
                if message.slot < 0:
                    free(message.part.keys)
                posted.append((message, target, group.recv([target], message.peer, tag)))
            arriving.append(posted)

    if last and rows[0].ready == 0:
        post(0)
    for now, row in enumerate(rows):
        for message in row.sends:
            ticket = [group.send([buffers.part(message.part)], message.peer, tag)]
            for key in message.part.keys:
                leaving.setdefault(key, []).append(ticket)
        post(now)
        for message, arrived, work in arriving[now]:
            work.wait()
            if message.slot >= 0:
                free(message.part.keys)
                buffers.settle(message, arrived)
        for local in row.locals:
            free(local.target.keys)
            buffers.local(local)
    free(list(leaving))


def round_by_round(steps: Program, buffers: Buffers, team: Team, call: Call) -> None:
    """The steps over a backend that wants the messages of a round together, as NCCL does."""
    group: Any = team.group
    for row in steps.steps:
        targets = [buffers.target(message) for message in row.receives]
        posts = [(dist.irecv, t, m.peer) for m, t in zip(row.receives, targets, strict=True)]
        posts += [(dist.isend, buffers.part(m.part), m.peer) for m in row.sends]
        if posts:
            works = dist.batch_isend_irecv(
                [dist.P2POp(do, tensor, group=group, group_peer=peer) for do, tensor, peer in posts]
            )
            for work in works:
                work.wait()
        for message, arrived in zip(row.receives, targets, strict=True):
            buffers.settle(message, arrived)
        for local in row.locals:
            buffers.local(local)
