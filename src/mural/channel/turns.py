"""Exchanges in turns: a piece arrives while the one before it is computed on, and a result leaves during the next.

A tensor is fetched in several turns, each with its own route, and results go back the same way, to be added up at their
owners. The next turn's messages are under way while this one's piece is computed on, forward and backward:

    messages   in 0 │ in 1 ──────┐ in 2 ──────┐            │
    compute         │ piece 0    │ piece 1    │ piece 2    │
    messages        │            │ out 0 ─────┼ out 1 ─────┼ out 2 │ all there

The two directions are each other's adjoints: in backward, what was fetched is sent back and added up, and the gradient
of what was added up is fetched. Pieces are not kept for backward but fetched again, one turn ahead, so that a rank
never holds more than two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mural.comm import Transport, mark
from mural.comm.exchange import ExchangeRoute, empty_like, fetched, post, returned
from mural.comm.messages import Transfer


class Line:
    """A tensor of one shape on this rank, and the turns in which it goes to others and comes back."""

    def __init__(self, shape: Sequence[int], routes: Sequence[ExchangeRoute], transport: Transport, name: str):
        self.shape, self.routes, self.transport, self.name = tuple(shape), tuple(routes), transport, name
        self.fetching: dict[int, tuple[Tensor, Transfer]] = {}
        self.giving: dict[int, tuple[Tensor, Transfer]] = {}
        self.again: dict[int, Tensor] = {}
        """Pieces that were fetched again for backward."""

    def start_fetch(self, turn: int, local: Tensor) -> None:
        """Send the turn's parts of this rank's tensor to the ranks that need them."""
        if 0 <= turn < len(self.routes) and turn not in self.fetching:
            route = self.routes[turn]
            transfer = post(self.transport, self.name, local, route.sends, route.receives, route.needed)
            self.fetching[turn] = (local, transfer)

    def end_fetch(self, turn: int) -> Tensor:
        """The turn's piece."""
        local, transfer = self.fetching.pop(turn)
        return fetched(local, transfer, self.routes[turn])

    def start_give(self, turn: int, piece: Tensor) -> None:
        """Send the turn's piece to its owners."""
        route = self.routes[turn]
        transfer = post(self.transport, self.name, piece, route.receives, route.sends, self.shape)
        self.giving[turn] = (piece, transfer)

    def end_give(self) -> Tensor:
        """This rank's tensor: the sum of what all turns brought, added in the order of turns."""
        local: Tensor | None = None
        for turn in sorted(self.giving):
            piece, transfer = self.giving[turn]
            if local is None:
                local = empty_like(piece, self.shape).zero_()
            returned(piece, transfer, self.routes[turn], local)
        self.giving.clear()
        if local is None:
            raise RuntimeError(f"{self.name}: no turn was begun")
        return local

    def forgetting(self, turn: int, piece: Tensor) -> AbstractContextManager[Any]:
        """A block in which autograd saves views of a turn's piece by their place in it, without the values."""
        start = piece.untyped_storage().data_ptr()

        def pack(tensor: Tensor) -> Tensor | TurnView:
            if tensor.untyped_storage().data_ptr() != start or tensor.dtype != piece.dtype:
                return tensor
            return TurnView(turn, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

        def unpack(saved: Tensor | TurnView) -> Tensor:
            if isinstance(saved, Tensor):
                return saved
            return self.again[saved.turn].as_strided(saved.shape, saved.stride, saved.offset)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


@dataclass(frozen=True)
class TurnView:
    """A view of the piece of a turn."""

    turn: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def token(like: Tensor) -> Tensor:
    """A token for a turn between two nodes of the graph: it carries their order, and no values."""
    return like.new_empty(0)


class _Opened(torch.autograd.Function):
    """One token for each turn; backward collects what the turns sent back."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, line: Line) -> tuple[Tensor, ...]:
        ctx.line = line
        return tuple(token(local) for _ in line.routes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        return ctx.line.end_give(), None


class _Taken(torch.autograd.Function):
    """The piece of one turn; backward sends its gradient."""

    @staticmethod
    def forward(ctx: Any, at: Tensor, local: Tensor, line: Line, turn: int) -> Tensor:
        ctx.line, ctx.turn = line, turn
        line.start_fetch(turn, local)
        line.start_fetch(turn + 1, local)
        return line.end_fetch(turn)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.line.start_give(ctx.turn, grad)
        return token(grad), None, None, None


class _Given(torch.autograd.Function):
    """A token for the piece of one turn, which is sent; backward fetches its gradient.

    With `source`, the line that the turn's input came by, and `local`, this rank's tensor there, backward also fetches
    that input again.
    """

    @staticmethod
    def forward(ctx: Any, piece: Tensor, line: Line, turn: int, source: Line | None, local: Tensor | None) -> Tensor:
        ctx.line, ctx.turn, ctx.source = line, turn, source
        if source is not None:
            ctx.save_for_backward(local)
        line.start_give(turn, piece)
        return token(piece)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None, None, None, None]:
        line, turn, source = ctx.line, ctx.turn, ctx.source
        line.start_fetch(turn - 1, line.fetching[turn][0])
        if source is not None:
            (local,) = ctx.saved_tensors
            source.start_fetch(turn, local)
            source.start_fetch(turn - 1, local)
        grad = line.end_fetch(turn)
        if source is not None:
            source.again = {turn: source.end_fetch(turn)}
        return grad, None, None, None, None


class _Closed(torch.autograd.Function):
    """The sum of the results of all turns; backward begins to fetch the last turn's gradient."""

    @staticmethod
    def forward(ctx: Any, line: Line, *_: Tensor) -> Tensor:
        ctx.line = line
        return line.end_give()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        line = ctx.line
        line.start_fetch(len(line.routes) - 1, grad)
        return None, *(token(grad) for _ in line.routes)


def taken(local: Tensor, line: Line) -> Iterator[Tensor]:
    """The pieces of all turns, one after the other; while one is used, the next is under way."""
    tokens = _Opened.apply(local, line)
    still = local.detach()
    for turn, at in enumerate(tokens):
        piece: Tensor = _Taken.apply(at, still, line, turn)
        mark()
        yield piece


class Delivery:
    """Results of turns on their way to their owners; `source` and `local` as in `_Given`."""

    def __init__(self, line: Line, source: Line | None = None, local: Tensor | None = None):
        self.line, self.source, self.local = line, source, local
        self.tokens: list[Tensor] = []

    def give(self, piece: Tensor) -> None:
        """Send the next turn's result."""
        self.tokens.append(_Given.apply(piece, self.line, len(self.tokens), self.source, self.local))

    def collect(self) -> Tensor:
        """This rank's tensor, once everything has arrived."""
        found: Tensor = _Closed.apply(self.line, *self.tokens)
        mark()
        return found
