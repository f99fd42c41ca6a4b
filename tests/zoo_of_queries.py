"""Other people's models that take more than an image, or return more than a tensor, small: as modules of one image."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from law import image
from zoo import Build, quiet

Call = Callable[[nn.Module, Tensor], Any]
BACKBONE = {
    "image_size": 64, "embed_dim": 8, "depths": [1, 1, 1, 1], "num_heads": [1, 2, 2, 2], "window_size": 4,
    "out_features": ["stage1", "stage2", "stage3", "stage4"], "drop_path_rate": 0.0,
}  # fmt: skip
DECODER = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "num_queries": 5, "dropout": 0.0,
}  # fmt: skip
ONEFORMER = {
    "num_queries": 5, "hidden_dim": 32, "conv_dim": 32, "mask_dim": 32, "num_attention_heads": 2, "encoder_layers": 1,
    "decoder_layers": 2, "encoder_feedforward_dim": 16, "dim_feedforward": 16, "task_seq_len": 7,
    "text_encoder_width": 16, "text_encoder_num_layers": 1, "text_encoder_vocab_size": 50, "text_encoder_n_ctx": 2,
    "text_encoder_context_length": 7, "is_training": False, "num_labels": 3, "dropout": 0.0, "common_stride": 4,
}  # fmt: skip
TOKENS = {"num_attention_heads": 2, "in_channels": 4, "num_layers": 2, "patch_size": 2}


class OfAnImage(nn.Module):
    """A model as a function of its image alone; every parameter that starts as zeros is drawn instead."""

    def __init__(self, net: nn.Module, call: Call):
        super().__init__()
        self.net, self.call = quiet(net).double(), call
        for parameter in net.parameters():
            if not parameter.abs().sum():
                nn.init.normal_(parameter, std=0.1)

    def forward(self, x: Tensor) -> Any:
        return [t for t in tensors(self.call(self.net, x)) if t.is_floating_point()]


def tensors(result: Any) -> list[Tensor]:
    """The tensors in what a model returns, in order."""
    if isinstance(result, Tensor):
        return [result]
    parts = result.values() if isinstance(result, dict) else result if isinstance(result, (tuple, list)) else []
    return [t for part in parts for t in tensors(part)]


def hugging_face() -> Any:
    from harness.vision import torchvision  # noqa: F401  (the package imports it)

    import transformers  # isort: skip

    return transformers


def maskformer() -> nn.Module:
    package = hugging_face()
    backbone, decoder = package.SwinConfig(**BACKBONE), package.DetrConfig(**DECODER)
    sizes = {"fpn_feature_size": 32, "mask_feature_size": 32, "num_labels": 3}
    config = package.MaskFormerConfig(backbone_config=backbone, decoder_config=decoder, **sizes)
    return OfAnImage(package.MaskFormerForInstanceSegmentation(config), lambda net, x: net(pixel_values=x))


def oneformer() -> nn.Module:
    package = hugging_face()
    config = package.OneFormerConfig(backbone_config=package.SwinConfig(**BACKBONE), **ONEFORMER)

    def call(net: nn.Module, x: Tensor) -> Any:
        return net(pixel_values=x, task_inputs=torch.arange(1, 8).expand(x.shape[0], 7))

    return OfAnImage(package.OneFormerForUniversalSegmentation(config), call)


def segresnet_ds() -> nn.Module:
    from monai.networks.nets import SegResNetDS

    sizes = {"init_filters": 4, "in_channels": 3, "out_channels": 2, "blocks_down": (1, 1, 1), "dsdepth": 2}
    return OfAnImage(SegResNetDS(2, **sizes), lambda net, x: net(x))


def diffusers() -> Any:
    from harness.vision import torchvision  # noqa: F401  (the package imports it)

    import diffusers as package  # isort: skip

    return package


def dit() -> nn.Module:
    more = {"attention_head_dim": 8, "out_channels": 4, "norm_num_groups": 4, "sample_size": 16}

    def call(net: nn.Module, x: Tensor) -> Any:
        step = torch.full((x.shape[0],), 3)
        return net(x, timestep=step, class_labels=step - 2, return_dict=False)

    return OfAnImage(diffusers().DiTTransformer2DModel(**TOKENS, **more, num_embeds_ada_norm=10), call)


def pixart(sample: int, conditions: bool) -> nn.Module:
    more = {"attention_head_dim": 12, "out_channels": 8, "cross_attention_dim": 24, "caption_channels": 24}
    sizes = {"sample_size": sample, "use_additional_conditions": conditions}

    def call(net: nn.Module, x: Tensor) -> Any:
        n = x.shape[0]
        added = {"resolution": torch.full((n, 2), 16.0).double(), "aspect_ratio": torch.ones(n, 1).double()}
        words, step = image(n, 5, 24, seed=4), torch.full((n,), 3)
        return net(x, encoder_hidden_states=words, timestep=step, added_cond_kwargs=added, return_dict=False)

    return OfAnImage(diffusers().PixArtTransformer2DModel(**TOKENS, **more, **sizes), call)


MODELS: dict[str, tuple[Build, tuple[int, ...]]] = {
    "monai SegResNetDS": (segresnet_ds, (2, 3, 32, 24)),
    "transformers MaskFormer": (maskformer, (1, 3, 64, 64)),
    "transformers OneFormer": (oneformer, (1, 3, 64, 64)),
    "diffusers DiT": (dit, (2, 4, 16, 16)),
    "diffusers PixArt": (partial(pixart, 16, False), (2, 4, 16, 16)),
    "diffusers PixArt with conditions": (partial(pixart, 128, True), (2, 4, 16, 16)),
}


class OfQueries(nn.Module):
    """A model that is built where it runs, from a seed."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def __reduce__(self) -> Any:
        return made, (self.name,)


def made(name: str) -> nn.Module:
    """The model in float64."""
    torch.manual_seed(3)
    return MODELS[name][0]()
