"""What ranks that write one image tell each other: whether all is well, who has which part, and the parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from mural.comm import Mesh
from mural.comm.transport import Transfer
from mural.errors import DataError, PeerError

TEXT = 1024
"""Bytes of a message about an error."""
T = TypeVar("T")


class Team:
    """The ranks that write together; without a mesh, this process alone."""

    def __init__(self, mesh: Mesh | None) -> None:
        self.mesh = mesh if mesh is not None and mesh.world > 1 else None
        self.rank = self.mesh.rank if self.mesh is not None else 0
        self.world = self.mesh.world if self.mesh is not None else 1
        self.peers = tuple(peer for peer in range(self.world) if peer != self.rank)
        self._told: BaseException | None = None

    def swap(self, name: str, sends: Mapping[int, torch.Tensor], sizes: Mapping[int, int]) -> dict[int, torch.Tensor]:
        """What the peers send: flat tensors of one type, of these sizes."""
        if self.mesh is None:
            return {}
        like = next(iter(sends.values()))
        return Transfer(self.mesh.transport, name, sends, sizes, like).wait()

    def tables(self, name: str, table: torch.Tensor) -> list[torch.Tensor]:
        """The tables of whole numbers of all ranks, in their order; they may have different numbers of rows."""
        if self.mesh is None:
            return [table]
        length = torch.tensor([table.numel()])
        lengths = self.swap(name, dict.fromkeys(self.peers, length), dict.fromkeys(self.peers, 1))
        flat = table.contiguous().view(-1)
        sizes = {peer: int(n) for peer, n in lengths.items()}
        found = self.swap(name, dict.fromkeys(self.peers, flat), sizes)
        return [table if rank == self.rank else found[rank].view(-1, table.shape[1]) for rank in range(self.world)]

    def agree(self, name: str, work: Callable[[], T]) -> T:
        """The result of this rank's work, once all ranks have done theirs; what one raised, all raise."""
        error: Exception | None = None
        result: list[T] = []
        try:
            result.append(work())
        except PeerError:
            raise
        except Exception as caught:
            error = caught
        if self.mesh is None:
            if error is not None:
                raise error
            return result[0]
        text = str(error or "").encode()[:TEXT] or (type(error).__name__.encode() if error is not None else b"")
        said = torch.zeros(TEXT, dtype=torch.uint8)
        said[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        found = self.swap(name, dict.fromkeys(self.peers, said), dict.fromkeys(self.peers, TEXT))
        texts = {peer: bytes(found[peer].tolist()).rstrip(b"\0").decode(errors="replace") for peer in self.peers}
        heard = [f"rank {peer}: {text}" for peer, text in texts.items() if text]
        self._told = error or (DataError(heard[0]) if heard else None)
        if self._told is not None:
            raise self._told
        return result[0]

    def raised(self, error: BaseException) -> None:
        """Tell the peers that this rank will not come, unless all of them know and have raised too."""
        if self.mesh is not None and error is not self._told:
            self.mesh.transport.raised(error)
