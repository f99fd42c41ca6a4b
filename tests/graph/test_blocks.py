"""Blocks and adjacency: the networks of document 001 and AmoebaNets as literals; levels tile and nest."""

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from harness.vision import narrowed
from torch import Tensor, nn

import mural
from mural import models
from mural.graph import Graph
from mural.graph.blocks import LEVELS, Level, adjacency, blocks, tree
from mural.graph.bytes import bytes_in
from mural.graph.work_and_depth import work
from printed import Basic, Interconnected
from zoo import dense, swin, vit


class Run(nn.Module):
    """A forward given as a function, over modules given by name."""

    def __init__(self, run: Callable[..., Any], **held: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, module in held.items():
            self.add_module(name, module)

    def forward(self, *inputs: Tensor) -> Any:
        return self.run(self, *inputs)


def names(graph: Graph, level: Level) -> list[str]:
    return [block.name for block in blocks(graph, level)]


# --- document 001 -----------------------------------------------------------------------------------------


def test_the_adjacency_that_the_document_prints() -> None:
    graph = mural.capture(Interconnected(), (1, 3, 32, 32))
    printed = {
        "conv1": [], "pool1": ["conv1"], "conv2": ["pool1"], "pool2": ["conv2"], "fc1": ["pool2"], "fc2": ["fc1"],
        "fc3": ["fc2"],
    }  # fmt: skip
    assert adjacency(graph) == adjacency(graph, "module") == printed
    assert adjacency(graph, direction="to") == {
        "conv1": ["pool1"], "pool1": ["conv2"], "conv2": ["pool2"], "pool2": ["fc1"], "fc1": ["fc2"], "fc2": ["fc3"],
        "fc3": [],
    }  # fmt: skip
    assert list(adjacency(graph, "layer")) == [
        "conv1", "relu:1", "pool1", "conv2", "relu:2", "pool2", "view:1", "fc1", "relu:3", "fc2", "relu:4", "fc3",
    ]  # fmt: skip
    assert adjacency(graph, "layer")["pool1"] == ["relu:1"]


def test_the_adjacency_of_the_documents_basic_network() -> None:
    graph = mural.capture(Basic(), (2, 1, 28, 28))
    assert adjacency(graph) == {
        "conv1": [], "conv2": ["conv1"], "conv2_drop": ["conv2"], "fc1": ["conv2_drop"], "fc2": ["fc1"]
    }  # fmt: skip
    layers = adjacency(graph, "layer")
    assert layers["log_softmax:1"] == ["fc2"]
    assert len(layers) == len(graph) == 13


AMOEBANET_6 = {
    "stem1": [],
    "stem2": ["stem1"],
    "stem3": ["stem1", "stem2"],
    "cell1_normal1": ["stem2", "stem3"],
    "cell1_normal2": ["stem3", "cell1_normal1"],
    "cell2_reduction": ["cell1_normal1", "cell1_normal2"],
    "cell3_normal1": ["cell1_normal2", "cell2_reduction"],
    "cell3_normal2": ["cell2_reduction", "cell3_normal1"],
    "cell4_reduction": ["cell3_normal1", "cell3_normal2"],
    "cell5_normal1": ["cell3_normal2", "cell4_reduction"],
    "cell5_normal2": ["cell4_reduction", "cell5_normal1"],
    "classify": ["cell5_normal2"],
}
AMOEBANET_18 = {
    "stem1": [],
    "stem2": ["stem1"],
    "stem3": ["stem1", "stem2"],
    "cell1_normal1": ["stem2", "stem3"],
    "cell1_normal2": ["stem3", "cell1_normal1"],
    "cell1_normal3": ["cell1_normal1", "cell1_normal2"],
    "cell1_normal4": ["cell1_normal2", "cell1_normal3"],
    "cell1_normal5": ["cell1_normal3", "cell1_normal4"],
    "cell1_normal6": ["cell1_normal4", "cell1_normal5"],
    "cell2_reduction": ["cell1_normal5", "cell1_normal6"],
    "cell3_normal1": ["cell1_normal6", "cell2_reduction"],
    "cell3_normal2": ["cell2_reduction", "cell3_normal1"],
    "cell3_normal3": ["cell3_normal1", "cell3_normal2"],
    "cell3_normal4": ["cell3_normal2", "cell3_normal3"],
    "cell3_normal5": ["cell3_normal3", "cell3_normal4"],
    "cell3_normal6": ["cell3_normal4", "cell3_normal5"],
    "cell4_reduction": ["cell3_normal5", "cell3_normal6"],
    "cell5_normal1": ["cell3_normal6", "cell4_reduction"],
    "cell5_normal2": ["cell4_reduction", "cell5_normal1"],
    "cell5_normal3": ["cell5_normal1", "cell5_normal2"],
    "cell5_normal4": ["cell5_normal2", "cell5_normal3"],
    "cell5_normal5": ["cell5_normal3", "cell5_normal4"],
    "cell5_normal6": ["cell5_normal4", "cell5_normal5"],
    "classify": ["cell5_normal6"],
}


@pytest.mark.parametrize(
    ("layers", "expected"), [(6, AMOEBANET_6), pytest.param(18, AMOEBANET_18, marks=pytest.mark.slow)]
)
def test_the_adjacency_of_amoebanets(layers: int, expected: dict[str, list[str]]) -> None:
    graph = mural.capture(models.amoebanetd(layers, 16), (1, 3, 64, 64))
    assert adjacency(graph) == expected
    feeds = adjacency(graph, direction="to")
    assert {(a, b) for a, after in feeds.items() for b in after} == {
        (a, b) for b, before in expected.items() for a in before
    }


# --- levels -----------------------------------------------------------------------------------------------

CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "unet": (lambda: models.UNet(width=4, depth=2), (1, 3, 33, 32)),
    "resnet": (lambda: narrowed("resnet18", 16), (1, 3, 64, 64)),
    "densenet": (lambda: dense(4, 3, (3, 4)), (1, 3, 64, 64)),
    "amoebanet": (lambda: models.amoebanetd(3, 16), (1, 3, 64, 64)),
    "inception": (lambda: narrowed("inception_v3", 16, init_weights=False), (2, 3, 299, 299)),
    "swin": (lambda: swin(4, [2, 1], [1, 2]), (1, 3, 45, 67)),
    "vit": (lambda: vit(12, 3, 8, (32, 40)), (1, 3, 45, 29)),
    "resnet v2": (lambda: models.resnet_v2(20, width=2), (1, 3, 32, 32)),
    "vgg": (lambda: narrowed("vgg11", 16), (1, 3, 33, 47)),
    "document": (Interconnected, (1, 3, 32, 32)),
}


