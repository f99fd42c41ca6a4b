"""Liveness, edges and named cuts: what is alive where, what travels to whom, and which cuts are refused and why."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness.vision import narrowed
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import mural
from mural import models
from mural.errors import PlanError
from mural.graph import Graph
from mural.graph.blocks import LEVELS
from mural.graph.cut_points import cut_name, cut_points, resolve_cuts
from mural.graph.liveness import CrossingValue, alive, alive_bytes, edges, flows, last_use, refused
from zoo import dense

IMAGE = (1, 3, 8, 8)


class Run(nn.Module):
    """A forward given as a function, over modules given by name."""

    def __init__(self, run: Callable[..., Any], **held: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, module in held.items():
            self.add_module(name, module)

    def forward(self, x: Tensor, *more: Tensor) -> Any:
        return self.run(self, x, *more)


def captured(run: Callable[..., Any], **held: nn.Module) -> Graph:
    return mural.capture(Run(run, **held), IMAGE)


def conv(inputs: int = 3, outputs: int = 3) -> nn.Module:
    return nn.Conv2d(inputs, outputs, 1)


def places(found: Any) -> list[tuple[int, int]]:
    return [each.value for each in found]


# --- alive ------------------------------------------------------------------------------------------------


def test_skips_are_alive_up_to_their_last_reader() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        skip = m.a(x)
        down = m.c(m.b(skip))
        return torch.cat([skip, down], 1).relu()

    graph = captured(run, a=conv(), b=conv(), c=conv())
    assert [places(alive(graph, cut)) for cut in range(len(graph) + 1)] == [
        [], [(0, 0)], [(0, 0), (1, 0)], [(0, 0), (2, 0)], [(3, 0)], []
    ]  # fmt: skip
    size = 3 * 64 * 4
    assert alive_bytes(graph) == (0, size, 2 * size, 2 * size, 2 * size, 0)


def test_the_models_inputs_do_not_travel_and_its_outputs_do() -> None:
    graph = captured(lambda m, x: (y := m.a(x), m.b(y) + x), a=conv(), b=conv())
    assert [node.site for node in graph] == ["a", "b", "add:1"]
    assert places(alive(graph, 2)) == [(0, 0), (1, 0)]  # the first is returned
    assert [(edge.value, edge.producer, edge.consumers) for edge in edges(graph, [1, 2])] == [
        ((0, 0), 0, (1, 2)),
        ((1, 0), 1, (2,)),
    ]


def test_several_inputs_and_outputs() -> None:
    def run(m: Any, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
        early = m.a(x)
        late = m.b(early * mask)
        return {"early": early, "late": late + mask, "mask": mask}

    graph = mural.capture(Run(run, a=conv(), b=conv()), [IMAGE, (1, 1, 8, 8)])
    assert [node.site for node in graph] == ["a", "mul:1", "b", "add:1"]
    assert [(edge.value, edge.consumers) for edge in edges(graph, [1, 3])] == [((0, 0), (1, 2)), ((2, 0), (2,))]


def test_edges_go_straight_to_each_reader_with_shape_bytes_and_gradient() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        values, indices = m.a(x).max(dim=1)
        return m.b(values.unsqueeze(1) * indices.unsqueeze(1)) + values.unsqueeze(1) + (x[:, :1] * 2)

    graph = captured(run, a=conv(), b=conv(1, 1))
    sites = [node.site for node in graph]
    cut = sites.index("unsqueeze:1")
    found = edges(graph, [0, cut, sites.index("b")])
    by_value = {edge.value: edge for edge in found}
    maximum = sites.index("max:1")
    assert by_value[maximum, 0] == CrossingValue((maximum, 0), 0, (1, 2), True, 64 * 4, (1, 8, 8), torch.float32)
    assert by_value[maximum, 1] == CrossingValue((maximum, 1), 0, (1,), False, 64 * 8, (1, 8, 8), torch.int64)
    late = edges(graph, [len(graph) - 1])
    assert {edge.value: edge.gradient for edge in late}[sites.index("mul:2"), 0] is False  # of the image alone


@pytest.mark.parametrize("starts", [[0, 0], [2, 1], [9], [0, 9], [-1]])
def test_stages_without_calls_are_refused(starts: list[int]) -> None:
    graph = mural.capture(nn.Sequential(conv(), nn.ReLU(), conv()), IMAGE)
    with pytest.raises(PlanError, match="leave one without calls"):
        edges(graph, starts)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_alive_is_what_edges_carry(data: st.DataObject) -> None:
    graph = UNET
    cuts = data.draw(st.lists(st.integers(1, len(graph) - 1), min_size=1, max_size=5, unique=True).map(sorted))
    found = edges(graph, cuts)
    for k, cut in enumerate(cuts, 1):
        across = {edge.value for edge in found if edge.producer < k <= edge.consumers[-1]}
        assert across == set(places(alive(graph, cut)))
    ends = [0, *cuts, len(graph)]
    for edge in found:
        assert ends[edge.producer] <= edge.value[0] < ends[edge.producer + 1]
        assert edge.producer not in edge.consumers


UNET = mural.capture(models.UNet(width=2, depth=2), (1, 3, 17, 16))


def test_alive_bytes_are_those_of_the_values_alive() -> None:
    found = alive_bytes(UNET)
    assert len(found) == len(UNET) + 1
    for cut in range(len(UNET) + 1):
        assert found[cut] == sum(flow.bytes for flow in alive(UNET, cut))
    for flow in flows(UNET):
        assert last_use(UNET, flow) >= flow.value[0]


# --- memory that is shared ----------------------------------------------------------------------------------


def test_memory_that_is_written_through_a_view_is_not_cut() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)  # 0
        y[:, :1].relu_()  # 1, 2
        return m.b(y)  # 3 reads 0 after 2

    graph = captured(run, a=conv(), b=conv())
    assert graph.nodes[3].after == (2,)
    assert sorted(refused(graph)) == [1, 2]
    assert refused(graph)[2] == "'relu_:1' writes to the memory of 'a' in place, and 'b' reads it afterwards"
    assert cut_points(graph) == (3,)
    with pytest.raises(PlanError, match=r"cannot begin at 'relu_:1': .*which a copy would miss; begin at 'b'"):
        resolve_cuts(graph, ["relu_:1"])


def test_a_view_may_be_made_from_a_copy_as_long_as_both_are_behind_the_cut() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)  # 0
        view = y.flatten(2)  # 1
        y.relu_()  # 2
        return view * 2  # 3 reads 1 after 2

    assert sorted(refused(captured(run, a=conv()))) == [2]


def test_what_is_written_in_place_and_read_as_such_may_be_cut() -> None:
    graph = mural.capture(nn.Sequential(conv(), nn.ReLU(inplace=True), conv()), IMAGE)
    assert refused(graph) == {}
    assert cut_points(graph) == (1, 2)


def test_an_output_that_is_written_through_a_view_is_not_cut() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)
        y[:, 0].zero_()
        return y

    assert refused(captured(run, a=conv()))[2].endswith("and the model returns it afterwards")


def test_a_shared_norm_in_training_keeps_its_calls_together() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.c(m.norm(m.b(m.norm(m.a(x)))))

    parts = {"a": conv(), "b": conv(), "c": conv(), "norm": nn.BatchNorm2d(3)}
    graph = captured(run, **parts)
    assert sorted(refused(graph)) == [2, 3]
    assert "norm.running_mean" in refused(graph)[2]
    assert refused(mural.capture(Run(run, **parts).eval(), IMAGE)) == {}


def test_an_input_that_is_written_through_a_view_keeps_its_readers() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        x[:, :1].zero_()  # 0, 1
        y = m.a(x)  # 2 reads x after 1
        return m.b(y)  # 3

    assert sorted(refused(captured(run, a=conv(), b=conv()))) == [1, 2]


# --- names ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "graph",
    [
        UNET,
        mural.capture(narrowed("resnet18", 32), (1, 3, 64, 64)),
        mural.capture(dense(4, 2, (3, 2)), (1, 3, 64, 64)),
        captured(lambda m, x: m.a(m.a(x)).relu() + F.interpolate(x, size=(8, 8)), a=conv()),
    ],
)
def test_names_of_cuts_mean_what_they_say(graph: Graph) -> None:
    for level in LEVELS:
        cuts = cut_points(graph, level)
        assert resolve_cuts(graph, [cut_name(graph, cut) for cut in cuts]) == cuts
    for node in graph.nodes[1:]:
        assert resolve_cuts(graph, [node.site]) == (node.id,)


def test_lists_of_modules_name_their_first_item() -> None:
    assert resolve_cuts(UNET, ["down", "up.0/cat:1", "up.1"]) == (6, 21, 28)
    assert [cut_name(UNET, cut) for cut in (6, 21, 28)] == ["down.0", "up.0/cat:1", "up.1"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["up.7"], r"cannot begin at 'up.7': there is no such module or call in the model; write 'up.\d"),
        (["down", "down"], "two stages cannot both begin at 'down'"),
        (["up.1", "up.0"], r"order in which the model runs: write \['up.0', 'up.1'\]"),
        (["stem"], "cannot begin at 'stem': the first stage does"),
        (["down.0", "down.0.0"], "'down.0' and 'down.0.0' begin at the same call"),
        (["?"], "write one of 'stem', 'stem.0', "),
    ],
)
def test_cuts_that_are_none_are_refused_with_the_remedy(names: list[str], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        resolve_cuts(UNET, names)
