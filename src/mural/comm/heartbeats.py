"""Heartbeats: what each rank reports about itself now and then, and the verdict which ranks hang."""

from __future__ import annotations

import json
import linecache
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import PurePath
from types import FrameType

ENGINE = ("torch", "autograd", "graph.py")
"""Where the main thread is while autograd's own threads run backward."""

QUIET = ("threading.py", "queue.py", "selectors.py", "subprocess.py", "popen_fork.py")
"""Files whose waits are for threads, processes and files of this rank."""


@dataclass(frozen=True)
class Heartbeat:
    """What a rank reports about itself.

    `moved`: the seconds since it made progress; `count` and `serial` number its progress and its transfers; `waits`:
    what it expects from other ranks, empty while it works itself; `at`: where its main thread is.
    """

    host: str
    pid: int
    beat: int = 0
    moved: float = 0.0
    count: int = 0
    serial: int = 0
    doing: str = ""
    waits: str = ""
    at: str = ""
    paused: bool = False
    left: bool = False

    def encode(self) -> bytes:
        """The heartbeat as text, to be sent."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def decode(text: bytes) -> Heartbeat:
        """The heartbeat from its text."""
        return Heartbeat(**json.loads(text))

    @property
    def place(self) -> str:
        """The host and the process, as text."""
        return f"host {self.host}, pid {self.pid}"

    def words(self, silence: float = 0.0) -> str:
        """What the rank is doing, as text."""
        doing = f" in {self.doing}" if self.doing else ""
        at = f" at {self.at}" if self.at else ""
        seconds = f"no progress for {self.moved + silence:.0f} s"
        if self.left:
            return "has left"
        if self.paused:
            return f"paused{doing}"
        return f"waiting {self.waits}{doing}, {seconds}" if self.waits else f"computing{doing}{at}, {seconds}"


@dataclass(frozen=True)
class HungRank:
    """A rank that hangs, and the evidence."""

    rank: int
    words: str


def judge(
    heartbeats: Mapping[int, Heartbeat | None], silence: Mapping[int, float], limit: float
) -> tuple[HungRank, ...]:
    """The ranks that hang, judged by each rank's heartbeat (None: none came yet) and how many seconds ago it came.

    A rank hangs if it sends no heartbeats, or works without progress for longer than the limit; one that waits for
    others, or paused, does not. Of several that seem to work, those with the least progress count, since a wait inside
    a GPU kernel looks like work. The same holds if all ranks wait.
    """
    silent = [r for r, p in heartbeats.items() if silence[r] > limit and not (p is not None and p.left)]
    if silent:
        return tuple(HungRank(r, _silence(heartbeats[r], silence[r])) for r in silent)
    active = {r: p for r, p in heartbeats.items() if p is None or not p.left}
    stuck = {r: p for r, p in active.items() if p is not None and not p.paused and p.moved + silence[r] > limit}
    working = {r: p for r, p in stuck.items() if not p.waits}
    if not working and len(stuck) < len(active):
        return ()
    suspects = working or stuck
    behind = min(((p.serial, p.count) for p in suspects.values()), default=None)
    return tuple(
        HungRank(r, f"{p.place}: {p.words(silence[r])}") for r, p in suspects.items() if (p.serial, p.count) == behind
    )


def _silence(heartbeat: Heartbeat | None, seconds: float) -> str:
    if heartbeat is None:
        return f"did not begin to send heartbeats in {seconds:.0f} s"
    doing = f"; it was {'waiting ' + heartbeat.waits if heartbeat.waits else 'computing'}"
    step = f" in {heartbeat.doing}" if heartbeat.doing else ""
    return f"{heartbeat.place}: stopped (no heartbeat for {seconds:.0f} s{doing}{step})"


def where(thread: int | None) -> str:
    """The file, line and function that a thread is in."""
    frame = sys._current_frames().get(thread or 0)
    return f"{PurePath(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}" if frame else ""


def waits_for_others(main: int | None) -> str:
    """The collective that a rank is in, from the Python frames of its main thread; empty if none.

    While backward runs on a GPU, the main thread is inside autograd's engine, so the engine's threads count.
    """
    frames = sys._current_frames()
    first = frames.get(main or 0)
    if first is None:
        return ""
    if PurePath(first.f_code.co_filename).parts[-3:] != ENGINE:
        return _collective(first)
    own = {thread.ident for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}
    return next((text for ident, frame in frames.items() if ident not in own and (text := _collective(frame))), "")


def _collective(frame: FrameType) -> str:
    """The name of the collective that a frame is in."""
    path = PurePath(frame.f_code.co_filename)
    if path.name == "distributed_c10d.py":
        back = frame.f_back
        while back is not None and PurePath(back.f_code.co_filename).name in ("distributed_c10d.py", "c10d_logger.py"):
            frame, back = (back if "distributed_c10d" in back.f_code.co_filename else frame), back.f_back
        return f"in {frame.f_code.co_name}"
    if ("mural", "comm") in zip(path.parts, path.parts[1:], strict=False):
        return f"in {frame.f_code.co_name}"
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return f"in {frame.f_code.co_name}" if ".wait(" in line and path.name not in QUIET else ""
