"""Streamed results without gradients: the plain model's, as a tensor, written into sinks, or told tile by tile."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mural
from mural.data import create
from mural.engine.result_tiles import ResultTile
from mural.memory.sinks import TensorSink
from mural.memory.window_source import HeldImage
from ranks import run_on
from streamed_law import apart, images, streamed
from streamed_losses import both
from streamed_models import Spec
from streamed_oddities import Attending, Supervised

TOLERANCE = 1e-10
PLAN = mural.Plan(stream=(12, 10))


def made(name: str) -> nn.Module:
    torch.manual_seed(2)
    models = {"attention": lambda: Attending(norm=True), "several": Supervised}
    return models[name]().double() if name in models else Spec(norm=name, depth=2, block="residual").build()


@pytest.mark.parametrize("name", ["batch", "group", "attention", "several"])
@pytest.mark.parametrize("training", [True, False])
def test_call(name: str, training: bool) -> None:
    """Norms in training mode use and learn the statistics of the whole image, as in torch."""
    x = images(2, (29, 34), 1)[0]
    plain = made(name).train(training)
    pm = streamed(plain, F.cross_entropy, PLAN, None)
    with torch.no_grad():
        expected = plain(x)
    found = pm(x)
    pairs = zip(expected.values(), found.values(), strict=True) if isinstance(expected, dict) else [(expected, found)]
    for want, got in pairs:
        assert apart(got.full() if isinstance(got, mural.ShardedTensor) else got, want) < TOLERANCE
    for want, got in zip(plain.buffers(), pm.plain.buffers(), strict=True):
        assert apart(got, want) < TOLERANCE
    assert all(p.grad is None for p in pm.parameters())


@pytest.mark.parametrize("training", [True, False])
def test_into_sinks(training: bool) -> None:
    x = images(2, (29, 34), 1)[0]
    plain = made("batch").train(training)
    pm = streamed(plain, F.cross_entropy, PLAN, None)
    sinks = [TensorSink(torch.full((3, 29, 34), float("nan"), dtype=torch.float64)) for _ in x]
    assert pm([HeldImage(one) for one in x], into=sinks) is None
    assert apart(torch.stack([sink.tensor for sink in sinks]), plain(x)) < TOLERANCE


def test_into_a_file(tmp_path: Path) -> None:
    x = images(1, (70, 45), 1)[0].float()
    plain = made("frozen").float()
    pm = streamed(plain, F.cross_entropy, PLAN, None)
    path = tmp_path / "scores.zarr"
    with create(path, (3, 70, 45), "float32") as sink:
        pm([HeldImage(x[0])], into=[sink])
    written = mural.open(path).read([(0, 3), (0, 70), (0, 45)])
    assert apart(written, plain(x)[0]) < 1e-5


def test_sinks_of_another_shape() -> None:
    pm = streamed(made("frozen"), F.cross_entropy, PLAN, None)
    with pytest.raises(mural.LayoutError, match="give one for each image"):
        pm(images(2, (29, 34), 1)[0], into=[TensorSink(torch.zeros(3, 29, 34))])


class Told:
    """Takes results tile by tile."""

    def begin(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.result = torch.full(tuple(shape), float("nan"), dtype=dtype)
        self.target = torch.full((shape[0], *shape[2:]), -1)

    def take(self, tile: ResultTile) -> None:
        place = tuple(slice(*i) for i in tile.box)
        self.result[place] = tile.output
        assert tile.target is not None
        self.target[(place[0], *place[2:])] = tile.target


@pytest.mark.parametrize("given", ["tensor", "sources"])
def test_evaluate_into(given: str) -> None:
    (x,) = images(2, (29, 34), 1)
    target = torch.randint(0, 3, (2, 29, 34), generator=torch.Generator().manual_seed(1))
    plain = made("batch").eval()
    pm = streamed(plain, both, PLAN, None)
    sink = Told()
    if given == "tensor":
        loss = pm.evaluate_into(x, target, sink)
    else:
        loss = pm.evaluate_into([HeldImage(i) for i in x], [HeldImage(t[None].to(torch.uint8)) for t in target], sink)
    with torch.no_grad():
        expected = plain(x)
        assert apart(loss, both(expected, target)) < TOLERANCE
    assert apart(sink.result, expected) < TOLERANCE
    assert sink.target.equal(target)


def test_evaluate() -> None:
    (x,) = images(2, (29, 34), 1)
    target = torch.randint(0, 3, (2, 29, 34), generator=torch.Generator().manual_seed(1))
    plain = made("batch").eval()
    output, goal, loss = streamed(plain, both, PLAN, None).evaluate(x, target)
    with torch.no_grad():
        expected = plain(x)
    assert apart(output.full(), expected) < TOLERANCE
    assert apart(loss, both(expected, target)) < TOLERANCE
    assert goal.full().equal(target)


def inferred(spatial: tuple[int, ...], x: Tensor) -> tuple[Tensor, Tensor]:
    """The result on a rank, and what all ranks wrote into a sink that they share."""
    pm = mural.parallelize(made("batch"), mural.Plan(spatial=spatial, stream=(12, 10)))
    sinks = [TensorSink(torch.zeros(3, *x.shape[2:], dtype=x.dtype)) for _ in x]
    pm([HeldImage(one) for one in x], into=sinks)
    return pm(x).full(), torch.stack([sink.tensor for sink in sinks])


def test_two_ranks() -> None:
    (x,) = images(2, (29, 34), 1)
    expected = deepcopy(made("batch"))(x)
    found = run_on(2, inferred, (2, 1), x)
    assert all(apart(whole, expected) < TOLERANCE for whole, _ in found)
    assert apart(sum(part for _, part in found), expected) < TOLERANCE


def spread(output: Tensor, target: Tensor) -> Tensor:
    """A loss that needs two passes over the result."""
    return F.cross_entropy(output, target) + (output - output.mean()).square().mean()


class Around(nn.Module):
    """A result that only the whole tensor gives."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1, padding_mode="circular")

    def forward(self, x: Tensor) -> Tensor:
        return self.two(F.relu(self.one(x)))


