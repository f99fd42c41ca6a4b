"""Exchanges with gradients: each one's backward is its true adjoint, so autograd runs on plain local tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mural.comm.messages import Transfer, Transport
from mural.errors import UnsupportedOp
from mural.geometry import Box, Interval, Needs, boxes, moves, slice_of, slices

Slices = tuple[slice, ...]
Parts = tuple[tuple[int, Slices], ...]
"""Slices of numbered tensors."""
EVERY: Slices = (slice(None), slice(None))
"""All images and channels."""


@dataclass(frozen=True)
class ExchangeRoute:
    """One rank's part of an exchange: slices of the piece it has and of the piece it needs.

    `inside` says that every rank's need is one box within what it has, so that nobody communicates.
    """

    needed: tuple[int, ...]
    keeps: tuple[tuple[Slices, Slices], ...]
    sends: tuple[tuple[int, tuple[Slices, ...]], ...]
    receives: tuple[tuple[int, tuple[Slices, ...]], ...]
    inside: bool

    @classmethod
    def of(cls, rank: int, have: Mapping[int, Box], need: Mapping[int, Needs]) -> ExchangeRoute:
        """The part of `rank` in the moves from `have` to `need`."""
        mine, wants = have[rank], need[rank]

        def wanted(box: Box) -> Slices:
            return tuple(slice_of(b, w) for b, w in zip(box, wants, strict=True))

        sends: dict[int, list[Slices]] = {}
        receives: dict[int, list[Slices]] = {}
        keeps: list[tuple[Slices, Slices]] = []
        for move in moves(have, need, rank):
            if move.source == move.destination == rank:
                keeps.append((slices(move.box, mine), wanted(move.box)))
            elif move.source == rank:
                sends.setdefault(move.destination, []).append(slices(move.box, mine))
            elif move.destination == rank:
                receives.setdefault(move.source, []).append(wanted(move.box))
        inside = all(
            len(parts := boxes(need[r])) == 1 and all(h.contains(p) for h, p in zip(have[r], parts[0], strict=True))
            for r in have
        )
        return cls(
            needed=tuple(sum(i.size for i in w) for w in wants),
            keeps=tuple(keeps),
            sends=tuple((p, tuple(s)) for p, s in sorted(sends.items())),
            receives=tuple((p, tuple(s)) for p, s in sorted(receives.items())),
            inside=inside,
        )


def extents(shape: Sequence[int], slices: Slices) -> tuple[int, ...]:
    """The shape of those slices of a tensor of that shape."""
    return tuple(len(range(*s.indices(n))) for s, n in zip(slices, shape, strict=True))


def pack(tensor: Tensor, parts: Sequence[Slices]) -> Tensor:
    """Parts of a tensor, concatenated in one flat buffer."""
    pieces = [tensor[part].reshape(-1) for part in parts]
    return flat(pieces[0]) if len(pieces) == 1 else torch.cat(pieces)


def flat(tensor: Tensor) -> Tensor:
    """The values of a tensor as they are sent: one after the other in memory, none of them still to be conjugated.

    torch represents gradients of zero, those of `sgn` or `floor`, by tensors without memory.
    """
    if tensor._is_zerotensor():
        tensor = tensor.clone()
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1)


def unpack(buffer: Tensor, tensor: Tensor, parts: Sequence[Slices], *, add: bool = False) -> None:
    """Write (or add) a flat buffer into parts of a tensor."""
    offset = 0
    for part in parts:
        target = tensor[part]
        values = buffer[offset : offset + target.numel()].view(target.shape)
        offset += target.numel()
        if add:
            target.add_(values)
        else:
            target.copy_(values)


def unpack_each(buffer: Tensor, tensors: Sequence[Tensor], parts: Parts) -> None:
    """Write a flat buffer into spatial slices of numbered tensors."""
    offset = 0
    for index, part in parts:
        target = tensors[index][EVERY + part]
        target.copy_(buffer[offset : offset + target.numel()].view(target.shape))
        offset += target.numel()


def uncropped(part: Tensor, shape: Sequence[int], crop: Slices) -> Tensor:
    """A tensor of that shape that is zero outside a crop of its spatial dims; the part itself if it covers all."""
    if part.shape == shape:
        return part
    whole = empty_like(part, shape).zero_()
    whole[EVERY + crop] = part
    return whole


def count(lead: Sequence[int], shape: Sequence[int], part: Slices) -> int:
    """The number of values in spatial slices of a tensor, over all of its batch and channels."""
    return prod(lead) * prod(extents(shape, part))


def post(
    transport: Transport,
    name: str,
    source: Tensor,
    sends: Sequence[tuple[int, tuple[Slices, ...]]],
    receives: Sequence[tuple[int, tuple[Slices, ...]]],
    shape: Sequence[int],
) -> Transfer:
    """Start sending parts of `source`, and receiving parts of a tensor of that shape."""
    buffers = {peer: pack(source, parts) for peer, parts in sends}
    sizes = {peer: sum(prod(extents(shape, part)) for part in parts) for peer, parts in receives}
    return Transfer(transport, name, buffers, sizes, source)


def give_back(grad: Tensor, route: ExchangeRoute, transport: Transport, name: str, shape: Sequence[int]) -> Tensor:
    """The adjoint of `fetch`: what each rank received goes back to its owner, which adds it up."""
    transfer = post(transport, name, grad, route.receives, route.sends, shape)
    return returned(grad, transfer, route, empty_like(grad, shape).zero_())


def returned(piece: Tensor, transfer: Transfer, route: ExchangeRoute, local: Tensor) -> Tensor:
    """This rank's tensor, plus what comes back from every piece: from its own, and through a transfer."""
    for held, wanted in route.keeps:
        local[held] += piece[wanted]
    arrived = transfer.wait()
    for peer, parts in route.sends:
        unpack(arrived[peer], local, parts, add=True)
    return local