@cache
def graph_of(name: str) -> Graph:
    build, shape = CASES[name]
    return mural.capture(build(), shape)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_levels_tile_the_nodes_and_nest(name: str) -> None:
    graph = graph_of(name)
    starts: set[int] = set()
    for level in LEVELS:
        found = blocks(graph, level)
        assert (found[0].start, found[-1].stop) == (0, len(graph))
        assert all(before.stop == after.start for before, after in pairwise(found))
        assert len({block.name for block in found}) == len(found)
        assert sum(block.flops for block in found) == work(graph).forward.work
        assert starts <= {block.start for block in found}
        starts = {block.start for block in found}
    roots = tree(graph)
    assert [root.block for root in roots] == list(blocks(graph, "module"))
    assert [leaf.block for root in roots for unit in root.children for leaf in unit.children] == list(
        blocks(graph, "layer")
    )
    assert all(child.block.parent == root.block.name for root in roots for child in root.children)


@pytest.mark.slow
def test_the_blocks_of_known_models() -> None:
    graphs = {name: graph_of(name) for name in CASES}
    assert names(graphs["unet"], "module") == ["stem", "down", "up", "head"]
    assert names(graphs["unet"], "block") == [
        "stem", "down.0.0", "down.0.1", "down.1.0", "down.1.1", "up.0", "up.1", "head",
    ]  # fmt: skip
    assert names(graphs["resnet"], "block")[3:7] == ["maxpool", "layer1.0", "layer1.1", "layer2.0"]
    assert names(graphs["densenet"], "module") == ["features", "classifier"]
    assert names(graphs["densenet"], "block")[4:8] == [
        "features.denseblock1.denselayer1",
        "features.denseblock1.denselayer2",
        "features.denseblock1.denselayer3",
        "features.transition1",
    ]
    assert "Mixed_5b" in names(graphs["inception"], "block")
    assert names(graphs["swin"], "block") == [
        "features.0", "features.1.0", "features.1.1", "features.2", "features.3.0", "norm", "permute", "avgpool",
        "flatten", "head",
    ]  # fmt: skip
    assert names(graphs["vit"], "block") == [
        "patch_embed", "pos_drop", "blocks.0", "blocks.1", "norm", "head_drop", "head",
    ]  # fmt: skip
    assert names(graphs["resnet v2"], "block")[1:4] == ["stages.0.0", "stages.0.1", "stages.1.0"]


