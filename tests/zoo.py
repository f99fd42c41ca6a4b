"""Other people's models, small, as their authors wrote them: a name, how it is built, and an input's shape.

Dropout and drop path are off: plain torch draws other masks. What a model returns is a tensor, or several.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Build = Callable[[], nn.Module]


def quiet(model: nn.Module) -> nn.Module:
    """The model without random layers."""
    for module in model.modules():
        if isinstance(module, (nn.Dropout, nn.Dropout2d, nn.Dropout3d)) or type(module).__name__ == "StochasticDepth":
            module.p = 0.0  # type: ignore[assignment]
        if type(module).__name__ == "DropPath":
            module.drop_prob = 0.0  # type: ignore[assignment]
    return model


class Output(nn.Module):
    """The main output of a model that returns several by name."""

    def __init__(self, net: nn.Module, name: str):
        super().__init__()
        self.net, self.name = net, name

    def forward(self, x: Tensor) -> Tensor:
        result: Any = self.net(x)
        return result[self.name] if isinstance(result, dict) else getattr(result, self.name)


def monai(name: str, *args: Any, **kwargs: Any) -> Build:
    def build() -> nn.Module:
        import monai.networks.nets as nets

        return quiet(getattr(nets, name)(*args, **kwargs))

    return build


def vision(name: str, **kwargs: Any) -> Build:
    def build() -> nn.Module:
        from harness.vision import torchvision

        return quiet(getattr(torchvision.models, name)(weights=None, **kwargs))

    return build


def scenes(name: str, **kwargs: Any) -> Build:
    def build() -> nn.Module:
        from harness.vision import torchvision

        found = getattr(torchvision.models.segmentation, name)(weights=None, weights_backbone=None, **kwargs)
        return Output(quiet(found), "out")

    return build


def dense(width: int, growth: int, blocks: tuple[int, ...], classes: int = 5) -> nn.Module:
    """A DenseNet of torchvision, of any size."""
    from harness.vision import torchvision

    return torchvision.models.DenseNet(growth, blocks, width, num_classes=classes)


def swin(width: int, depths: list[int], heads: list[int], patch: int = 4, window: int = 3) -> nn.Module:
    """A Swin transformer of torchvision, of any size, for 5 classes."""
    from harness.vision import torchvision

    found = torchvision.models.SwinTransformer([patch] * 2, width, depths, heads, [window] * 2, num_classes=5)
    return quiet(found)


def vit(width: int, heads: int, patch: int, extents: tuple[int, int], **more: Any) -> nn.Module:
    """A vision transformer of timm of two blocks, for 5 classes and for images of any extents."""
    from harness.vision import timm

    return timm.models.vision_transformer.VisionTransformer(
        extents, patch, num_classes=5, embed_dim=width, depth=2, num_heads=heads,
        dynamic_img_size=True, dynamic_img_pad=True, **more,
    )  # fmt: skip


def timm_model(name: str, **kwargs: Any) -> Build:
    def build() -> nn.Module:
        from harness.vision import timm

        return quiet(timm.create_model(name, pretrained=False, num_classes=5, **kwargs))

    return build


def hugging(model: str, config: str, **kwargs: Any) -> Build:
    def build() -> nn.Module:
        from harness.vision import torchvision  # noqa: F401  (the package imports it)

        import transformers  # isort: skip

        return Output(quiet(getattr(transformers, model)(getattr(transformers, config)(**kwargs))), "logits")

    return build


def smp(name: str, encoder: str = "resnet18", **kwargs: Any) -> Build:
    def build() -> nn.Module:
        from harness.vision import torchvision  # noqa: F401  (the package imports it)

        import segmentation_models_pytorch as package  # isort: skip

        return quiet(getattr(package, name)(encoder, encoder_weights=None, classes=3, **kwargs))

    return build


GROUPS = ("GROUP", {"num_groups": 2})
SEGFORMER = {
    "num_labels": 3, "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4],
    "decoder_hidden_size": 16, "drop_path_rate": 0.0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    "classifier_dropout_prob": 0.0,
}  # fmt: skip
SWIN = {"depths": (2, 2), "embed_dim": 24, "num_heads": (2, 4), "window_size": 4}
SWIN_UNETR = {
    "in_channels": 1, "out_channels": 2, "feature_size": 12, "depths": (1, 2, 1, 1), "num_heads": (1, 2, 2, 2),
    "window_size": 4,
}  # fmt: skip
MAXVIT = {
    "input_size": (64, 64), "stem_channels": 16, "block_channels": [16, 32], "block_layers": [1, 1], "head_dim": 8,
    "stochastic_depth_prob": 0.0, "partition_size": 4, "num_classes": 5,
}  # fmt: skip


def maxvit() -> nn.Module:
    from harness.vision import torchvision

    return quiet(torchvision.models.maxvit.MaxVit(**MAXVIT))


def vision_transformer() -> nn.Module:
    """Narrower than those that torchvision names: four ranks of its smallest took 18 GB in float64."""
    from harness.vision import torchvision

    model = torchvision.models.VisionTransformer(96, 32, 4, 4, hidden_dim=96, mlp_dim=192, num_classes=5)
    nn.init.normal_(model.heads.head.weight, std=0.1)  # zeros, so nothing before it would have a gradient
    return quiet(model)


ZOO: dict[str, tuple[Build, tuple[int, ...]]] = {
    "monai SegResNet": (
        monai("SegResNet", spatial_dims=2, init_filters=4, in_channels=3, out_channels=2, norm=GROUPS),
        (1, 3, 32, 40),
    ),
    "monai SegResNet 3D": (
        monai(
            "SegResNet", spatial_dims=3, init_filters=4, in_channels=1, out_channels=2, norm=GROUPS,
            blocks_down=(1, 1, 2), blocks_up=(1, 1),
        ),
        (1, 1, 16, 16, 24),
    ),
    "monai AttentionUnet": (monai("AttentionUnet", 2, 3, 2, channels=(4, 8, 16), strides=(2, 2)), (1, 3, 32, 24)),
    "monai SwinUNETR": (monai("SwinUNETR", spatial_dims=2, **SWIN_UNETR), (1, 1, 64, 64)),
    "monai SwinUNETR 3D": (monai("SwinUNETR", spatial_dims=3, **SWIN_UNETR), (1, 1, 64, 32, 32)),
    "monai UNETR": (
        monai(
            "UNETR", in_channels=1, out_channels=2, img_size=(32, 32), feature_size=4, hidden_size=24, mlp_dim=32,
            num_heads=2, spatial_dims=2,
        ),
        (1, 1, 32, 32),
    ),
    "monai BasicUNetPlusPlus": (monai("BasicUNetPlusPlus", 2, 3, 2, features=(4, 4, 8, 8, 16, 4)), (1, 3, 32, 32)),
    "monai HighResNet": (monai("HighResNet", 2, 3, 2), (1, 3, 20, 24)),
    "monai FlexibleUNet": (monai("FlexibleUNet", 3, 2, "efficientnet-b0", spatial_dims=2), (1, 3, 64, 64)),
    "torchvision deeplabv3_resnet50": (scenes("deeplabv3_resnet50", num_classes=3), (2, 3, 65, 57)),
    "torchvision lraspp_mobilenet_v3_large": (scenes("lraspp_mobilenet_v3_large", num_classes=3), (2, 3, 65, 57)),
    "torchvision densenet121": (vision("densenet121", num_classes=5), (2, 3, 65, 64)),
    "torchvision efficientnet_b0": (vision("efficientnet_b0", num_classes=5), (2, 3, 65, 64)),
    "torchvision convnext_tiny": (vision("convnext_tiny", num_classes=5), (1, 3, 65, 64)),
    "torchvision regnet_y_400mf": (vision("regnet_y_400mf", num_classes=5), (2, 3, 65, 64)),
    "torchvision shufflenet_v2_x0_5": (vision("shufflenet_v2_x0_5", num_classes=5), (2, 3, 65, 64)),
    "torchvision swin_t": (vision("swin_t", num_classes=5), (1, 3, 96, 64)),
    "torchvision swin_v2_t": (vision("swin_v2_t", num_classes=5), (1, 3, 64, 64)),
    "torchvision VisionTransformer": (vision_transformer, (2, 3, 96, 96)),
    "torchvision MaxVit": (maxvit, (2, 3, 64, 64)),
    "timm convnext_atto": (timm_model("convnext_atto"), (1, 3, 65, 64)),
    "timm swin_tiny": (timm_model("swin_tiny_patch4_window7_224", img_size=(64, 96), **SWIN), (1, 3, 64, 96)),
    "timm swinv2_tiny": (timm_model("swinv2_tiny_window8_256", img_size=64, **SWIN), (1, 3, 64, 64)),
    "timm vit_tiny": (timm_model("vit_tiny_patch16_224", img_size=64, depth=2), (2, 3, 64, 64)),
    "timm maxvit_nano": (timm_model("maxvit_nano_rw_256", img_size=64), (1, 3, 64, 64)),
    "timm pvt_v2_b0": (timm_model("pvt_v2_b0"), (1, 3, 64, 64)),
    "transformers SegFormer": (
        hugging("SegformerForSemanticSegmentation", "SegformerConfig", **SEGFORMER),
        (1, 3, 64, 96),
    ),
    "transformers Swin": (
        hugging(
            "SwinForImageClassification", "SwinConfig", image_size=64, embed_dim=16, depths=[2, 2], num_heads=[2, 4],
            window_size=4, drop_path_rate=0.0, num_labels=4,
        ),
        (1, 3, 64, 64),
    ),
    "segmentation_models_pytorch Unet": (smp("Unet"), (2, 3, 64, 64)),
    "segmentation_models_pytorch UnetPlusPlus": (smp("UnetPlusPlus"), (2, 3, 64, 64)),
    "segmentation_models_pytorch FPN": (smp("FPN"), (2, 3, 64, 64)),
    "segmentation_models_pytorch DeepLabV3Plus": (smp("DeepLabV3Plus"), (2, 3, 64, 64)),
    "segmentation_models_pytorch PSPNet": (smp("PSPNet"), (2, 3, 64, 64)),
    "segmentation_models_pytorch MAnet": (smp("MAnet"), (2, 3, 64, 64)),
    "segmentation_models_pytorch UPerNet": (smp("UPerNet"), (2, 3, 64, 64)),
    "segmentation_models_pytorch Segformer": (smp("Segformer"), (2, 3, 64, 64)),
}  # fmt: skip


class Named(nn.Module):
    """A model of the zoo that is built where it runs, from a seed: quicker than sending its parameters."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def __reduce__(self) -> Any:
        return made, (self.name,)


def made(name: str) -> nn.Module:
    """The model in float64."""
    torch.manual_seed(3)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        return ZOO[name][0]().double()
