"""Work and depth: torch's own counter agrees on products, forward and backward; document 003's table as literals."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness.vision import narrowed
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import mural
from mural import models
from mural.graph import Graph
from mural.graph.facts import FACTS, KIND_OF
from mural.graph.operation_counts import argument
from mural.graph.work_and_depth import Parallelism, node_costs, table, work
from mural.graph.work_formulas import Work
from mural.shard.table import KINDS
from zoo import dense, swin, timm_model, vision, vit

Build = Callable[[], nn.Module]


def products(graph: Graph) -> tuple[int, int]:
    """What multiply-adds cost, forward and backward; softmax is 5 and 4 of each score.

    torch's counter forgets the groups of a convolution in the gradient of its weight, and counts it once per group.
    """
    forward = backward = 0
    for node, cost in zip(graph, node_costs(graph), strict=True):
        if node.op == "scaled_dot_product_attention":
            query, key = node.input_shapes[:2]
            scores = torch.Size(query[:-1]).numel() * key[-2]
            forward += cost.result.work - 5 * scores
            backward += cost.backward.work - 4 * scores
        elif node.kind == "product" or node.op.startswith("conv"):
            forward += cost.result.work
            backward += cost.backward.work
            backward += (argument(node, 6, "groups", 1) - 1) * cost.weights.work if "conv" in node.op else 0
    return forward, backward


def counted(model: nn.Module, shape: tuple[int, ...]) -> tuple[int, int]:
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward:
            result: Any = model(torch.randn(shape))
        with FlopCounterMode(display=False) as backward:
            sum(t.sum() for t in ((result,) if isinstance(result, Tensor) else result)).backward()
    return forward.get_total_flops(), backward.get_total_flops()


SMALL: dict[str, tuple[Build, tuple[int, ...]]] = {
    "unet": (partial(models.UNet, width=4, depth=2), (2, 3, 33, 32)),
    "unet 3D": (partial(models.UNet, 3, width=4, depth=2, upsample="interpolate"), (1, 3, 9, 8, 8)),
    "resnet18": (partial(narrowed, "resnet18", 16), (2, 3, 33, 47)),
    "densenet": (partial(dense, 4, 3, (2, 3)), (2, 3, 33, 47)),
    "amoebanet": (partial(models.amoebanetd, 3, 16, 5), (2, 3, 64, 48)),
    "vit": (partial(vit, 12, 3, 8, (32, 40)), (2, 3, 45, 29)),
    "swin": (partial(swin, 4, [2, 1], [1, 2]), (2, 3, 45, 67)),
    "perceptron": (partial(models.Perceptron, 12, 8, 9, 5), (2, 3, 2, 2)),
    "signals": (partial(models.CNN1D, 3, 5), (2, 3, 64)),
}


@pytest.mark.parametrize("name", SMALL)
def test_products_are_those_that_torch_counts(name: str) -> None:
    build, shape = SMALL[name]
    model = build()
    assert products(mural.capture(model, shape)) == counted(model, shape)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (vision("inception_v3", init_weights=False), (2, 3, 299, 299)),
        (vision("mobilenet_v3_small"), (2, 3, 64, 64)),
        (vision("efficientnet_b0"), (2, 3, 64, 64)),
        (vision("regnet_y_400mf"), (2, 3, 64, 64)),
        (timm_model("convnext_atto"), (2, 3, 64, 64)),
        (timm_model("vit_tiny_patch16_224"), (1, 3, 224, 224)),
    ],
)
def test_products_of_others_models_are_those_that_torch_counts(build: Build, shape: tuple[int, ...]) -> None:
    model = build()
    assert products(mural.capture(model, shape)) == counted(model, shape)


class Run(nn.Module):
    """A function of tensors, with parameters of these shapes."""

    def __init__(self, run: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.run = run
        self.held = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.run(*inputs, *self.held)


@pytest.mark.parametrize(
    ("run", "shapes"),
    [
        (lambda x, w: F.conv2d(x, weight=w, groups=3, stride=2, dilation=2), [(2, 6, 11, 9), (9, 2, 3, 2)]),
        (lambda x, w: F.conv_transpose2d(x, w, groups=2, stride=3), [(2, 4, 5, 6), (4, 3, 3, 2)]),
        (lambda x, w: x @ w, [(2, 3, 4, 5), (5, 6)]),
        (lambda x, w: torch.bmm(x, w), [(2, 4, 5), (2, 5, 3)]),
        (lambda x, w, b: torch.addmm(b, x, w), [(4, 5), (5, 3), (4, 3)]),
        (lambda x, w, b: torch.baddbmm(b, x, w), [(2, 4, 5), (2, 5, 3), (2, 4, 3)]),
        (lambda x, w: torch.einsum("bchw,dc->bdhw", x, w), [(2, 3, 4, 5), (6, 3)]),
        (lambda x, w: torch.einsum("...c,dc->...d", x, w), [(2, 3, 4), (6, 4)]),
    ],
)
def test_products_in_other_words_are_those_that_torch_counts(run: Any, shapes: list[tuple[int, ...]]) -> None:
    model = Run(run, *shapes[1:])
    assert products(mural.capture(model, shapes[0])) == counted(model, shapes[0])


def test_torchs_own_attention_counts_projections_and_products() -> None:
    model = nn.MultiheadAttention(12, 3)
    graph = mural.capture(Run(lambda x, net=model: net(x, x, x, need_weights=False)[0]), (7, 2, 12))
    [node] = [node for node in graph if node.op == "multi_head_attention_forward"]
    cost = node_costs(graph)[node.id]
    x = torch.randn(7, 2, 12)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(x, x, x, need_weights=False)
    assert cost.result.work - 5 * 7 * 7 * 2 * 3 == counter.get_total_flops()


def test_the_table_of_the_document() -> None:
    """N = 4, C = 8, H = W = 16, K = 3: as document 003 has it, with constants and without the O."""
    first_half = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    net = nn.Sequential(first_half, nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.Flatten(), nn.Linear(576, 10))
    costs = node_costs(mural.capture(net, (4, 3, 16, 16)))
    first, relu, pool, conv, norm, flatten, linear = costs
    size = 4 * 8 * 16 * 16
    assert first.inputs == Work()  # the image asks for no gradient
    assert (relu.result, relu.weights, relu.inputs) == (Work(size, 1), Work(), Work(size, 1))
    assert (pool.result, pool.inputs) == (Work(size, 2), Work(size // 4, 1))
    multiplied = 2 * 4 * 16 * 8 * 6 * 6 * 9
    assert conv.result == Work(multiplied, 1 + 7)  # 72 channels and taps
    assert conv.weights == Work(multiplied, 1 + 8)  # 144 images and positions
    assert conv.inputs == Work(multiplied, 1 + 7)  # 81 of 144: borders read less
    positions = 4 * 16 * 36
    assert norm.result == Work(8 * positions, 6 + 2 * 8)
    assert (norm.weights, norm.inputs) == (Work(3 * positions, 1 + 8), Work(7 * positions, 6 + 8))
    assert flatten.result == Work()
    assert (linear.result, linear.weights, linear.inputs) == (
        Work(2 * 4 * 576 * 10, 1 + 10), Work(2 * 4 * 576 * 10, 1 + 2), Work(2 * 4 * 576 * 10, 1 + 4)
    )  # fmt: skip


def test_depth_is_the_longest_chain_and_work_the_sum() -> None:
    net = Run(lambda x, w: (x * w).relu().relu() + (x * w))
    net.held.append(nn.Parameter(torch.randn(4)))
    found = work(mural.capture(net, (2, 4)))
    assert found.forward == Parallelism(work=5 * 8, depth=4)
    assert found.training.work == found.forward.work + found.backward.work
    assert found.training.depth == found.forward.depth + found.backward.depth


def test_brents_bounds() -> None:
    found = work(mural.capture(models.UNet(width=8, depth=2), (1, 3, 64, 64))).training
    for processors in (1, 7, 10**9):
        least, most = found.bounds(processors)
        assert max(found.work / processors, found.depth) == least <= most == found.work / processors + found.depth
    assert found.bounds(1)[0] == found.work
    assert found.average == found.work / found.depth > 1
    with pytest.raises(ValueError, match="at least one"):
        found.bounds(0)


def test_work_grows_with_the_image_and_depth_hardly() -> None:
    small, large = (work(mural.capture(models.UNet(width=8, depth=2), (1, 3, n, n))).forward for n in (64, 131072))
    assert large.work == small.work * 2048**2
    assert large.depth < 2 * small.depth + 500


def test_parameters_alone_and_detached_values_have_no_gradient() -> None:
    net = Run(lambda x, w: (x.detach() * 2) @ w.detach() + w.sum(), (4, 4))
    costs = node_costs(mural.capture(net, (2, 4)))
    assert [cost.backward.work for cost in costs] == [0, 0, 0, 0, 16, 8]


def test_each_kind_of_rule_has_a_formula_and_each_formula_an_operation() -> None:
    assert set(KINDS.values()) <= set(KIND_OF)
    assert {name for name, fact in FACTS.items() if fact.formula} <= {*KINDS, "convolution"}


@pytest.mark.parametrize(
    ("run", "cost"),
    [
        (lambda x: x.softmax(1), Work(5 * 96, 3 + 2 * 2)),
        (lambda x: x.mean((2, 3)), Work(96, 3)),
        (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), Work(2 * 4 * 384, 1 + 2)),
        (lambda x: F.interpolate(x, scale_factor=2), Work(0, 1)),
        (lambda x: F.avg_pool2d(x, (2, 1)), Work(96, 1)),
        (lambda x: F.adaptive_avg_pool2d(x, 1), Work(96, 3)),
        (lambda x: F.group_norm(x, 2), Work(8 * 96, 6 + 2 * 4)),
        (lambda x: F.layer_norm(x, (2,)), Work(8 * 96, 6 + 2 * 1)),
        (lambda x: F.cross_entropy(x, x.argmax(1)), Work(5 * 96 + 24, 3 + 2 * 2 + 5)),
        (lambda x: F.mse_loss(x, x), Work(3 * 96, 2 + 7)),
        (lambda x: torch.sort(x, -1)[0], Work(96 * 2, 3)),
        (lambda x: torch.cat([x, x], 1).flatten(1), Work()),
        (lambda x: F.dropout(x), Work(2 * 96, 2)),
    ],
)  # fmt: skip
def test_costs_of_other_operations(run: Any, cost: Work) -> None:
    costs = node_costs(mural.capture(Run(run), (3, 4, 4, 2)))
    assert max((c.result for c in costs), key=lambda w: w.work) == cost


def test_the_table_prints_operations_and_evaluations() -> None:
    lines = table(mural.capture(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), (1, 3, 10, 10))).splitlines()
    assert lines[0].split() == ["operator", "eval.", "work", "depth"]
    assert [line.split() for line in lines[1:]] == [
        ["conv2d", "y", "13824", "6"],
        ["conv2d", "∇w", "13824", "7"],
        ["relu", "y", "256", "1"],
        ["relu", "∇x", "256", "1"],
    ]
