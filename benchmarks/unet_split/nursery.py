"""Ranks that are forked: one process imports torch and mural once, and a new rank is there in no time.

A rank that ran out of memory ends with its team, so ranks are started often here. The process that forks them never
touches the GPU.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path

MODULES = ["torch", "mural", "rank"]
"""What is imported before the fork; `rank` lies in this folder."""
CONTEXT = multiprocessing.get_context("forkserver")


class Forked:
    """A forked process with the parts of `subprocess.Popen` that teams use."""

    def __init__(self, log: Path) -> None:
        ours, theirs = CONTEXT.Pipe(duplex=False), CONTEXT.Pipe(duplex=False)
        self.process = CONTEXT.Process(target=enter, args=(theirs[0], ours[1], str(log)), daemon=True)
        self.process.start()
        self.stdin = os.fdopen(os.dup(theirs[1].fileno()), "w")
        self.stdout = os.fdopen(os.dup(ours[0].fileno()))
        for end in (*ours, *theirs):
            end.close()

    def kill(self) -> None:
        """End it now."""
        self.process.kill()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for its end."""
        self.process.join(timeout)

    @property
    def returncode(self) -> int | None:
        """Its exit code; below zero a signal."""
        return self.process.exitcode


def forked(log: Path, environment: dict[str, str]) -> Forked:
    """A new rank. The first call settles the environment of all."""
    os.environ.update(environment)
    CONTEXT.set_forkserver_preload(MODULES)
    return Forked(log)


def enter(commands: Connection, answers: Connection, log: str) -> None:
    """Become a rank: commands come in, answers go out, everything printed goes to the log."""
    from harness.worker import serve  # noqa: PLC0415
    from rank import Splitter  # noqa: PLC0415  # imported before the fork; the parent needs none of it

    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for fd, target in ((commands.fileno(), 0), (answers.fileno(), 1), (file, 2)):
        os.dup2(fd, target)
    commands.close()
    answers.close()
    sys.stdin, sys.stderr = os.fdopen(0), os.fdopen(2, "w", buffering=1)
    serve(Splitter())
