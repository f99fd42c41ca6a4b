"""The vision transformer, for images of any extents, with timm's layers and parameter names.

Dosovitskiy et al., "An image is worth 16x16 words", 2020: each patch is one token, and every token attends to all.

    image ─ pad ─ patches (conv k = stride = patch) ─ + positions ─ tokens ─ blocks ─ norm ─ scores

    block       x ─ + attention(norm(x)) ─ + mlp(norm(x)) ─

Positions are learned for the grid of patches of one image and interpolated to the grid of another (bicubic,
with antialiasing, as timm does); the last patches of an image that does not divide are padded with zeros.

- head "image": one answer per image, read from a token of its own (pool "token") or from the mean of all
  tokens (pool "mean");
- head "pixels": one answer per patch, enlarged to the pixels.

A state dict of timm's VisionTransformer of the same sizes loads as it is; pool "mean" is its model with
class_token=False, global_pool="avg" and fc_norm=False.
"""

from collections import OrderedDict
from math import ceil, prod
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mural.models.checked_arguments import check_choice, check_heads, check_image, check_positive, check_rate
from mural.models.layers_by_dims import dropout as drop
from mural.models.transformer import DropPath, initialize, mlp, pad_to_multiple, rates

Head = Literal["image", "pixels"]
Pool = Literal["token", "mean"]

MLP_NAMES = ("fc1", "act", "drop1", "fc2", "drop2")


class Attention(nn.Module):
    """Each token with what it attends to, over all tokens, in several heads."""

    def __init__(self, width: int, heads: int, rate: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.drop = drop(rate)

    def forward(self, tokens: Tensor) -> Tensor:
        batch, length, width = tokens.shape
        qkv = self.qkv(tokens).reshape(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        found = F.scaled_dot_product_attention(query, key, value)
        return self.drop(self.proj(found.transpose(1, 2).reshape(batch, length, width)))


class Block(nn.Module):
    """Attention and MLP, each on normalized tokens and added to what it read."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float, drop_path: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = Attention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(OrderedDict(zip(MLP_NAMES, mlp(width, hidden, dropout), strict=True)))
        self.drop_path = DropPath(drop_path)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.drop_path(self.attn(self.norm1(tokens)))
        return tokens + self.drop_path(self.mlp(self.norm2(tokens)))


class ViT(nn.Module):
    """Class scores of each image or of each pixel; by default ViT-S/16, with positions for 224 × 224.

    >>> ViT(classes=7, width=8, depth=1, heads=2)(torch.zeros(2, 3, 45, 67)).shape
    torch.Size([2, 7])
    >>> ViT(classes=7, width=8, depth=1, heads=2, head="pixels")(torch.zeros(2, 3, 45, 67)).shape
    torch.Size([2, 7, 45, 67])
    """

    def __init__(
        self,
        in_channels: int = 3,
        classes: int = 1000,
        width: int = 384,
        depth: int = 12,
        heads: int = 6,
        patch: int = 16,
        extents: tuple[int, int] = (224, 224),
        expansion: int = 4,
        head: Head = "image",
        pool: Pool = "token",
        dropout: float = 0.0,
        drop_path: float = 0.0,
    ) -> None:
        """Builds `depth` blocks on tokens of `width` channels; images of `extents` need no interpolated positions."""
        super().__init__()
        check_positive("ViT", in_channels=in_channels, classes=classes, depth=depth, patch=patch, expansion=expansion)
        check_positive("ViT", height=extents[0], width=extents[1])
        check_heads("ViT", width, heads)
        check_choice("ViT", "head", head, ("image", "pixels"))
        check_choice("ViT", "pool", pool, ("token", "mean"))
        check_rate("ViT", dropout=dropout, drop_path=drop_path)
        self.in_channels = in_channels
        self.patch = patch
        self.grid = (ceil(extents[0] / patch), ceil(extents[1] / patch))
        self.scores_pixels = head == "pixels"
        self.cls_token = nn.Parameter(torch.empty(1, 1, width)) if pool == "token" else None
        length = prod(self.grid) + (self.cls_token is not None)
        self.pos_embed = nn.Parameter(torch.empty(1, length, width))
        self.patch_embed = nn.Sequential(
            OrderedDict[str, nn.Module](proj=nn.Conv2d(in_channels, width, patch, stride=patch))
        )
        self.pos_drop = drop(dropout)
        self.blocks = nn.Sequential(
            *(Block(width, heads, expansion * width, dropout, rate) for rate in rates(drop_path, depth))
        )
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)
        initialize(self)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        if self.cls_token is not None:
            nn.init.normal_(self.cls_token, std=1e-6)

    def forward(self, image: Tensor) -> Tensor:
        """Scores of shape (batch, classes), or (batch, classes, height, width)."""
        check_image("ViT", image.shape, self.in_channels, dims=2)
        batch, _, height, width = image.shape
        features: Tensor = self.patch_embed(pad_to_multiple(image, self.patch))
        rows, columns = features.shape[2:]
        features = features + self.positions(rows, columns)
        tokens = features.flatten(2).transpose(1, 2)
        if self.cls_token is not None:
            token = self.cls_token + self.pos_embed[:, :1]
            tokens = torch.cat([token.expand(batch, -1, -1), tokens], 1)
        tokens = self.norm(self.blocks(self.pos_drop(tokens)))
        if not self.scores_pixels:
            return self.head(tokens.mean(1) if self.cls_token is None else tokens[:, 0])
        if self.cls_token is not None:
            tokens = tokens[:, 1:]
        scores = self.head(tokens).transpose(1, 2).reshape(batch, -1, rows, columns)
        scores = F.interpolate(scores, scale_factor=self.patch, mode="bilinear")
        return scores[:, :, :height, :width]

    def positions(self, rows: int, columns: int) -> Tensor:
        """What is added to the patches of a grid, of shape (1, width, rows, columns)."""
        trained = self.pos_embed[:, -prod(self.grid) :].transpose(1, 2).unflatten(2, self.grid)
        if (rows, columns) == self.grid:
            return trained
        return F.interpolate(trained, size=(rows, columns), mode="bicubic", antialias=True)


def vit_tiny(in_channels: int = 3, classes: int = 1000, head: Head = "image", pool: Pool = "token") -> ViT:
    """ViT-Ti/16: 5.7 million parameters."""
    return ViT(in_channels, classes, width=192, depth=12, heads=3, head=head, pool=pool)


def vit_small(in_channels: int = 3, classes: int = 1000, head: Head = "image", pool: Pool = "token") -> ViT:
    """ViT-S/16: 22.1 million parameters."""
    return ViT(in_channels, classes, width=384, depth=12, heads=6, head=head, pool=pool)


def vit_base(in_channels: int = 3, classes: int = 1000, head: Head = "image", pool: Pool = "token") -> ViT:
    """ViT-B/16: 86.6 million parameters."""
    return ViT(in_channels, classes, width=768, depth=12, heads=12, head=head, pool=pool)
