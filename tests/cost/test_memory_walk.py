"""The walk over a graph finds the very peak that torch has: counted on real runs, with and without a GPU's rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from harness.vision import narrowed
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mural import models
from mural.cost.memory_effects import effects
from mural.cost.memory_tally import Tally, exact
from mural.cost.memory_walk import Peak, Walk
from mural.errors import PlanError
from mural.graph import Graph, capture
from mural.graph.differentiable import differentiable
from zoo import dense, timm_model, vit


class Function(nn.Module):
    """A function with parameters, as a model."""

    def __init__(self, function: Callable[..., Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)
        self.function = function

    def forward(self, image: Tensor) -> Tensor:
        return self.function(image, **self.layers)


def tied(image: Tensor, conv: nn.Module) -> Tensor:
    return conv(F.relu(conv(image)))


def twice(image: Tensor, conv: nn.Module) -> Tensor:
    inner = conv(image)
    return inner * inner + torch.cat((inner, inner), 1)[:, ::2]


def dead(image: Tensor, conv: nn.Module, other: nn.Module) -> Tensor:
    other(image)
    return conv(image)


def parts(image: Tensor, conv: nn.Module) -> Tensor:
    left, right = conv(image).chunk(2, 1)
    return torch.sigmoid(left) * right.transpose(2, 3).reshape(left.shape)


def written(image: Tensor, conv: nn.Module) -> Tensor:
    return F.relu_(conv(image).mul_(2.0).add_(1.0))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resnet": (lambda: narrowed("resnet18", 8), (2, 3, 64, 64)),
    "unet": (lambda: models.UNet2D(width=4, depth=3), (1, 3, 48, 64)),
    "group unet": (lambda: models.UNet2D(width=8, depth=2, norm="group", upsample="interpolate"), (1, 3, 32, 32)),
    "unet in 3d": (lambda: models.UNet3D(in_channels=1, width=4, depth=2), (1, 1, 16, 16, 24)),
    "densenet": (lambda: dense(8, 4, (2, 2), 1000), (2, 3, 64, 64)),
    "vgg": (lambda: narrowed("vgg11", 16, classes=7), (1, 3, 64, 64)),
    "vit": (lambda: vit(16, 2, 16, (224, 224)), (2, 3, 64, 64)),
    "tied": (lambda: Function(tied, conv=nn.Conv2d(4, 4, 3, padding=1)), (1, 4, 16, 16)),
    "twice": (lambda: Function(twice, conv=nn.Conv2d(4, 4, 3, padding=1)), (2, 4, 16, 16)),
    "parts": (lambda: Function(parts, conv=nn.Conv2d(4, 8, 1)), (2, 4, 16, 16)),
    "written": (lambda: Function(written, conv=nn.Conv2d(4, 8, 1)), (2, 4, 16, 16)),
    "dead": (lambda: Function(dead, conv=nn.Conv2d(4, 8, 1), other=nn.Conv2d(4, 2, 1)), (2, 4, 16, 16)),
}


def counted(model: nn.Module, shape: Sequence[int], image_gradient: bool, backward: bool = True) -> int:
    """The peak of a real step, each storage counted by its bytes."""
    image = torch.rand(tuple(shape)).requires_grad_(image_gradient)
    tally = Tally(exact)
    for tensor in (*model.parameters(), *model.buffers(), image):
        tally.enter(tensor)
    with tally:
        if not backward:
            with torch.no_grad():
                model(image)
            return tally.peak
        output = model(image)
        torch.autograd.backward(output, torch.ones_like(output))
    return tally.peak


def walked(graph: Graph, image: bool, *, start: int = 0, stop: int | None = None, training: bool = True) -> Peak:
    """The peak by the walk. While a dispatch mode watches, autograd adds no gradients in place; nor does the walk."""
    wanted = differentiable(graph, image=image)
    known = effects(graph, wanted, "cpu")
    walk = Walk(graph, known, wanted, start, stop or len(graph.nodes), lambda *_: 0, "cpu", adds_in_place=False)
    return walk.peak(training)


@pytest.mark.parametrize("image", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_walk_finds_the_peak_of_a_real_step_to_the_byte(name: str, image: bool) -> None:
    build, shape = MODELS[name]
    torch.manual_seed(0)
    model = build()
    assert walked(capture(model, shape), image).bytes == counted(model, shape, image)


def test_attention_with_a_learned_mask_is_within_a_percent() -> None:
    # On meta tensors its softmax takes other operations than on a CPU.
    build = timm_model("swin_tiny_patch4_window7_224", img_size=56, depths=(2, 2), embed_dim=8, num_heads=(1, 2))
    model = build()
    found = walked(capture(model, (1, 3, 56, 56)), False).bytes
    assert found == pytest.approx(counted(model, (1, 3, 56, 56), False), rel=0.01)


@pytest.mark.parametrize("name", ["resnet", "densenet"])
def test_inference_keeps_nothing_but_what_is_read_later(name: str) -> None:
    build, shape = MODELS[name]
    model = build()
    graph = capture(model, shape)
    found = walked(graph, False, training=False)
    assert found.bytes == counted(model, shape, False, backward=False)
    assert found.bytes < walked(graph, False).bytes


OPERATIONS: dict[str, Callable[[int], nn.Module]] = {
    "conv": lambda c: nn.Conv2d(c, c, 3, padding=1),
    "norm": lambda c: nn.BatchNorm2d(c),
    "relu": lambda c: nn.ReLU(),
    "norm and relu in place": lambda c: nn.Sequential(nn.BatchNorm2d(c), nn.ReLU(inplace=True)),
    "gelu": lambda c: nn.GELU(),
    "pool": lambda c: nn.MaxPool2d(3, 1, 1),
    "mean": lambda c: nn.AvgPool2d(3, 1, 1),
    "group": lambda c: nn.GroupNorm(2, c),
}


class Chain(nn.Module):
    """A random chain with skips: `joins[i]` is added to the result of layer i, or nothing."""

    def __init__(self, names: Sequence[str], joins: Sequence[int | None]) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.rest = nn.ModuleList(OPERATIONS[name](4) for name in names)
        self.joins = tuple(joins)

    def forward(self, image: Tensor) -> Tensor:
        features = self.first(image)
        results = [features.sigmoid()]
        for layer, join in zip(self.rest, self.joins, strict=True):
            features = layer(features)
            if join is not None:
                features = features + results[join % len(results)]
                results.append(features * 2)
        return features


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_random_chains_with_skips_keep_no_more_than_the_walk_says_after_forward(data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=1, max_size=7))
    joins = data.draw(st.lists(st.none() | st.integers(0, 3), min_size=len(names), max_size=len(names)))
    model = Chain(names, joins)
    graph = capture(model, (2, 3, 12, 12))
    image = torch.rand(2, 3, 12, 12)
    tally = Tally(exact)
    for tensor in (*model.parameters(), *model.buffers(), image):
        tally.enter(tensor)
    with tally:
        output = model(image)
        kept = tally.live
        output.backward(torch.ones_like(output))
    found = walked(graph, False)
    assert found.state + found.kept == kept
    # In forward, a list in Python may hold what nothing reads any more; the walk does not know of it.
    assert found.bytes <= tally.peak
    assert found.bytes >= kept


def test_stages_need_less_than_the_whole_and_their_states_add_up() -> None:
    model = models.UNet2D(width=4, depth=2)
    graph = capture(model, (1, 3, 32, 32))
    whole = walked(graph, False)
    third = len(graph) // 3
    stages = [
        walked(graph, False, start=a, stop=b) for a, b in ((0, third), (third, 2 * third), (2 * third, len(graph)))
    ]
    assert all(stage.bytes < whole.bytes for stage in stages)
    assert sum(stage.state for stage in stages) == whole.state
    assert sum(stage.gradients for stage in stages) >= whole.gradients


def test_an_optimizer_adds_its_numbers_for_each_parameter() -> None:
    model = narrowed("vgg11", 16, classes=7)
    graph = capture(model, (1, 3, 64, 64))
    wanted = differentiable(graph)
    walk = Walk(graph, effects(graph, wanted, "cuda"), wanted, 0, len(graph.nodes), lambda *_: 0)
    parameters = sum(-(-parameter.nbytes // 512) * 512 for parameter in model.parameters())
    assert walk.peak(optimizer=2.0).bytes - walk.peak().bytes == 2 * parameters


def test_workspaces_count_while_their_call_runs() -> None:
    graph = capture(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), (1, 3, 16, 16))
    wanted = differentiable(graph)
    known = effects(graph, wanted, "cpu")

    def peak(size: int) -> Peak:
        return Walk(graph, known, wanted, 0, 2, lambda node, _: size if node.op == "conv2d" else 0, "cpu").peak()

    assert peak(10**6).bytes - peak(0).bytes > 9 * 10**5
    assert peak(10**6).site == "0"


def test_a_stage_outside_the_graph_is_refused() -> None:
    from mural.cost import Estimate, Hardware

    graph = capture(nn.Conv2d(3, 4, 3), (1, 3, 16, 16))
    with pytest.raises(PlanError, match="nodes 1 to 3 are not a stage of a graph of 1 nodes"):
        Estimate(graph, Hardware.named("h200")).peak(1, 3)
