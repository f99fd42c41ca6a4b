"""Shares: the part of a parameter that a rank of the channel axis holds, and how the whole is put together again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from mural.comm import fetch
from mural.comm.exchange import ExchangeRoute
from mural.errors import LayoutError
from mural.geometry import Box, Interval
from mural.ranks import Mesh


@dataclass(frozen=True)
class Share:
    """What a rank holds of a parameter: the interval of dim `dim` that belongs to its coordinate on the channel axis.

    `intervals` are those of all coordinates. Ranks that differ only along data and spatial axes hold the same.
    """

    name: str
    shape: tuple[int, ...]
    dim: int
    intervals: tuple[Interval, ...]
    mesh: Mesh

    def box_at(self, coordinate: int) -> Box:
        """The global place of a coordinate's part."""
        return tuple(self.intervals[coordinate] if d == self.dim else Interval(0, n) for d, n in enumerate(self.shape))

    @cached_property
    def box(self) -> Box:
        """The global place of this rank's part."""
        return self.box_at(self.mesh.coordinates["channel"])

    def cut(self, whole: Tensor) -> Tensor:
        """This rank's part of the whole tensor."""
        interval = self.box[self.dim]
        return whole.narrow(self.dim, interval.start, interval.size)

    def check(self, part: Tensor) -> None:
        """Raise unless a tensor has the extents of this rank's part."""
        wanted = tuple(interval.size for interval in self.box)
        if tuple(part.shape) != wanted:
            raise LayoutError(
                f"{self.name}, of shape {self.shape}, is split by channels, and this rank has {wanted} of it, but it "
                f"was replaced by a tensor of {tuple(part.shape)}: load whole weights by load_state_dict, or cut them"
            )

    def without_memory(self, part: Tensor) -> nn.Parameter:
        """The whole tensor on the meta device."""
        return nn.Parameter(torch.empty(self.shape, dtype=part.dtype, device="meta"), part.requires_grad)

    @torch.no_grad()
    def whole(self, part: Tensor) -> Tensor:
        """The whole tensor on every rank, from everyone's part. Collective over the channel axis."""
        self.check(part)
        mesh = self.mesh
        have = {r: self.box_at(mesh.coordinates_of(r)["channel"]) for r in mesh.peers(("channel",))}
        need = dict.fromkeys(have, tuple((Interval(0, n),) for n in self.shape))
        route = ExchangeRoute.of(mesh.rank, have, need)
        return fetch(part.detach().contiguous(), route, mesh.transport, f"the whole of {self.name}")


def mark_share(parameter: nn.Parameter, share: Share) -> nn.Parameter:
    """The parameter, marked as a part of a larger one."""
    parameter._mural_share = share  # type: ignore[attr-defined]
    return parameter


def share_of(parameter: object) -> Share | None:
    """The share that a parameter is; None for one that the rank holds whole."""
    return getattr(parameter, "_mural_share", None)


def shares_among(parameters: Iterable[Tensor]) -> list[tuple[Tensor, Share]]:
    """The parameters that are parts of larger ones, each once."""
    distinct = {id(p): p for p in parameters}
    return [(p, share) for p in distinct.values() if (share := share_of(p)) is not None]
