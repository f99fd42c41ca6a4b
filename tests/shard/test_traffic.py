"""Communication: counted as `moves` predicts, overlapped with the interior, and never a copy of the interior."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from law import FUSED, Grid, image
from mural.geometry import Cuts, Interval, Window, moves, traffic
from mural.shard.halo.fuse import fusing
from ranks import run_on


def net(layers: int, width: int) -> nn.Sequential:
    torch.manual_seed(0)
    parts = [m for _ in range(layers) for m in (nn.Conv2d(width, width, 3, padding=1), nn.ReLU())]
    return nn.Sequential(*parts)


def counted(spatial: tuple[int, int], size: int, layers: int) -> tuple[int, int]:
    """Messages and bytes that this rank sends in one step that exchanges for each layer."""
    with fusing(False):
        return counted_here(spatial, size, layers)


def counted_here(spatial: tuple[int, int], size: int, layers: int) -> tuple[int, int]:
    grid = Grid(spatial)
    model = net(layers, 4).double()
    x = grid.shard(image(1, 4, size, size)).requires_grad_()
    with x.mesh.transport.record() as record:
        model(x).relu_()
    forward = record.messages, record.bytes
    y = model(x)
    total = y.square().sum()
    with x.mesh.transport.record() as record:
        total.backward()
    # Of these, the sum's own messages: one number to each other rank.
    others = x.mesh.world - 1
    return forward[0], forward[1], record.messages - others, record.bytes - 8 * others


def predicted(spatial: tuple[int, int], size: int, layers: int) -> list[tuple[int, int]]:
    """What `moves` says of the same step: halos forward, and the same back."""
    window = Window.conv(size, 3, 1, 1)
    rows, columns = (Cuts.even(size, n).intervals() for n in spatial)
    places = [(r, c) for r in rows for c in columns]
    have = dict(enumerate(places))
    need = {i: (window.reads(r), window.reads(c)) for i, (r, c) in enumerate(places)}
    pairs = traffic(moves(have, need), width=4 * 8)
    world = len(places)
    forward = [
        (layers * sum(a == i for a, _ in pairs), layers * sum(n for (a, _), n in pairs.items() if a == i))
        for i in range(world)
    ]
    backward = [
        (layers * sum(b == i for _, b in pairs), layers * sum(n for (_, b), n in pairs.items() if b == i))
        for i in range(world)
    ]
    return [(*f, *b) for f, b in zip(forward, backward, strict=True)]


def test_messages_and_bytes_are_what_moves_predicts() -> None:
    for spatial in ((2, 1), (2, 2), (3, 1)):
        world = spatial[0] * spatial[1]
        assert run_on(world, counted, spatial, 24, 3) == predicted(spatial, 24, 3)


def trace() -> list[bool]:
    """Whether every transfer was under way while the interior was computed."""
    grid = Grid((2, 1))
    model = net(2, 8)
    x = grid.shard(torch.randn(1, 8, 256, 256)).requires_grad_()
    with x.mesh.transport.record() as record:
        model(x).square().mean().backward()
    transfers, interiors = record.spans("transfer"), record.spans("interior")
    return [any(a < c and d < b for a, b in transfers) for c, d in interiors]


def test_strips_travel_while_the_interior_computes() -> None:
    for overlapped in run_on(2, trace):
        assert overlapped == [True] * 4


def peak_bytes() -> tuple[float, float]:
    """The largest number of bytes allocated at a time: sharded, and plain torch on a tensor of the piece's shape."""
    from torch.profiler import ProfilerActivity, profile

    def peak(x: torch.Tensor, model: nn.Module) -> float:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
            model(x).square().mean().backward()
        current = best = 0
        for event in trace.profiler.kineto_results.events():
            if event.name() == "[memory]":
                current += event.nbytes()
                best = max(best, current)
        return best

    grid = Grid((2, 1))
    model = nn.Sequential(
        net(3, 8), nn.MaxPool2d(3, 1, 1), nn.ReLU(), nn.AvgPool2d(3, 1, 1), nn.BatchNorm2d(8), net(1, 8)
    )
    sharded = grid.shard(torch.randn(1, 8, 512, 512))
    plain = sharded.local.clone()
    peak(plain, model), peak(sharded, model)
    return peak(sharded, model), peak(plain, model)


@pytest.mark.skipif(FUSED, reason="a fused exchange attaches its window")
def test_the_interior_is_never_copied() -> None:
    for sharded, plain in run_on(2, peak_bytes):
        assert sharded < 1.05 * plain, sharded / plain


def test_intervals_of_a_halo() -> None:
    window = Window.conv(24, 3, 1, 1)
    assert window.reads(Interval(0, 12)) == (Interval(0, 13),)
