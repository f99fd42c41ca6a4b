"""Margins: positions of neighbours around a piece that this rank has computed too, so that it need not fetch them.

own box        extended piece
+-----+        +.........+
|     |   ->   . +-----+ .      Each rank's extended piece has the values that its neighbours hold there.
|     |        . |     | .      Operations that know of margins run on it; all others see the own piece,
+-----+        . +-----+ .      which is cut out of it at first use.
               +.........+
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from mural.comm.exchange import Slices, give_back
from mural.errors import LayoutError
from mural.geometry import Box, Interval, slices
from mural.shard.layout import Layout, Want, route

Spans = tuple[tuple[Interval, ...], ...]
"""For each dim, an interval for every coordinate of its mesh axis; a single one where the dim belongs to no axis."""


@lru_cache(maxsize=4096)
def own_spans(layout: Layout) -> Spans:
    """What every rank owns."""
    return tuple(
        (Interval(0, n),) if cuts is None else cuts.intervals()
        for n, cuts in zip(layout.shape, layout.cuts, strict=True)
    )


def box_in(spans: Spans, layout: Layout) -> Box:
    """This rank's box."""
    at = layout.mesh.coordinates
    return tuple(
        intervals[0] if cuts is None else intervals[at[axis or ""]]
        for intervals, cuts, axis in zip(spans, layout.cuts, layout.axes, strict=True)
    )


def wants_in(spans: Spans, layout: Layout) -> tuple[Want, ...]:
    """The spans as every rank's needs."""
    return tuple(
        (None if cuts is None else axis, tuple((i,) for i in intervals))
        for intervals, cuts, axis in zip(spans, layout.cuts, layout.axes, strict=True)
    )


def covers(outer: Spans, inner: Spans) -> bool:
    """Whether, on every rank, one contains the other."""
    return all(a.contains(b) for o, i in zip(outer, inner, strict=True) for a, b in zip(o, i, strict=True))


def common(a: Spans, b: Spans) -> Spans:
    """The intersection on every rank."""
    return tuple(tuple(x & y for x, y in zip(p, q, strict=True)) for p, q in zip(a, b, strict=True))


def hull(a: Spans, b: Spans) -> Spans:
    """The smallest spans that cover both."""
    return tuple(
        tuple(Interval(min(x.start, y.start), max(x.stop, y.stop)) for x, y in zip(p, q, strict=True))
        for p, q in zip(a, b, strict=True)
    )


_pieces: WeakValueDictionary[int, Margin] = WeakValueDictionary()
"""The margins whose own piece was cut out, by the memory of that piece."""


@dataclass(eq=False)
class Margin:
    """The extended piece of a tensor.

    `live` says that operations may still read it, and `used` that one has, so that gradients of the tensor do not all
    come through the owned piece. Both are the same on every rank.
    """

    extended: Tensor
    spans: Spans
    placement: Layout
    live: bool = True
    used: bool = False
    piece: Tensor | None = None
    version: int = 0
    grad: Tensor | None = None
    keeper: Any = None

    @property
    def crop(self) -> Slices:
        """The slices of the owned box in the extended piece."""
        return slices(self.placement.box, box_in(self.spans, self.placement))

    def cut_out(self) -> Tensor:
        """The owned piece, with the history of the extended one, in any grad mode."""
        if self.piece is None:
            with torch.inference_mode(False), torch.enable_grad():
                self.piece = self.extended[self.crop].clone()
            self.version = self.piece._version
            _pieces[self.piece.untyped_storage()._cdata] = self
        return self.piece

    def read(self, spans: Spans) -> Tensor:
        """The part of the extended piece at those spans, for an operation that runs on it."""
        self.check()
        self.used = True
        box = box_in(self.spans, self.placement)
        part = box_in(spans, self.placement)
        return self.extended if box == part else self.extended[slices(part, box)]

    def check(self) -> None:
        """Raise if the owned piece was written to: the neighbours' margins would not see it."""
        if self.piece is not None and self.piece._version != self.version:
            raise LayoutError(
                f"the piece of a sharded tensor of shape {self.placement.shape} was written in place through .local, "
                f"but its neighbours computed those positions too: write to the sharded tensor itself, or to a clone, "
                f"or run the model in `with fusing(False)` of mural.shard.halo.fuse"
            )

    def homed(self, grad: Tensor) -> Tensor:
        """The gradient of the own piece, from the gradients of all ranks' extended pieces; collective."""
        self.check()
        found = route(self.placement, wants_in(self.spans, self.placement))
        shape = self.placement.local_shape
        return give_back(grad, found, self.placement.mesh.transport, "gradient of a margin", shape)

    def hook(self, of_own: Callable[[Tensor], Tensor | None]) -> Any:
        """Call a hook with the gradient of the own piece; it may return another."""

        def on_extended(grad: Tensor) -> Tensor:
            own = self.homed(grad)
            changed = of_own(own)
            return self.spread(own if changed is None else changed)

        handle = self.extended.register_hook(on_extended)
        if self.keeper is not None:
            self.retain()
        return handle

    def retain(self) -> None:
        """Keep the gradient of the own piece as `grad`; after all hooks, as torch does."""
        if self.keeper is not None:
            self.keeper.remove()
        self.keeper = self.extended.register_hook(self.keep)

    def keep(self, grad: Tensor) -> None:
        """Keep the gradient of the own piece."""
        own = self.homed(grad)
        self.grad = own if self.grad is None else self.grad + own

    def spread(self, grad: Tensor) -> Tensor:
        """The gradient of the extended piece that corresponds to a gradient of the owned piece."""
        whole = torch.zeros_like(self.extended)
        whole[self.crop] = grad
        return whole


def forget(local: Tensor) -> None:
    """Before a write to a piece: stop using its margin, and that of a tensor that it is a view of."""
    if len(_pieces) and (margin := _pieces.get(local.untyped_storage()._cdata)) is not None:
        margin.live = False
