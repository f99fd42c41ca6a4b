"""Compiled modules take sharded tensors, and stay exact."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from law import Grid, difference, image
from mural.models import UNet
from ranks import restart, run_on


def step(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    y = model(x)
    loss = y.square().mean()
    loss.backward()
    return y, loss.detach()


def compiled() -> tuple[float, float]:
    torch.manual_seed(0)
    plain = UNet(width=4, depth=2).double()
    model = UNet(width=4, depth=2).double()
    model.load_state_dict(plain.state_dict())
    x = image(1, 3, 32, 32)
    y, loss = step(plain, x)
    z, other = step(torch.compile(model), Grid((2, 1)).shard(x))  # type: ignore[arg-type]
    return difference(z.full(), y), difference(other, loss)  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_compiled_model_is_exact_and_not_traced_into() -> None:
    try:
        for found in run_on(2, compiled):  # tracing into the rules would take longer than the ranks may
            assert max(found) < 1e-10
    finally:
        restart(2)  # dynamo stays loaded in the ranks
