"""Other people's models, streamed: equal to themselves, loss and gradients and running statistics."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import mural
from law import image
from streamed_law import apart, differences, streamed, wrong
from zoo import ZOO, Build, monai, scenes, timm_model, vision

GROUPS = {"num_groups": 2}
MODELS: dict[str, tuple[Build, tuple[int, ...], tuple[int, ...]]] = {
    "torchvision resnet50": (vision("resnet50", num_classes=5), (2, 3, 129, 97), (64, 64)),
    "torchvision convnext_tiny": (vision("convnext_tiny", num_classes=5), (1, 3, 129, 96), (64, 64)),
    "torchvision deeplabv3_resnet50": (scenes("deeplabv3_resnet50", num_classes=3), (2, 3, 97, 81), (64, 64)),
    "torchvision fcn_resnet50": (scenes("fcn_resnet50", num_classes=3), (2, 3, 97, 81), (64, 64)),
    "torchvision lraspp": (scenes("lraspp_mobilenet_v3_large", num_classes=3), (2, 3, 97, 81), (64, 64)),
    "torchvision densenet121": (vision("densenet121", num_classes=5), (2, 3, 97, 64), (64, 64)),
    "torchvision efficientnet_b0": (vision("efficientnet_b0", num_classes=5), (2, 3, 97, 64), (64, 64)),
    "monai UNet 3D": (
        monai("UNet", 3, 1, 2, channels=(4, 8, 8), strides=(2, 2), num_res_units=1),
        (1, 1, 32, 24, 28),
        (16, 16, 16),
    ),
    "monai BasicUNet": (monai("BasicUNet", 2, 3, 2, features=(4, 4, 8, 8, 8, 4)), (1, 3, 64, 96), (32, 32)),
    "monai SegResNet": (*ZOO["monai SegResNet"], (16, 16)),
    "timm convnext_atto": (timm_model("convnext_atto"), (1, 3, 97, 64), (64, 64)),
    "timm resnet18": (timm_model("resnet18"), (2, 3, 97, 64), (64, 64)),
    "timm efficientnet_b0": (timm_model("efficientnet_b0"), (2, 3, 97, 64), (64, 64)),
    "segmentation_models_pytorch Unet": (*ZOO["segmentation_models_pytorch Unet"], (32, 32)),
    "segmentation_models_pytorch UnetPlusPlus": (*ZOO["segmentation_models_pytorch UnetPlusPlus"], (32, 32)),
    "segmentation_models_pytorch FPN": (*ZOO["segmentation_models_pytorch FPN"], (32, 32)),
    "segmentation_models_pytorch DeepLabV3Plus": (*ZOO["segmentation_models_pytorch DeepLabV3Plus"], (32, 32)),
    "segmentation_models_pytorch MAnet": (*ZOO["segmentation_models_pytorch MAnet"], (32, 32)),
    "transformers SegFormer": (*ZOO["transformers SegFormer"], (48, 48)),
}


def projected(output: Tensor, target: Tensor) -> Tensor:
    """A loss in which every output has a gradient of its own."""
    return (output * target).sum() + output.square().mean()


def built(build: Build) -> nn.Module:
    """The model in float64, with norms that have something to do."""
    torch.manual_seed(3)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        return build().double()


def differing(name: str, tile: Sequence[int], keep: str | None) -> dict[str, float]:
    """How far a streamed step of a model is apart from the plain one."""
    build, shape, _ = MODELS[name]
    plain = built(build)
    pm = streamed(plain, projected, mural.Plan(stream=tuple(tile)), keep)
    x = image(*shape)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    output = plain(theirs)
    target = image(*output.shape, seed=5)
    expected = projected(output, target)
    expected.backward()
    found = {"loss": apart(pm.step(ours, target), expected)}
    return found | differences(pm, plain, projected, [(ours.grad, theirs.grad)])  # type: ignore[list-item]


AGAIN = ("monai UNet 3D", "monai BasicUNet", "monai SegResNet", "segmentation_models_pytorch MAnet")
"""Models with few norms: where nothing is kept, each norm is a pass over all that comes before it."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "keep"), [*((n, None) for n in MODELS), *((n, "none") for n in AGAIN)])
def test_other_peoples_models(name: str, keep: str | None) -> None:
    """In MAnet, a tensor of tokens met an image of which another dim was cut, and the result was cut twice."""
    found = differing(name, MODELS[name][2], keep)
    assert not wrong(found)
