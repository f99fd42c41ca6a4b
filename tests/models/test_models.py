"""The models have the published sizes, take any extents, train every parameter, and refuse the rest."""

import ast
import doctest
import importlib
import pkgutil
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.vision import narrowed, torchvision
from torch import Tensor, nn

import mural.models as models
from mural.models.resnet_v2 import VARIANTS, Unit


@pytest.fixture(autouse=True)
def same_draws() -> None:
    torch.manual_seed(0)


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def check_trains(model: nn.Module, image: Tensor, shape: tuple[int, ...]) -> None:
    """Scores have the shape, and a random cotangent gives every parameter a finite gradient, not all zero."""
    scores = model.double()(image.double())
    assert scores.shape == shape
    (scores * torch.randn_like(scores)).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


# --- every model at odd extents ---------------------------------------------------------------------------

IMAGES = {1: (37,), 2: (19, 34), 3: (9, 8, 11)}
CNNS = {1: models.CNN1D, 2: models.CNN2D, 3: models.CNN3D}


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("depth", [1, 3])
def test_cnn_scores_the_image_or_each_position(dims: int, depth: int) -> None:
    extents = IMAGES[dims]
    image = torch.randn(2, 3, *extents)
    check_trains(CNNS[dims](classes=4, width=3, depth=depth), image, (2, 4))
    coarse = tuple(extent // 2 ** (depth - 1) for extent in extents)
    check_trains(CNNS[dims](classes=4, width=3, depth=depth, head="positions"), image, (2, 4, *coarse))


@pytest.mark.parametrize("extents", [(1, 1), (33, 47), (64, 31)])
def test_fcn_restores_any_extents(extents: tuple[int, int]) -> None:
    check_trains(models.FCN2D(classes=3, width=2, dropout=0.0), torch.randn(1, 3, *extents), (1, 3, *extents))


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(
    ("norm", "block", "upsample"),
    list(product(["batch", "instance", "group", None], ["plain", "residual"], ["transposed", "interpolate"])),
)
def test_unet_restores_any_extents(dims: int, norm: str | None, block: str, upsample: str) -> None:
    unet = models.UNet(dims, 1, 3, width=4, depth=2, norm=norm, block=block, upsample=upsample)
    extents = IMAGES[dims]
    check_trains(unet, torch.randn(2, 1, *extents), (2, 3, *extents))


def test_unet_interpolates_only_where_halving_left_a_remainder() -> None:
    class Calls(torch.overrides.TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.names.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    unet = models.UNet(width=2, depth=2)
    counts = {}
    for extent in (16, 18, 19):
        with Calls() as calls:
            unet(torch.zeros(1, 3, extent, extent))
        counts[extent] = calls.names.count("interpolate")
    assert counts == {16: 0, 18: 1, 19: 2}  # 18 → 9 → 4; 19 → 9 → 4


def test_unet_with_dims_in_its_name() -> None:
    assert models.UNet2D(width=2, depth=1)(torch.zeros(1, 3, 5, 6)).shape == (1, 2, 5, 6)
    assert models.UNet3D(in_channels=1, width=2, depth=1)(torch.zeros(1, 1, 5, 6, 7)).shape == (1, 2, 5, 6, 7)


SMALL = {
    "Perceptron": (lambda: models.Perceptron(3 * 19 * 34, 8, 9, 5), (2, 3, 19, 34)),
    "LeNet5": (lambda: models.LeNet5(3, 5, (19, 34)), (2, 3, 19, 34)),
    "ResNetV2": (lambda: models.ResNetV2(20, classes=5, width=2), (2, 3, 19, 34)),
    "ResNetV2 of Keras": (lambda: models.ResNetV2(11, classes=5, width=2, variant="keras"), (2, 3, 1, 7)),
}


@pytest.mark.parametrize("name", SMALL)
def test_scores_and_gradients_at_odd_extents(name: str) -> None:
    build, shape = SMALL[name]
    check_trains(build(), torch.randn(shape), (2, 5))


# --- published sizes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "count"),
    [
        (models.UNet, 31_037_698),
        # The paper's own: one channel in, no norms.
        (lambda: models.UNet(in_channels=1, norm=None), 31_030_658),
        # VGG-16's convolutions, fc6 and fc7 as convolutions, and three scores of 21 classes.
        (models.FCN2D, 14_714_688 + 102_764_544 + 16_781_312 + 21 * (4096 + 512 + 256 + 3)),
        (models.LeNet5, 61_706),
        (models.Perceptron, 784 * 100 + 100 + 100 * 100 + 100 + 100 * 10 + 10),
        # Document `001`, table 2: two classes.
        (partial(torchvision.models.vgg19, num_classes=2), 139_578_434),
        (partial(torchvision.models.alexnet, num_classes=2), 57_012_034),
        (partial(torchvision.models.resnet50, num_classes=2), 23_512_130),
        (partial(torchvision.models.inception_v3, num_classes=2, init_weights=False), 24_348_900),
        # Document `004`: as benchmarks/hybrid trains them, for 16 classes.
        (partial(narrowed, "alexnet", 8, 16), 902_456),
        (partial(narrowed, "vgg19", 16, 16), 550_212),
        # Pre-activation bottlenecks on CIFAR-10, as the model zoo imgclsmob counts them.
        (partial(models.resnet_v2, 164), 1_703_258),
        (models.resnet1001_v2, 10_327_706),
    ],
)
def test_the_number_of_parameters_is_the_published_one(build: Callable[[], nn.Module], count: int) -> None:
    with torch.device("meta"):
        assert parameters(build()) == count


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
    with torch.device("meta"):
        model = models.resnet_v2(9 * blocks + 2, variant="keras")
    assert parameters(model) == keras_parameters(blocks)


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
    features = torch.randn(2, 8, 5, 6, dtype=torch.float64)
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
        (
            lambda: models.CNN2D(depth=0),
            r"CNN2D got depth=0, but depth is an integer of at least 1: set depth=1",
        ),
        (lambda: models.CNN1D(head="pixel"), r"CNN1D got head='pixel'.*'image', 'positions'"),
        (lambda: models.FCN2D(width=2.5), r"FCN2D got width=2\.5"),
        (lambda: models.FCN2D(width=1, dropout=1), r"FCN2D got dropout=1, but dropout is in \[0, 1\)"),
        (lambda: models.UNet(dims=4), r"UNet got dims=4, but dims is one of 1, 2, 3: set dims=1"),
        (lambda: models.UNet(norm="layer"), r"UNet got norm='layer'.*'batch', 'instance', 'group', None"),
        (lambda: models.UNet(block="dense"), r"UNet got block='dense'"),
        (lambda: models.UNet(upsample="nearest"), r"UNet got upsample='nearest'"),
        (lambda: models.resnet110_v2(classes=-1), r"ResNetV2 got classes=-1"),
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
    ("shape", "message"),
    [
        ((3, 32, 32), r"takes batch, channels and 2 dims: add 1"),
        ((1, 3, 8, 8, 8), r"drop 1"),
        ((1, 1, 32, 32), r"1 channels.*build it with in_channels=1"),
        ((1, 3, 32, 3), r"extents \(32, 3\), but each is at least 4: pad to \(32, 4\)"),
    ],
)
def test_bad_images_raise(shape: tuple[int, ...], message: str) -> None:
    for model in (models.UNet(width=2, depth=2), models.CNN2D(width=2, depth=3)):
        with pytest.raises(ValueError, match=message):
            model(torch.zeros(shape))


@pytest.mark.parametrize(
    ("build", "shape", "message"),
    [
        (models.LeNet5, (1, 1, 28, 28), r"extents \(28, 28\), but has \(32, 32\): build it with extents=\(28, 28\)"),
        (models.Perceptron, (1, 1, 32, 32), r"1024 numbers.*build it with inputs=1024"),
    ],
)
def test_images_of_other_extents_raise(build: Callable[[], nn.Module], shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()(torch.zeros(shape))


# --- the folder -------------------------------------------------------------------------------------------


def test_models_import_only_torch_and_the_standard_library() -> None:
    for file in Path(models.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                root = name.split(".")[0]
                assert root in sys.stdlib_module_names or root == "torch" or name.startswith("mural.models"), name
                assert not name.startswith("torch.distributed"), name


def test_examples_in_docstrings() -> None:
    for found in pkgutil.iter_modules(models.__path__, "mural.models."):
        assert doctest.testmod(importlib.import_module(found.name)).failed == 0
