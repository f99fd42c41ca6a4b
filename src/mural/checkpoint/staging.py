"""Staging: the parts that this rank writes, copied into one host buffer that every save uses again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from mural.checkpoint.pieces import Part, Piece
from mural.checkpoint.planners import Staged
from mural.comm.host_staging import Buffer, Pinned, Plain
from mural.geometry import slices


class Staging:
    """Host memory for this rank's parts of the state: as large as the largest save so far, no larger."""

    def __init__(self) -> None:
        self.buffer: Buffer | None = None

    def copy(self, parts: Sequence[Part], pieces: Mapping[str, Piece]) -> list[Staged]:
        """The parts as they are now; the next call overwrites them."""
        # Wide types first, as in the file: each part then starts at a multiple of its width.
        ordered = sorted(parts, key=lambda part: -pieces[part.name].tensor.itemsize)
        memory = self._memory(sum(part.bytes for part in parts), any(p.tensor.is_cuda for p in pieces.values()))
        staged: list[Staged] = []
        at = 0
        for part in ordered:
            piece = pieces[part.name]
            source = piece.tensor.detach()[slices(part.box, piece.place)]
            target = memory[at : at + part.bytes].view(source.dtype).view(source.shape)
            target.copy_(source, non_blocking=True)
            staged.append(Staged(part.name, tuple(piece.shape), part.box, target))
            at += part.bytes
        for device in {piece.tensor.device for piece in pieces.values() if piece.tensor.is_cuda}:
            torch.cuda.synchronize(device)  # the training changes the originals next
        return staged

    def _memory(self, size: int, pinned: bool) -> torch.Tensor:
        if self.buffer is None or self.buffer.memory.nbytes < size or (pinned and not isinstance(self.buffer, Pinned)):
            self.buffer = None  # gone before the larger one comes
            self.buffer = (Pinned if pinned else Plain)(max(size, 1))
        return self.buffer.memory
