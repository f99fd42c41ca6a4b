"""The linear maps of the adjoint law, in families: each gives both sides of the law for a drawn case on one rank."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mural
from law import Grid, tensors_of
from mural.channel.split import split_channels
from mural.comm import fetch
from mural.engine.tile_inputs import TensorInput
from mural.geometry import Cuts, Interval, slices
from mural.memory.kept_tensors import KeptTensor
from mural.pipeline.delivery import delivery
from mural.ranks import SPATIAL, Mesh
from mural.shard.halo.fuse import fusing
from mural.shard.layout import Layout, Want, route
from mural.shard.relayout import merged, relayout, stacked

Sides = tuple[float, float, float]
"""Of one rank: ⟨Fx, y⟩, ⟨x, F*y⟩, and the size of what was added."""

OPERATIONS = """
F.conv2d(x, whole(5, 4, 3, 3), padding=1)
F.conv2d(x, whole(6, 2, 3, 3), stride=2, padding=2, dilation=2, groups=2)
F.conv2d(x, whole(3, 4, 4, 1), stride=(3, 1))
F.conv2d(x, whole(3, 4, 5, 3), padding="same")
F.conv_transpose2d(x, whole(4, 3, 4, 3), stride=2, padding=1, output_padding=1)
F.conv_transpose2d(x, whole(4, 2, 2, 3), stride=(3, 1), dilation=(1, 2))
F.avg_pool2d(x, 3, 2, 1)
F.avg_pool2d(x, 2, ceil_mode=True, count_include_pad=False)
F.adaptive_avg_pool2d(x, (3, 2)), F.adaptive_avg_pool2d(x, 1)
F.interpolate(x, scale_factor=2), F.interpolate(x, (9, 5))
F.interpolate(x, (11, 6), mode="bilinear", align_corners=True)
F.interpolate(x, scale_factor=(0.5, 1.5), mode="bilinear")
F.interpolate(x, (7, 9), mode="bicubic")
F.pad(x, (1, 2, 0, 3)), F.pad(x, (-1, 1, 2, -1))
F.pad(x, (1, 1, 2, 1), mode="reflect")
F.pad(x, (2, 0, 1, 3), mode="replicate")
F.pad(x, (1, 2, 2, 1), mode="circular")
F.unfold(x, 3, padding=1)
F.pixel_shuffle(x, 2), F.channel_shuffle(x, 2)
F.pixel_unshuffle(F.pad(x, (0, -x.shape[3] % 2, 0, -x.shape[2] % 2)), 2)
x.flip(2), x.flip((2, 3))
torch.roll(x, (1, -2), (2, 3))
x[:, :, 1:-1:2], x[..., ::3], x[1:, 2:, :4]
x.transpose(2, 3), x.permute(0, 2, 3, 1), x.movedim(1, 3)
x.flatten(2), x.flatten(1), x.permute(0, 2, 3, 1).reshape(-1, 4)
x.sum((2, 3)), x.mean(), x.sum(0), x.sum((0, 2), keepdim=True)
x.cumsum(2), x.cumsum(3)
torch.cat([x, x.flip(3)], 2), torch.cat([x, x[:, 1:]], 1)
torch.stack([x, 2 * x], 2), x.repeat(1, 1, 2, 1)
x.unfold(2, 3, 2)
x.diff(dim=2)
torch.matmul(x, whole(x.shape[3], 3)), torch.matmul(whole(3, x.shape[2]), x)
torch.einsum("nchw,cd->ndhw", x, whole(4, 3))
F.linear(x.flatten(2).transpose(1, 2), whole(5, 4))
x - x.mean((2, 3), keepdim=True), x + x[:, :, :1]
x.tril(), x.triu(1)
x.index_select(2, torch.tensor([0, x.shape[2] - 1, 0])), x[:, :, [0, 2, 1]]
F.grid_sample(x, whole(x.shape[0], 5, 6, 2) * 0.4, align_corners=False)
x.narrow(2, 1, x.shape[2] - 2), x.tensor_split(3, 2)[1], x.unbind(1)[2]
x.rot90(1, (2, 3))
""".strip().splitlines()
"""Linear operations on x with 4 channels."""
CHAINS = """
F.conv2d(F.conv2d(x, whole(3, 4, 3, 3), padding=1), whole(2, 3, 3, 3), padding=1)
F.avg_pool2d(F.conv2d(x, whole(3, 4, 5, 5), padding=2), 2)
F.conv2d(F.conv2d(F.conv2d(x, whole(3, 4, 3, 1)), whole(4, 3, 3, 3), padding=1), whole(2, 4, 3, 3), dilation=2)
F.interpolate(F.conv2d(x, whole(2, 4, 3, 3), padding=1), scale_factor=2, mode="bilinear")
""".strip().splitlines()


class Draw(random.Random):
    """Random choices that are the same on all ranks, and numbers that are not."""

    def __init__(self, seed: int, rank: int) -> None:
        super().__init__(seed)
        self.own = torch.Generator().manual_seed(1000 * seed + rank)
        self.common = torch.Generator().manual_seed(seed)

    def here(self, shape: Sequence[int]) -> Tensor:
        """Small whole numbers of this rank's own."""
        return torch.randint(-4, 5, tuple(shape), generator=self.own).double()

    def whole(self, *shape: int) -> Tensor:
        """Small whole numbers, the same on all ranks."""
        return torch.randint(-2, 3, shape, generator=self.common).double()

    def bounds(self, extent: int, parts: int) -> tuple[int, ...]:
        """Bounds of parts, some of them empty now and then."""
        if self.random() < 0.3:
            return Cuts.even(extent, parts).bounds
        return (0, *sorted(self.randint(0, extent) for _ in range(parts - 1)), extent)

    def intervals(self, extent: int) -> tuple[Interval, ...]:
        """Up to two intervals that do not meet, or none."""
        ends = sorted(self.randint(0, extent) for _ in range(2 * self.choice((0, 1, 1, 1, 2))))
        return tuple(Interval(a, b) for a, b in zip(ends[::2], ends[1::2], strict=True) if a < b)

    def layout(self, mesh: Mesh) -> Layout:
        """The layout of images with 4 channels, at uneven cuts."""
        shape = (self.randint(1, 3), 4, *(self.randint(1, 11) for _ in range(2)))
        axes = ("data", None, *SPATIAL[:2])
        cuts = tuple(
            Cuts.of(self.bounds(n, mesh.size(axis))) if axis and mesh.size(axis) > 1 else None
            for n, axis in zip(shape, axes, strict=True)
        )
        images = tuple(sorted((a, c) for a, c in zip(axes, cuts, strict=True) if a is not None and c is not None))
        return Layout(mesh, shape, axes, cuts, images)


