"""Partition: dynamic programming finds what trying all cuts finds; naive cuts, limits, and cuts of known models."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness.vision import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import mural
from mural import models
from mural.cost import Estimate, Hardware
from mural.errors import PlanError
from mural.graph import Graph, capture
from mural.graph.bytes import bytes_in
from mural.graph.cut_points import cut_points, resolve_cuts
from mural.graph.liveness import edges
from mural.graph.work_and_depth import node_costs
from mural.pipeline.partition import bound, partition

# --- graphs that hypothesis draws ---------------------------------------------------------------------------


class Drawn(nn.Module):
    """Calls that read earlier results or the input, share parameters, and keep results and masks for backward."""

    def __init__(self, steps: list[tuple[str, list[int], int]], extra: int) -> None:
        super().__init__()
        self.steps, self.extra = steps, extra
        self.weights = nn.ParameterList(nn.Parameter(torch.rand(4, 4)) for _ in range(2))
        self.scale = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        made = [x]
        for kind, before, number in self.steps:
            read = [made[i] for i in before]
            one = torch.cat(read) if len(read) > 1 else read[0]
            call: dict[str, Callable[[], Tensor]] = {
                "linear": lambda one=one, number=number: F.linear(one, self.weights[number % 2]),
                "scale": lambda one=one: one * self.scale,
                "relu": one.relu,
                "sigmoid": one.sigmoid,
                "rows": lambda one=one, number=number: one[: number + 1] + 1,
            }
            made.append(call[kind]())
        return made[-1], made[self.extra]


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    kinds = st.sampled_from(["linear", "scale", "relu", "sigmoid", "rows"])
    steps: list[tuple[str, list[int], int]] = []
    for i in range(draw(st.integers(2, 6))):
        before = draw(st.lists(st.integers(0, i), min_size=1, max_size=3, unique=True))
        steps.append((draw(kinds), before, draw(st.integers(0, 20))))
    return capture(Drawn(steps, draw(st.integers(1, len(steps)))), (draw(st.integers(1, 30)), 4))


def stage_memory(walks: Estimate, cuts: tuple[int, ...], stage: int, under_way: int, optimizer: float) -> int:
    """The bytes of one stage, as the docstring of `partition` states them."""
    ends = [0, *cuts, len(walks.graph)]
    found = walks.walk(ends[stage], ends[stage + 1]).peak(optimizer=optimizer, accumulates=True)
    return found.bytes + (under_way - 1) * found.kept


def stage_seconds(cuts: tuple[int, ...], seconds: list[float]) -> list[float]:
    return [math.fsum(seconds[a:b]) for a, b in pairwise([0, *cuts, len(seconds)])]


def travelled(graph: Graph, cuts: tuple[int, ...]) -> int:
    return sum(edge.bytes * len(edge.consumers) for edge in edges(graph, cuts))


@settings(max_examples=2 * settings().max_examples, deadline=None)
@given(graph=graphs(), data=st.data())
def test_no_other_cuts_are_better(graph: Graph, data: st.DataObject) -> None:
    points = cut_points(graph)
    stages = data.draw(st.integers(1, min(4, len(points) + 1)))
    optimizer = data.draw(st.integers(0, 2))
    under_way = data.draw(st.lists(st.integers(1, 3), min_size=stages, max_size=stages))
    seconds = [float(s) for s in data.draw(st.lists(st.integers(0, 9), min_size=len(graph), max_size=len(graph)))]
    choices = list(combinations(points, stages - 1))
    walks = Estimate(graph, Hardware.named("cpu"))
    memory = {
        cuts: max(stage_memory(walks, cuts, k, under_way[k], optimizer) for k in range(stages)) for cuts in choices
    }
    slowest = {cuts: max(stage_seconds(cuts, seconds)) for cuts in choices}
    sent = {cuts: travelled(graph, cuts) for cuts in choices}
    options: dict[str, Any] = {"microbatches": under_way, "seconds": seconds, "optimizer": optimizer}

    lean = partition(graph, stages, "memory", **options)
    assert (lean.memory, sent[lean.cuts]) == min((memory[cuts], sent[cuts]) for cuts in choices)
    assert lean.memory == memory[lean.cuts]
    fast = partition(graph, stages, "time", **options)
    assert (fast.seconds, sent[fast.cuts]) == min((slowest[cuts], sent[cuts]) for cuts in choices)
    assert [stage.seconds for stage in fast.stages] == stage_seconds(fast.cuts, seconds)
    assert sum(stage.received for stage in fast.stages) == sent[fast.cuts]
    assert fast.memory == memory[fast.cuts]

    limit = data.draw(st.sampled_from(sorted(memory.values())))
    allowed = [cuts for cuts in choices if memory[cuts] <= limit]
    both = partition(graph, stages, "both", limit=limit, **options)
    assert (both.seconds, sent[both.cuts]) == min((slowest[cuts], sent[cuts]) for cuts in allowed)
    with pytest.raises(PlanError, match="raise stages"):
        partition(graph, stages, "both", limit=lean.memory - 1, **options)


@settings(max_examples=60, deadline=None)
@given(graph=graphs(), stages=st.integers(1, 5))
def test_naive_cuts_are_as_even_as_can_be(graph: Graph, stages: int) -> None:
    most = len(cut_points(graph)) + 1
    if stages > most:
        with pytest.raises(PlanError, match=f"ask for {most} stages"):
            partition(graph, stages, "layers")
        return
    counts = [stage.layers for stage in partition(graph, stages, "layers").stages]
    assert sum(counts) == len(graph)
    assert max(counts) - min(counts) <= 1


# --- models -----------------------------------------------------------------------------------------------


def test_naive_cuts_count_the_leaf_modules() -> None:
    net = nn.Sequential(*(nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU()) for _ in range(5)))
    found = partition(mural.capture(net, (1, 3, 8, 8)), 4, "layers")
    assert [stage.layers for stage in found.stages] == [2, 3, 2, 3]
    assert found.names == ("1", "2.1", "3.1")


def test_functions_count_for_no_layer() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            for _ in range(7):
                x = x.relu() + 1
            return self.b(x)

    assert partition(mural.capture(Net(), (1, 3, 8, 8)), 2, "layers").names == ("b",)


UNET = mural.capture(models.UNet(width=8, depth=4), (1, 3, 256, 256))


def test_cuts_of_a_unet_are_vertical_and_balanced() -> None:
    """Encoder and decoder of the highest resolution lie on different stages, and none needs much more than another."""
    naive, lean = (partition(UNET, 4, by, microbatches=4) for by in ("layers", "memory"))
    assert lean.memory < 0.75 * naive.memory
    needs = [stage.memory for stage in lean.stages]
    assert max(needs) < 1.3 * sum(needs) / 4
    stage_of = {node.site: k for k, s in enumerate(lean.stages) for node in UNET.nodes[s.start : s.stop]}
    assert stage_of["stem.0"] == 0
    assert stage_of["up.3.block.3"] == 3
    assert resolve_cuts(UNET, lean.names) == lean.cuts


def test_cuts_by_time_share_the_operations() -> None:
    costs = [cost.result.work + cost.backward.work for cost in node_costs(UNET)]
    found = partition(UNET, 3, "time")
    assert sum(stage.seconds for stage in found.stages) == sum(costs)
    assert sum(costs) / 3 <= found.seconds < 1.25 * sum(costs) / 3
    assert found.seconds <= partition(UNET, 3, "layers").seconds


@pytest.mark.parametrize("level", ["module", "block", "layer"])
def test_cuts_lie_on_the_points_of_their_level(level: Any) -> None:
    found = {by: partition(UNET, 3, by, level=level) for by in ("layers", "time", "memory")}
    assert all(set(each.cuts) <= set(cut_points(UNET, level)) for each in found.values())
    assert found["memory"].memory == min(each.memory for each in found.values())
    assert found["time"].seconds == min(each.seconds for each in found.values())
    assert found["memory"].memory >= partition(UNET, 3, "memory").memory


def test_the_bound_on_what_cuts_can_gain() -> None:
    found = bound(UNET, 4)
    naive = [stage.memory for stage in partition(UNET, 4, "layers").stages]
    assert found.share == max(naive) / sum(naive)
    assert found.bound == math.sqrt(4 * found.share)
    assert found.optimum == math.sqrt(max(naive) / partition(UNET, 4, "memory").memory)
    assert 1 < found.optimum <= 1.05 * found.bound


def test_more_micro_batches_and_an_optimizer_weigh_what_they_are_of() -> None:
    one, four = (partition(UNET, 2, "layers", microbatches=count) for count in (1, 4))
    lone, adam = (partition(UNET, 2, "layers", optimizer=count) for count in (0, 2))
    for k, stage in enumerate(one.stages):
        weights = bytes_in(UNET, stage.start, stage.stop).parameters
        saved = bytes_in(UNET, stage.start, stage.stop).saved
        assert adam.stages[k].memory - lone.stages[k].memory == 2 * weights
        assert saved <= (four.stages[k].memory - stage.memory) / 3 <= 1.2 * saved
    each = partition(UNET, 2, "layers", microbatches=[4, 1])
    assert [s.memory for s in each.stages] == [four.stages[0].memory, one.stages[1].memory]


def test_tied_parameters_weigh_on_each_stage_that_reads_them() -> None:
    one, other = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
    other.weight = one.weight
    graph = mural.capture(nn.Sequential(one, nn.ReLU(), other), (1, 64))
    # The weight, its gradient, and the gradient that backward adds to it, on both; 82 bytes are the kernel's own.
    assert [stage.memory for stage in partition(graph, 2, "layers").stages] == [
        3 * 64 * 64 * 4 + 3 * 256 + 82,
        3 * 64 * 64 * 4 + 5 * 256 + 82,
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stages": 0}, "at least one stage, not 0"),
        ({"stages": 9, "level": "module"}, "has 3 at the level of modules: ask for 4 stages or for level='layer'"),
        ({"stages": 2, "by": "luck"}, "cannot be chosen by 'luck'"),
        ({"stages": 2, "by": "both"}, "give limit in bytes"),
        ({"stages": 2, "by": "time", "seconds": [1.0]}, "1 seconds were given for"),
        ({"stages": 2, "microbatches": [1, 2, 3]}, "give one number of at least 1, or 2 of them"),
        ({"stages": 2, "by": "layers", "limit": 10}, 'cuts by "layers" into 2 stages need'),
        ({"stages": 2, "by": "memory", "limit": 10}, "the leanest cuts into 2 stages need"),
    ],
)
def test_questions_without_an_answer_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        partition(UNET, **arguments)


def test_cuts_that_would_miss_a_write_are_never_taken() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            y[:, :1].relu_()
            return self.b(y)

    graph = mural.capture(Net(), (1, 3, 8, 8))
    for by in ("layers", "time", "memory"):
        assert partition(graph, 2, by).cuts == (3,)


def test_calls_that_a_model_makes_without_gradients_do_not_hinder_cuts_by_memory() -> None:
    """Spectral norm writes to its vectors by `out=`, which autograd refuses where a gradient is wanted."""
    convs = [nn.utils.parametrizations.spectral_norm(nn.Conv2d(4, 4, 1)) for _ in range(2)]
    assert partition(mural.capture(nn.Sequential(*convs), (1, 4, 8, 8)), 2, "memory").memory > 0


@pytest.mark.slow
@pytest.mark.parametrize("stages", [4, 16])
def test_large_models_are_cut(stages: int) -> None:
    for model, shape in ((torchvision.models.densenet121(), (1, 3, 224, 224)), (models.resnet110_v2(), (1, 3, 64, 64))):
        graph = mural.capture(model, shape)
        naive, lean = (partition(graph, stages, by) for by in ("layers", "memory"))
        assert lean.memory < naive.memory
        assert bound(graph, stages).optimum > 0.9 * bound(graph, stages).bound


def test_many_points_are_searched_coarse_to_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()) for _ in range(40)]
    graph = capture(nn.Sequential(*layers), (1, 4, 16, 16))
    exact = partition(graph, 3)
    monkeypatch.setattr("mural.pipeline.partition.MANY", 20)
    monkeypatch.setattr("mural.pipeline.partition.SOME", 12)
    found = partition(graph, 3)
    assert found.memory == exact.memory
    assert found.stages[1].start == found.cuts[0]
