"""Random layers: the same numbers for every grid.

Each call draws one 64-bit key from torch's default generator, which is in the same state on every rank and
which checkpoint restores before a recompute. Values come from a fixed lattice of global blocks, each drawn
from a generator seeded by (key, block); a rank draws the blocks that its piece touches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mural.geometry import Box, Interval, overlap, slices
from mural.shard.folds.regroup import spans
from mural.shard.gradient_scale import require_gradient
from mural.shard.layout import Layout
from mural.shard.ops.call_arguments import bound, dim_of
from mural.shard.ops.pointwise.elementwise import check_writable, written
from mural.shard.table import name_of, register, register_folded
from mural.shard.tensor import ShardedTensor, unfolded

BLOCK = {"cpu": 2**16, "cuda": 2**20}
"""The largest number of values in a block: small enough to waste little at a cut, large enough for full speed."""

Draw = Callable[[Tensor, torch.Generator], Any]


def new_key() -> int:
    """A fresh 64-bit key, the same on every rank."""
    return int(torch.randint(-(2**63), 2**63 - 1, ()).item())


def lattice(shape: Sequence[int], limit: int) -> tuple[int, ...]:
    """The edges of a block: the global shape, its longest edge halved until a block has few enough values.

    >>> lattice((1, 64, 1024, 1024), 2**16), lattice((2, 8), 2**16)
    ((1, 32, 32, 64), (2, 8))
    """
    edges = [max(1, n) for n in shape]
    size = 1
    for n in edges:
        size *= n
    while size > limit:
        longest = max(range(len(edges)), key=lambda d: edges[d])
        size = size // edges[longest] * ((edges[longest] + 1) // 2)
        edges[longest] = (edges[longest] + 1) // 2
    return tuple(edges)


def blocks(box: Box, shape: Sequence[int], edges: Sequence[int]) -> Iterator[tuple[tuple[int, ...], Box]]:
    """Number and place of every block that a box touches."""
    ranges = [range(i.start // e, -(-i.stop // e)) if i.size else range(0) for i, e in zip(box, edges, strict=True)]
    for at in product(*ranges):
        yield (
            at,
            tuple(Interval(k * e, min(n, (k + 1) * e)) for k, e, n in zip(at, edges, shape, strict=True)),
        )


def fill(out: Tensor, layout: Layout, draw: Draw) -> Tensor:
    """Fill a piece with the values of its global place."""
    key = new_key()
    if out.is_meta:
        return out
    shape, box = layout.shape, layout.box
    edges = lattice(shape, BLOCK.get(out.device.type, 2**20))
    generator = torch.Generator(out.device)
    for at, place in blocks(box, shape, edges):
        digest = hashlib.blake2b(f"{key}:{at}".encode(), digest_size=8).digest()
        generator.manual_seed(int.from_bytes(digest, "little", signed=True))
        inside = overlap(box, place)
        target = out[slices(inside, box)]
        if inside == place and target.is_contiguous():
            draw(target, generator)
            continue
        values = out.new_empty([i.size for i in place])
        draw(values, generator)
        target.copy_(values[slices(inside, place)])
    return out


def fill_folded(out: Tensor, x: ShardedTensor, draw: Draw) -> Tensor:
    """Fill the piece of a tensor with merged dims: its positions of a merged dim are not one interval."""
    key = new_key()
    if out.is_meta:
        return out
    shape = tuple(x.shape)
    edges = lattice(shape, BLOCK.get(out.device.type, 2**20))
    generator = torch.Generator(out.device)
    positions = [merged_positions(x.box[a:b], x.placement.shape[a:b]) for a, b in spans(x.folds)]
    flat = out.view([len(p) for p in positions])
    for at in product(*(sorted(set((p // e).tolist())) for p, e in zip(positions, edges, strict=True))):
        digest = hashlib.blake2b(f"{key}:{at}".encode(), digest_size=8).digest()
        generator.manual_seed(int.from_bytes(digest, "little", signed=True))
        values = out.new_empty([min(n, (k + 1) * e) - k * e for k, e, n in zip(at, edges, shape, strict=True)])
        draw(values, generator)
        target = flat
        for d, (p, k, e) in enumerate(zip(positions, at, edges, strict=True)):
            mine = (p // e == k).nonzero().flatten()
            target = target.narrow(d, int(mine[0]), len(mine))  # positions ascend, so those of a block are adjacent
            values = values.index_select(d, (p[mine] - k * e).to(out.device))
        target.copy_(values)
    return out


def merged_positions(box: Box, shape: Sequence[int]) -> Tensor:
    """The ascending positions of a box in the flattened shape."""
    found = torch.zeros(1, dtype=torch.int64)
    for interval, extent in zip(box, shape, strict=True):
        found = (found[:, None] * extent + torch.arange(interval.start, interval.stop)).flatten()
    return found


def keep_mask(layout: Layout, keep: float, like: Tensor) -> Tensor:
    """A mask of a layout's piece that is true with a probability."""
    mask = torch.empty(layout.local_shape, dtype=torch.bool, device=like.device)
    return fill(mask, layout, lambda values, generator: values.bernoulli_(keep, generator=generator))