def sides(draw: Draw, x: Tensor, made: Any) -> Sides:
    """Both sides of the law on this rank, for everything that was made of x."""
    outputs = [getattr(one, "local", one) for one in tensors_of(made)]
    ys = [draw.here(one.shape) for one in outputs]
    live = [(one, y) for one, y in zip(outputs, ys, strict=True) if one.requires_grad]
    left = sum(float((one.detach() * y).sum()) for one, y in zip(outputs, ys, strict=True))
    back = torch.autograd.grad([o for o, _ in live], x, [y for _, y in live], allow_unused=True)[0] if live else None
    right = 0.0 if back is None else float((x.detach() * back).sum())
    size = sum(float((one.detach() * y).abs().sum()) for one, y in zip(outputs, ys, strict=True))
    return left, right, size


def piece(draw: Draw, layout: Layout) -> tuple[Tensor, mural.ShardedTensor]:
    """This rank's numbers as a leaf, and the sharded tensor made of them."""
    local = draw.here(layout.local_shape).requires_grad_()
    return local, mural.ShardedTensor(local * 1, layout)


# -- families ----------------------------------------------------------------------------------------------------------


def windows(draw: Draw, mesh: Mesh) -> Sides:
    """Any intervals of each dim, for each coordinate."""
    layout = draw.layout(mesh)
    wants: list[Want] = []
    for extent, axis, cuts in zip(layout.shape, layout.axes, layout.cuts, strict=True):
        several = cuts is not None and axis is not None
        wants.append((axis, tuple(draw.intervals(extent) for _ in range(mesh.size(axis)))) if several else
                     (None, (draw.intervals(extent),)))  # fmt: skip
    local = draw.here(layout.local_shape).requires_grad_()
    return sides(draw, local, fetch(local, route(layout, tuple(wants)), mesh.transport, "windows"))


