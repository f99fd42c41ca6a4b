"""Tiles as graphs: the same bits as from tapes. What captures stands in for CUDA here: it runs a tape again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mural
from mural.memory import tile_graphs
from mural.memory.tape import FRESH
from mural.memory.tile_graphs import TileGraphs, can_be_graph
from mural.models import UNet
from streamed_law import images, streamed
from streamed_models import BLOCKS, Spec

EXTENTS = (40, 44)
CPU = torch.device("cpu")
FRESH_FROM = 3
"""The number of the first step whose tiles are all graphs."""


@dataclass
class Repeated:
    """Work that runs again on the same memory, and whose results are spoilt until it has."""

    run: Callable[[], Sequence[Tensor]]
    results: Sequence[Tensor]

    def replay(self) -> None:
        for place, result in zip(self.results, self.run(), strict=True):
            place.copy_(result)


class TapeGraphs(TileGraphs):
    """Graphs without a GPU."""

    def __init__(self, refuse: int = 10**9) -> None:
        super().__init__(CPU, 0)
        self.refuse, self.captures, self.ran = refuse, 0, 0

    def capture(self, run: Callable[[], Sequence[Tensor]]) -> Any:
        """What runs again; gradients that were added up while it was captured do not count."""
        self.captures += 1
        if self.captures > self.refuse:
            raise torch.OutOfMemoryError("no room")
        before = {name: tensor.clone() for name, tensor in self.adding.items()}
        for memory in self.windows.values():
            memory.zero_()
        results = [torch.full_like(t, 77) for t in run()]
        for name, tensor in before.items():
            self.adding[name].copy_(tensor)
        return Repeated(run, results)

    def run(self, kind: Any, replay: Any, windows: Any, others: Any, sums: Any) -> list[Tensor] | None:
        self.adding, self.ran = sums, self.ran + 1
        return super().run(kind, replay, windows, others, sums)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs begin after a few tiles."""
    monkeypatch.setattr(tile_graphs, "IN_A_ROW", 3)


def pair(model: nn.Module, plan: mural.Plan, loss: Any = F.cross_entropy) -> tuple[Any, Any, TapeGraphs]:
    """The same model streamed with graphs and without, and the graphs."""
    with_graphs, without = (streamed(model, loss, plan, None) for _ in range(2))
    with_graphs.way.tile_graphs = graphs = TapeGraphs()
    return with_graphs, without, graphs


def check_same(one: Any, other: Any, given: Sequence[Any], rate: float = 0.1) -> None:
    """A step of both gives the same bits; then the weights are updated."""
    losses = [pm.step(*given) for pm in (one, other)]
    assert losses[0].equal(losses[1])
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or p.grad.equal(q.grad)
        with torch.no_grad():
            for each in (p, q):
                if each.grad is not None:
                    each.sub_(each.grad, alpha=rate)
                each.grad = None


def target_for(batch: int) -> Tensor:
    return torch.randint(3, (batch, *EXTENTS))


def frozen(**options: Any) -> nn.Module:
    """A U-Net with known statistics."""
    torch.manual_seed(0)
    return UNet(in_channels=2, width=2, depth=1, classes=3, **options).double().eval()


@pytest.mark.parametrize("batch", [1, 2])
def test_the_same_bits(batch: int) -> None:
    one, other, graphs = pair(frozen(), mural.Plan(stream=(11, 11)))
    for x in images(batch, EXTENTS, FRESH_FROM + 1):
        graphs.ran = 0
        check_same(one, other, (x, target_for(batch)))
    assert graphs.ran == 16 * batch, "all tiles of the last step were graphs"


def test_captured_once() -> None:
    one, other, graphs = pair(frozen(), mural.Plan(stream=(11, 11)))
    given = [(x, target_for(1)) for x in images(1, EXTENTS, FRESH_FROM + 3)]
    for step in given[:FRESH_FROM]:
        check_same(one, other, step)
        assert one.way.report()["unsettled"] > 0
    before = graphs.captures
    for step in given[FRESH_FROM:]:
        check_same(one, other, step)
        assert one.way.report()["unsettled"] == 0
    assert graphs.captures == before


def test_a_classifier_whose_images_have_totals_of_their_own() -> None:
    torch.manual_seed(0)
    features = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    net = nn.Sequential(features, nn.Flatten(), nn.Linear(3, 4))
    one, other, graphs = pair(net.double(), mural.Plan(stream=(11, 11)))
    for x in images(2, EXTENTS, FRESH_FROM):
        check_same(one, other, (x, torch.tensor([1, 3])))
    assert graphs.ran


