"""Ranks as processes: a pool that keeps some ready in advance, and teams of them that answer commands together.

A team that fails in any way is ended at once, all of it: a rank that ran out of memory leaves its peers waiting, and
a process is the one place that surely gives all its memory back. So the pool starts processes ahead of need: they
import torch and mural while others work, and hold nothing of the device. This side imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.results import Log, scrubbed

BENCHMARKS = Path(__file__).resolve().parents[1]
LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
ENVIRONMENT = {**dict.fromkeys(THREADS, "1"), "GLOO_SOCKET_IFNAME": "lo"}
# Freed memory goes back to the system at once, so that a peak is one of tensors.
EXACT_RESIDENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
START_LIMIT, GRACE = 180.0, 5.0
Start = Callable[[Path, dict[str, str]], Any]
GRAVITY = ("memory", "error", "ended", "peer", "late")
"""Which of several ranks' failures says most about the cause, most telling first."""


class CaseFailed(RuntimeError):
    """A team that could not answer: `kind` is one of `GRAVITY`."""

    def __init__(self, kind: str, message: str, printed: str = "") -> None:
        super().__init__(f"{kind}: {message}")
        self.kind, self.message, self.printed = kind, message, printed

    def note(self, log: Log, words: str, **about: Any) -> None:
        """Write that what this is about failed, and say so."""
        log.write("failure", **about, why=self.kind, message=self.message)
        log.say(f"{words}: {self}"[:200])
        print(self.printed, end="\n" if self.printed else "", flush=True)


@dataclass(frozen=True)
class Starter:
    """Starts processes that become ranks, of which a module says what they answer; what they print goes to a log.

    With `all_cores`, each has those of the machine; with `usual_memory`, the usual allocator: both as a user's has.
    """

    module: str = "harness.worker"
    all_cores: bool = False
    usual_memory: bool = False

    def __call__(self, log: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
        """A new process."""
        command, pipe = [sys.executable, "-P", "-m", self.module], subprocess.PIPE
        kept = {k: v for k, v in environment.items() if not (self.usual_memory and k in EXACT_RESIDENT)}
        threads = dict.fromkeys(THREADS, str(os.cpu_count())) if self.all_cores else {}
        with log.open("w") as errors:
            return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True, env=kept | threads)


class Worker:
    """One process, which says `ready` once it has imported everything."""

    def __init__(self, log: Path, process: Any, inbox: queue.Queue[tuple[Worker, str | None]]) -> None:
        self.log, self.process, self.ready, self.ended = log, process, False, False
        threading.Thread(target=self._listen, args=(inbox,), daemon=True).start()

    def _listen(self, inbox: queue.Queue[tuple[Worker, str | None]]) -> None:
        for line in self.process.stdout or ():
            inbox.put((self, line))
        inbox.put((self, None))

    def tell(self, command: dict[str, Any]) -> None:
        """Send a command; a process that ended says so by its silence."""
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.write(json.dumps(command) + "\n")
                self.process.stdin.flush()

    def heard(self, line: str | None) -> None:
        """Note a line that nobody waits for: the process is ready, or (no line) has ended."""
        self.ready, self.ended = True, self.ended or line is None

    def last_words(self) -> str:
        """The last line that it printed, and its exit code."""
        lines = self.log.read_text(errors="replace").strip().splitlines() or ["it printed nothing"]
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=2)
        return scrubbed(f"exit code {self.process.returncode}: {lines[-1]}")


