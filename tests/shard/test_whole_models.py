"""Whole models, ours and other people's as their authors wrote them, under the law."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.vision import narrowed
from torch import Tensor, nn

from law import Grid, holds, image, some
from mural.models import CNN1D, CNN2D, CNN3D, FCN2D, UNet
from ranks import only

PLANE = [Grid((2, 1)), Grid((2, 2)), Grid((3, 1)), Grid((1, 2), data=2)]
OURS = {
    "CNN2D": (lambda: CNN2D(width=4), (2, 3, 37, 31)),
    "CNN2D positions": (lambda: CNN2D(width=4, head="positions"), (2, 3, 37, 31)),
    "FCN2D": (lambda: FCN2D(width=4, dropout=0.0), (1, 3, 65, 51)),
    "UNet": (lambda: UNet(width=4, depth=3), (2, 3, 41, 37)),
    "UNet instance residual interpolate": (
        lambda: UNet(width=4, depth=2, norm="instance", block="residual", upsample="interpolate"),
        (2, 3, 41, 37),
    ),
    "UNet group": (lambda: UNet(width=8, depth=2, norm="group"), (2, 3, 29, 32)),
    "resnet18": (lambda: narrowed("resnet18", 16, classes=5), (2, 3, 67, 64)),
    "resnet50": (lambda: narrowed("resnet50", 16, classes=5), (2, 3, 64, 64)),
}


def seeded(build: Any) -> nn.Module:
    torch.manual_seed(3)
    return build().double()


@pytest.mark.parametrize("grid", some(PLANE, 0, 2), ids=str)
@pytest.mark.parametrize("name", OURS)
def test_our_models(name: str, grid: Grid) -> None:
    build, shape = OURS[name]
    holds(seeded(build), image(*shape), grid)


@pytest.mark.parametrize("grid", [Grid((2,)), Grid((3,)), Grid((4,))], ids=str)
def test_signals(grid: Grid) -> None:
    holds(seeded(lambda: CNN1D(width=4)), image(2, 3, 101), grid)
    holds(seeded(lambda: UNet(1, width=4, depth=2)), image(1, 3, 97), grid)


@pytest.mark.parametrize("grid", [Grid((2, 1, 1)), Grid((1, 2, 2)), Grid((2,)), Grid((1, 1, 3))], ids=str)
def test_volumes(grid: Grid) -> None:
    holds(seeded(lambda: CNN3D(width=4)), image(1, 3, 13, 12, 11), grid)
    holds(seeded(lambda: UNet(3, width=4, depth=2)), image(1, 3, 17, 12, 13), grid)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape"), [("UNet", (2, 3, 41, 37)), ("resnet18", (2, 3, 67, 64)), ("FCN2D", (1, 3, 97, 90))]
)
@pytest.mark.parametrize("grid", [Grid((3, 2)), Grid((2, 4)), Grid((2, 2), data=2), Grid((6,)), Grid((8, 1))], ids=str)
def test_six_and_eight_ranks(name: str, shape: tuple[int, ...], grid: Grid) -> None:
    holds(seeded(OURS[name][0]), image(*shape), grid)


@pytest.mark.slow
def test_volumes_on_eight_ranks() -> None:
    holds(seeded(lambda: UNet(3, width=4, depth=2)), image(1, 3, 17, 16, 19), Grid((2, 2, 2)))


def monai_unet() -> nn.Module:
    from monai.networks.nets import UNet as MonaiUNet

    return MonaiUNet(2, 3, 2, channels=(4, 8, 16), strides=(2, 2), num_res_units=2)


def monai_unet_3d() -> nn.Module:
    from monai.networks.nets import UNet as MonaiUNet

    return MonaiUNet(3, 3, 2, channels=(4, 8, 16), strides=(2, 2), norm="batch")


def dynunet() -> nn.Module:
    from monai.networks.nets import DynUNet

    return DynUNet(
        2, 3, 2, kernel_size=[3, 3, 3], strides=[1, 2, 2], upsample_kernel_size=[2, 2], filters=[4, 8, 8],
        deep_supervision=True, deep_supr_num=1,
    )  # fmt: skip


def torchvision_resnet50() -> nn.Module:
    from harness.vision import torchvision

    return torchvision.models.resnet50(weights=None, num_classes=5)


class Out(nn.Module):
    """The main output of a torchvision segmentation model, its dropout off (plain torch draws other masks)."""

    def __init__(self) -> None:
        super().__init__()
        from harness.vision import torchvision

        self.net = torchvision.models.segmentation.fcn_resnet50(weights=None, weights_backbone=None, num_classes=3)
        for module in self.net.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)["out"]


THIRD_PARTY = {
    "monai UNet": (monai_unet, (2, 3, 32, 28)),
    "monai UNet 3D": (monai_unet_3d, (1, 3, 16, 16, 16)),
    "monai DynUNet": (dynunet, (2, 3, 32, 28)),
    "torchvision resnet50": (torchvision_resnet50, (2, 3, 65, 64)),
    "torchvision fcn_resnet50": (Out, (2, 3, 65, 57)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", THIRD_PARTY)
def test_third_party(name: str) -> None:
    build, shape = THIRD_PARTY[name]
    holds(Built(build), image(*shape), Grid((2, 1)), tolerance=1e-9 if "torchvision" in name else 1e-10)


MORE = [Grid((2, 2)), Grid((3, 1)), Grid((1, 1), data=2), Grid((3, 2)), Grid((2, 2), data=2)]


@pytest.mark.slow
@pytest.mark.parametrize("grid", MORE, ids=str)
@pytest.mark.parametrize("name", THIRD_PARTY)
def test_third_party_on_more_grids(name: str, grid: Grid) -> None:
    build, shape = THIRD_PARTY[name]
    only(grid.world)
    holds(Built(build), image(*shape), grid, tolerance=1e-9 if "torchvision" in name else 1e-10)


class Built(nn.Module):
    """A model that is built where it runs, from a seed: quicker than sending its parameters."""

    def __init__(self, build: Any):
        super().__init__()
        self.build = build

    def __reduce__(self) -> Any:
        return remake, (self.build,)


def remake(build: Any) -> nn.Module:
    return seeded(build)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        {"softmax": True, "to_onehot_y": True},
        {"sigmoid": True},
        {"softmax": True, "batch": True, "squared_pred": True, "jaccard": True},
    ],
    ids=str,
)
def test_monai_dice_loss_as_written(arguments: dict[str, Any]) -> None:
    holds(Dice(arguments), image(2, 3, 17, 13), Grid((2, 2)))


class Dice(nn.Module):
    """MONAI's DiceLoss on scores and a target."""

    def __init__(self, arguments: dict[str, Any]):
        super().__init__()
        self.arguments = arguments

    def forward(self, x: Tensor) -> Tensor:
        from monai.losses import DiceLoss

        classes = torch.randint(3, (2, 1, 17, 13), generator=torch.Generator().manual_seed(5))
        target = (
            classes if self.arguments.get("to_onehot_y") else torch.cat([(classes == c) for c in range(3)], 1).double()
        )
        if hasattr(x, "mesh"):
            import mural

            target = mural.shard(target, x.mesh)
        return DiceLoss(**self.arguments)(x, target)
