"""The classifiers and transformers are those of torchvision and timm, have the published sizes and train."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mural.models as models
from mural.models.resnet_v2 import VARIANTS, Unit
from mural.models.transformer import DropPath


@pytest.fixture(autouse=True)
def same_draws() -> None:
    torch.manual_seed(0)


def parameters(build: Callable[[], nn.Module]) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build().parameters())


def scramble(model: nn.Module) -> nn.Module:
    """The model with norms, biases and running statistics that are not all ones and zeros."""
    for name, value in model.state_dict().items():
        if value.ndim == 1 and value.is_floating_point():
            value.uniform_(0.5, 1.5) if name.endswith("var") else value.add_(0.2 * torch.randn_like(value))
    return model.double()


def sharing(build: Callable[[], nn.Module], theirs: nn.Module) -> nn.Module:
    """Our model with the very tensors of theirs, under the same names."""
    with torch.device("meta"):
        ours = build()
    ours.load_state_dict(theirs.state_dict(), assign=True)
    return ours.requires_grad_().train(theirs.training)


def image(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def check_same(ours: nn.Module, theirs: nn.Module, pixels: Tensor, tolerance: float = 1e-10) -> None:
    """Both give the same scores and, for the same cotangents, the same gradients in the same order."""
    found, wanted = ours(pixels), theirs(pixels)
    found, wanted = ((value,) if isinstance(value, Tensor) else tuple(value) for value in (found, wanted))
    close = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    for one, other in zip(found, wanted, strict=True):
        close(one, other)
    cotangents = [torch.randn_like(value) for value in wanted]
    gradients = torch.autograd.grad(found, list(ours.parameters()), cotangents)
    for one, other in zip(gradients, torch.autograd.grad(wanted, list(theirs.parameters()), cotangents), strict=True):
        close(one, other)


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

SMALL_VIT = partial(models.ViT, classes=5, width=12, depth=2, heads=3, patch=8, extents=(32, 40))
SMALL_SWIN = partial(models.Swin, classes=5, width=4, depths=(2, 2, 1), heads=(1, 2, 4), window=3)
SMALL = {
    "Perceptron": (lambda: models.Perceptron(3 * 19 * 34, 8, 9, 5), (2, 3, 19, 34)),
    "LeNet5": (lambda: models.LeNet5(3, 5, (19, 34)), (2, 3, 19, 34)),
    "AlexNet": (lambda: models.AlexNet(3, 5, width=4, dropout=0.0), (2, 3, 65, 97)),
    "VGG 11": (lambda: models.VGG(11, 3, 5, width=4, dropout=0.0), (2, 3, 33, 47)),
    "VGG 19 with norms": (lambda: models.vgg19(3, 5, width=2, batch_norm=True, dropout=0.0), (2, 3, 33, 47)),
    "DenseNet": (lambda: models.DenseNet(3, 5, width=4, growth=3, blocks=(2, 3, 1)), (2, 3, 65, 39)),
    "ResNetV2": (lambda: models.ResNetV2(20, classes=5, width=2), (2, 3, 19, 34)),
    "ResNetV2 of Keras": (lambda: models.ResNetV2(11, classes=5, width=2, variant="keras"), (2, 3, 1, 7)),
    "InceptionV3": (lambda: models.InceptionV3(3, 5, width=2, aux=False, dropout=0.0), (2, 3, 107, 121)),
    "ViT": (SMALL_VIT, (2, 3, 45, 29)),
    "ViT mean": (partial(SMALL_VIT, pool="mean"), (2, 3, 5, 64)),
    "ViT pixels": (partial(SMALL_VIT, head="pixels"), (2, 3, 45, 29)),
    "ViT pixels mean": (partial(SMALL_VIT, head="pixels", pool="mean"), (2, 3, 32, 40)),
    "Swin": (SMALL_SWIN, (2, 3, 45, 67)),
    "Swin pixels": (partial(SMALL_SWIN, head="pixels"), (2, 3, 45, 67)),
    "Swin narrow": (partial(SMALL_SWIN, head="pixels"), (2, 3, 9, 67)),
}


@pytest.mark.parametrize("name", SMALL)
def test_scores_and_gradients_at_odd_extents(name: str) -> None:
    build, shape = SMALL[name]
    check_trains(build(), image(*shape), (2, 5, *shape[2:]) if any(w in name for w in ("pixels", "narrow")) else (2, 5))


def test_inception_gives_auxiliary_scores_in_training_alone() -> None:
    model = models.InceptionV3(3, 5, width=1)
    pixels = torch.randn(2, 3, 299, 299)
    both = model(pixels)
    assert isinstance(both, models.InceptionOutputs)
    assert both.logits.shape == both.aux_logits.shape == (2, 5)
    assert model.eval()(pixels).shape == (2, 5)
    assert models.InceptionV3(3, 5, width=1, aux=False)(pixels).shape == (2, 5)


# --- published sizes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "count"),
    [
        (models.LeNet5, 61_706),
        (models.Perceptron, 784 * 100 + 100 + 100 * 100 + 100 + 100 * 10 + 10),
        (models.alexnet, 61_100_840),
        (models.vgg11, 132_863_336),
        (models.vgg13, 133_047_848),
        (models.vgg16, 138_357_544),
        (models.vgg19, 143_667_240),
        (partial(models.vgg19, batch_norm=True), 143_678_248),
        (models.densenet121, 7_978_856),
        (models.densenet169, 14_149_480),
        (models.densenet201, 20_013_928),
        (models.inception_v3, 27_161_264),
        (models.vit_tiny, 5_717_416),
        (models.vit_small, 22_050_664),
        (models.vit_base, 86_567_656),
        (models.swin_tiny, 28_288_354),
        # Document `001`, table 2: two classes.
        (partial(models.vgg19, classes=2), 139_578_434),
        (partial(models.alexnet, classes=2), 57_012_034),
        (partial(models.resnet50, classes=2), 23_512_130),
        (partial(models.inception_v3, classes=2), 24_348_900),
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


# --- torchvision and timm ---------------------------------------------------------------------------------


def torchvision_model(name: str, **arguments: Any) -> nn.Module:
    from harness.vision import torchvision

    return getattr(torchvision.models, name)(weights=None, **arguments)


def check_torchvision(name: str, pixels: Tensor, build: Callable[[], nn.Module], **arguments: Any) -> None:
    theirs = scramble(torchvision_model(name, **arguments)).eval()
    check_same(sharing(build, theirs), theirs, pixels)


def test_densenet121_computes_what_torchvision_computes() -> None:
    check_torchvision("densenet121", image(2, 3, 45, 38), models.densenet121)


def test_inception_v3_computes_what_torchvision_computes() -> None:
    theirs = scramble(torchvision_model("inception_v3", init_weights=False)).eval()
    ours = sharing(models.inception_v3, theirs)
    pixels = image(2, 3, 75, 97)
    with torch.no_grad():
        torch.testing.assert_close(ours(pixels), theirs(pixels), rtol=1e-10, atol=1e-10)


NAMED = ["alexnet", "vgg11", "vgg13", "vgg16", "vgg19", "densenet121", "densenet169", "densenet201", "inception_v3"]


def shapes(model: nn.Module) -> list[tuple[str, torch.Size]]:
    return [(name, value.shape) for name, value in model.state_dict().items()]


@pytest.mark.parametrize("name", NAMED)
def test_state_dicts_have_the_names_and_the_order_of_torchvision(name: str) -> None:
    with torch.device("meta"):
        theirs = torchvision_model(name, **({"init_weights": False} if name == "inception_v3" else {}))
        ours = getattr(models, name)()
    assert shapes(ours) == shapes(theirs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "build"),
    [
        ("alexnet", models.alexnet),
        ("vgg11_bn", partial(models.vgg11, batch_norm=True)),
        ("vgg19", models.vgg19),
        ("densenet201", models.densenet201),
    ],
)
def test_large_models_compute_what_torchvision_computes(name: str, build: Callable[[], nn.Module]) -> None:
    check_torchvision(name, image(2, 3, 65, 71), build)


@pytest.mark.slow
def test_inception_v3_trains_as_torchvision_does() -> None:
    theirs = scramble(torchvision_model("inception_v3", init_weights=False, dropout=0.0))
    check_same(sharing(partial(models.inception_v3, dropout=0.0), theirs), theirs, image(2, 3, 299, 299))


def test_densenet_trains_as_torchvision_does() -> None:
    from harness.vision import torchvision

    theirs = scramble(torchvision.models.DenseNet(4, (2, 3, 2), 8, num_classes=5))
    build = partial(models.DenseNet, classes=5, width=8, growth=4, blocks=(2, 3, 2))
    check_same(sharing(build, theirs), theirs, image(2, 3, 45, 38))


@pytest.mark.parametrize("extents", [(40, 52), (36, 12), (28, 92)])
def test_swin_computes_what_torchvision_computes(extents: tuple[int, int]) -> None:
    from harness.vision import torchvision

    theirs = scramble(
        torchvision.models.SwinTransformer(
            [4, 4], 8, [2, 2, 3], [1, 2, 4], [3, 3], stochastic_depth_prob=0.0, num_classes=5
        )
    )
    build = partial(models.Swin, classes=5, width=8, depths=(2, 2, 3), heads=(1, 2, 4), window=3)
    check_same(sharing(build, theirs), theirs, image(2, 3, *extents))


def timm_vit(**more: Any) -> nn.Module:
    from harness.vision import timm

    return timm.models.vision_transformer.VisionTransformer(
        img_size=(32, 40), patch_size=8, num_classes=5, embed_dim=12, depth=2, num_heads=3,
        dynamic_img_size=True, dynamic_img_pad=True, **more,
    )  # fmt: skip


TIMM = {"token": {}, "mean": {"class_token": False, "global_pool": "avg", "fc_norm": False}}


@pytest.mark.parametrize("pool", TIMM)
@pytest.mark.parametrize("extents", [(32, 40), (27, 35)])
def test_vit_computes_what_timm_computes(pool: Any, extents: tuple[int, int]) -> None:
    theirs = scramble(timm_vit(**TIMM[pool]))
    check_same(sharing(partial(SMALL_VIT, pool=pool), theirs), theirs, image(2, 3, *extents))


@pytest.mark.parametrize("pool", TIMM)
@pytest.mark.parametrize("extents", [(16, 24), (45, 83)])
def test_vit_interpolates_positions_as_timm_does(pool: Any, extents: tuple[int, int]) -> None:
    # timm interpolates in float32.
    theirs = scramble(timm_vit(**TIMM[pool]))
    check_same(sharing(partial(SMALL_VIT, pool=pool), theirs), theirs, image(2, 3, *extents), tolerance=1e-5)


def test_vit_computes_what_torchvision_computes() -> None:
    from harness.vision import torchvision

    theirs = scramble(torchvision.models.VisionTransformer(32, 8, 2, 3, 12, 48, num_classes=5))
    nn.init.normal_(theirs.heads.head.weight)
    values = list(theirs.state_dict().values())
    # torchvision has the positions after the patches, timm (and so mural) before them.
    token, weight, bias, positions, *rest = values
    ours = SMALL_VIT(extents=(32, 32)).double()
    ours.load_state_dict(dict(zip(ours.state_dict(), [token, positions, weight, bias, *rest], strict=True)))
    pixels = image(2, 3, 32, 32)
    torch.testing.assert_close(ours(pixels), theirs(pixels), rtol=1e-10, atol=1e-10)


def test_pixels_are_scored_by_the_patch_that_they_lie_in() -> None:
    model = SMALL_VIT(head="pixels", pool="mean").double()
    model.blocks = nn.Sequential()  # no attention: a patch's score depends on that patch alone
    pixels = image(1, 3, 27, 35)
    changed = pixels.clone()
    changed[:, :, 8:16, 16:24] += 1
    differs = (model(pixels) != model(changed)).any(1)[0]
    # Bilinear interpolation reaches half a patch beyond.
    assert differs[8:16, 16:24].all()
    differs[4:20, 12:28] = False
    assert not differs.any()


def test_dropped_paths_are_whole_images_scaled_to_the_same_expectation() -> None:
    drop, branch = DropPath(0.25), torch.ones(4000, 2, 3)
    found = drop(branch)
    values = found[:, 0, 0]
    assert torch.equal(found, values[:, None, None].expand_as(found))
    assert values.unique().tolist() == pytest.approx([0, 4 / 3])
    assert values.mean().item() == pytest.approx(1, abs=0.05)
    assert drop.eval()(branch) is branch
    assert DropPath(0.0)(branch) is branch


# --- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: models.resnet_v2(100), r"ResNetV2 got depth=100, but depth is 9 n \+ 2 .*: set depth=101"),
        (lambda: models.resnet_v2(2), r"ResNetV2 got depth=2, .*set depth=11"),
        (lambda: models.resnet_v2(110, variant="torch"), r"variant='torch'.*'paper', 'keras'"),
        (lambda: models.VGG(12), r"VGG got depth=12, but depth is one of 11, 13, 16, 19"),
        (lambda: models.alexnet(width=2, dropout=1.5), r"AlexNet got dropout=1.5, but dropout is in \[0, 1\)"),
        (lambda: models.DenseNet(blocks=(2, 0)), r"DenseNet got blocks\[1\]=0"),
        (lambda: models.InceptionV3(width=0), r"InceptionV3 got width=0"),
        (lambda: models.LeNet5(extents=(32, 12)), r"LeNet5 got extents=\(32, 12\).*set extents=\(32, 16\)"),
        (lambda: models.Perceptron(second=0), r"Perceptron got second=0"),
        (lambda: models.ViT(heads=7), r"ViT got heads=7, but heads divide the 384 channels: set heads=6"),
        (lambda: models.ViT(head="positions"), r"ViT got head='positions'.*'image', 'pixels'"),
        (lambda: models.ViT(pool="max"), r"ViT got pool='max'"),
        (lambda: models.ViT(width=8, heads=2, drop_path=-1), r"ViT got drop_path=-1"),
        (lambda: models.Swin(depths=(2, 2)), r"2 depths and 4 heads.*set depths=\(2, 2\) and give 2 heads"),
        (lambda: models.Swin(depths=(2, 2), heads=(3, 5)), r"heads=5, but heads divide the 192 channels: set heads=4"),
        (lambda: models.Swin(depths=(0,), heads=(3,)), r"Swin got depths\[0\]=0"),
    ],
)
def test_bad_arguments_raise(build: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    ("build", "shape", "message"),
    [
        (lambda: models.AlexNet(width=1), (1, 3, 62, 99), r"extents \(62, 99\).*at least 63: pad to \(63, 99\)"),
        (lambda: models.VGG(11, width=1), (1, 3, 32, 31), r"at least 32: pad to \(32, 32\)"),
        (lambda: models.DenseNet(width=2, growth=1), (1, 3, 28, 29), r"at least 29"),
        (lambda: models.InceptionV3(width=1), (2, 3, 298, 299), r"at least 299"),
        (lambda: models.InceptionV3(width=1).eval(), (2, 3, 74, 80), r"at least 75"),
        (models.LeNet5, (1, 1, 28, 28), r"extents \(28, 28\), but has \(32, 32\): build it with extents=\(28, 28\)"),
        (models.Perceptron, (1, 1, 32, 32), r"1024 numbers.*build it with inputs=1024"),
        (SMALL_VIT, (1, 4, 32, 32), r"ViT got 4 channels"),
        (SMALL_SWIN, (3, 32, 32), r"Swin got a tensor of shape \(3, 32, 32\)"),
    ],
)
def test_bad_images_raise(build: Callable[[], nn.Module], shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()(torch.zeros(shape))