@register_folded("dropout", "dropout_")
def dropout_folded(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Dropout of positions of a tensor with merged dims: the same draws as for a plain tensor."""
    x, p, training, inplace = bound(args, kwargs, ("input", "p", "training", "inplace"), 0.5, True, False)
    if not training or p in (0.0, 1.0) or not x.is_floating_point():
        settled_args = (unfolded(x), p, training, inplace)
        y = dropout(func, settled_args, {})
        return x if y is settled_args[0] else ShardedTensor(y.local, x.placement, y.aliased, x.folds)
    mask = torch.empty(x.placement.local_shape, dtype=torch.bool, device=x.device)
    fill_folded(mask, x, lambda values, generator: values.bernoulli_(1.0 - p, generator=generator))
    if inplace or name_of(func).endswith("_"):
        check_writable(x, "dropout_")
        return written(x, x.local.mul_(mask).mul_(1.0 / (1.0 - p)))
    return ShardedTensor(x.local * mask * (1.0 / (1.0 - p)), x.placement, "", x.folds)


def feature_layout(layout: Layout, lead: int) -> Layout:
    """One value for each image and channel, the first `lead` dims."""
    shape = tuple(n if d < lead else 1 for d, n in enumerate(layout.shape))
    return replace(layout, shape=shape, cuts=tuple(c if d < lead else None for d, c in enumerate(layout.cuts)))


DROPOUTS = (
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_alpha_dropout",
    "feature_dropout",
)


@register("random", *DROPOUTS, *(f"{n}_" for n in DROPOUTS))
def dropout(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Dropout of positions or of whole channels, plain or keeping the moments (alpha)."""
    name = name_of(func)
    x, p, training, inplace = bound(args, kwargs, ("input", "p", "training", "inplace"), 0.5, True, False)
    inplace = inplace or name.endswith("_")
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"{name}: the probability must be between 0 and 1, not {p}")
    if not x.is_floating_point():
        raise RuntimeError(f"{name} of {x.dtype}: convert it to a floating point type")
    if inplace:
        check_writable(x, name)
    if not training or p == 0.0:
        return x
    whole_channels = name.startswith("feature") or name.rstrip("_")[-2:] in ("1d", "2d", "3d")
    # torch treats these as one image without a batch dim.
    alone = (name.rstrip("_"), x.ndim) in (("dropout1d", 2), ("dropout3d", 4))
    layout = feature_layout(x.placement, 1 if alone else 2) if whole_channels else x.placement
    mask = keep_mask(layout, 1.0 - p, x.local)
    if "alpha" in name:
        return alpha(x, mask, p, inplace)
    scale = 0.0 if p == 1.0 else 1.0 / (1.0 - p)
    if inplace:
        return written(x, x.local.mul_(mask).mul_(scale))
    return ShardedTensor(x.local * mask * scale, x.placement)