def fetched(local: Tensor, transfer: Transfer, route: ExchangeRoute) -> Tensor:
    """The piece that a route assembles: what this rank keeps, and what a posted transfer brings."""
    piece = empty_like(local, route.needed)
    for held, wanted in route.keeps:
        piece[wanted] = local[held]
    arrived = transfer.wait()
    for peer, parts in route.receives:
        unpack(arrived[peer], piece, parts)
    return piece


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, route: ExchangeRoute, transport: Transport, name: str) -> Tensor:
        ctx.route, ctx.transport, ctx.name, ctx.shape = route, transport, name, local.shape
        transfer = post(transport, name, local, route.sends, route.receives, route.needed)
        return fetched(local, transfer, route)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return give_back(grad, ctx.route, ctx.transport, f"{ctx.name} backward", ctx.shape), None, None, None


def rows_of(local: Tensor, peers: tuple[int, ...], rank: int, transport: Transport, name: str) -> list[Tensor]:
    """The tensors of all peers, in rank order, without autograd history."""
    own = flat(local)
    others = [p for p in peers if p != rank]
    sends = dict.fromkeys(others, own)
    arrived = Transfer(transport, name, sends, dict.fromkeys(others, own.numel()), own).wait()
    return [local if p == rank else arrived[p].view(local.shape) for p in peers]


class _Stack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, peers: tuple[int, ...], rank: int, transport: Transport, name: str) -> Tensor:
        ctx.peers, ctx.rank, ctx.transport, ctx.name = peers, rank, transport, name
        return torch.stack(rows_of(local, peers, rank, transport, name))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        rows = {p: flat(grad[i]) for i, p in enumerate(ctx.peers)}
        own = rows.pop(ctx.rank)
        sizes = {p: own.numel() for p in rows}
        arrived = Transfer(ctx.transport, f"{ctx.name} backward", rows, sizes, own).wait()
        # All ranks add in the same order.
        total = sum((own if p == ctx.rank else arrived[p] for p in ctx.peers), torch.zeros_like(own))
        return total.view(grad.shape[1:]), None, None, None, None


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward that refuses to be differentiated itself.

    torch's `once_differentiable` refuses only gradients that require grad themselves; a nonlinear node depends on its
    inputs even if the gradient is constant, and that dependence would be lost.
    """

    @wraps(backward)
    def refusing(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise UnsupportedOp("second derivatives (create_graph=True) through sharded convolutions, norms and pools")
        return backward(ctx, *grads)

    return refusing


CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def order_of(tensor: Tensor) -> torch.memory_format:
    """The memory format of a tensor, or of one that it is a part of: channels-last if it is not contiguous as well."""
    form = CHANNELS_LAST.get(tensor.ndim)
    if form is None or tensor.is_contiguous() or tensor.stride(1) != 1:
        return torch.contiguous_format
    columns, rows = tensor.stride(-1), tensor.stride(-2)
    return form if rows >= columns >= tensor.shape[1] else torch.contiguous_format


def empty_like(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """An uninitialised tensor of another shape in the same memory format."""
    return torch.empty(tuple(shape), dtype=tensor.dtype, device=tensor.device, memory_format=order_of(tensor))


def dense(tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor, dense in memory, in the memory format of another."""
    return tensor.contiguous(memory_format=order_of(like))


def saving_hooks() -> bool:
    """Whether hooks on saved tensors are active, as they are in a checkpoint and in its recompute.

    Those that give back what they got do not count.
    """
    engine: Any = torch._C._autograd  # type: ignore[attr-defined]  # torch's stubs leave it out
    found = engine._top_saved_tensors_default_hooks(True)
    return found is not None and not hasattr(found[0], "__gives_back__")


def gives_back(save: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """A hook for saved tensors whose counterpart gives back just what was saved: nothing is computed again."""
    save.__gives_back__ = True  # type: ignore[attr-defined]
    return save


def mark() -> None:
    """Save a tensor after an exchange.

    A non-reentrant checkpoint stops its recompute at the last saved tensor of a region. With a mark after every
    exchange, it stops after the same exchange on every rank, so no rank waits for a peer that stopped early. Outside of
    a checkpoint this does nothing.
    """
    if torch.is_grad_enabled() and saving_hooks():
        token = torch.empty(0, requires_grad=True)
        _ = token * token


def fetch(local: Tensor, route: ExchangeRoute, transport: Transport, name: str) -> Tensor:
    """The piece that this rank needs, assembled along the route from what it and its peers have."""
    if route.inside:
        ((held, _),) = route.keeps or ((tuple(slice(0, n) for n in route.needed), ()),)  # a need without positions
        return local[held] if extents(local.shape, held) != tuple(local.shape) else local
    piece: Tensor = _Fetch.apply(local, route, transport, name)
    mark()
    return piece


def stack(local: Tensor, peers: tuple[int, ...], rank: int, transport: Transport, name: str) -> Tensor:
    """The tensors of all peers, stacked in a new leading dim, the same on each of them."""
    if len(peers) == 1:
        return local.unsqueeze(0)
    rows: Tensor = _Stack.apply(local, peers, rank, transport, name)
    mark()
    return rows


def box_of(intervals: Sequence[tuple[int, int]]) -> Box:
    """A box from pairs of numbers."""
    return tuple(Interval(int(a), int(b)) for a, b in intervals)
