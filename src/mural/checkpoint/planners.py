"""Planners for `torch.distributed.checkpoint`: it saves parts that are divided already, and loads pieces of any cut."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from mural.checkpoint.pieces import HERE, Piece
from mural.geometry import Box, Interval, moves, needs_of, slices


class Staged(NamedTuple):
    """A part of a tensor, copied for writing."""

    name: str
    shape: tuple[int, ...]
    box: Box
    tensor: Tensor


class PartSavePlanner(SavePlanner):
    """Plans to write what this rank was given to write, and nothing else."""

    def __init__(self, staged: Iterable[Staged]):
        self.staged = {MetadataIndex(one.name, offsets(one.box)): one for one in staged}

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Nothing: the parts were given to the planner itself."""

    def create_local_plan(self) -> SavePlan:
        """One item for each part."""
        items: list[WriteItem] = []
        for index, one in self.staged.items():
            chunk = ChunkStorageMetadata(offsets(one.box), torch.Size(one.tensor.shape))
            data = TensorWriteData(chunk, TensorProperties(dtype=one.tensor.dtype), torch.Size(one.shape))
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The plans as they are: the parts were divided before they were copied."""
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The values of a part."""
        return self.staged[write_item.index].tensor


class PieceLoadPlanner(LoadPlanner):
    """Plans to read, for each piece, what the checkpoint's blocks have in common with it."""

    def __init__(self, pieces: Mapping[str, Piece]):
        self.pieces = pieces

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Keep what the checkpoint holds."""
        self.metadata: Any = metadata

    def create_local_plan(self) -> LoadPlan:
        """One item for each block that overlaps a piece."""
        items: list[ReadItem] = []
        for name, piece in self.pieces.items():
            chunks = self.metadata.state_dict_metadata[name].chunks
            held = {number: _box(chunk) for number, chunk in enumerate(chunks)}
            for number, _, common in moves(held, {HERE: needs_of(piece.place)}):
                items.append(
                    ReadItem(
                        LoadItemType.TENSOR,
                        dest_index=MetadataIndex(name, offsets(piece.place)),
                        dest_offsets=_from(common, piece.place),
                        storage_index=MetadataIndex(name, chunks[number].offsets),
                        storage_offsets=_from(common, held[number]),
                        lengths=torch.Size([i.size for i in common]),
                    )
                )
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Never called: a mural checkpoint holds no objects."""
        raise NotImplementedError(f"{read_item.dest_index.fqn}: a mural checkpoint holds tensors, and values as JSON")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The part of the piece that an item fills."""
        place = (slice(o, o + n) for o, n in zip(read_item.dest_offsets, read_item.lengths, strict=True))
        return self.pieces[read_item.dest_index.fqn].tensor.detach()[tuple(place)]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing: what was resolved is a view of the piece."""


def offsets(box: Box) -> torch.Size:
    """Where a box starts."""
    return torch.Size([i.start for i in box])


def _box(chunk: ChunkStorageMetadata) -> Box:
    return tuple(Interval(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))


def _from(part: Box, outer: Box) -> torch.Size:
    return torch.Size([s.start for s in slices(part, outer)])
