"""Activations that draw numbers: the same on every grid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mural.shard.ops.call_arguments import bound, dim_of
from mural.shard.table import name_of, register


@register("random", "rrelu", "rrelu_")
def rrelu(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Negative values times a slope: drawn for each position in training, else the mean of the limits."""
    names = ("input", "lower", "upper", "training", "inplace", "generator")
    x, low, high, training, inplace, generator = bound(args, kwargs, names, 1 / 8, 1 / 3, False, False, None)
    if generator is not None:
        raise ValueError("rrelu: a generator of your own would draw other numbers on each grid: use the default")
    if not training:
        return F.leaky_relu(x, (low + high) / 2, inplace or name_of(func) == "rrelu_")
    slope = torch.rand_like(x.detach()) * (high - low) + low
    slope = torch.where(x.detach() <= 0, slope, 1.0)
    return x.mul_(slope) if inplace or name_of(func) == "rrelu_" else x * slope


@register("random", "gumbel_softmax")
def gumbel_softmax(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """A softmax of logits with Gumbel noise; `hard` gives one-hot values with the gradient of the soft ones."""
    names = ("logits", "tau", "hard", "eps", "dim")
    x, tau, hard, _, dim = bound(args, kwargs, names, 1.0, False, 1e-10, -1)
    dim = dim_of(dim, x.ndim, "gumbel_softmax")
    noise = -torch.empty_like(x.detach()).exponential_().log()
    soft = ((x + noise) / tau).softmax(dim)
    if not hard:
        return soft
    largest = soft.detach().argmax(dim, keepdim=True)
    position = torch.arange(x.shape[dim], device=x.device).view(-1, *(1,) * (x.ndim - 1 - dim))
    one = (position == largest).to(x.dtype)
    return one - soft.detach() + soft
