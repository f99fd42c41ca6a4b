"""Checkpoints of a run: saved while training goes on, complete or absent, the last few kept.

    training   step  step  save  step  step  step  save  …
                            │ copy to host                 │ waits for the one before, raises what it met
    thread                  └ write, sync, rename, prune ──┘

Every rank copies and writes only its part of the state. The thread's messages have a process group of their own.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import Tensor

from mural.checkpoint.folder import Lock, clean, remove, saving_path, step_path, steps_in
from mural.checkpoint.pieces import Offer, Piece, WrittenPart, as_piece, divide, offer
from mural.checkpoint.saving import StagedPart, Staging, begin, finish, write_share
from mural.checkpoint.snapshot import AGREEING, Snapshot, of_first, on_all, open_snapshot
from mural.checkpoint.values import check_plain
from mural.comm.failure.agree import describe, gather
from mural.comm.groups import group_on_host, place_in
from mural.errors import CheckpointError
from mural.ranks import Mesh

WAIT = timedelta(hours=2)
"""How long ranks wait for the slowest one's disk. A rank that dies ends the wait at once."""


class Checkpoints:
    """The checkpoints in a folder that this run alone writes to; the last `keep` are kept.

    Making one is collective, and so are `save`, `wait` and `read`: each succeeds on all ranks, or raises the same
    `CheckpointError` on all of them. After an error the object stays usable.
    """

    def __init__(self, folder: Path | str, mesh: Mesh, *, keep: int = 3, asynchronous: bool = True):
        if keep < 1:
            raise CheckpointError(f"keep={keep}: at least the newest checkpoint is kept, so give 1 or more")
        self.folder, self.keep, self.asynchronous = Path(folder), keep, asynchronous
        self.group = group_on_host(mesh.transport, "checkpoints", WAIT) if mesh.world > 1 else None
        self.staging = Staging()
        self.rank, self.world = place_in(self.group)
        self.best: int | None = None
        """A step that is kept however many come after it."""
        self.continues = False
        """Whether this run has read or saved here: then whatever is newer than its step belongs to an abandoned run."""
        self.divided: tuple[list[str], tuple[WrittenPart, ...]] = ([], ())
        self.thread = ThreadPoolExecutor(1, "mural-checkpoint")
        self.writing: Future[None] | None = None
        self.lock: Lock | None = None
        with on_all(self.group):
            self._occupy()

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, ascending."""
        return steps_in(self.folder)

    def latest(self) -> int | None:
        """The newest complete checkpoint's step, if there is any."""
        return max(self.steps(), default=None)

    def save(self, step: int, tensors: Mapping[str, Tensor | Piece], values: Mapping[str, Any]) -> None:
        """Begin to save tensors and values (rank 0's, plain JSON) as the checkpoint of a step.

        A full tensor is the same on every rank, and is written once; pieces together make up a tensor. What is given
        may change as soon as this returns. A save that is still under way is waited for first, and its error raised.
        """
        self.wait()
        with on_all(self.group):
            pieces, plain = self._prepare(step, tensors, values)
        parts = self._parts(step, [offer(name, piece) for name, piece in pieces.items()])
        with on_all(self.group):
            staged = self.staging.copy(parts, pieces)
        self.writing = self.thread.submit(self._write, step, staged, plain)
        self.continues = True
        if not self.asynchronous:
            self.wait()

    def wait(self) -> None:
        """Return when the save that was begun last is on disk; raise on every rank if it failed on any."""
        if self.writing is None:
            return
        self.writing.exception()  # an interrupt here leaves it under way
        writing, self.writing = self.writing, None
        try:
            with on_all(self.group):
                writing.result()
        except CheckpointError as error:
            latest = gather(self.group, self.latest(), AGREEING)[0]
            rest = "there is no complete checkpoint" if latest is None else f"step {latest} is complete"
            raise CheckpointError(f"{error}; {rest}") from error

    def read(self, step: int | None = None) -> Snapshot:
        """The checkpoint of a step, checked; without a step, the newest that is intact (see `Snapshot.passed_over`)."""
        self.wait()
        snapshot = open_snapshot(self.folder, self.group, step)
        self.continues = True
        return snapshot

    def close(self) -> None:
        """Let this rank's writing end, and leave the folder to others; not collective, call `wait` before."""
        self.thread.shutdown()
        if self.lock is not None:
            self.lock.close()
            self.lock = None

    def _occupy(self) -> None:
        if self.rank == 0:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                self.lock = Lock(self.folder)
                clean(self.folder)
            except OSError as error:
                raise CheckpointError(
                    f"checkpoints cannot be written to {self.folder}: {error.strerror}: choose another folder"
                ) from error

    def _prepare(
        self, step: int, tensors: Mapping[str, Tensor | Piece], values: Mapping[str, Any]
    ) -> tuple[dict[str, Piece], Any]:
        if type(step) is not int or step < 0:
            raise CheckpointError(f"step={step!r}: give a whole number of at least 0")
        check_plain(values, "values")
        newer = [s for s in self.steps() if s >= step] if self.rank == 0 and not self.continues else []
        if newer:
            raise CheckpointError(
                f"{self.folder} already holds step {newer[-1]}, and this run would save step {step} without having "
                f"read it: resume from it, or give the run a folder of its own"
            )
        return {name: as_piece(name, tensor) for name, tensor in tensors.items()}, json.loads(json.dumps(values))

    def _parts(self, step: int, own: Sequence[Offer]) -> tuple[WrittenPart, ...]:
        """What this rank writes; worked out again only when some rank's tensors are others than last time."""
        told = f"{step} {hashlib.sha256(repr(own).encode()).hexdigest()}"
        digests = gather(self.group, told, AGREEING)
        steps = {rank: int(digest.split()[0]) for rank, digest in digests.items()}
        if len(set(steps.values())) > 1:
            raise CheckpointError(f"the ranks save different steps at the same time: {steps}")
        kinds = [digest.split()[1] for digest in digests.values()]
        if kinds != self.divided[0]:
            offers = [own] * self.world if len(set(kinds)) == 1 else list(gather(self.group, own, AGREEING).values())
            self.divided = (kinds, divide(offers)[self.rank])
        return self.divided[1]

    def _write(self, step: int, staged: Sequence[StagedPart], values: Mapping[str, Any]) -> None:
        """In the thread: write, and then drop what is no longer kept."""
        place, first = step_path(self.folder, step), self.rank == 0
        try:
            of_first(self.group, lambda: begin(place))
            with on_all(self.group):
                share = write_share(place, self.rank, staged)
            shares = list(gather(self.group, share, AGREEING).values())
            of_first(self.group, lambda: finish(place, step, shares, values))
        except Exception as error:
            if first:
                shutil.rmtree(saving_path(place), ignore_errors=True)
            raise CheckpointError(f"step {step} was not saved: {describe(error)}") from error
        if first:
            self._prune(step)

    def _prune(self, step: int) -> None:
        steps = self.steps()
        kept = [*[s for s in steps if s <= step][-self.keep :], self.best]
        try:
            remove(self.folder, [s for s in steps if s not in kept])
        except OSError as error:
            raise CheckpointError(f"step {step} was saved, but others could not be removed: {error}") from error
