"""Steps in tiles: the masks of dropout, the same bits each time, few shapes of tiles, and the kinds of inputs."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mural
from mural.memory.tile_sweeps import TileSweeps
from streamed_law import apart, check_steps, differences, images, streamed, wrong
from streamed_losses import both
from streamed_models import Spec
from streamed_oddities import Halves, Recomputed

PLAN = mural.Plan(stream=(12, 10))


def masks(count: int, extents: Sequence[int], seed: int = 1) -> Tensor:
    return torch.randint(0, 3, (count, *extents), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dropout", ["features", "channels", "alpha"])
@pytest.mark.parametrize(("norm", "keep"), [("none", None), ("batch", "none"), ("batch", None)])
def test_dropout(dropout: str, norm: str, keep: str | None) -> None:
    """A streamed step draws the masks of a step in one piece, in forward and again in backward."""
    spec = Spec(norm=norm, dropout=dropout, block="residual")
    model = spec.build()
    ours, theirs = streamed(model, both, PLAN, keep), mural.parallelize(deepcopy(model), mural.Plan(), both)
    for x in images(2, (21, 26)):
        target = masks(2, (21, 26))
        assert apart(ours.step(x, target), theirs.step(x, target)) < 1e-10
    found = differences(ours, theirs.plain, both, [])
    assert not wrong(found)


@pytest.mark.parametrize("norm", ["frozen", "batch"])
def test_same_bits(norm: str) -> None:
    """Tiles come in a fixed order."""
    results: list[list[Tensor]] = []
    (x,) = images(2, (29, 34), 1)
    for _ in range(2):
        pm = mural.parallelize(Spec(norm=norm, dropout="features").build().float(), PLAN, both)
        losses = [pm.step(x.float(), masks(2, (29, 34))) for _ in range(2)]
        results.append([*losses, *(p.grad for p in pm.parameters() if p.grad is not None), *pm.plain.buffers()])
    assert all(a.equal(b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("norm", ["frozen", "batch"])
@pytest.mark.parametrize(("dims", "extents", "tile", "most"), [(2, (196, 239), (48, 48), 9), (1, (1001,), (96,), 3)])
def test_few_shapes(
    norm: str, dims: int, extents: tuple[int, ...], tile: tuple[int, ...], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Corners, edges and the middle: at most nine shapes in a pass of a plane, whatever the image's size."""
    shapes: dict[tuple[int, Any], set[Any]] = {}
    given = TileSweeps.given

    def watched(self: TileSweeps, one: Any, *rest: Any) -> Any:
        found = given(self, one, *rest)
        key = one.number, tuple(one.reads)
        shapes.setdefault(key, set()).add(tuple(tuple(window.shape) for window in found.windows.values()))
        return found

    monkeypatch.setattr(TileSweeps, "given", watched)
    pm = mural.parallelize(Spec(dims=dims, norm=norm, depth=2).build(), mural.Plan(stream=tile))
    pm.step(images(1, extents, 1)[0], masks(1, extents))
    assert shapes
    assert all(len(found) <= most for found in shapes.values()), {k: len(v) for k, v in shapes.items()}


def test_several_inputs() -> None:
    """A model of two images, in a tuple."""
    torch.manual_seed(1)
    plain = Halves().double()
    pm = streamed(plain, F.cross_entropy, PLAN, None)
    x, y = images(2, (21, 26))
    ours, theirs = [[t.clone().requires_grad_() for t in (x, y)] for _ in range(2)]
    expected = F.cross_entropy(plain(*theirs), masks(2, (21, 26)))
    expected.backward()
    found = {"loss": apart(pm.step(tuple(ours), masks(2, (21, 26))), expected)}
    pairs = [(a.grad, b.grad) for a, b in zip(ours, theirs, strict=True)]
    assert not wrong(found | differences(pm, plain, F.cross_entropy, pairs))  # type: ignore[arg-type]


def test_blocks_under_checkpoints() -> None:
    torch.manual_seed(1)
    check_steps(Recomputed().double(), both, [(images(2, (21, 26), 1)[0], masks(2, (21, 26)))], PLAN)


@pytest.mark.parametrize("keep", [None, "none", "all"])
def test_channels_last(keep: str | None) -> None:
    model = Spec(norm="batch", depth=2).build().to(memory_format=torch.channels_last)
    batches = [(x, masks(2, (21, 26))) for x in images(2, (21, 26))]
    check_steps(model, both, batches, PLAN, keep)


@pytest.mark.parametrize("recompute", ["all", ("downs.0", "ends.0")])
def test_blocks_that_are_computed_again(recompute: Any) -> None:
    """Blocks inside tiles, as the plan says."""
    model = Spec(norm="batch", depth=2, block="residual").build()
    batches = [(x, masks(2, (21, 26))) for x in images(2, (21, 26))]
    check_steps(model, both, batches, mural.Plan(stream=(12, 10), recompute=recompute))


def test_gradients_that_are_there_already() -> None:
    """Steps add to gradients; those of a frozen parameter stay away."""
    model = Spec(norm="batch").build()
    for p in model.downs[0].parameters():  # type: ignore[union-attr]
        p.requires_grad_(False)
    batches = [(x, masks(2, (21, 26))) for x in images(2, (21, 26))]
    check_steps(model, both, batches, PLAN, accumulate=True, weights=(0.5, 0.5))


def test_bfloat16() -> None:
    """Autocast as in torch: close to the plain model under autocast, in the types that torch gives."""
    torch.manual_seed(1)
    plain = Spec(norm="batch", width=4).build().float()
    pm = mural.parallelize(deepcopy(plain), mural.Plan(stream=(12, 10), precision="bfloat16"), F.cross_entropy)
    (x,) = images(2, (21, 26), 1)
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.cross_entropy(plain(x.float()), masks(2, (21, 26)))
    expected.backward()
    assert apart(pm.step(x.float(), masks(2, (21, 26))), expected) < 0.02
    for p, q in zip(plain.parameters(), pm.parameters(), strict=True):
        assert q.grad is not None
        assert q.grad.dtype == torch.float32
        assert apart(q.grad, p.grad, 0.05) < 0.2


class Deep(nn.Module):
    """A model that halves its image until little is left."""

    def __init__(self) -> None:
        super().__init__()
        parts = [nn.Sequential(nn.Conv2d(2, 2, 3, stride=2, padding=1), nn.BatchNorm2d(2), nn.SiLU()) for _ in range(4)]
        self.parts, self.end = nn.Sequential(*parts), nn.Conv2d(2, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(self.end(self.parts(x)), x.shape[2:])


@pytest.mark.parametrize("extents", [(16, 17), (33, 47), (5, 61)])
def test_little_is_left(extents: tuple[int, int]) -> None:
    """Tiles that own no position at the lowest resolution."""
    torch.manual_seed(1)
    batches = [(x, masks(2, extents)) for x in images(2, extents)]
    check_steps(Deep().double(), both, batches, mural.Plan(stream=(4, 4)), "none")