def layouts(draw: Draw, mesh: Mesh) -> Sides:
    """Whole dims, other cuts, or the axes on other dims."""
    local, x = piece(draw, draw.layout(mesh))
    at = x.placement
    way = draw.choice(("gathered", "cuts", "axes", "full"))
    if way == "full":
        return sides(draw, local, x.full())
    if way == "gathered":
        return sides(draw, local, relayout(x, at.gathered(draw.sample(range(4), draw.randint(1, 4))), "law"))
    if way == "cuts":
        cuts = tuple(c and Cuts.of(draw.bounds(c.extent, c.parts)) for c in at.cuts)
        return sides(draw, local, relayout(x, replace(at, cuts=cuts), "law"))
    order = draw.sample(range(4), 4)
    axes = tuple(at.axes[d] for d in order)
    cuts = tuple(
        Cuts.of(draw.bounds(n, mesh.size(axis))) if axis and mesh.size(axis) > 1 else None
        for n, axis in zip(at.shape, axes, strict=True)
    )
    return sides(draw, local, relayout(x, replace(at, axes=axes, cuts=cuts), "law"))


def sums(draw: Draw, mesh: Mesh) -> Sides:
    """The tensors of ranks along some axes, stacked or added up."""
    axes = draw.sample(("data", *SPATIAL[:2]), draw.randint(1, 3))
    local = draw.here([draw.randint(0, 4) for _ in range(draw.randint(0, 3))]).requires_grad_()
    return sides(draw, local, draw.choice((merged, stacked))(local, mesh, axes, "law"))


def computed(draw: Draw, mesh: Mesh, code: str) -> Sides:
    """What an expression makes of a sharded tensor, of extents that torch takes."""
    names = {"F": F, "torch": torch, "whole": draw.whole}
    while not taken(code, layout := draw.layout(mesh), names):
        pass
    local, x = piece(draw, layout)
    return sides(draw, local, eval(code, {"x": x, **names}))


def taken(code: str, layout: Layout, names: dict[str, Any]) -> bool:
    """Whether torch takes an expression for a tensor of that shape."""
    try:
        eval(code, {"x": torch.zeros(layout.shape, dtype=torch.float64), **names})
    except (RuntimeError, ValueError, IndexError):
        return False
    return True


def operations(draw: Draw, mesh: Mesh) -> Sides:
    """One operation."""
    with fusing(False):
        return computed(draw, mesh, draw.choice(OPERATIONS))


def chains(draw: Draw, mesh: Mesh) -> Sides:
    """Layers in a row; the second run knows what follows what."""
    code, again = draw.choice(CHAINS), draw.getstate()
    with fusing(True):
        computed(draw, mesh, code)
        draw.setstate(again)
        return computed(draw, mesh, code)


def channels(draw: Draw, mesh: Mesh) -> Sides:
    """A layer that is split over two ranks, or over all."""
    world = mesh.world
    mesh = mural.init(channel=world, data=1) if world < 4 or draw.random() < 0.5 else mural.init(channel=2, data=2)
    bias = False  # the law is of linear maps
    one = draw.choice((nn.Conv2d(4, 5, 3, padding=1, bias=bias), nn.Conv2d(4, 8, 2, stride=2, groups=4, bias=bias)))
    one.weight.data = draw.whole(*one.weight.shape)
    layer, by = nn.Sequential(one), draw.choice(("0:input", "0:output")) if one.groups == 1 else "0:output"
    split_channels(layer, mesh, (by,), draw.choice(("batch", "rank", "part")))
    while min((layout := draw.layout(mesh.folded)).shape[2:]) < 2:
        pass
    local, x = piece(draw, layout)
    return sides(draw, local, layer(x))


