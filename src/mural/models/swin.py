"""The Swin transformer, for images of any extents, with torchvision's layers and parameter names.

Liu et al., "Swin transformer: hierarchical vision transformer using shifted windows", 2021: tokens attend within
windows; every other block shifts the windows by half, so that what one block keeps apart the next one joins.

    image ─ pad ─ patches /4 ─ stage 0 ─ merge /8 ─ stage 1 ─ merge /16 ─ stage 2 ─ merge /32 ─ stage 3 ─ scores

A shift is a roll: what left on one side comes back on the other, and shares a window with what it is no
neighbour of. Regions say who is, and no attention crosses them (window 4, shift 2):

    before      0 1 2 3 │ 4 5 6 7 │ 8 9 a b
    rolled      2 3 4 5 │ 6 7 8 9 │ a b·0 1       regions 0 0 0 0 │ 0 0 0 0 │ 1 1·2 2

Extents that the window or the merging does not divide are padded with zeros, as in torchvision, and so
are images that the patch does not divide. Two heads:

- head "image": one answer per image, from the mean of all positions;
- head "pixels": one answer per pixel. Each stage is scored; coarse scores are enlarged and added to the finer
  ones, and at last enlarged to the pixels.

A state dict of torchvision's model of the same sizes loads as it is into one with head "image".
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mural.models.checked_arguments import check_choice, check_heads, check_image, check_positive, check_rate
from mural.models.layers_by_dims import LAYERS
from mural.models.layers_by_dims import dropout as drop
from mural.models.transformer import DropPath, initialize, mlp, pad_to_multiple, rates

Head = Literal["image", "pixels"]


def relative_positions(window: int) -> Tensor:
    """For each pair of positions in a window, row by row, the number of their relative position.

    >>> relative_positions(2).reshape(4, 4)
    tensor([[4, 3, 1, 0],
            [5, 4, 2, 1],
            [7, 6, 4, 3],
            [8, 7, 5, 4]])
    """
    place = torch.arange(window)
    apart = place[:, None] - place[None, :] + window - 1
    pairs = apart[:, None, :, None] * (2 * window - 1) + apart[None, :, None, :]
    return pairs.flatten()


def regions(extent: int, window: int, shift: int, device: torch.device) -> Tensor:
    """The region of each position of a dim that was rolled back by a shift, in rows of one window each.

    >>> regions(12, 4, 2, torch.device("cpu")).tolist()
    [[0, 0, 0, 0], [0, 0, 0, 0], [1, 1, 2, 2]]
    """
    place = torch.arange(extent, device=device)
    return ((place >= extent - window).long() + (place >= extent - shift).long()).unflatten(0, (-1, window))


def apart(extents: Sequence[int], window: int, shifts: Sequence[int], device: torch.device) -> Tensor:
    """Which pairs in which window lie in different regions: (rows of windows, columns of windows, pairs)."""
    rows, columns = (regions(*each, device) for each in zip(extents, (window, window), shifts, strict=True))
    # A token is a row and a column of its window: (windows, row, column).
    by_row = rows[:, :, None].expand(-1, -1, window).flatten(1)
    by_column = columns[:, None, :].expand(-1, window, -1).flatten(1)
    rows_differ = by_row[:, :, None] != by_row[:, None, :]
    columns_differ = by_column[:, :, None] != by_column[:, None, :]
    return rows_differ[:, None] | columns_differ[None, :]


class WindowAttention(nn.Module):
    """Each token with what it attends to inside its window, in several heads."""

    relative_position_index: Tensor

    def __init__(self, width: int, heads: int, window: int, shift: int, rate: float) -> None:
        super().__init__()
        self.heads = heads
        self.window = window
        self.shift = shift
        self.relative_position_bias_table = nn.Parameter(torch.empty((2 * window - 1) ** 2, heads))
        self.register_buffer("relative_position_index", relative_positions(window))
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.drop = drop(rate)
        nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)

    def forward(self, features: Tensor) -> Tensor:
        """The features of shape (batch, height, width, channels), each window by itself."""
        window = self.window
        height, width = features.shape[1:3]
        below, right = -height % window, -width % window
        if below or right:
            features = F.pad(features, (0, 0, 0, right, 0, below))
        batch, rows, columns, channels = features.shape
        # One window along a dim has nothing to be joined with.
        shifts = [self.shift if extent > window else 0 for extent in (rows, columns)]
        if any(shifts):
            features = features.roll([-shift for shift in shifts], (1, 2))
        windows = features.reshape(batch, rows // window, window, columns // window, window, channels)
        tokens = windows.transpose(2, 3).reshape(batch, rows // window, columns // window, window**2, channels)
        tokens = self.attend(tokens, self.bias((rows, columns), shifts))
        windows = tokens.reshape(batch, rows // window, columns // window, window, window, channels)
        features = windows.transpose(2, 3).reshape(batch, rows, columns, channels)
        if any(shifts):
            features = features.roll(shifts, (1, 2))
        return features[:, :height, :width] if below or right else features

    def attend(self, tokens: Tensor, bias: Tensor) -> Tensor:
        """Attention over the last dim but one of (batch, rows, columns, tokens, channels)."""
        query, key, value = self.qkv(tokens).unflatten(-1, (3, self.heads, -1)).transpose(3, 5).unbind(4)
        found = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        return self.drop(self.proj(found.transpose(3, 4).flatten(4)))

    def bias(self, extents: tuple[int, int], shifts: Sequence[int]) -> Tensor:
        """What is added to the attention of each pair of tokens: (heads, pairs), or for each window by itself."""
        size = self.window**2
        table = self.relative_position_bias_table[self.relative_position_index]
        bias = table.unflatten(0, (size, size)).permute(2, 0, 1)
        if not any(shifts):
            return bias
        mask = apart(extents, self.window, shifts, bias.device)
        return bias.masked_fill(mask.unsqueeze(2), float("-inf"))


class Block(nn.Module):
    """Attention within windows and MLP, each on normalized features and added to what it read."""

    def __init__(
        self, width: int, heads: int, window: int, shift: int, expansion: int, dropout: float, drop_path: float
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = WindowAttention(width, heads, window, shift, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(*mlp(width, expansion * width, dropout))
        self.drop_path = DropPath(drop_path)

    def forward(self, features: Tensor) -> Tensor:
        features = features + self.drop_path(self.attn(self.norm1(features)))
        return features + self.drop_path(self.mlp(self.norm2(features)))


class Merge(nn.Module):
    """Each 2 × 2 positions as one, of twice the channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.reduction = nn.Linear(4 * width, 2 * width, bias=False)
        self.norm = nn.LayerNorm(4 * width)

    def forward(self, features: Tensor) -> Tensor:
        height, width = features.shape[1:3]
        if height % 2 or width % 2:
            features = F.pad(features, (0, 0, 0, width % 2, 0, height % 2))
        corners = [features[:, row::2, column::2] for column in (0, 1) for row in (0, 1)]
        return self.reduction(self.norm(torch.cat(corners, -1)))


