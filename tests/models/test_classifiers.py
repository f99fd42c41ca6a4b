"""The classifiers have the published sizes, take any extents, train every parameter, and refuse the rest."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from harness.vision import torchvision
from torch import Tensor, nn

import mural.models as models
from mural.models.resnet_v2 import VARIANTS, Unit


@pytest.fixture(autouse=True)
def same_draws() -> None:
    torch.manual_seed(0)


def parameters(build: Callable[[], nn.Module]) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build().parameters())


def image(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def check_trains(model: nn.Module, pixels: Tensor, shape: tuple[int, ...]) -> None:
    """Scores have the shape, and a random cotangent gives every parameter a finite gradient, not all zero."""
    scores = model.double()(pixels)
    assert scores.shape == shape
    (scores * torch.randn_like(scores)).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


# --- every model at odd extents ---------------------------------------------------------------------------

SMALL = {
    "Perceptron": (lambda: models.Perceptron(3 * 19 * 34, 8, 9, 5), (2, 3, 19, 34)),
    "LeNet5": (lambda: models.LeNet5(3, 5, (19, 34)), (2, 3, 19, 34)),
    "ResNetV2": (lambda: models.ResNetV2(20, classes=5, width=2), (2, 3, 19, 34)),
    "ResNetV2 of Keras": (lambda: models.ResNetV2(11, classes=5, width=2, variant="keras"), (2, 3, 1, 7)),
}


@pytest.mark.parametrize("name", SMALL)
def test_scores_and_gradients_at_odd_extents(name: str) -> None:
    build, shape = SMALL[name]
    check_trains(build(), image(*shape), (2, 5))


# --- published sizes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "count"),
    [
        (models.LeNet5, 61_706),
        (models.Perceptron, 784 * 100 + 100 + 100 * 100 + 100 + 100 * 10 + 10),
        # Document `001`, table 2: two classes.
        (partial(torchvision.models.vgg19, num_classes=2), 139_578_434),
        (partial(torchvision.models.alexnet, num_classes=2), 57_012_034),
        (partial(torchvision.models.resnet50, num_classes=2), 23_512_130),
        (partial(torchvision.models.inception_v3, num_classes=2, init_weights=False), 24_348_900),
        # Pre-activation bottlenecks on CIFAR-10, as the model zoo imgclsmob counts them.
        (partial(models.resnet_v2, 164), 1_703_258),
        (models.resnet1001_v2, 10_327_706),
    ],
)
def test_the_number_of_parameters_is_the_published_one(build: Callable[[], nn.Module], count: int) -> None:
    assert parameters(build) == count


def keras_parameters(blocks: int) -> int:
    """The trainable parameters of Keras' cifar10_resnet, version 2, with this many blocks per stage."""
    total, inputs, bottleneck = 3 * 16 * 9 + 16 + 2 * 16, 16, 16
    for stage in range(3):
        outputs = bottleneck * (4 if stage == 0 else 2)
        for block in range(blocks):
            total += 0 if stage == block == 0 else 2 * inputs
            total += inputs * bottleneck + bottleneck + 2 * bottleneck
            total += bottleneck * bottleneck * 9 + bottleneck + 2 * bottleneck
            total += bottleneck * outputs + outputs
            total += inputs * outputs + outputs if block == 0 else 0
            inputs = outputs
        bottleneck = outputs
    return total + 2 * inputs + 10 * inputs + 10


@pytest.mark.parametrize("blocks", [1, 12, 111])
def test_resnet_v2_of_keras_has_keras_parameters(blocks: int) -> None:
    assert parameters(partial(models.resnet_v2, 9 * blocks + 2, variant="keras")) == keras_parameters(blocks)


@pytest.mark.parametrize("depth", [11, 110, 1001])
def test_resnet_v2_has_as_many_layers_as_its_depth_says(depth: int) -> None:
    with torch.device("meta"):
        model = models.resnet_v2(depth)
    layers = [name for name, each in model.named_modules() if isinstance(each, nn.Conv2d | nn.Linear)]
    assert len([name for name in layers if "shortcut" not in name]) == depth


@pytest.mark.parametrize("variant", VARIANTS)
def test_resnet_v2_passes_features_by_untouched(variant: Any) -> None:
    unit = Unit(8, 2, 8, 1, VARIANTS[variant]).double()
    for parameter in unit.branch[-1].parameters():
        nn.init.zeros_(parameter)
    features = image(2, 8, 5, 6)
    assert torch.equal(unit(features), features)


def test_lenet_keeps_as_much_data_as_the_document_counts() -> None:
    model, kept = models.LeNet5(), []
    for layer in model.modules():
        if isinstance(layer, nn.AvgPool2d | nn.Linear):
            layer.register_forward_hook(lambda _, __, output: kept.append(output.numel()))
    model(torch.zeros(1, 1, 32, 32))
    assert kept == [1176, 400, 120, 84, 10]
    assert sum(kept) == 1790


# --- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: models.resnet_v2(100), r"ResNetV2 got depth=100, but depth is 9 n \+ 2 .*: set depth=101"),
        (lambda: models.resnet_v2(2), r"ResNetV2 got depth=2, .*set depth=11"),
        (lambda: models.resnet_v2(110, variant="torch"), r"variant='torch'.*'paper', 'keras'"),
        (lambda: models.LeNet5(extents=(32, 12)), r"LeNet5 got extents=\(32, 12\).*set extents=\(32, 16\)"),
        (lambda: models.Perceptron(second=0), r"Perceptron got second=0"),
    ],
)
def test_bad_arguments_raise(build: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    ("build", "shape", "message"),
    [
        (models.LeNet5, (1, 1, 28, 28), r"extents \(28, 28\), but has \(32, 32\): build it with extents=\(28, 28\)"),
        (models.Perceptron, (1, 1, 32, 32), r"1024 numbers.*build it with inputs=1024"),
    ],
)
def test_bad_images_raise(build: Callable[[], nn.Module], shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()(torch.zeros(shape))
