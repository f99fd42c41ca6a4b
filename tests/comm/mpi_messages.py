"""Checks of messages over MPI: their order, their memory, and that they travel while nobody waits."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mpi_collectives import gathers_in_every_type
from mpi_values import rank, same, size

from mural.comm.mpi import buffers
from mural.errors import PeerError, UnsupportedOp


def messages_arrive_in_their_order() -> None:
    right, left = (rank() + 1) % size(), (rank() - 1) % size()
    out = [torch.full((n,), float(i)) for i, n in enumerate((1, 100_000, 3, 40_000, 1))]
    back = [torch.empty_like(x) for x in out]
    works = [dist.isend(x, right) for x in out] + [dist.irecv(x, left) for x in back]
    for work in reversed(works):
        work.wait()
    for x, y in zip(out, back, strict=True):
        same(y, x)
    with_tags = [dist.irecv(back[0], left, tag=7), dist.irecv(back[2], left, tag=3)]
    with_tags += [dist.isend(out[2], right, tag=3), dist.isend(out[0], right, tag=7)]
    for work in with_tags:
        work.wait()
    same(back[0], out[0])
    same(back[2], out[2])


def batches_blocking_calls_and_any_source() -> None:
    peer, x, y = rank() ^ 1, torch.full((5,), float(rank())), torch.empty(5)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, y, peer)]):
        work.wait()
    same(y, torch.full((5,), float(peer)))
    if rank() == 0:
        seen = {dist.recv(y) for _ in range(size() - 1)}
        assert seen == set(range(1, size()))
    else:
        dist.send(x, 0)
    with pytest.raises(UnsupportedOp, match="tag"):
        dist.isend(x, peer, tag=2**14)


def tensors_with_gaps_travel() -> None:
    x = torch.arange(12.0).view(3, 4).t()[::2]
    y = torch.zeros(4, 6)[:, 1:4][::2]
    works = [dist.isend(x, (rank() + 1) % size()), dist.irecv(y, (rank() - 1) % size())]
    for work in works:
        work.wait()
    same(y, x)
    z = torch.ones(4, 4)[:, ::2]
    dist.all_reduce(z)
    same(z, torch.full((4, 2), float(size())))
    dist.broadcast(z.t(), src=0)


def large_messages_travel_in_parts() -> None:
    before, buffers.CHUNK_BYTES = buffers.CHUNK_BYTES, 1000
    try:
        gathers_in_every_type()
        x = torch.arange(10_001.0) + rank()
        y = torch.empty_like(x)
        works = [dist.isend(x, (rank() + 1) % size()), dist.irecv(y, (rank() - 1) % size())]
        for work in works:
            work.wait()
        same(y, torch.arange(10_001.0) + (rank() - 1) % size())
        dist.all_reduce(x)
        same(x, torch.arange(10_001.0) * size() + sum(range(size())))
        dist.broadcast(y, src=0)
    finally:
        buffers.CHUNK_BYTES = before


def sizes_that_differ_are_noticed() -> None:
    for given, wanted in ((3, 5), (5, 3)):
        group = dist.new_group()
        works = [
            dist.isend(torch.ones(given), (rank() + 1) % size(), group=group),
            dist.irecv(torch.empty(wanted), (rank() - 1) % size(), group=group),
        ]
        works[0].wait()
        with pytest.raises(PeerError):
            works[1].wait()


def operations_move_on_while_nobody_waits() -> None:
    x, y = torch.full((2**20,), float(rank())), torch.empty(2**20)
    total = torch.ones(2**18)
    works: list[Any] = [dist.irecv(y, (rank() - 1) % size()), dist.isend(x, (rank() + 1) % size())]
    works.append(dist.all_reduce(total, async_op=True))
    until = time.monotonic() + 20
    while not all(work.arrived for work in works) and time.monotonic() < until:
        time.sleep(0.01)  # the thread alone calls MPI meanwhile
    assert all(work.arrived for work in works)
    for work in works:
        work.wait()
    same(y, torch.full((2**20,), float((rank() - 1) % size())))
    same(total, torch.full((2**18,), float(size())))


def futures_complete_by_themselves() -> None:
    x = torch.full((1000,), float(rank()))
    work = dist.all_reduce(x, async_op=True)
    future = work.get_future().then(lambda done: done.value()[0] * 2)
    same(future.wait(), torch.full((1000,), 2.0 * sum(range(size()))))
    dist.barrier()


def buffers_outlive_their_callers() -> None:
    for _ in range(20):
        dist.isend(torch.full((30_000,), 5.0), (rank() + 1) % size())  # nobody keeps the tensor or the work
    y = torch.empty(30_000)
    for _ in range(20):
        dist.recv(y, (rank() - 1) % size())
        same(y, torch.full((30_000,), 5.0))
