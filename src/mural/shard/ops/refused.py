"""Operations that need the whole image in a way that no exchange of windows serves: a clear refusal of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mural.errors import UnsupportedOp
from mural.shard.table import TABLE, Rule, functions, name_of
from mural.shard.tensor import run_replicated, sharded_in

FRACTIONAL = [f"fractional_max_pool{n}d{more}" for n in (2, 3) for more in ("", "_with_indices")]
SPECTRA = [getattr(torch.fft, name) for name in dir(torch.fft) if "fft" in name and callable(getattr(torch.fft, name))]


def refusal(why: str) -> Rule:
    """A rule that refuses tensors that are cut; tensors that every rank holds whole go to torch."""

    def refuse(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        cut = [t for t in sharded_in(args, kwargs) if t.placement.cut_dims]
        if not cut:
            return run_replicated(func, args, kwargs)
        raise UnsupportedOp(
            f"{name_of(func)} of a sharded tensor of shape {tuple(cut[0].shape)}, where dims "
            f"{cut[0].placement.cut_dims} are cut: {why} (or add a rule to src/mural/shard/ops/)"
        )

    return refuse


# No kind is registered: the documentation lists only what has a rule.
for function in SPECTRA:
    TABLE[function] = (
        function.__name__,
        refusal(
            "every frequency depends on every position, so nothing less than the whole tensor serves. Call .full() "
            "first if it fits on one rank, or transform a pooled image or tiles of it"
        ),
    )
for name in FRACTIONAL:
    for function in functions(name):
        TABLE[function] = (
            name,
            refusal(
                "torch draws the windows of every image and channel at random, other ones on each rank. Use max_pool "
                "or adaptive_max_pool, or call .full() first if the tensor fits on one rank"
            ),
        )
