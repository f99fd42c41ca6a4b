"""Groups over NCCL without a GPU: what ends them, when, and what is raised after that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mural
from mural.comm import hosts
from mural.comm.channels import Channels
from mural.comm.failure import connections
from mural.comm.failure.alarm import Awaited
from mural.errors import PeerError
from ranks import Pool


class Half:
    """What carries a group's CUDA tensors, as torch shows it."""

    def __init__(self, together: threading.Barrier | None = None, error: str = "SUCCESS"):
        self.together, self.error, self.aborted = together, error, threading.Event()

    def abort(self) -> None:
        if self.together is not None:
            self.together.wait(5)  # as a real one waits for the kernels of the others
        self.aborted.set()

    def get_error(self) -> str:
        return f"ErrorType.{self.error}"


class Group:
    """A group over NCCL."""

    def __init__(self, half: Half):
        self.half = half

    def _get_backend(self, _: Any) -> Half:
        return self.half


def stand_in(monkeypatch: pytest.MonkeyPatch, *halves: Half) -> None:
    """Let this process believe that it has groups over NCCL."""
    monkeypatch.setattr(connections, "_nccl", [Group(half) for half in halves])
    monkeypatch.setattr(connections, "_ended", [])
    monkeypatch.setattr(connections, "destroyed", lambda _: False)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0, 1])


def test_all_are_aborted_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, each waited for the kernels of the next."""
    together = threading.Barrier(3)
    halves = [Half(together) for _ in range(3)]
    stand_in(monkeypatch, *halves)
    begun = time.monotonic()
    connections.abort_all("rank 1 raised")
    assert all(half.aborted.is_set() for half in halves)
    assert time.monotonic() - begun < 4
    connections.abort_all("another reason")
    assert connections.trouble() == "rank 1 raised"
    with pytest.raises(PeerError, match="a step: rank 1 raised"):
        connections.check("a step")


def test_an_error_of_nccl_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, Half(), Half(error="COMM_ERROR"))
    with pytest.raises(PeerError, match=r"COMM_ERROR in the group of ranks \[0, 1\]"):
        connections.check("a step")


def test_without_nccl_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_nccl", [])
    connections.check("a step")
    connections.await_gpu("a step")
    connections.abort_all("nobody hears it")
    assert connections.aborted() == ""


def abandoned(followed: bool) -> str:
    """On rank 0 what ends groups that it believes to have over NCCL, after rank 1 was killed."""
    half = Half()
    connections._nccl[:] = [Group(half)]  # type: ignore[list-item]
    connections.destroyed = lambda group: False
    mesh = mural.init(spatial=(2,))
    connections._nccl[:] = [Group(half)]  # type: ignore[list-item]
    alarm = mesh.transport.alarm
    assert alarm is not None
    alarm.on_gpu = True
    if mesh.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if followed:
        alarm.followed.append(Awaited(5, "a transfer", (Unfinished(),)))
    half.aborted.wait(15)
    return connections.aborted()


class Unfinished:
    def is_completed(self) -> bool:
        return False


@pytest.mark.parametrize("followed", [True, False], ids=["with a transfer under way", "while it does something else"])
def test_a_rank_that_was_killed_ends_the_groups_of_the_others(followed: bool) -> None:
    pool = Pool(2, "gloo")
    try:
        (good, said), _ = pool.answers(abandoned, followed)
    finally:
        pool.close()
    assert good, said
    assert said == "the process of rank 1 ended: see its log"


def test_processes_that_ended() -> None:
    code = "from mural.comm.hosts import identity; print(repr(identity()), flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    other = eval(child.stdout.readline())
    assert not hosts.has_ended(other)
    child.kill()
    deadline = time.monotonic() + 5
    while not hosts.has_ended(other) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert hosts.has_ended(other)  # nobody has reaped it yet
    child.communicate()
    assert hosts.has_ended(other)
    assert not hosts.has_ended("\n".join(["elsewhere", *other.split("\n")[1:]]))


def test_first_messages_are_in_the_memory_of_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over NCCL a first message on the host went over gloo and connected nobody: four domains waited in a circle."""

    class Common:
        def in_common(self, buffer: torch.Tensor) -> torch.Tensor:
            return buffer.to("meta")  # stands for GPU memory

    channels: Any = Channels.__new__(Channels)
    channels.rank, channels.met, channels.transports = 1, set(), [Common(), Common()]
    seen: list[tuple[str, int, str]] = []
    monkeypatch.setattr(channels, "send", lambda _, peer, token: seen.append(("send", peer, token.device.type)))
    monkeypatch.setattr(channels, "post", lambda _, peer, __, token: seen.append(("post", peer, token.device.type)))
    monkeypatch.setattr(channels, "wait", lambda _: seen.append(("wait", 0, "")))
    channels.meet([(2, 1), (0, 1), (3, 2), (1, 0)])
    first, second = [("post", 0, "meta"), ("send", 0, "meta")], [("send", 2, "meta"), ("post", 2, "meta")]
    assert seen == [*first, ("wait", 0, ""), *second, ("wait", 0, "")]
