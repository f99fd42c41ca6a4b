"""Which rank hangs: judged from tables of heartbeats, and found among real processes that stop, sleep and spin."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import mural
from mural.comm import Watchdog
from mural.comm.heartbeats import Heartbeat, judge, waits_for_others, where
from mural.comm.hosts import LOCAL_STORE
from mural.comm.watchdog import HUNG
from mural.errors import PlanError

WELL = Heartbeat("a", 1, moved=1.0, count=12, serial=90, doing="step 12")
SLOW = Heartbeat("b", 2, moved=9.0, count=12, serial=80, doing="step 12")
WORKING = Heartbeat("b", 2, moved=31.0, count=12, serial=80, doing="step 12", at="train.py:7 in forward")
WAITING = Heartbeat("c", 3, moved=31.0, count=12, serial=90, doing="step 12", waits="for rank 1 in conv2d")
BEHIND = Heartbeat("d", 4, moved=31.0, count=12, serial=79, doing="step 12", waits="for rank 0 in conv2d")
PAUSED = Heartbeat("d", 4, moved=99.0, count=12, serial=70, paused=True)
LEFT = Heartbeat("d", 4, moved=99.0, left=True)

# heartbeats, seconds since they came, who hangs, and words about it
JUDGED: dict[str, tuple[dict[int, Heartbeat | None], dict[int, float], list[int], str]] = {
    "all well": ({0: WELL, 1: WELL}, {}, [], ""),
    "slow, below the limit": ({0: WAITING, 1: SLOW, 2: WAITING}, {}, [], ""),
    "one works too long": (
        {0: WAITING, 1: WORKING, 2: WAITING},
        {},
        [1],
        "host b, pid 2: computing in step 12 at train",
    ),
    "one is stopped": ({0: WAITING, 1: WAITING, 2: WELL}, {2: 31.0}, [2], "stopped \\(no heartbeat for 31 s"),
    "one never began": ({0: WAITING, 1: None}, {1: 40.0}, [1], "did not begin"),
    "one has not begun yet": ({0: WAITING, 1: None}, {1: 5.0}, [], ""),
    "the heartbeat grew old": ({0: WAITING, 1: SLOW}, {1: 25.0}, [1], "no progress for 34 s"),
    "all wait": ({0: WAITING, 1: WAITING, 2: BEHIND}, {}, [2], "waiting for rank 0 in conv2d"),
    "others wait for a pause": ({0: WAITING, 1: PAUSED}, {}, [], ""),
    "one left": ({0: WELL, 1: LEFT}, {1: 99.0}, [], ""),
    "one left, one waits for it": ({0: WAITING, 1: LEFT}, {1: 99.0}, [0], "waiting for rank 1"),
    "a wait that looks like work": (
        {0: Heartbeat("a", 1, moved=31.0, count=12, serial=90), 1: WORKING},
        {},
        [1],
        "host b",
    ),
}


@pytest.mark.parametrize("name", JUDGED)
def test_judgement(name: str) -> None:
    heartbeats, silence, expected, words = JUDGED[name]
    found = judge(heartbeats, dict.fromkeys(heartbeats, 0.0) | silence, limit=30.0)
    assert [finding.rank for finding in found] == expected
    assert not words or re.search(words, found[0].words)


def test_heartbeats_travel() -> None:
    assert Heartbeat.decode(WORKING.encode()) == WORKING


def test_where_a_thread_is_and_whether_it_waits() -> None:
    state: dict[str, Any] = {}
    begun, go = threading.Event(), threading.Event()

    def waits_for_a_thread() -> None:
        begun.set()
        go.wait()

    thread = threading.Thread(target=waits_for_a_thread)
    thread.start()
    begun.wait()
    time.sleep(0.1)
    state["waits"] = waits_for_others(thread.ident)
    state["where"] = where(thread.ident)
    go.set()
    thread.join()
    assert state["waits"] == ""  # a thread of this rank is not another rank
    assert "threading.py" in state["where"]


def test_a_wait_for_a_collective_is_seen() -> None:
    class Work:
        def wait(self, seconds: float) -> None: ...

    work: Any = Work()
    work.wait = time.sleep
    thread = threading.Thread(target=lambda: work.wait(0.5))
    thread.start()
    time.sleep(0.1)
    assert waits_for_others(thread.ident) == "in <lambda>"
    thread.join()


@pytest.mark.slow
def test_one_rank_and_limits() -> None:
    mesh = mural.init()
    with pytest.raises(PlanError, match="positive"):
        Watchdog(mesh, 0)
    with Watchdog(mesh, 3.0) as dog:  # not less: a false alarm on a loaded machine would end the tests
        for step in range(4):
            dog.progress(f"step {step}")
            time.sleep(0.05)
        with dog.pause("saving"):
            time.sleep(3.5)
        assert "rank 0" in dog.report(())
    assert not any(thread.is_alive() for thread in dog.threads)
    with pytest.raises(PlanError, match="new Watchdog"):
        dog.__enter__()


SCRIPT = """
    import os, signal, sys, time
    import torch
    import mural
    from mural.comm import Watchdog
    from mural.ranks import run_local

    class Slow(torch.nn.Module):
        def __init__(self, rank, how):
            super().__init__()
            self.rank, self.how, self.calls = rank, how, 0
        def forward(self, x):
            self.calls += 1
            if self.rank == int(sys.argv[2]) and self.calls == 3:
                if self.how == "stop": os.kill(os.getpid(), signal.SIGSTOP)
                if self.how == "sleep": time.sleep(600)
                if self.how == "spin":
                    while True: pass
                if self.how == "slow": time.sleep(2.5)
            return x

    def train(rank=None, how=None):
        how = how or sys.argv[1]
        torch.set_num_threads(1)
        mesh = mural.init(spatial=(2, 1))
        torch.manual_seed(0)
        conv = torch.nn.Conv2d(1, 1, 3, padding=1)
        model = torch.nn.Sequential(conv, Slow(mesh.rank, how), torch.nn.Conv2d(1, 1, 3, padding=1))
        with Watchdog(mesh, float(sys.argv[3])) as dog:
            while None in dog.heartbeats.values():  # until the others are heard, as this one has to be before it stops
                dog.progress("start")
                time.sleep(0.05)
            for step in range(6):
                dog.progress(f"step {step}")
                x = mural.shard(torch.rand(1, 1, 16, 8), mesh)
                loss = model(x).square().mean()
                loss.backward()
                mural.reduce_gradients(model, mesh)
            if how == "saving" and mesh.rank == int(sys.argv[2]):
                with dog.pause("saving"):
                    time.sleep(5)
        os.write(1, f"rank {mesh.rank} is through\\n".encode())

    if __name__ == "__main__":
        if len(sys.argv) > 4:
            from mural.ranks import RankError
            try:
                run_local(train, 2, sys.argv[1])
            except RankError as error:
                print(error, file=sys.stderr)
                sys.exit(3)
        else:
            train()