def collectives(draw: Draw, mesh: Mesh) -> Sides:
    """A call of `mural.comm` and the one that is its adjoint."""
    world, rank = mesh.world, mesh.rank
    shape = (world * draw.randint(0, 3), draw.randint(1, 5))
    x, y = draw.here(shape), draw.here(shape)
    way = draw.choice(("all-reduce", "rooted", "gathered"))
    if way == "all-reduce":
        named = {"algorithm": draw.choice(("ring", "tree", "butterfly", "halving-doubling", "ring-blocking"))}
        made, back = mural.comm.all_reduce(x.clone(), **named), mural.comm.all_reduce(y.clone(), **named)
    elif way == "rooted":
        root, more = draw.randrange(world), {"chunks": draw.randint(1, 3), "shape": draw.choice(("tree", "chain"))}
        made, back = mural.comm.reduce(x.clone(), root, **more), mural.comm.broadcast(y.clone(), root, **more)
        made = made if rank == root else made * 0  # the others keep partial sums
    else:
        x = draw.here((shape[0] // world, shape[1])) if world else x
        made, back = mural.comm.all_gather(x).view(shape), mural.comm.reduce_scatter(y)
    return float((made * y).sum()), float((x * back).sum()), float((made * y).abs().sum())


def deliveries(draw: Draw, mesh: Mesh) -> Sides:
    """What moves from one grid to another, and the gradients that move back; every rank simulates all of them."""
    grids = ((1, 1), (2, 1), (3, 1), (1, 2), (2, 2), (1, 3))
    (first, second), start = (draw.choice(grids) for _ in range(2)), draw.choice((0, 2, 10))
    seats = [seat_mesh(mesh, grid, at) for grid, at in ((first, 0), (second, start))]
    have, need = draw.layout(seats[0]), draw.layout(seats[1])
    extents = have.shape
    cuts = (c if c is None else Cuts.of(draw.bounds(n, c.parts)) for n, c in zip(extents, need.cuts, strict=True))
    need = replace(need, shape=extents, cuts=tuple(cuts))
    numbers = torch.Generator().manual_seed(draw.randrange(10**6))
    x, y = (torch.randint(-4, 5, extents, generator=numbers).double() for _ in range(2))
    made, back = delivered(x, have, need), delivered(y, need, have)
    left = sum(float((made[rank] * y[slices(box)]).sum()) for rank, box in boxes_of(need).items())
    right = sum(float((back[rank] * x[slices(box)]).sum()) for rank, box in boxes_of(have).items())
    return left, right, float((x * y).abs().sum())


def seat_mesh(mesh: Mesh, grid: tuple[int, ...], start: int) -> Mesh:
    """The mesh of a seat whose ranks begin at a number."""
    ranks = tuple(range(start, start + grid[0] * grid[1]))
    return Mesh((1, 1, 1, 1, *grid, 1), start, 2, mesh.transport, ranks)


def boxes_of(layout: Layout) -> dict[int, Any]:
    """The place of each rank's piece."""
    return {rank: layout.box_at(layout.mesh.coordinates_of(rank)) for rank in layout.mesh.ranks}


def delivered(whole: Tensor, have: Layout, need: Layout) -> dict[int, Tensor]:
    """What each rank that needs a part has after all moves."""
    taken = {rank: torch.zeros([i.size for i in box], dtype=whole.dtype) for rank, box in boxes_of(need).items()}
    held = {rank: whole[slices(box)] for rank, box in boxes_of(have).items()}
    moves = {move for rank in {*taken, *held} for move in delivery(rank, have, need)}
    for move in moves:
        into = taken[move.destination][slices(move.box, boxes_of(need)[move.destination])]
        into += held[move.source][slices(move.box, boxes_of(have)[move.source])]
    return taken


def tiles(draw: Draw, mesh: Mesh) -> Sides:
    """Windows that overlap, of a tensor on this rank, and of a value that passes keep."""
    shape = tuple(draw.randint(1, 8) for _ in range(4))
    boxes = [tuple(Interval(*sorted(draw.randint(0, n) for _ in range(2))) for n in shape) for _ in range(4)]
    x = draw.here(shape)
    box = tuple(Interval(3, 3 + n) for n in shape)
    if draw.random() < 0.5:
        held: Any = TensorInput(x.clone().requires_grad_(), torch.device("cpu"), torch.contiguous_format)
    else:
        held, boxes = KeptTensor(box), [tuple(i.shift(3) for i in one) for one in boxes]
        held.write(box, x)
    ys = [draw.here([i.size for i in one]) for one in boxes]
    products = [held.read(one) * y for one, y in zip(boxes, ys, strict=True)]
    for one, y in zip(boxes, ys, strict=True):
        held.add_gradient(one, y)
    back = held.grad if isinstance(held, TensorInput) else held.gradient(box)
    return float(sum(p.sum() for p in products)), float((x * back).sum()), float(sum(p.abs().sum() for p in products))


FAMILIES: dict[str, tuple[Callable[[Draw, Mesh], Sides], int]] = {
    "windows": (windows, 1),
    "layouts": (layouts, 1),
    "sums": (sums, 1),
    "operations": (operations, 1),
    "chains": (chains, 2),
    "channels": (channels, 2),
    "collectives": (collectives, 1),
    "deliveries": (deliveries, 1),
    "tiles": (tiles, 1),
}
"""By name, with the least number of ranks."""
GRIDS: dict[int, tuple[Grid, ...]] = {
    1: (Grid((1, 1)),),
    2: (Grid((2, 1)), Grid((1, 2)), Grid((1, 1), data=2)),
    3: (Grid((3, 1)), Grid((1, 3)), Grid((1, 1), data=3)),
    4: (Grid((4, 1)), Grid((2, 2)), Grid((1, 4)), Grid((2, 1), data=2), Grid((1, 2), data=2)),
}
