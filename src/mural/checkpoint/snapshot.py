"""A snapshot: one checkpoint that was found intact, its values, and its tensors in whatever parts they are wanted."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from mural.checkpoint.files import damages, read_block, read_manifest
from mural.checkpoint.folder import step_path, steps_in
from mural.checkpoint.manifest import Manifest, StoredTensor
from mural.checkpoint.pieces import HERE, Piece, as_piece
from mural.comm.failure.agree import gather, together
from mural.comm.groups import place_in
from mural.errors import CheckpointError
from mural.geometry import moves, needs_of, slices, whole

T = TypeVar("T")
AGREEING = "agreeing on a checkpoint"


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint whose every byte agreed with its CRC-32 when it was opened.

    `passed_over` says which newer ones were not intact, and why. `load` is collective; the rest is not.
    """

    place: Path
    manifest: Manifest
    group: dist.ProcessGroup | None
    passed_over: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """The step after which it was saved."""
        return self.manifest.step

    @property
    def values(self) -> Mapping[str, Any]:
        """The values that were saved along with the tensors."""
        return self.manifest.values

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Type and shape of every tensor, by name."""
        return self.manifest.tensors

    def load(self, targets: Mapping[str, Tensor | Piece]) -> None:
        """Fill tensors, or pieces of any cut, in place; nothing is changed unless everything fits on every rank."""

        def fitting() -> dict[str, Piece]:
            pieces = {name: as_piece(name, target) for name, target in targets.items()}
            faults = [fault for name, piece in pieces.items() if (fault := self._misfit(name, piece))]
            if faults:
                raise CheckpointError(f"{self.place} does not fit: {listed(faults)}")
            return pieces

        with on_all(self.group):
            pieces = fitting()
        try:
            with on_all(self.group):
                for name, piece in pieces.items():
                    self._fill(name, piece)
        except CheckpointError as error:
            raise CheckpointError(
                f"{self.place} became unreadable while it was loaded: {error}. Some tensors were overwritten already: "
                f"start again"
            ) from error

    def tensor(self, name: str, box: Sequence[tuple[int, int]] | None = None) -> Tensor:
        """A tensor, or a box of it, in new host memory."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.place} does not fit: {lacking(name, self.tensors)}")
        entry = self.tensors[name]
        place = whole(entry.shape) if box is None else tuple(box)
        piece = Piece(torch.empty([stop - start for start, stop in place], dtype=entry.dtype), entry.shape, place)
        self._fill(name, piece)
        return piece.tensor

    def _fill(self, name: str, piece: Piece) -> None:
        """Copy from each block that overlaps a piece, once it was checked."""
        entry = self.tensors[name]
        held = {number: block.box for number, block in enumerate(entry.blocks)}
        for move in moves(held, {HERE: needs_of(piece.place)}):
            block = entry.blocks[move.source]
            values = read_block(self.place, name, block, entry.dtype)
            piece.tensor.detach()[slices(move.box, piece.place)].copy_(values[slices(move.box, block.box)])

    def _misfit(self, name: str, piece: Piece) -> str:
        entry = self.tensors.get(name)
        if entry is None:
            return lacking(name, self.tensors)
        if entry.shape != tuple(piece.shape):
            return f"{name} has the shape {entry.shape} there, but {tuple(piece.shape)} here"
        if entry.dtype != piece.tensor.dtype:
            return f"{name} has the type {entry.dtype} there, but {piece.tensor.dtype} here"
        return ""


def lacking(name: str, names: Collection[str], there: str = "there") -> str:
    """The message that a name is not among others, with those nearest to it."""
    near = difflib.get_close_matches(name, names, n=2, cutoff=0.6)
    return f"{name} is not {there}" + (f" (nearest: {', '.join(near)})" if near else "")


def listed(faults: Sequence[str], most: int = 4) -> str:
    """Some faults in one text."""
    rest = len(faults) - most
    return "; ".join(faults[:most]) + (f"; and {rest} more" if rest > 0 else "")


def open_snapshot(folder: Path, group: dist.ProcessGroup | None = None, step: int | None = None) -> Snapshot:
    """The checkpoint of a step, or the newest intact one; collective. The ranks share the work of checking it."""
    steps = of_first(group, lambda: steps_in(folder))
    if not steps or (step is not None and step not in steps):
        what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise CheckpointError(f"{folder} holds {what}" + (f", but of steps {', '.join(map(str, steps))}" * bool(steps)))
    damaged: dict[int, CheckpointError] = {}
    for candidate in (s for s in reversed(steps) if step is None or s <= step):
        try:
            found = _intact(step_path(folder, candidate), group)
        except CheckpointError as error:
            damaged[candidate] = error
            continue
        if damaged and step is not None:
            raise CheckpointError(f"{damaged[step]}; step {candidate} is intact: read that one") from damaged[step]
        return replace(found, passed_over=_passed_over(damaged))
    if step is not None:
        raise CheckpointError(f"{damaged[step]}; there is no older one that is intact") from damaged[step]
    raise CheckpointError(f"{folder} holds no intact checkpoint: {'; '.join(_passed_over(damaged))}")


def _passed_over(damaged: Mapping[int, CheckpointError]) -> tuple[str, ...]:
    return tuple(f"step {step} was passed over: {error}" for step, error in damaged.items())


def on_all(group: dist.ProcessGroup | None) -> AbstractContextManager[None]:
    """A block that succeeds on all ranks, or raises the same `CheckpointError` on all of them. Collective."""
    return together(group, kind=CheckpointError, same=True)


def of_first(group: dist.ProcessGroup | None, read: Callable[[], T]) -> T:
    """What rank 0 reads, on all ranks; where it cannot, an error on all. Collective."""
    found: T | None = None
    with on_all(group):
        if place_in(group)[0] == 0:
            found = read()
    return cast(T, gather(group, found, AGREEING)[0])


def _intact(place: Path, group: dist.ProcessGroup | None) -> Snapshot:
    manifest = of_first(group, lambda: read_manifest(place))
    if step_path(place.parent, manifest.step) != place:
        raise CheckpointError(f"{place} holds step {manifest.step}: it was renamed, or copied from that step")
    found = gather(group, list(islice(damages(place, manifest, *place_in(group)), 3)), AGREEING)
    faults = list(dict.fromkeys(text for own in found.values() for text in own))
    if faults:
        raise CheckpointError(listed(faults, 3))
    return Snapshot(place, manifest, group)