"""


def run(folder: Path, how: str, rank: int, limit: float, *command: str) -> tuple[int, str, str, float]:
    """Exit code, output, messages and seconds of a training in which a rank does something odd in step 2."""
    script = folder / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    local = [] if command else ["local"]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    start = time.monotonic()
    run = subprocess.Popen(
        [*(command or [sys.executable]), str(script), how, str(rank), str(limit), *local],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, messages = run.communicate(timeout=150)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
    return run.returncode, out, messages, time.monotonic() - start


@pytest.mark.slow
def test_a_rank_that_sleeps_is_named_by_all(tmp_path: Path) -> None:
    code, out, messages, _ = run(tmp_path, "sleep", 1, 4.0)
    assert code == 3, messages
    assert "through" not in out
    named = re.findall("mural: rank 1 hangs; host .*", messages)  # possibly in the middle of another's line
    assert len(named) == 2, messages  # both say so
    assert all("computing in step 2 at train.py:" in line for line in named)
    assert re.search("rank 0, host .*: waiting for rank 1 in (conv2d|mean) in step 2", messages), messages
    assert "most recent call first" in messages  # the stack of the hung rank
    assert "left, since its watchdog found a rank that hangs" in messages


@pytest.mark.slow
@pytest.mark.parametrize("how", ["spin", "stop"])
def test_a_rank_that_hangs_is_named(how: str, tmp_path: Path) -> None:
    code, out, messages, seconds = run(tmp_path, how, 0, 4.0)
    assert code == 3, messages
    assert "through" not in out
    words = "stopped (no heartbeat" if how == "stop" else "computing in step 2"
    assert [line for line in messages.splitlines() if "mural: rank 0 hangs; host " in line and words in line], messages
    assert seconds < 100


@pytest.mark.slow
@pytest.mark.parametrize("how", ["slow", "saving"])
def test_no_alarm_for_a_slow_rank_or_a_pause(how: str, tmp_path: Path) -> None:
    limit = 10.0 if how == "slow" else 4.0
    code, out, messages, _ = run(tmp_path, how, 1, limit)
    assert code == 0, messages
    assert out.count("is through") == 2
    assert "hangs" not in messages


@pytest.mark.slow
def test_the_rank_that_holds_the_store_is_stopped(tmp_path: Path) -> None:
    """By hand: rank 0 holds the store, so that it does not answer any more."""
    port = mural.ranks.free_port()
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, str(script), "stop", "0", "4.0"]
    ranks = [
        subprocess.Popen(command, env=environ | {"RANK": str(r)}, stderr=subprocess.PIPE, text=True) for r in (0, 1)
    ]
    try:
        _, messages = ranks[1].communicate(timeout=120)
        assert ranks[1].returncode == HUNG, messages
        assert "mural: rank 0 hangs; host " in messages
        # Whichever is noticed first: the store that it holds does not answer, or its heartbeat stopped.
        assert f"pid {ranks[0].pid}: stopped (" in messages
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def test_a_store_whose_rank_was_never_heard_of_has_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that was stopped before its first heartbeat was named without its host."""
    for name in (LOCAL_STORE, "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "node7")
    dog = Watchdog(mural.init(), 4.0)
    (finding,) = dog._findings(dog.answered_at + 5)
    assert (finding.rank, finding.words) == (0, "stopped (the store that it holds on node7 does not answer for 5 s)")


@pytest.mark.slow
def test_torchrun_starts_again_after_a_hang(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    code, _, messages, _ = run(tmp_path, "sleep", 1, 4.0, *torchrun, "--max-restarts", "1")
    assert code != 0
    pids = set(re.findall(r"mural: rank 1 hangs; host .*, pid (\d+): computing in step 2", messages))
    assert len(pids) == 2, messages  # in both attempts
