"""Lakes that a network finds: run on tiles that overlap by half, counted by their distance from land."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from water.training import as_input
from water.world import LAKE, LAND, OCEAN

AT_ONCE = 2**23
"""Pixels that go through the network together."""
THRESHOLDS = tuple(tenth / 10 for tenth in range(1, 10))
"""Chances from which on water is called a lake: which one counts is chosen where labels may be used."""
Counts = list[tuple[int, int, int]]
"""For each range of distances: lake pixels found, pixels wrongly called lake, lake pixels not found."""


def chances(model: nn.Module, tiles: Tensor) -> Tensor:
    """The chance of each class (N, classes, H, W), in the precision of training."""
    with torch.no_grad(), torch.autocast(tiles.device.type, torch.bfloat16, enabled=tiles.is_cuda):
        return model(as_input(tiles)).float().softmax(1)


def lake_chance(model: nn.Module, box: Tensor, extent: int) -> Tensor:
    """The chance (H, W) that the water of a box is a lake; 0 on land, which is given.

    Sides of the box are multiples of half a tile. Tiles overlap by half, and the middle of a tile counts most.
    """
    step = extent // 2
    tiles = box.unfold(0, extent, step).unfold(1, extent, step).reshape(-1, extent, extent)
    along = torch.arange(extent, device=box.device)
    ramp = torch.minimum(along + 1, extent - along) / (extent / 2)
    weight = ramp[:, None] * ramp

    def laid(values: Tensor) -> Tensor:
        return F.fold(values.flatten(1).T[None], tuple(box.shape), (extent, extent), stride=step)[0]

    parts = [chances(model, part) * weight for part in tiles.split(max(1, AT_ONCE // extent**2))]
    total = laid(torch.cat(parts))
    return torch.where(box == LAND, 0.0, total[LAKE] / (total[LAKE] + total[OCEAN]).clamp_min(1e-9))


def ranges(box: Tensor, edges: Iterable[int]) -> Tensor:
    """The number of edges (H, W) that lie between a pixel and the nearest land, by rows or columns, within the box."""
    land = (box == LAND).float()[None]
    found = torch.zeros_like(box)
    for edge in edges:
        size = 2 * edge + 1
        rows = F.max_pool2d(land, (size, 1), stride=1, padding=(edge, 0))
        found += (F.max_pool2d(rows, (1, size), stride=1, padding=(0, edge))[0] == 0).to(found.dtype)
    return found


def counted(chance: Tensor, box: Tensor, far: Tensor, count: int) -> list[Counts]:
    """For each threshold, right and wrong pixels of lakes in each of `count` ranges of distances."""
    there, found = box == LAKE, list[Counts]()
    for threshold in THRESHOLDS:
        said = chance >= threshold
        kinds = (said & there, said & ~there, ~said & there)
        by_range = [torch.bincount(far[kind].long(), minlength=count).tolist() for kind in kinds]
        found.append([(right, wrong, missed) for right, wrong, missed in zip(*by_range, strict=True)])
    return found


def overlap(counts: Iterable[Sequence[int]]) -> float:
    """Intersection over union of all these counts together; 0 where there is no lake.

    >>> overlap([(1, 1, 0), (2, 0, 2)])
    0.5
    """
    right, wrong, missed = (sum(column) for column in zip(*counts, strict=True))
    return right / max(1, right + wrong + missed)
