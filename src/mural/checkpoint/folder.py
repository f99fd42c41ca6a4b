"""The folder of a run's checkpoints: steps appear and disappear in it whole, whenever a process is killed.

checkpoints/
  .lock                  held by the run that writes here
  step-00000100/         a complete checkpoint: it got this name by a rename, after everything was on disk
  .step-00000200.saving  a save under way, or what a killed one left
  .step-00000050.gone    on its way out: renamed first, then deleted
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import socket
import time
import weakref
from collections.abc import Iterable
from pathlib import Path

from mural.checkpoint.manifest import NAME, Damaged, Manifest
from mural.errors import CheckpointError

LOCK_SECONDS = 10.0
"""How long to wait for a lock: a run that is being restarted may still be ending."""


def step_path(folder: Path, step: int) -> Path:
    """Where a complete checkpoint is."""
    return folder / f"step-{step:08d}"


def saving_path(place: Path) -> Path:
    """Where a checkpoint is written before it gets its name."""
    return place.with_name(f".{place.name}.saving")


def steps_in(folder: Path) -> list[int]:
    """The steps of all checkpoints that got their name, ascending."""
    if not folder.is_dir():
        return []
    matches = (re.fullmatch(r"step-(\d{8,})", path.name) for path in folder.iterdir())
    return sorted(int(match[1]) for match in matches if match)


def sync_folder(folder: Path) -> None:
    """Put the names in a folder on disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that keep names on disk by themselves
            raise
    finally:
        os.close(handle)


def write_synced(path: Path, text: str) -> None:
    """Write a file and put it on disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def publish(saved: Path, place: Path) -> None:
    """Give a complete checkpoint its name, in place of an older one of that name."""
    sync_folder(saved)
    if place.exists():
        _take_away(place)
    saved.rename(place)
    sync_folder(place.parent)


def remove(folder: Path, steps: Iterable[int]) -> None:
    """Remove checkpoints: each loses its name at once, then its files."""
    for step in steps:
        _take_away(step_path(folder, step))
    sync_folder(folder)
    for path in folder.glob(".step-*.gone"):
        # Some files may still be open elsewhere; the next removal tries again.
        shutil.rmtree(path, ignore_errors=True)


def clean(folder: Path) -> None:
    """Finish what a killed run had begun: name what it had saved completely, delete the rest."""
    for path in folder.glob(".step-*.saving"):
        place = path.with_name(path.name.removeprefix(".").removesuffix(".saving"))
        if not place.exists() and _complete(path):
            publish(path, place)
        else:
            shutil.rmtree(path)
    for path in folder.glob(".step-*.gone"):
        shutil.rmtree(path, ignore_errors=True)


def _take_away(place: Path) -> None:
    gone = place.with_name(f".{place.name}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    place.rename(gone)


def _complete(path: Path) -> bool:
    with contextlib.suppress(OSError, Damaged, UnicodeDecodeError):
        manifest = Manifest.loads((path / NAME).read_text(encoding="utf-8"))
        return all((path / file.name).stat().st_size == file.bytes for file in manifest.files.values())
    return False


class Lock:
    """A folder held for this process, until `close`, or until the process ends, in whatever way.

    A record lock, since a forked child (a loader's worker) would inherit one of flock and could outlive its parent.
    """

    def __init__(self, folder: Path, wait: float = LOCK_SECONDS):
        handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self.close = weakref.finalize(self, os.close, handle)
        until = time.monotonic() + wait
        while not _locked(handle):
            if time.monotonic() >= until:
                owner = os.read(handle, 1000).decode(errors="replace").strip() or "another process"
                self.close()
                raise CheckpointError(
                    f"{folder} is in use by {owner}: end that run, or give this one a folder of its own"
                )
            time.sleep(0.1)
        os.truncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


def _locked(handle: int) -> bool:
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.ENOLCK, errno.ENOTSUP)  # a file system without locks
    return True
