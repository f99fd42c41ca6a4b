"""The status of a run: `status.json` in its folder says whether it runs, or how it ended.

    running    the process that trains, `pid` on `host`, is running, or ended without a message: it was killed
    finished   all updates were taken
    stopped    a signal, or train.stop_after, `by`, made it save and leave
    failed     an error ended it: `error`, met on `rank`
    killed     a signal, `by`, ended a rank at once, as seen by the process that started the ranks

A run that is refused leaves the file as it was.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mural.errors import PeerError
from mural.ranks.spawn import RankError
from mural.ranks.spawned import excused
from mural.text_files import write_whole

FILE = "status.json"


@dataclass(frozen=True)
class Position:
    """Where a run stands: updates taken, the epoch, and the batches of it that were used."""

    step: int = 0
    epoch: int = 0
    batch: int = 0


class Status:
    """What the ranks of a run write to the file, from `begin` on; before, the file is that of an earlier run."""

    def __init__(self, folder: Path, rank: int):
        self.file, self.rank = folder / FILE, rank
        self.begun = False
        self.before: dict[str, Any] = {}
        """What the file said when the run began: how the start before this one ended."""
        self.position = Position()
        self.saved: int | None = None

    def begin(self, position: Position) -> None:
        """The run was not refused, and runs."""
        self.begun, self.position, self.before = True, position, read(self.file)
        self.tell("running")

    def tell(self, state: str, *, by: str = "", error: str = "", **more: Any) -> None:
        """Write how the run stands; of ranks that report the same, the first does."""
        if self.rank == 0 or error:
            facts = {"state": state, "by": by, "error": error, **asdict(self.position), "saved": self.saved, **more}
            place = {"rank": self.rank, "pid": os.getpid(), "parent": os.getppid(), "host": socket.gethostname()}
            write(self.file, {**facts, **place})

    @contextmanager
    def told(self) -> Generator[None]:
        """A block whose failure is reported; where others fail with it, the rank whose own error it is reports it."""
        try:
            yield
        except KeyboardInterrupt:
            self._end("killed", by="SIGINT", error="a second SIGINT ended the run at once")
            raise
        except BaseException as error:
            self._end("failed", error=f"{type(error).__name__}: {error}", excused=excused(error))
            raise

    def hung(self, report: str) -> None:
        """Report what the watchdog found, before it ends the process."""
        self._end("failed", error=report.strip(), excused=self.rank != 0)

    def _end(self, state: str, *, error: str, by: str = "", excused: bool = False) -> None:
        if self.begun and not (excused and read(self.file).get("state") != "running"):
            with suppress(OSError):  # what ended the run is raised, not that it could not be reported
                self.tell(state, by=by, error=error)


@contextmanager
def told_of_ranks(folder: Path) -> Generator[None]:
    """A block that starts local ranks: reports how they ended, where they could not do so themselves."""
    try:
        yield
    except RankError as error:
        if not error.raised:
            _amend(folder, "killed" if error.by else "failed", error.by, str(error))
        raise
    except KeyboardInterrupt:
        _amend(folder, "killed", "SIGINT", "a second SIGINT ended the run at once")
        raise
    except SystemExit as error:
        if isinstance(error.code, int) and error.code > 128:
            name = signal.Signals(error.code - 128).name
            _amend(folder, "killed", name, f"the run was ended by {name}")
        raise


def _amend(folder: Path, state: str, by: str, error: str) -> None:
    """Replace the status of ranks that this process started, unless they reported their own end."""
    found = read(folder / FILE)
    mine = found.get("parent") == os.getpid() and found.get("host") == socket.gethostname()
    unsure = found.get("state") == "running" or str(found.get("error")).startswith(PeerError.__name__)
    if mine and unsure:
        with suppress(OSError):
            write(folder / FILE, {**found, "state": state, "by": by, "error": error})


def read(file: Path) -> dict[str, Any]:
    """What a status says; nothing where there is none."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def write(file: Path, facts: Mapping[str, Any]) -> None:
    """Write a status, whole or not at all."""
    text = json.dumps({**facts, "time": datetime.now(UTC).isoformat(timespec="seconds")}, indent=1)
    write_whole(file, text + "\n")
