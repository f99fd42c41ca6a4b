"""Quarter turns: flips and transposes, which leave data where they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from mural.shard.ops.call_arguments import bound, dim_of
from mural.shard.table import register


@register("view", "rot90")
def rot90(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The plane of two dims turned by k quarters, from the first towards the second."""
    x, k, dims = bound(args, kwargs, ("input", "k", "dims"), 1, (0, 1))
    a, b = (dim_of(d, x.ndim, "rot90") for d in dims)
    if a == b:
        raise RuntimeError(f"rot90 needs two different dims, not {tuple(dims)}")
    if k % 4 == 2:
        return x.flip((a, b))
    if k % 4 == 0:
        return x.clone()
    return x.flip(b).transpose(a, b) if k % 4 == 1 else x.flip(a).transpose(a, b)
