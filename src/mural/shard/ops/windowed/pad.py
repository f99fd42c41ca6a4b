"""Padding and rolling: outputs that read one input each, from the image, its mirror, its edge or its far side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mural.errors import ShapeError, UnsupportedOp
from mural.geometry import Reads, Remap, Window, slice_of
from mural.geometry.interval import Interval
from mural.shard.autocasting import in_plain_type
from mural.shard.halo.fuse import through
from mural.shard.ops.call_arguments import bound, dim_of
from mural.shard.ops.view.slices import sliced
from mural.shard.rules import Place, Windowed, is_identity, pad_border, windowed
from mural.shard.table import register
from mural.shard.tensor import ShardedTensor

REMAPS = {"reflect": Remap.reflect, "replicate": Remap.replicate, "circular": Remap.circular}


def constant_rule(extents: Sequence[int], amounts: Sequence[tuple[int, int]], value: float) -> Windowed:
    """The rule of padding with a constant; negative amounts crop."""
    dims = tuple(
        Window.shifted(e, e + before + after, -before) for e, (before, after) in zip(extents, amounts, strict=True)
    )

    def run(piece: Tensor, places: tuple[Place, ...]) -> Tensor:
        padded = pad_border(piece, places, value)
        return padded.clone() if padded is piece else padded

    return Windowed("pad", dims, run)


def remap_rule(name: str, dims: tuple[Reads, ...]) -> Windowed:
    """The rule of an operation whose outputs read one input each."""

    def run(piece: Tensor, places: tuple[Place, ...]) -> Tensor:
        copied = False
        for dim, at in enumerate(places, piece.ndim - len(places)):
            if isinstance(at.reads, Remap):
                where = [at.reads.index(o) for o in range(*at.out)]
                local = [slice_of(Interval(i, i + 1), at.have).start for i in where]
                # On every rank, needed there or not: it saves its positions, and a checkpoint recomputes, with its
                # exchanges, when backward first needs a saved tensor.
                piece, copied = (
                    piece.index_select(dim, torch.tensor(local, device=piece.device, dtype=torch.int64)),
                    True,
                )
        return piece if copied else piece.clone()

    return Windowed(name, dims, run)


@register("windowed", "pad")
def pad(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """`F.pad` in all modes, asymmetric and negative."""
    x, amounts, mode, value = bound(args, kwargs, ("input", "pad", "mode", "value"), "constant", None)
    if len(amounts) % 2 or len(amounts) > 2 * x.ndim:
        raise RuntimeError(f"pad {tuple(amounts)} must have an even length of at most twice the {x.ndim} dims")
    n = len(amounts) // 2
    pairs = [(int(amounts[2 * i]), int(amounts[2 * i + 1])) for i in reversed(range(n))]
    extents = tuple(x.shape[x.ndim - n :])
    if any(e + min(a, 0) < 0 or e + min(b, 0) < 0 or e + a + b < 0 for e, (a, b) in zip(extents, pairs, strict=True)):
        raise ShapeError(f"pad {tuple(amounts)} leaves a negative extent of {extents}")
    if mode == "constant":
        return through(x, constant_rule(extents, pairs, 0.0 if value is None else value))
    if mode not in REMAPS:
        raise NotImplementedError(f"pad: unknown mode {mode!r}")
    if value is not None and value != 0:
        raise RuntimeError(f"pad: mode {mode!r} takes no value")
    if n not in (x.ndim - 2, x.ndim - 1) or not 1 <= n <= 3:
        raise NotImplementedError(f"pad: {mode} padding of {n} dims is not supported for a tensor of {x.ndim} dims")
    x = in_plain_type(x, lambda small: F.pad(small, (1,) * (2 * (x.ndim - 2)), mode=mode))
    for dim, (before, after) in enumerate(pairs, x.ndim - n):
        if before < 0 or after < 0:
            x = sliced(x, dim, max(0, -before), x.shape[dim] - max(0, -after))
    positive = [(max(0, a), max(0, b)) for a, b in pairs]
    if any(not e and max(p) for e, p in zip(x.shape[x.ndim - n :], positive, strict=True)):
        raise UnsupportedOp(
            f"pad({mode}) by {tuple(amounts)} of extents {extents} crops all positions and then repeats some: pad by "
            f"another amount, or crop in a separate step"
        )
    for extent, (a, b) in zip(x.shape[x.ndim - n :], positive, strict=True):
        limit = extent - 1 if mode == "reflect" else extent if mode == "circular" else max(a, b)
        if max(a, b) > limit:
            raise RuntimeError(f"pad: {mode} padding {max(a, b)} is too large for an extent of {extent}")
    dims = tuple(
        REMAPS[mode](e, a, b) if a or b else Window(e, e)
        for e, (a, b) in zip(x.shape[x.ndim - n :], positive, strict=True)
    )
    return through(x, remap_rule(f"pad({mode})", dims))


@register("windowed", "roll")
def roll(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Positions shifted, wrapping around the end."""
    x, shifts, dims = bound(args, kwargs, ("input", "shifts", "dims"), None)
    if dims is None or (not isinstance(dims, int) and len(dims) == 0):
        raise UnsupportedOp("roll of a flattened sharded tensor: give dims")
    moved = dict.fromkeys(range(x.ndim), 0)
    amounts, places = ([n] if isinstance(n, int) else list(n) for n in (shifts, dims))
    if len(amounts) != len(places):
        raise RuntimeError(f"roll: {len(amounts)} shifts were given for {len(places)} dims")
    for shift, dim in zip(amounts, places, strict=True):
        moved[dim_of(dim, x.ndim, "roll")] += int(shift)
    reads: tuple[Reads, ...] = tuple(
        Remap.roll(e, moved[d]) if e and moved[d] % e else Window(e, e) for d, e in enumerate(x.shape)
    )
    return x.clone() if all(is_identity(r) for r in reads) else windowed(x, remap_rule("roll", reads))  # type: ignore[return-value]
