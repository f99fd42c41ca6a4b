"""Local ranks without a launcher: new processes on this machine, which get signals and restart after a failure.

    parent   starts the ranks, holds the store in which they meet, forwards signals, waits
    rank     joins the process group, calls the function, sends its value or its traceback to the parent

If a rank dies, the others are ended too, and all ranks end with the parent, even if it is killed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.multiprocessing as mp

from mural.comm.backends import check_available
from mural.comm.watchdog import HUNG
from mural.errors import TRACEBACK, MuralError, PlanError
from mural.ranks.spawned import UNGUARDED, Answer, Orders, check_importable, leave_unguarded, serve
from mural.ranks.store import host

FORWARDED = [getattr(signal, n) for n in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP") if hasattr(signal, n)]
SETTLE_SECONDS = 1.0
"""How long other ranks may take to report after a failure, before they are ended."""


class RankError(MuralError, RuntimeError):
    """A local rank raised, or its process ended early; `rank` is its number, `raised` whether it was an exception.

    `by` is the signal that ended its process, if one did.
    """

    def __init__(self, message: str, rank: int, raised: bool, by: str = ""):
        super().__init__(message)
        self.rank, self.raised, self.by = rank, raised, by


def run_local(
    function: Callable[..., Any],
    ranks: int,
    *args: Any,
    threads: int | None = None,
    device: str = "cpu",
    backend: str | None = None,
    restarts: int = 0,
    grace: float = 60.0,
    timeout: float = 1800.0,
    say: Callable[[str], None] | None = None,
) -> Any:
    """Rank 0's result of `function(rank, *args)`, called in that many new processes that form a process group.

    `device`: "cpu" (over gloo), "cuda" (NCCL if each rank gets its own GPU, else they share over gloo), or "auto";
    `backend` names another, such as NCCL for ranks that share a GPU. `say` gets a line about what is started. The first
    rank that fails ends the others; then all start again, up to `restarts` times (`attempt()` tells them how often), or
    `RankError` names the rank and what ended it.

    SIGINT, SIGTERM, SIGUSR1 and SIGHUP go to the ranks, which have `grace` seconds to save and leave. If all leave
    without an error, this returns as usual; else it raises KeyboardInterrupt, or SystemExit with 128 + the signal.
    """
    leave_unguarded()
    check_importable(function)
    if ranks < 1 or restarts < 0:
        raise PlanError(f"ranks={ranks}, restarts={restarts}: start at least 1 rank, 0 times again or more")
    say = say or _silent
    check_available(backend)
    usual, gpus, words = equipment(ranks, device)
    backend = backend or usual
    threads = threads or max(1, processors() // ranks)
    say(f"starting {ranks} local {'rank' if ranks == 1 else 'ranks'} over {backend}: {words}, {threads} threads each")
    if not gpus and ranks > processors():
        say(
            f"warning: {ranks} ranks share {processors()} processors, so they take turns and are not faster than "
            f"{processors()} would be"
        )
    for number in itertools.count():
        # The parent holds the store, so that it answers even while a rank is stopped.
        store = host("", 0, 0, timeout, loopback=True)
        meeting = f"{store.host}:{store.port}"
        orders = Orders(ranks, meeting, backend, gpus, threads, number, timeout, os.getpid())
        run = LocalRun(orders, grace)
        with run.told_of_signals():
            run.start(function, args)
            run.wait()
        cause = run.cause()
        if cause is None:
            return run.ranks[0].answer.value if run.ranks[0].answer is not None else None
        # What mural itself refuses would be refused again.
        if number == restarts or run.signals or cause.final:
            raise RankError(cause.trouble(), cause.number, cause.raised, cause.by)
        say(f"{cause.trouble()}\nstarting all ranks again: {number + 1} of {restarts}")


def equipment(ranks: int, device: str) -> tuple[str, int, str]:
    """The backend, the number of GPUs to spread the ranks over, and a description of both."""
    if device not in ("cpu", "cuda", "auto"):
        raise PlanError(f"device={device!r}: choose cpu, cuda or auto")
    gpus = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    if device == "cuda" and not gpus:
        raise PlanError("device='cuda', but torch finds no GPU: choose device='cpu', or see what `mural doctor` says")
    if not gpus:
        return "gloo", 0, "on the CPU"
    if gpus >= ranks and torch.distributed.is_nccl_available():
        return "nccl", gpus, "each on a GPU of its own"
    return "gloo", gpus, f"sharing {gpus} {'GPU' if gpus == 1 else 'GPUs'}"


def processors() -> int:
    """How many CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _silent(_: str) -> None:
    """Say nothing."""


