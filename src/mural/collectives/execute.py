"""Running a collective: a rank's program over a process group, on a flat tensor in place.

A call of 64 KiB takes a fifth of a millisecond, so overhead counts. What does not change is cached from call to call:
the program, the scratch memory and its slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mural.collectives.program import BufferPart, Key, RankProgram, program, segments_of
from mural.collectives.rounds import Collective
from mural.collectives.team import CollectiveCall, Team
from mural.errors import PlanError

KEPT_JOBS, KEPT_BYTES = 64, 2**27
"""How many jobs a team keeps, and how many bytes of scratch memory; beyond that, they are created again."""


class CollectiveJob:
    """A collective over tensors of one size and type, ready to be run again and again."""

    def __init__(self, collective: Collective, flat: Tensor, team: Team):
        if collective.ranks != team.size:
            raise PlanError(f"{collective.name} has {collective.ranks} ranks, but the group {team.size}")
        values = flat.numel()
        self.collective = collective
        self.words = f"{collective.name} of {described(flat)}, rounds {collective.digest}"
        segments = segments_of(collective, values, flat.element_size()) if team.backend.eager else 1
        self.program: RankProgram = program(collective, team.rank, values, segments)
        memory = torch.empty(self.program.scratch + self.program.spares, dtype=flat.dtype, device=flat.device)
        self.bytes = memory.nbytes
        scratch, spares = memory.split([self.program.scratch, self.program.spares])
        self.spares: list[Tensor] = list(spares.split(values)) if self.program.spares else []
        self.slots = [
            [None if m.slot < 0 else scratch[m.slot : m.slot + m.part.stop - m.part.start] for m in step.receives]
            for step in self.program.steps
        ]

    def part(self, flat: Tensor, part: BufferPart) -> Tensor:
        """A part of the tensor or of one of its spare copies."""
        return (self.spares[part.spare - 1] if part.spare else flat)[part.start : part.stop]


def run(collective: Collective, flat: Tensor, team: Team, options: str = "") -> Tensor:
    """The tensor, which now holds what the collective leaves on this rank. Collective.

    It is flat and contiguous, with the same size and type on every rank; CUDA tensors go through pinned memory if the
    backend sends from host memory only. `options` is text that has to be the same on every rank.
    """
    if not team.staged(flat):
        carry_out(job_of(collective, flat, team), flat, team, options)
        return flat
    host = team.host_copy(flat)
    carry_out(job_of(collective, host, team), host, team, options)
    return flat.copy_(host)


def described(flat: Tensor) -> str:
    """A description of a tensor's values."""
    return f"{flat.numel()} values of {str(flat.dtype).removeprefix('torch.')}"


def job_of(collective: Collective, flat: Tensor, team: Team) -> CollectiveJob:
    """The job for such a tensor, created at the first call."""
    key = (id(collective), flat.numel(), flat.dtype, flat.device)  # a job keeps its collective, so ids stay apart
    job = team.jobs.get(key)
    if job is None:
        if len(team.jobs) >= KEPT_JOBS or sum(each.bytes for each in team.jobs.values()) > KEPT_BYTES:
            team.jobs.clear()
        job = team.jobs[key] = CollectiveJob(collective, flat, team)
    return job


def carry_out(job: CollectiveJob, flat: Tensor, team: Team, options: str) -> None:
    """Make the call, over memory that the backend can send from."""
    with team.calling(job.words + options) as call:
        if not flat.numel() and team.calls is not None:
            team.calls.tell(call)  # others may have values, and wait for this rank
        team.connect(flat)
        (one_by_one if team.backend.eager else round_by_round)(job, flat, team.group, call)


def one_by_one(job: CollectiveJob, flat: Tensor, group: Any, call: CollectiveCall) -> None:
    """Run the steps over a backend whose messages are independent of each other."""
    tag, rows, ahead = call.tag, job.program.steps, job.program.ahead
    leaving: dict[Key, list[list[Any]]] = {}
    arriving: list[list[Any]] = []
    departed = 0

    def free(keys: Sequence[Key]) -> None:
        """Wait until the sends from these places are complete: a buffer is not reused before."""
        for key in keys:
            for ticket in leaving.pop(key, ()):
                if ticket:  # gloo would wait for another message the second time
                    ticket.pop().wait()

    def post(now: int) -> None:
        while (at := len(arriving)) < len(rows) and at <= now + ahead and rows[at].ready <= now:
            works: list[Any] = []
            for message, slot in zip(rows[at].receives, job.slots[at], strict=True):
                if slot is None:
                    free(message.part.keys)
                    slot = job.part(flat, message.part)
                works.append(group.recv([slot], message.peer, tag))
            arriving.append(works)

    post(0)
    for now, row in enumerate(rows):
        while departed < len(rows) and rows[departed].leave <= now:
            for message in rows[departed].sends:
                ticket = [group.send([job.part(flat, message.part)], message.peer, tag)]
                for key in message.part.keys:
                    leaving.setdefault(key, []).append(ticket)
            departed += 1
        post(now)
        for message, slot, work in zip(row.receives, job.slots[now], arriving[now], strict=True):
            work.wait()
            if slot is not None:
                free(message.part.keys)
                combine(job.part(flat, message.part), slot, message.reduce)
        for local in row.locals:
            free(local.target.keys)
            combine(job.part(flat, local.target), job.part(flat, local.source), local.reduce)
    free(list(leaving))


def round_by_round(job: CollectiveJob, flat: Tensor, group: Any, call: CollectiveCall) -> None:
    """Run the steps over a backend that needs the messages of a round together, such as NCCL."""
    for row, slots in zip(job.program.steps, job.slots, strict=True):
        arriving = list(zip(row.receives, slots, strict=True))
        posts = [(dist.irecv, job.part(flat, m.part) if slot is None else slot, m.peer) for m, slot in arriving]
        posts += [(dist.isend, job.part(flat, m.part), m.peer) for m in row.sends]
        if posts:
            operations = [dist.P2POp(do, tensor, group=group, group_peer=peer) for do, tensor, peer in posts]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        for message, slot in arriving:
            if slot is not None:
                combine(job.part(flat, message.part), slot, message.reduce)
        for local in row.locals:
            combine(job.part(flat, local.target), job.part(flat, local.source), local.reduce)


def combine(target: Tensor, source: Tensor, reduce: bool) -> None:
    """Add to the target, or replace it."""
    if reduce:
        torch.add(target, source, out=target)
    else:
        target.copy_(source)
