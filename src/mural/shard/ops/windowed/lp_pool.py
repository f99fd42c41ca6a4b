"""Power-average pooling: powers, averages and roots, in torch's own steps."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mural.shard.ops.call_arguments import bound
from mural.shard.ops.windowed.conv import each
from mural.shard.table import name_of, register

MAX: dict[int, Callable[..., Tensor]] = {1: torch.max_pool1d, 2: torch.max_pool2d, 3: torch.max_pool3d}
AVERAGE: dict[int, Callable[..., Tensor]] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


@register("windowed", "lp_pool1d", "lp_pool2d", "lp_pool3d")
def lp_pool(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The p-norm of each window; each step is torch's, so signs and gradients at zero are too."""
    names = ("input", "norm_type", "kernel_size", "stride", "ceil_mode")
    x, p, kernel, stride, ceil = bound(args, kwargs, names, None, False)
    n = int(name_of(func)[-2])
    strides = [] if stride is None else stride
    if p in (inf, -inf):
        largest = MAX[n](x.abs() if p > 0 else -x.abs(), kernel, strides, 0, 1, ceil)
        return largest if p > 0 else -largest
    mean = AVERAGE[n](x.pow(p), kernel, strides, 0, ceil)
    return (torch.sign(mean) * F.relu(mean.abs())).mul(prod(each(kernel, n))).pow(1.0 / p)
