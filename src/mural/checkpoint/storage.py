"""Storage for `torch.distributed.checkpoint`: tensors in safetensors files, the rest in a JSON manifest, no pickle.

`dcp.save(…, storage_writer=Writer(place, step))` makes a checkpoint appear at `place` whole, or not at all;
`dcp.load(…, storage_reader=Reader(place))` reads one and checks every block that it reads against its CRC-32.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import socket
import zlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from mural.checkpoint.files import header, read_block, read_manifest, write_tensor
from mural.checkpoint.folder import publish, saving_path, sync_folder, write_synced
from mural.checkpoint.manifest import NAME, Block, Entry, File, Manifest, mural_version
from mural.checkpoint.planners import offsets
from mural.errors import CheckpointError
from mural.geometry import Box, Interval, volume


@dataclasses.dataclass(frozen=True)
class Stored:
    """Where a block went: what a rank tells the coordinator of what it wrote."""

    file: File
    block: Block


class Writer(StorageWriter):
    """Writes a checkpoint beside its place, one safetensors file per rank, and renames it when all of it is on disk."""

    def __init__(self, place: Path, step: int, values: Mapping[str, Any] | None = None):
        self.place, self.step, self.values = place, step, values or {}
        self.saving = saving_path(place)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: a writer is for one checkpoint, whose place it was given."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """An empty folder to write into; the other ranks write after the plans are settled."""
        if is_coordinator:
            shutil.rmtree(self.saving, ignore_errors=True)
            self.saving.mkdir(parents=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans, each with the name of its rank's file."""
        return [
            dataclasses.replace(plan, storage_data=f"rank-{rank:05d}.safetensors") for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file, and put it on disk."""
        done: Future[list[WriteResult]] = Future()
        done.set_result(self._write(plan, planner) if plan.items else [])
        return done

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        path = self.saving / plan.storage_data
        # Wide types first: every tensor then starts at a multiple of its width, and there are no gaps.
        writes = sorted(map(_described, plan.items), key=lambda write: -write.dtype.itemsize)
        try:
            head, ranges = header({write.key: (write.dtype, [i.size for i in write.box]) for write in writes})
            with path.open("xb") as file:
                file.write(head)
                crcs = [write_tensor(file, _resolved(planner, write.item)) for write in writes]
                file.flush()
                os.fsync(file.fileno())
            sync_folder(self.saving)
        except OSError as error:
            raise CheckpointError(_failed(self.place / path.name, writes, error)) from error
        meta = File(path.name, len(head) + ranges[writes[-1].key][1], len(head), zlib.crc32(head))
        results: list[WriteResult] = []
        for write, crc in zip(writes, crcs, strict=True):
            start, stop = (len(head) + at for at in ranges[write.key])
            block = Block(write.box, path.name, start, stop, crc)
            results.append(WriteResult(write.item.index, stop - start, Stored(meta, block)))
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest last, then let the checkpoint appear at its place."""
        files: dict[str, File] = {}
        blocks: dict[str, list[Block]] = {}
        for result in (one for own in results for one in own):
            files[result.storage_data.file.name] = result.storage_data.file
            blocks.setdefault(result.index.fqn, []).append(result.storage_data.block)
        tensors: dict[str, Entry] = {}
        for name, found in metadata.state_dict_metadata.items():
            if isinstance(found, TensorStorageMetadata):
                tensors[name] = Entry(found.properties.dtype, tuple(found.size), tuple(blocks[name]))
        now = datetime.now(UTC).isoformat(timespec="seconds")
        written = {"mural": mural_version(), "torch": torch.__version__, "time": now, "host": socket.gethostname()}
        manifest = Manifest(self.step, written, files, tensors, self.values)
        try:
            write_synced(self.saving / NAME, manifest.dumps())
            publish(self.saving, self.place)
        except OSError as error:
            raise CheckpointError(f"{self.saving} could not become {self.place.name}: {error}") from error

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Never: `dcp.save` is given a writer, it does not look for one."""
        return False


class Reader(StorageReader):
    """Reads a checkpoint, its manifest at first, then the blocks that a plan asks for."""

    def __init__(self, place: Path, manifest: Manifest | None = None):
        self.place = place
        self.manifest = manifest or read_manifest(place)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: a reader is for one checkpoint, whose place it was given."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What there is, in the words of `torch.distributed.checkpoint`."""
        described: dict[str, Any] = {}
        stored: dict[MetadataIndex, Block] = {}
        for name, entry in self.manifest.tensors.items():
            chunks = [ChunkStorageMetadata(offsets(b.box), torch.Size([i.size for i in b.box])) for b in entry.blocks]
            described[name] = TensorStorageMetadata(
                TensorProperties(dtype=entry.dtype), torch.Size(entry.shape), chunks
            )
            stored |= {MetadataIndex(name, offsets(b.box)): b for b in entry.blocks}
        return Metadata(described, storage_data=stored)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Keep where the blocks lie."""
        self.stored: dict[MetadataIndex, Block] = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are: every rank reads what it needs."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read and check each block that is needed once, and copy from it what is asked for."""
        wanted: dict[MetadataIndex, list[ReadItem]] = {}
        for item in plan.items:
            wanted.setdefault(item.storage_index, []).append(item)
        for index, items in wanted.items():
            values = read_block(self.place, index.fqn, self.stored[index], self.manifest.tensors[index.fqn].dtype)
            for item in items:
                place = tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))
                target = planner.resolve_tensor(item).detach()
                target.copy_(values[place])
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Never: `dcp.load` is given a reader, it does not look for one."""
        return False


class _Write(NamedTuple):
    """A block to write: its name in the file, its type, and its place."""

    item: WriteItem
    key: str
    dtype: torch.dtype
    box: Box


def _described(item: WriteItem) -> _Write:
    data = item.tensor_data
    if data is None:
        raise CheckpointError(f"{item.index.fqn} is no tensor: give it to the writer as one of its values")
    box = tuple(Interval(o, o + n) for o, n in zip(data.chunk.offsets, data.chunk.sizes, strict=True))
    # A part of a tensor is called by its place in it too.
    part = "" if data.chunk.sizes == data.size else f"[{', '.join(f'{i.start}:{i.stop}' for i in box)}]"
    return _Write(item, item.index.fqn + part, data.properties.dtype, box)


def _resolved(planner: SavePlanner, item: WriteItem) -> Tensor:
    found = planner.resolve_data(item)
    if not isinstance(found, Tensor):
        raise CheckpointError(f"{item.index.fqn} is no tensor: give it to the writer as one of its values")
    return found


def _failed(path: Path, writes: Sequence[_Write], error: OSError) -> str:
    text = f"{path} could not be written: {error.strerror}"
    if isinstance(error, FileNotFoundError):
        return f"{text} on {socket.gethostname()}: all ranks need to see the folder of checkpoints"
    needed = sum(volume(write.box) * write.dtype.itemsize for write in writes)
    free = shutil.disk_usage(path.parent.parent).free
    return f"{text} ({needed / 1e6:,.1f} MB to write, {free / 1e6:,.1f} MB free)"
