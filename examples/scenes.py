"""The images of the examples: blobs on a texture, computed for any box, with their masks."""

import torch
from torch import Tensor

IMAGES, ROWS, COLUMNS = 4, 96, 128

Span = tuple[int, int]


def scene(number: int, rows: Span = (0, ROWS), columns: Span = (0, COLUMNS)) -> tuple[Tensor, Tensor]:
    """The pixels (3, …) and the mask (…) of a box of one image."""
    down = torch.arange(*rows).view(-1, 1)
    across = torch.arange(*columns).view(1, -1)
    mask = (torch.sin(down / 20 + number) * torch.cos(across / 25 - number) > 0.3).long()
    texture = torch.stack([(down * a + across * b) % 17 / 17 for a, b in ((3, 5), (7, 2), (1, 11))])
    return mask * 0.5 + texture, mask


def batch() -> tuple[Tensor, Tensor]:
    """All images (N, 3, rows, columns) and their masks (N, rows, columns)."""
    images, masks = zip(*(scene(number) for number in range(IMAGES)), strict=True)
    return torch.stack(images), torch.stack(masks)
