"""The ranks of one variant as processes: started once, asked alternately, never left behind.

This side imports no torch: a child's `ru_maxrss` counts what its parent held when it was started.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from job import Job

WORKER = Path(__file__).with_name("worker.py")
SINGLE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TP_SOCKET_IFNAME": "lo",
}
LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class WorkerError(RuntimeError):
    """A rank ended, or did not answer in time."""


class Ranks:
    """All ranks of one variant."""

    def __init__(self, folder: Path, variant: str, ranks: int, size: int, layers: int, python: str, limit: float):
        self.variant, self.limit = variant, limit
        environment = {k: v for k, v in os.environ.items() if k not in LAUNCHER_NAMES} | SINGLE_THREAD
        self.logs = [folder / f"rank{rank}.log" for rank in range(ranks)]
        self.processes: list[subprocess.Popen[str]] = []
        for rank, log in enumerate(self.logs):
            job = Job(variant, rank, ranks, str(folder / "store"), size, layers)
            with log.open("w") as errors:
                self.processes.append(
                    subprocess.Popen(
                        [python, str(WORKER), job.encode()],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=errors,
                        text=True,
                        env=environment,
                    )
                )

    def ask(self, command: str) -> list[Any]:
        """Every rank's answer; the ranks work at the same time."""
        for process in self.processes:
            self._tell(process, command)
        late = threading.Timer(self.limit, self.kill)
        late.start()
        try:
            return [self._answer(rank) for rank in range(len(self.processes))]
        finally:
            late.cancel()

    def _tell(self, process: subprocess.Popen[str], command: str) -> None:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended: reading its answer says why
            process.stdin.write(command + "\n")
            process.stdin.flush()

    def _answer(self, rank: int) -> Any:
        stdout = self.processes[rank].stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            last = self.logs[rank].read_text().strip().splitlines()[-1:] or [f"no answer within {self.limit:.0f} s"]
            raise WorkerError(f"rank {rank} of {self.variant} ended: {last[0]}")
        return json.loads(line)

    def kill(self) -> None:
        """End the ranks at once."""
        for process in self.processes:
            process.kill()

    def close(self) -> None:
        """Let the ranks end, and end those that do not."""
        for process in self.processes:
            self._tell(process, "end")
        for process in self.processes:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def running(
    variant: str, ranks: int, size: int, layers: int, python: str = sys.executable, limit: float = 300.0
) -> Iterator[Ranks]:
    """The ranks of a variant, for the length of a block."""
    with tempfile.TemporaryDirectory(prefix="mural-peers-") as name:
        team = Ranks(Path(name), variant, ranks, size, layers, python, limit)
        try:
            yield team
        except BaseException:
            team.kill()
            raise
        finally:
            team.close()
