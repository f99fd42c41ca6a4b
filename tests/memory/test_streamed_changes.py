"""A model that changes between calls: what was recorded of it is found to be old."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mural
from mural.engine.result_tiles import ResultTile
from mural.memory.recorded_tiles import RecordedTiles
from streamed_law import images


@pytest.mark.parametrize("where", ["model", "loss"])
def test_constants_that_are_replaced_between_steps(where: str) -> None:
    """Steps after the first one read the first tensor."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.scale = nn.Conv2d(2, 3, 3, padding=1), torch.ones(3, 1, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x) * self.scale.to(x.dtype)

    classes = [torch.ones(3).double()]
    x, target = images(1, (26, 30), 1)[0], torch.randint(3, (1, 26, 30))
    plain = Scaled().double()
    pm = mural.parallelize(plain, mural.Plan(stream=(8, 8)), loss=lambda y, t: F.cross_entropy(y, t, classes[0]))
    for factor in (1.0, 2.0, 2.0, 3.0):
        if where == "model":
            plain.scale = torch.full((3, 1, 1), factor)
        else:
            classes[0] = torch.tensor([1.0, factor, 1.0]).double()
        expected = F.cross_entropy(plain(x), target, classes[0])
        torch.testing.assert_close(pm.step(x, target), expected)


def test_buffers_that_are_replaced_between_steps() -> None:
    """A norm whose tile ran from a tape learned in the buffers of the step that was noted."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3)).double()
    pm = mural.parallelize(model, mural.Plan(stream=(8, 8)), loss=F.cross_entropy)
    other = deepcopy(model)
    for x in images(2, (26, 30), 3):
        for net in (model, other):
            net.load_state_dict({name: t.clone() for name, t in net.state_dict().items()}, assign=True)
        pm.step(x, torch.zeros(2, 26, 30).long())
        other(x)
    for found, expected in zip(model.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(found, expected)


def test_sinks_see_each_tile_once() -> None:
    """The first tile of a model that has changed since came from the calls of the model before, and then again."""

    class Sink:
        def __init__(self) -> None:
            self.begun, self.seen = 0, torch.zeros(1, 3, 26, 30)

        def begin(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
            self.begun += 1

        def take(self, tile: ResultTile) -> None:
            self.seen[tuple(slice(*part) for part in tile.box)] += 1

    clip = nn.Hardtanh()
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), clip).double()
    pm = mural.parallelize(model, mural.Plan(stream=(8, 8)), loss=F.cross_entropy)
    for limit in (1.0, 0.5):
        clip.max_val = limit
        sink = Sink()
        pm.evaluate_into(images(1, (26, 30), 1)[0], torch.zeros(1, 26, 30).long(), sink)
        assert sink.begun == 1
        assert sink.seen.eq(1).all()


def test_a_module_that_is_replaced() -> None:
    """The first tile ran the calls of the module before, and did not find its buffers."""
    model, x = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Identity()).double(), images(1, (26, 30), 1)[0]
    pm = mural.parallelize(model, mural.Plan(stream=(8, 8)), loss=F.cross_entropy)
    for module in (nn.BatchNorm2d(3), nn.InstanceNorm2d(3), nn.Conv2d(3, 5, 1)):
        model[1] = module.double()
        target = torch.randint(3, (1, 26, 30))
        torch.testing.assert_close(pm.step(x, target), F.cross_entropy(model(x), target))


class Casting(nn.Module):
    """Convolutions under an autocast of their own."""

    def __init__(self, lower: bool) -> None:
        super().__init__()
        self.lower, self.one, self.two = lower, nn.Conv2d(2, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.lower):
            return self.two(self.one(x).relu()).float()


def test_autocast_inside_of_a_model() -> None:
    """It was lost: calls ran in the precision of the plan."""
    x = images(1, (26, 30), 1)[0].float()
    model = Casting(lower=False)
    pm = mural.parallelize(model, mural.Plan(stream=(8, 8), precision="bfloat16"), loss=F.cross_entropy)
    torch.testing.assert_close(pm(x).full(), model(x), rtol=1e-5, atol=1e-5)
    lower = mural.parallelize(Casting(lower=True), mural.Plan(stream=(8, 8)), loss=F.cross_entropy)
    torch.testing.assert_close(lower(x).full(), lower.plain(x), rtol=0, atol=1e-3)
    assert lower(x).full().bfloat16().float().equal(lower(x).full())


def test_autocast_that_changes_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tape of one type ran for another one."""
    x, target = images(1, (26, 30), 1)[0].float(), torch.zeros(1, 26, 30).long()
    found: list[Tensor] = []
    for by_rules in (False, True):
        if by_rules:
            monkeypatch.setattr(RecordedTiles, "run", lambda _, tile, given: tile(given))
        torch.manual_seed(0)
        pm = mural.parallelize(nn.Conv2d(2, 3, 3, padding=1), mural.Plan(stream=(8, 8)), loss=F.cross_entropy)
        for dtype in (torch.bfloat16, torch.float16):
            pm.zero_grad()
            with torch.autocast("cpu", dtype):
                pm.step(x, target)
        found += [p.grad for p in pm.parameters() if p.grad is not None][:1]
    assert found[0].equal(found[1])