class ChannelsLast(nn.Module):
    """Features of shape (batch, channels, height, width) as (batch, height, width, channels)."""

    def forward(self, features: Tensor) -> Tensor:
        return features.permute(0, 2, 3, 1)


def check_stages(width: int, depths: Sequence[int], heads: Sequence[int]) -> None:
    """Raises ValueError for stages without blocks or heads, or whose heads do not divide their channels."""
    check_positive("Swin", stages=len(depths))
    if len(depths) != len(heads):
        fewer = min(len(depths), max(1, len(heads)))
        raise ValueError(
            f"Swin got {len(depths)} depths and {len(heads)} heads, but each stage has one of both: "
            f"set depths={tuple(depths[:fewer])} and give {fewer} heads"
        )
    for index, (depth, count) in enumerate(zip(depths, heads, strict=True)):
        check_positive("Swin", **{f"depths[{index}]": depth})
        check_heads("Swin", width * 2**index, count)


class Swin(nn.Module):
    """Class scores of each image or of each pixel; by default Swin-T.

    >>> small = {"classes": 7, "width": 4, "depths": (2, 2), "heads": (1, 2), "window": 3}
    >>> Swin(**small)(torch.zeros(2, 3, 45, 67)).shape
    torch.Size([2, 7])
    >>> Swin(**small, head="pixels")(torch.zeros(2, 3, 45, 67)).shape
    torch.Size([2, 7, 45, 67])
    """

    def __init__(
        self,
        in_channels: int = 3,
        classes: int = 1000,
        width: int = 96,
        depths: Sequence[int] = (2, 2, 6, 2),
        heads: Sequence[int] = (3, 6, 12, 24),
        patch: int = 4,
        window: int = 7,
        expansion: int = 4,
        head: Head = "image",
        dropout: float = 0.0,
        drop_path: float = 0.0,
    ) -> None:
        """Builds one stage per depth, each of half the extents and twice the channels of the one before."""
        super().__init__()
        check_positive("Swin", in_channels=in_channels, classes=classes, width=width, patch=patch, window=window)
        check_positive("Swin", expansion=expansion)
        check_stages(width, depths, heads)
        check_choice("Swin", "head", head, ("image", "pixels"))
        check_rate("Swin", dropout=dropout, drop_path=drop_path)
        patches = nn.Conv2d(in_channels, width, patch, stride=patch)
        layers: list[nn.Module] = [nn.Sequential(patches, ChannelsLast(), nn.LayerNorm(width))]
        drops = iter(rates(drop_path, sum(depths)))
        widths = [width * 2**index for index in range(len(depths))]
        for channels, depth, count in zip(widths, depths, heads, strict=True):
            if channels != width:
                layers.append(Merge(channels // 2))
            # Every other block shifts its windows by half.
            shifts = [window // 2 * (index % 2) for index in range(depth)]
            layers.append(
                nn.Sequential(
                    *(Block(channels, count, window, shift, expansion, dropout, next(drops)) for shift in shifts)
                )
            )
        self.in_channels = in_channels
        self.patch = patch
        self.scores_pixels = head == "pixels"
        self.features = nn.Sequential(*layers)
        if self.scores_pixels:
            self.norms = nn.ModuleList(nn.LayerNorm(channels) for channels in widths)
            self.scores = nn.ModuleList(nn.Linear(channels, classes) for channels in widths)
        else:
            self.norm = nn.LayerNorm(widths[-1])
            self.head = nn.Linear(widths[-1], classes)
        initialize(self)

    def forward(self, image: Tensor) -> Tensor:
        """Scores of shape (batch, classes), or (batch, classes, height, width)."""
        check_image("Swin", image.shape, self.in_channels, dims=2)
        features = pad_to_multiple(image, self.patch)
        if not self.scores_pixels:
            return self.head(self.norm(self.features(features)).mean((1, 2)))
        levels: list[Tensor] = []
        for layer in self.features:
            features: Tensor = layer(features)
            # The patches come first, then stages and merges by turns.
            levels.append(features)
        return self.enlarged(levels[1::2], image)

    def enlarged(self, levels: Sequence[Tensor], image: Tensor) -> Tensor:
        """The scores of all stages, coarse ones enlarged and added to finer ones, at the image's extents."""
        fused: Tensor | None = None
        for level, norm, score in zip(reversed(levels), reversed(self.norms), reversed(self.scores), strict=True):
            finer: Tensor = score(norm(level)).permute(0, 3, 1, 2)
            fused = finer if fused is None else finer + LAYERS[2].resize(fused, like=finer)
        if fused is None:
            raise RuntimeError("a Swin has at least one stage")
        height, width = image.shape[2:]
        return F.interpolate(fused, scale_factor=self.patch, mode="bilinear")[:, :, :height, :width]


def swin_tiny(in_channels: int = 3, classes: int = 1000, head: Head = "image") -> Swin:
    """Swin-T: 28.3 million parameters."""
    return Swin(in_channels, classes, head=head)