def alpha(x: ShardedTensor, mask: Tensor, p: float, inplace: bool) -> ShardedTensor:
    """Dropped values become SELU's negative limit; an affine map restores mean and variance."""
    limit = -1.7580993408473766
    scale = 0.0 if p == 1.0 else ((1.0 - p) * (1.0 + p * limit**2)) ** -0.5
    shift = -scale * limit * p
    local = torch.where(mask, x.local, torch.tensor(limit, dtype=x.dtype, device=x.device)) * scale + shift
    return written(x, x.local.copy_(local)) if inplace else ShardedTensor(local, x.placement)


@register("random", "rand_like", "randn_like")
def random_like(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Uniform or normal values in the layout of a tensor."""
    x = args[0]
    out = torch.empty_like(x.local, **{k: v for k, v in kwargs.items() if k in ("dtype", "device")})
    draw: Draw = (
        (lambda v, g: v.uniform_(generator=g))
        if name_of(func) == "rand_like"
        else (lambda v, g: v.normal_(generator=g))
    )
    made = ShardedTensor(fill(out.detach(), x.placement, draw), x.placement)
    return require_gradient(made) if kwargs.get("requires_grad") else made


@register(
    "random",
    "bernoulli",
    "bernoulli_",
    "uniform_",
    "normal_",
    "exponential_",
    "log_normal_",
    "cauchy_",
    "geometric_",
)
def random_fill(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Random values in place, and Bernoulli draws with a probability for each position."""
    name = name_of(func)
    x, *rest = args
    if kwargs.pop("generator", None) is not None:
        raise ValueError(f"{name}: a generator of your own would draw other numbers on each grid: use the default")
    if name == "bernoulli" or (
        name == "bernoulli_" and (rest or kwargs) and isinstance((*rest, *kwargs.values())[0], Tensor)
    ):
        chance = (*rest, *kwargs.values(), x)[0]
        uniform = torch.rand_like(x, dtype=torch.float32 if x.dtype != torch.float64 else torch.float64)
        drawn = (uniform < chance).to(x.dtype)
        if name == "bernoulli":
            return drawn.detach()  # type: ignore[return-value]
        return x.copy_(drawn)  # type: ignore[return-value]
    check_writable(x, name)
    method = getattr(torch.Tensor, name)
    with torch.no_grad():
        fill(x.local, x.placement, lambda values, g: method(values, *rest, generator=g, **kwargs))
    return x


@register("random", "rrelu", "rrelu_")
def rrelu(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Negative values times a slope: drawn for each position in training, else the mean of the limits."""
    names = ("input", "lower", "upper", "training", "inplace", "generator")
    x, low, high, training, inplace, generator = bound(args, kwargs, names, 1 / 8, 1 / 3, False, False, None)
    if generator is not None:
        raise ValueError("rrelu: a generator of your own would draw other numbers on each grid: use the default")
    if not training:
        return F.leaky_relu(x, (low + high) / 2, inplace or name_of(func) == "rrelu_")
    slope = torch.rand_like(x.detach()) * (high - low) + low
    slope = torch.where(x.detach() <= 0, slope, 1.0)
    return x.mul_(slope) if inplace or name_of(func) == "rrelu_" else x * slope


@register("random", "gumbel_softmax")
def gumbel_softmax(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """A softmax of logits with Gumbel noise; `hard` gives one-hot values with the gradient of the soft ones."""
    names = ("logits", "tau", "hard", "eps", "dim")
    x, tau, hard, _, dim = bound(args, kwargs, names, 1.0, False, 1e-10, -1)
    dim = dim_of(dim, x.ndim, "gumbel_softmax")
    noise = -torch.empty_like(x.detach()).exponential_().log()
    soft = ((x + noise) / tau).softmax(dim)
    if not hard:
        return soft
    largest = soft.detach().argmax(dim, keepdim=True)
    position = torch.arange(x.shape[dim], device=x.device).view(-1, *(1,) * (x.ndim - 1 - dim))
    one = (position == largest).to(x.dtype)
    return one - soft.detach() + soft
