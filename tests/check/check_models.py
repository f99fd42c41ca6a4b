"""Other people's models at the sizes that people train them at, for plans that are exact."""

from __future__ import annotations

import contextlib
import io
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mural import Plan
from zoo import GROUPS, SEGFORMER, Build, hugging, monai, scenes, smp, timm_model, vision

SPATIAL, BOTH, STAGES = Plan(spatial=(2, 1)), Plan(data=2, spatial=(1, 2)), Plan(stage=2)
MODELS: dict[str, tuple[Build, tuple[int, ...], Plan]] = {
    "monai UNet": (
        monai("UNet", 2, 3, 2, channels=(8, 16, 32), strides=(2, 2), norm="BATCH"),
        (1, 3, 640, 640), SPATIAL,
    ),
    "monai UNet stages": (
        monai("UNet", 2, 3, 2, channels=(8, 16, 32), strides=(2, 2)),
        (1, 3, 384, 384), STAGES,
    ),
    "monai BasicUNet": (monai("BasicUNet", 2, 3, 2, features=(4, 4, 8, 8, 16, 4)), (1, 3, 512, 512), BOTH),
    "monai SegResNet": (
        monai("SegResNet", spatial_dims=2, init_filters=4, in_channels=3, out_channels=2, norm=GROUPS),
        (1, 3, 448, 512), SPATIAL,
    ),
    "monai AttentionUnet": (
        monai("AttentionUnet", 2, 3, 2, channels=(4, 8, 16), strides=(2, 2)), (2, 3, 320, 320), BOTH,
    ),
    "monai BasicUNetPlusPlus": (
        monai("BasicUNetPlusPlus", 2, 3, 2, features=(4, 4, 8, 8, 16, 4)), (1, 3, 256, 256), STAGES,
    ),
    "monai DynUNet": (
        monai(
            "DynUNet", 2, 3, 2, kernel_size=(3, 3, 3), strides=(1, 2, 2), upsample_kernel_size=(2, 2),
            filters=(8, 16, 32),
        ),
        (1, 3, 512, 512), SPATIAL,
    ),
    "torchvision deeplabv3_mobilenet": (
        scenes("deeplabv3_mobilenet_v3_large", num_classes=3, aux_loss=False), (2, 3, 321, 257), SPATIAL,
    ),
    "torchvision lraspp": (scenes("lraspp_mobilenet_v3_large", num_classes=3), (2, 3, 384, 320), BOTH),
    "torchvision resnet18": (vision("resnet18", num_classes=5), (1, 3, 320, 320), SPATIAL),
    "torchvision regnet_y_400mf": (vision("regnet_y_400mf", num_classes=5), (2, 3, 256, 256), SPATIAL),
    "torchvision mobilenet_v3_small": (vision("mobilenet_v3_small", num_classes=5), (4, 3, 320, 320), STAGES),
    "torchvision shufflenet_v2_x0_5": (vision("shufflenet_v2_x0_5", num_classes=5), (4, 3, 256, 256), STAGES),
    "timm convnext_atto": (timm_model("convnext_atto"), (1, 3, 384, 384), BOTH),
    "timm resnet10t": (timm_model("resnet10t"), (1, 3, 384, 384), SPATIAL),
    "timm pvt_v2_b0": (timm_model("pvt_v2_b0"), (1, 3, 256, 256), SPATIAL),
    "timm vit_tiny": (timm_model("vit_tiny_patch16_224", img_size=256, depth=3), (2, 3, 256, 256), STAGES),
    "transformers SegFormer": (
        hugging("SegformerForSemanticSegmentation", "SegformerConfig", **SEGFORMER), (2, 3, 384, 384), SPATIAL,
    ),
    "smp Unet": (smp("Unet", "mobilenet_v2"), (2, 3, 256, 256), SPATIAL),
    "smp FPN": (smp("FPN", "mobilenet_v2"), (2, 3, 256, 256), BOTH),
    "smp DeepLabV3Plus": (smp("DeepLabV3Plus", "mobilenet_v2"), (2, 3, 256, 256), SPATIAL),
}  # fmt: skip


def entropy(result: Any, target: Tensor) -> Tensor:
    """Cross-entropy of the first result."""
    return F.cross_entropy(result[0] if isinstance(result, list) else result, target)


def built(name: str, dtype: torch.dtype) -> tuple[nn.Module, Tensor, Tensor]:
    """The model, and a batch with targets for what it returns."""
    torch.manual_seed(3)
    build, shape, _ = MODELS[name]
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        model = build().to(dtype)
    generator = torch.Generator().manual_seed(0)
    image = torch.rand(shape, generator=generator, dtype=torch.float64).to(dtype)
    with torch.no_grad():
        result: Any = model.eval()(image)
    model.train()
    result = result[0] if isinstance(result, list) else result
    return model, image, torch.randint(result.shape[1], (len(image), *result.shape[2:]), generator=generator)