@dataclass
class Rank:
    """A local rank as its parent sees it."""

    number: int
    process: Any
    pipe: Connection
    answer: Answer | None = None

    def listen(self) -> None:
        """Take the rank's answer, if it sent one."""
        with contextlib.suppress(EOFError, OSError):
            if self.answer is None and self.pipe.poll():
                self.answer = self.pipe.recv()

    @property
    def raised(self) -> bool:
        """Whether the function raised there."""
        return self.answer is not None and self.answer.raised != ""

    @property
    def failed(self) -> bool:
        """Whether the function raised there, or the process ended without returning."""
        return self.raised or self.process.exitcode not in (None, 0)

    @property
    def told(self) -> str:
        """The text of an error that was raised there and needs no traceback, or nothing."""
        return self.answer.told if self.answer is not None else ""

    @property
    def final(self) -> bool:
        """Whether what was raised there would be raised again."""
        return self.answer is not None and self.answer.final

    @property
    def by(self) -> str:
        """The signal that ended the process, or nothing."""
        code = self.process.exitcode
        return signal.Signals(-code).name if code is not None and code < 0 else ""

    def trouble(self) -> str:
        """A description of what ended the rank."""
        code, place = self.process.exitcode, f"rank {self.number} (pid {self.process.pid})"
        if self.told and not os.environ.get(TRACEBACK):
            return f"rank {self.number}: {self.told}"
        if self.answer is not None and self.answer.raised:
            return f"{place} raised:\n\n{self.answer.raised}"
        if self.by:
            hint = ", as the system does when memory runs out" if code == -signal.SIGKILL else ""
            return f"{place} was ended by {self.by}{hint}"
        if code == HUNG:
            return f"{place} left, since its watchdog found a rank that hangs; its report is above"
        if code == UNGUARDED:
            return (
                "a local rank imports the script that starts it, and this script starts ranks whenever it is imported: "
                'put what it does under `if __name__ == "__main__":`'
            )
        return f"{place} ended with exit code {code}"


@dataclass
class LocalRun:
    """The ranks of one attempt: those that failed, in order, those that were ended, and the signals that arrived."""

    orders: Orders
    grace: float
    ranks: list[Rank] = field(default_factory=list[Rank])
    failures: list[Rank] = field(default_factory=list[Rank])
    signals: list[int] = field(default_factory=list[int])
    ended: set[int] = field(default_factory=set[int])
    until: float = float("inf")

    def start(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Start all ranks; they inherit only what is pickled."""
        context = mp.get_context("spawn")
        for number in range(self.orders.ranks):
            ours, theirs = context.Pipe(duplex=False)
            target = (number, self.orders, theirs, function, args)
            process = context.Process(target=serve, args=target, name=f"mural rank {number}")
            process.start()
            theirs.close()
            self.ranks.append(Rank(number, process, ours))

    @contextlib.contextmanager
    def told_of_signals(self) -> Generator[None]:
        """Forward signals inside the block, and leave no rank running after it; only the main thread gets signals."""
        main = threading.current_thread() is threading.main_thread()
        before = {number: signal.signal(number, self.forward) for number in FORWARDED} if main else {}
        try:
            yield
        finally:
            self.end()
            for number, handler in before.items():
                signal.signal(number, handler)

    def forward(self, number: int, _: object = None) -> None:
        """Pass a signal on; the grace time begins. A second SIGINT or SIGTERM ends the ranks at once."""
        urgent = number in self.signals and number in (signal.SIGINT, signal.SIGTERM)
        self.signals.append(number)
        self.until = 0.0 if urgent else min(self.until, time.monotonic() + self.grace)
        for rank in self.ranks:
            if rank.process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.process.pid, number)

    def wait(self) -> None:
        """Wait until all ranks have ended; end the rest once one failed, or when the grace time is over."""
        while living := [rank for rank in self.ranks if rank.process.is_alive()]:
            wait([r.process.sentinel for r in living] + [r.pipe for r in living if r.answer is None], timeout=0.5)
            self._look()
            if self.failures and not self.signals:
                self.until = min(self.until, time.monotonic() + SETTLE_SECONDS)
            if time.monotonic() >= self.until:
                self.end()
        self._look()

    def _look(self) -> None:
        for rank in self.ranks:
            rank.listen()
            if rank.failed and rank not in self.failures and rank.number not in self.ended:
                self.failures.append(rank)

    def end(self) -> None:
        """End the ranks that still run."""
        for rank in self.ranks:
            if rank.process.is_alive():
                self.ended.add(rank.number)
                rank.process.kill()
        for rank in self.ranks:
            rank.process.join()

    def cause(self) -> Rank | None:
        """The rank that failed first, and not because another one did; None if all returned.

        Ranks that a signal ended did not fail: then this raises KeyboardInterrupt, or SystemExit with its number.
        """
        guilty = [rank for rank in self.failures if not (rank.answer is not None and rank.answer.excused)]
        if self.signals and not any(rank.raised for rank in guilty) and (self.failures or self.ended):
            if signal.SIGINT in self.signals:
                raise KeyboardInterrupt
            sys.exit(128 + self.signals[0])
        return next(iter(guilty or self.failures), None)
