"""A save: the parts that this rank writes, copied to host memory, written to its file, and listed in the manifest."""

from __future__ import annotations

import os
import shutil
import socket
import zlib
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mural.checkpoint.files import header, write_tensor
from mural.checkpoint.folder import publish, saving_path, sync_folder, write_synced
from mural.checkpoint.manifest import NAME, File, Manifest, StoredBlock, StoredTensor, mural_version
from mural.checkpoint.pieces import Piece, WrittenPart
from mural.comm.host_staging import Buffer, PageableMemory, Pinned
from mural.errors import CheckpointError
from mural.geometry import Box, slices


class StagedPart(NamedTuple):
    """A part of a tensor, copied for writing."""

    name: str
    shape: tuple[int, ...]
    box: Box
    tensor: Tensor

    @property
    def key(self) -> str:
        """Its name in the file; that of a part says its place too."""
        whole = self.shape == tuple(self.tensor.shape)
        return self.name + ("" if whole else f"[{', '.join(f'{i.start}:{i.stop}' for i in self.box)}]")


class Staging:
    """Host memory for this rank's parts of the state: as large as the largest save so far, no larger."""

    def __init__(self) -> None:
        self.buffer: Buffer | None = None

    def copy(self, parts: Sequence[WrittenPart], pieces: Mapping[str, Piece]) -> list[StagedPart]:
        """The parts as they are now; the next call overwrites them."""
        # Wide types first: each part then starts at a multiple of its width, here and in the file, without gaps.
        ordered = sorted(parts, key=lambda part: -pieces[part.name].tensor.itemsize)
        memory = self._memory(sum(part.bytes for part in parts), any(p.tensor.is_cuda for p in pieces.values()))
        staged: list[StagedPart] = []
        at = 0
        for part in ordered:
            piece = pieces[part.name]
            source = piece.tensor.detach()[slices(part.box, piece.place)]
            target = memory[at : at + part.bytes].view(source.dtype).view(source.shape)
            target.copy_(source, non_blocking=True)
            staged.append(StagedPart(part.name, tuple(piece.shape), part.box, target))
            at += part.bytes
        for device in {piece.tensor.device for piece in pieces.values() if piece.tensor.is_cuda}:
            torch.cuda.synchronize(device)  # the training changes the originals next
        return staged

    def _memory(self, size: int, pinned: bool) -> Tensor:
        if self.buffer is None or self.buffer.memory.nbytes < size or (pinned and not isinstance(self.buffer, Pinned)):
            self.buffer = None  # gone before the larger one comes
            self.buffer = (Pinned if pinned else PageableMemory)(max(size, 1))
        return self.buffer.memory


class RankFile(NamedTuple):
    """What one rank wrote: its file, and the blocks of tensors in it."""

    file: File
    tensors: dict[str, StoredTensor]


def begin(place: Path) -> None:
    """Make an empty folder next to a checkpoint's place, for all ranks to write into."""
    shutil.rmtree(saving_path(place), ignore_errors=True)
    saving_path(place).mkdir(parents=True)


def write_share(place: Path, rank: int, staged: Sequence[StagedPart]) -> RankFile | None:
    """A rank's parts in a safetensors file on disk; no file where there are none."""
    if not staged:
        return None
    folder, name = saving_path(place), f"rank-{rank:05d}.safetensors"
    try:
        head, ranges = header({one.key: (one.tensor.dtype, one.tensor.shape) for one in staged})
        with (folder / name).open("xb") as file:
            file.write(head)
            crcs = [write_tensor(file, one.tensor) for one in staged]
            file.flush()
            os.fsync(file.fileno())
        sync_folder(folder)
    except OSError as error:
        raise CheckpointError(_unwritable(place / name, staged, error)) from error
    tensors: dict[str, StoredTensor] = {}
    for one, crc in zip(staged, crcs, strict=True):
        start, stop = (len(head) + at for at in ranges[one.key])
        block = StoredBlock(one.box, name, start, stop, crc)
        before = tensors[one.name].blocks if one.name in tensors else ()
        tensors[one.name] = StoredTensor(one.tensor.dtype, one.shape, (*before, block))
    size = len(head) + ranges[staged[-1].key][1]
    return RankFile(File(name, size, len(head), zlib.crc32(head)), tensors)


def finish(place: Path, step: int, shares: Iterable[RankFile | None], values: Mapping[str, Any]) -> None:
    """Write the manifest last, then let the checkpoint appear at its place."""
    files: dict[str, File] = {}
    tensors: dict[str, StoredTensor] = {}
    for share in filter(None, shares):
        files[share.file.name] = share.file
        for name, entry in share.tensors.items():
            before = tensors[name].blocks if name in tensors else ()
            tensors[name] = StoredTensor(entry.dtype, entry.shape, (*before, *entry.blocks))
    now = datetime.now(UTC).isoformat(timespec="seconds")
    written = {"mural": mural_version(), "torch": torch.__version__, "time": now, "host": socket.gethostname()}
    saving = saving_path(place)
    try:
        write_synced(saving / NAME, Manifest(step, written, files, tensors, values).dumps())
        publish(saving, place)
    except OSError as error:
        raise CheckpointError(f"{saving} could not become {place.name}: {error}") from error


def _unwritable(path: Path, staged: Sequence[StagedPart], error: OSError) -> str:
    text = f"{path} could not be written: {error.strerror}"
    if isinstance(error, FileNotFoundError):
        return f"{text} on {socket.gethostname()}: all ranks need to see the folder of checkpoints"
    needed = sum(one.tensor.nbytes for one in staged)
    free = shutil.disk_usage(path.parent.parent).free
    return f"{text} ({needed / 1e6:,.1f} MB to write, {free / 1e6:,.1f} MB free)"
