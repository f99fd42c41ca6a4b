"""Histograms: each rank counts its piece in the bins of the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mural.shard.merge import merged
from mural.shard.ops.call_arguments import bound
from mural.shard.table import register
from mural.shard.tensor import replicated


@register("reduction", "histc")
def histc(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """How many values lie in each of some bins of equal width, by default between the smallest and the largest."""
    x, bins, low, high = bound(args, kwargs, ("input", "bins", "min", "max"), 100, 0, 0)
    func(x.local.new_zeros(2), bins, low, high)  # refuses what torch refuses, on ranks without positions too
    if low == high and x.numel():
        low, high = (float(value) for value in torch.aminmax(x.detach()))
        if low == high:
            low, high = low - 1, high + 1
    counts = func(x.local.detach(), bins, low, high)
    counts = merged(counts, x.mesh, x.placement.axes_of(range(x.ndim)), "histc")
    return replicated(counts, x.placement)