@pytest.mark.parametrize("case", ["two passes", "whole"])
def test_results_that_are_read_again(case: str) -> None:
    """Results were lost that a whole pass gave, and those that a later pass reads could not be read."""
    (x,) = images(2, (20, 18), 1)
    target = torch.randint(0, 3, (2, 20, 18), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(1)
    plain = Around().double() if case == "whole" else made("batch").eval()
    pm = streamed(plain, spread, PLAN, None)
    told, sinks = Told(), [TensorSink(torch.full((3, 20, 18), float("nan"), dtype=torch.float64)) for _ in x]
    pm(x, into=sinks)
    loss = pm.evaluate_into(x, target, told)
    with torch.no_grad():
        expected = plain(x)
    assert apart(torch.stack([sink.tensor for sink in sinks]), expected) < TOLERANCE
    assert apart(loss, spread(expected, target)) < TOLERANCE
    assert apart(told.result, expected) < TOLERANCE
    assert told.target.equal(target)


def test_sources_of_a_whole_pass() -> None:
    """A pass on whole tensors read the first image alone from sources."""
    (x,) = images(3, (20, 18), 1)
    target = torch.randint(0, 3, (3, 20, 18), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(1)
    plain = Around().double()
    pm = streamed(plain, spread, PLAN, None)
    loss = pm.step([HeldImage(i) for i in x], [HeldImage(t[None].to(torch.uint8)) for t in target])
    expected = spread(plain(x), target)
    expected.backward()
    assert apart(loss, expected) < TOLERANCE
    for p, q in zip(plain.parameters(), pm.parameters(), strict=True):
        assert apart(q.grad, p.grad) < TOLERANCE