def test_training_norms_run_from_tapes() -> None:
    """They hand on large tensors."""
    one, other, graphs = pair(frozen().train(), mural.Plan(stream=(11, 11)))
    for x in images(1, EXTENTS, 4):
        check_same(one, other, (x, target_for(1)))
    assert not graphs.tiles


def test_weights_that_have_moved() -> None:
    one, other, graphs = pair(frozen(), mural.Plan(stream=(11, 11)))
    for number, x in enumerate(images(1, EXTENTS, FRESH_FROM + 3)):
        check_same(one, other, (x, target_for(1)))
        if number == FRESH_FROM:
            before = graphs.captures
            for pm in (one, other):
                pm.plain.head.weight.data = pm.plain.head.weight.data.clone() * 2
    assert graphs.captures > before


@pytest.mark.slow
def test_another_image_size_in_between() -> None:
    """Its tiles run by the rules, so graphs give their memory back, and begin again."""
    one, other, graphs = pair(frozen(), mural.Plan(stream=(11, 11)))
    large = [(x, target_for(1)) for x in images(1, EXTENTS, FRESH_FROM + 4)]
    for step in large[:FRESH_FROM]:
        check_same(one, other, step)
    assert graphs.tiles
    assert graphs.sums
    check_same(one, other, (images(1, (30, 28), 1)[0], torch.randint(3, (1, 30, 28))))
    assert not graphs.tiles
    assert not graphs.sums
    for step in large[FRESH_FROM:]:
        check_same(one, other, step)
    assert graphs.tiles


def test_gradients_of_a_step_are_not_those_of_the_next() -> None:
    """Graphs add up in the same memory in each step."""
    one, _, graphs = pair(frozen(), mural.Plan(stream=(11, 11)))
    x, target = images(1, EXTENTS, 1)[0], target_for(1)
    for _ in range(FRESH_FROM + 1):
        one.step(x, target)
    assert graphs.tiles
    held = [p.grad for p in one.parameters()]
    before = [grad.clone() for grad in held]
    for p in one.parameters():
        p.grad = None
    one.step(-x, target)
    assert all(a.equal(b) for a, b in zip(held, before, strict=True))


def test_graphs_without_room() -> None:
    one, other, graphs = pair(frozen(), mural.Plan(stream=(11, 11)))
    graphs.refuse = 2
    for x in images(1, EXTENTS, FRESH_FROM + 1):
        check_same(one, other, (x, target_for(1)))
    assert graphs.refused
    assert not graphs.tiles


def test_parameters_that_stop_learning() -> None:
    one, other, _ = pair(frozen(), mural.Plan(stream=(11, 11)))
    for number, x in enumerate(images(1, EXTENTS, FRESH_FROM + 3)):
        for pm in (one, other):
            pm.plain.head.weight.requires_grad_(number % 3 != 0)
        check_same(one, other, (x, target_for(1)))


@pytest.mark.slow
@pytest.mark.parametrize("head", ["pixels", pytest.param("classes", marks=pytest.mark.slow)])
@pytest.mark.parametrize("block", BLOCKS)
def test_blocks_of_every_kind(block: str, head: str) -> None:
    one, other, graphs = pair(Spec(block=block, norm="frozen", head=head).build(), mural.Plan(stream=(11, 9)))
    for x in images(2, EXTENTS, FRESH_FROM + 2):
        check_same(one, other, (x, torch.randint(3, (2, *EXTENTS) if head == "pixels" else (2,))))
    assert graphs.tiles


def test_numbers_of_the_host_are_not_in_a_graph() -> None:
    """A graph would keep what they were when it was captured."""
    there = torch.device("cuda")
    x = torch.empty(2, device="meta")
    copied = torch.ops.aten._to_copy.default, (), {"device": torch.device("cpu")}, None
    assert can_be_graph([], [], [x], x.device)
    assert not can_be_graph([], [], [x, torch.ones(())], x.device)
    assert not can_be_graph([copied], [], [], there)
    assert not can_be_graph([], ["of_windows"], [], there)
    assert not can_be_graph([(FRESH, (), {}, None)], [], [], there)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_on_a_gpu(precision: str) -> None:
    model = frozen(norm="batch").float().cuda().to(memory_format=torch.channels_last)
    one, other = (
        streamed(model, F.cross_entropy, mural.Plan(stream=(11, 11), precision=precision), None) for _ in "ab"
    )
    other.way.graphs = lambda program: None
    for x in images(1, EXTENTS, FRESH_FROM + 1):
        check_same(one, other, (x.float().cuda(), target_for(1).cuda()))
    assert one.way.tile_graphs.tiles
