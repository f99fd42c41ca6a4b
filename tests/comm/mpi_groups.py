"""Checks of process groups over MPI: those of some ranks, several at once, and ones that are given up."""

from __future__ import annotations

import threading
import time
import traceback
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from mpi_values import rank, same, size

from mural.errors import PeerError


def groups_of_some_ranks() -> None:
    evens, odds = (dist.new_group([r for r in range(size()) if r % 2 == k]) for k in range(2))
    mine, others = (evens, odds) if rank() % 2 == 0 else (odds, evens)
    assert dist.get_rank(others) == -1
    x = torch.tensor([float(rank())])
    dist.all_reduce(x, group=mine)
    same(x, torch.tensor([float(sum(range(rank() % 2, size(), 2)))]))
    backwards = dist.new_group(list(range(size())))
    dist.broadcast(x, src=size() - 1, group=backwards)
    alone = [dist.new_group([r]) for r in range(size())][rank()]
    dist.all_reduce(x, group=alone)
    dist.destroy_process_group(backwards)
    with pytest.raises((PeerError, ValueError)):
        dist.all_reduce(x, group=backwards)


def a_gloo_group_lives_beside() -> None:
    group = dist.new_group(backend="gloo")
    x = torch.tensor([rank()], device="cpu")
    dist.all_reduce(x, group=group)
    same(x, torch.tensor([sum(range(size()))], device="cpu"))
    dist.destroy_process_group(group)


def a_wait_without_an_answer_ends() -> None:
    group = dist.new_group(timeout=timedelta(seconds=1))
    begun, burnt = time.monotonic(), time.thread_time()
    work = dist.irecv(torch.empty(3), (rank() + 1) % size(), group=group)
    with pytest.raises(PeerError, match="not answered in 1 s"):
        work.wait()
    assert 0.9 < time.monotonic() - begun < 10
    assert time.thread_time() - burnt < 0.5, "waiting took a core"
    assert not work.is_success()
    barrier = dist.irecv(torch.empty(3), (rank() + 1) % size(), group=group)
    with pytest.raises(PeerError, match=r"0\.2 s"):
        barrier.wait(timedelta(seconds=0.2))


def an_abort_ends_a_wait() -> None:
    group = dist.new_group()
    timer = threading.Timer(0.3, group.abort)
    timer.start()
    with pytest.raises(PeerError, match="given up"):
        dist.recv(torch.empty(3), (rank() + 1) % size(), group=group)
    timer.join()
    with pytest.raises(PeerError, match="given up"):
        dist.all_reduce(torch.ones(1), group=group)


def threads_may_call_at_once() -> None:
    groups = [dist.new_group() for _ in range(3)]
    wrong: list[str] = []

    def work(index: int) -> None:
        try:
            for step in range(20):
                x = torch.full((50,), float(index + step + rank()))
                dist.all_reduce(x, group=groups[index])
                same(x, torch.full((50,), float(size() * (index + step) + sum(range(size())))))
                y = torch.empty(2000)
                ops = [
                    dist.P2POp(dist.isend, torch.full((2000,), float(step)), (rank() + 1) % size(), groups[index]),
                    dist.P2POp(dist.irecv, y, (rank() - 1) % size(), groups[index]),
                ]
                for each in dist.batch_isend_irecv(ops):
                    each.wait()
                same(y, torch.full((2000,), float(step)))
        except BaseException:
            wrong.append(traceback.format_exc())

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]
