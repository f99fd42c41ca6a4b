"""Micro-batches as pieces in time: global shapes, draws of the batch, and refusals of what looks across."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import mural
from mural.engine.microbatches import rows_of
from mural.errors import OutOfTime, UnsupportedOp
from mural.shard.in_time import batch_dim, lifted, lowered


def pieces(batch: Tensor, parts: int) -> list[Tensor]:
    mesh, rows = mural.init(), rows_of(len(batch), parts)
    return [lifted(mural.shard(batch[r.start : r.stop], mesh), i, rows) for i, r in enumerate(rows)]


LOCAL: dict[str, Callable[[Tensor], Tensor]] = {
    "share of the batch": lambda x: x / x.shape[0],
    "convolution": lambda x: F.conv2d(x, torch.ones(2, 3, 3, 3, dtype=x.dtype), padding=1),
    "images in windows": lambda x: x.unfold(2, 2, 2).flatten(0, 1),
    "norm of each image": lambda x: F.layer_norm(x, x.shape[1:]),
    "a number for each image": lambda x: x.mean((1, 2, 3)),
    "channels first": lambda x: x.transpose(0, 1) * 2.0,
    "plain weights of the batch": lambda x: x * torch.arange(x.shape[0], dtype=x.dtype).view(-1, 1, 1, 1),
}
ACROSS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x.mean(0),
    "roll": lambda x: x.roll(1, 0),
    "flip": lambda x: x + x.flip(0),
    "norm": lambda x: x / x.norm(),
    "max": lambda x: x - x.max(),
    "sort": lambda x: x.sort(0)[0],
    "first image": lambda x: x - x[:1],
    "running statistics": lambda x: F.instance_norm(x, torch.zeros(3), torch.ones(3), use_input_stats=True),
}


@pytest.mark.parametrize("name", LOCAL)
@given(images=st.integers(1, 7), parts=st.integers(1, 4))
def test_what_stays_in_an_image_is_that_of_the_batch(name: str, images: int, parts: int) -> None:
    batch = torch.rand(images, 3, 6, 4, dtype=torch.float64)
    found = [LOCAL[name](piece) for piece in pieces(batch, parts)]
    right = LOCAL[name](mural.shard(batch, mural.init())).full()
    assert all(tuple(part.shape) == tuple(right.shape) for part in found)
    dim = batch_dim(found[0]) if len(found) > 1 else 0
    assert dim is not None
    assert torch.equal(torch.cat([lowered(part).full() for part in found], dim), right)


@pytest.mark.parametrize("name", ACROSS)
def test_what_looks_across_is_refused_by_name(name: str) -> None:
    for piece in pieces(torch.rand(4, 3, 6, 4), 2):
        with pytest.raises(UnsupportedOp, match="microbatches = 1") as caught:
            ACROSS[name](piece)
        assert caught.type is OutOfTime


@given(images=st.integers(2, 6), parts=st.integers(2, 3))
def test_draws_are_those_of_the_batch(images: int, parts: int) -> None:
    batch = torch.ones(images, 3, 6, 4)

    def dropped(x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return F.dropout(x, 0.5)

    found = [lowered(dropped(piece)).full() for piece in pieces(batch, parts)]
    assert torch.equal(torch.cat(found), dropped(mural.shard(batch, mural.init())).full())


def test_a_result_in_another_order_is_refused() -> None:
    for piece in pieces(torch.rand(4, 3, 6, 4), 2):
        with pytest.raises(OutOfTime, match="another order"):
            lowered(piece.flip(0))