class Pool:
    """Processes ready for teams; `spares` of them are kept ahead of need, `start` starts one as a `Starter` does."""

    def __init__(self, device: str, spares: int = 0, start: Start | None = None) -> None:
        self.device, self.spares, self.start = device, spares, start or Starter()
        self.folder = tempfile.TemporaryDirectory(prefix="mural-bench-")
        self.inbox: queue.Queue[tuple[Worker, str | None]] = queue.Queue()
        self.idle: list[Worker] = []
        self.started = 0
        inherited = {k: v for k, v in os.environ.items() if k not in LAUNCHER_NAMES}
        paths = [str(BENCHMARKS), str(BENCHMARKS.parent / "src"), inherited.get("PYTHONPATH", "")]
        exact = EXACT_RESIDENT if device == "cpu" else {}
        self.environment = inherited | ENVIRONMENT | exact | {"PYTHONPATH": os.pathsep.join(p for p in paths if p)}
        self.prepare(spares)

    def prepare(self, count: int) -> None:
        """Start processes until that many are idle, or about to be."""
        while len(self.idle) < count:
            self.started += 1
            log = Path(self.folder.name) / f"worker{self.started}.log"
            self.idle.append(Worker(log, self.start(log, self.environment), self.inbox))

    def settle(self, workers: list[Worker] | None = None) -> None:
        """Wait until those processes (all idle ones) have imported what they need, and the machine is quiet."""
        workers = self.idle if workers is None else workers
        deadline = time.monotonic() + START_LIMIT
        while any(not w.ready for w in workers):
            try:
                worker, line = self.inbox.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise SystemExit(f"a process did not start within {START_LIMIT:.0f} s") from None
            worker.heard(line)
        if ended := [w for w in workers if w.ended]:
            raise SystemExit(f"a process ended while it started: {ended[0].last_words()}")

    @contextlib.contextmanager
    def team(self, ranks: int, cap: int | None) -> Generator[Team]:
        """A team of that many ranks, each with that many bytes, for the length of a block."""
        self.prepare(ranks)
        members, self.idle = self.idle[:ranks], self.idle[ranks:]
        self.prepare(self.spares)
        team = Team(self, members)
        try:
            self.settle(members)
            store = str(Path(self.folder.name) / f"store{self.started}.{id(team)}")
            team.facts = team.ask(
                "join", each=[{"rank": rank} for rank in range(ranks)],
                ranks=ranks, store=store, device=self.device, cap=cap,
            )[0]  # fmt: skip
            yield team
        finally:
            team.kill()

    def close(self) -> None:
        """End the processes that wait."""
        for worker in self.idle:
            worker.process.kill()
            worker.process.wait()
        self.idle = []
        self.folder.cleanup()


class Team:
    """Processes that run the same commands at the same time."""

    def __init__(self, pool: Pool, members: list[Worker]) -> None:
        self.pool, self.members = pool, members
        self.facts: dict[str, Any] = {}

    def ask(
        self, do: str, *, limit: float = 120.0, each: list[dict[str, Any]] | None = None, **given: Any
    ) -> list[Any]:
        """Every rank's answer; CaseFailed, and the end of the team, if one fails or the limit passes."""
        for rank, worker in enumerate(self.members):
            worker.tell({"do": do, **given, **(each[rank] if each else {})})
        answers: dict[Worker, Any] = {}
        failures: list[CaseFailed] = []
        deadline = time.monotonic() + limit
        while len(answers) < len(self.members) and not any(f.kind != "peer" for f in failures):
            try:
                worker, line = self.pool.inbox.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                failures.append(CaseFailed("late", f"no answer to {do} within {limit:.0f} s"))
                break
            if worker not in self.members:
                worker.heard(line)
            elif (failure := failure_of(worker, line)) is not None:
                failures.append(failure)
                # A rank that failed by itself is about to say so.
                deadline = min(deadline, time.monotonic() + GRACE)
            else:
                answers[worker] = json.loads(line or "{}")["value"]
        if failures:
            self.kill()
            raise min(failures, key=lambda f: GRAVITY.index(f.kind))
        return [answers[worker] for worker in self.members]

    def kill(self) -> None:
        """End the ranks now, and wait until their memory is free."""
        for worker in self.members:
            worker.process.kill()
        for worker in self.members:
            worker.process.wait()


def failure_of(worker: Worker, line: str | None) -> CaseFailed | None:
    """What went wrong, if this line of a rank says so."""
    printed = "\n".join(worker.log.read_text(errors="replace").splitlines()[-20:])
    if line is None:
        return CaseFailed("ended", worker.last_words(), printed)
    answer = json.loads(line)
    if "error" not in answer:
        return None
    return CaseFailed(answer["error"], scrubbed(answer["message"]), printed if answer["error"] == "error" else "")