def test_a_wrapper_counts_as_what_it_wraps() -> None:
    inner = Run(lambda m, x: m.b(m.a(x).relu()), a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(4, 5, 1))
    graph = mural.capture(Run(lambda m, x: m.net(x * 2) + 1, net=Run(lambda m, x: m.net(x), net=inner)), (1, 3, 8, 8))
    assert names(graph, "module") == ["net.net.a", "net.net.b"]
    assert [(block.start, block.stop) for block in blocks(graph, "module")] == [(0, 3), (3, 5)]


def test_functions_join_the_module_before_unless_they_bring_something_else() -> None:
    def run(m: Run, x: Tensor) -> Tensor:
        a = m.a(x - 1).relu()
        b = m.b(a).relu()
        return m.c(torch.cat([a, b], 1).relu()) * 2

    convs = {"a": nn.Conv2d(3, 4, 1), "b": nn.Conv2d(4, 4, 1), "c": nn.Conv2d(8, 4, 1)}
    graph = mural.capture(Run(run, **convs), (1, 3, 8, 8))
    assert [[n.op for n in graph.nodes[b.start : b.stop]] for b in blocks(graph)] == [
        ["sub", "conv2d", "relu"],
        ["conv2d", "relu"],
        ["cat", "relu", "conv2d", "mul"],
    ]
    assert adjacency(graph) == {"a": [], "b": ["a"], "c": ["a", "b"]}


def test_a_model_of_functions_alone_has_a_block_for_each_call() -> None:
    graph = mural.capture(Run(lambda m, x: x.relu() * x.mean()), (1, 3, 8, 8))
    for level in LEVELS:
        assert names(graph, level) == ["relu:1", "mean:1", "mul:1"]


def test_a_module_that_is_called_twice_is_two_blocks() -> None:
    graph = mural.capture(Run(lambda m, x: m.a(m.a(x)) + x, a=nn.Conv2d(3, 3, 1)), (1, 3, 8, 8))
    assert adjacency(graph) == {"a": [], "a@2": ["a"]}
    first, second = blocks(graph)
    assert first.parameters == second.parameters == 12
    assert first.parameter_bytes == 48


def test_lists_that_take_turns_stay_apart() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        for one, other in zip(m.ones, m.others, strict=True):
            x = other(one(x))
        return m.head(x)

    convs = [nn.ModuleList(nn.Conv2d(3, 3, 1) for _ in range(2)) for _ in range(2)]
    graph = mural.capture(Run(run, ones=convs[0], others=convs[1], head=nn.Conv2d(3, 1, 1)), (1, 3, 8, 8))
    assert names(graph, "module") == ["ones.0", "others.0", "ones.1", "others.1", "head"]


def test_unknown_levels_and_directions_are_refused() -> None:
    graph = mural.capture(nn.ReLU(), (1, 3))
    level: Any = "stage"
    with pytest.raises(ValueError, match="no level 'stage'"):
        blocks(graph, level)
    with pytest.raises(ValueError, match="'from' or 'to'"):
        adjacency(graph, direction=level)


# --- bytes ------------------------------------------------------------------------------------------------


def test_bytes_count_shared_memory_once() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 1), nn.Flatten())
    graph = mural.capture(net, (1, 3, 8, 8))
    conv, norm, relu, last, flat = (bytes_in(graph, node.id, node.id + 1) for node in graph)
    size = 8 * 8 * 4
    assert (conv.parameters, conv.buffers, conv.activations, conv.saved) == (64, 0, 4 * size, 3 * size)
    assert (norm.parameters, norm.buffers, norm.activations) == (32, 32, 4 * size)
    assert norm.saved == 4 * size + 32  # what it read, and two statistics of its own
    assert (relu.activations, relu.saved) == (0, 4 * size)
    assert last.saved == 4 * size  # the same memory as the relu's
    assert flat.activations == 0
    whole = bytes_in(graph)
    assert whole.saved == 3 * size + 4 * size + 32 + 4 * size
    assert whole.parameters == sum(p.numel() * 4 for p in net.parameters())
    assert bytes_in(graph, 2, 4).saved == 4 * size


def test_tied_parameters_count_once_in_the_graph_and_in_each_block() -> None:
    one, other = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    other.weight = one.weight
    graph = mural.capture(nn.Sequential(one, nn.ReLU(), other), (2, 4))
    assert bytes_in(graph).parameters == 64
    assert [block.parameters for block in blocks(graph, "layer")] == [16, 0, 16]


@pytest.mark.parametrize("name", ["unet", "resnet", "densenet"])
def test_saved_bytes_are_what_autograd_holds(name: str) -> None:
    build, shape = CASES[name]
    model = build()
    seen: dict[int, int] = {}
    known = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    held: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            held.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.randn(shape))
    found = bytes_in(mural.capture(model, shape)).saved
    assert abs(found - sum(seen.values())) <= 0.01 * found
