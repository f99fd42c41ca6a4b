"""The law of random numbers: a streamed step draws those of a step in one piece, step after step."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mural
from drawing_models import BufferNoise, Drawn, StochasticDepth, drawing_loss, largest_gap, residual_net, trained
from mural.errors import UnsupportedOp

TILES = mural.Plan(stream=(12, 10))
ROW, BATCH = StochasticDepth("row"), StochasticDepth("batch")
GENERATOR = torch.Generator()


def shuffled(x: Tensor) -> Tensor:
    return x[:, torch.randperm(4)] * torch.rand(x.shape[2:], dtype=x.dtype)


def unused(x: Tensor) -> Tensor:
    torch.randn(5)
    return x


def of_a_mean(x: Tensor) -> Tensor:
    mean = x.mean().detach()  # a plain number, which only tiles can tell
    return x * torch.bernoulli(torch.sigmoid(mean).reshape(1).expand(4))[:, None, None]


def of_channels(x: Tensor) -> Tensor:
    return x * F.dropout(torch.sigmoid(x.mean((0, 2, 3))), 0.5)[:, None, None]


def of_low_channels(x: Tensor) -> Tensor:
    low = F.avg_pool2d(x, 8).flip(2).mean((0, 2, 3))  # from a pass on whole tensors, and not cut
    return x * F.dropout(torch.sigmoid(low), 0.5)[:, None, None]


def by_values(x: Tensor) -> Tensor:
    return x * torch.poisson(torch.full((4, 1, 1), 3.0, dtype=x.dtype))


def attended(x: Tensor) -> Tensor:
    low = F.avg_pool2d(x, 4)
    tokens = F.dropout(low.flatten(2).transpose(1, 2), 0.4)
    found = F.scaled_dot_product_attention(tokens, tokens, tokens, dropout_p=0.4).transpose(1, 2).reshape(low.shape)
    return x + F.interpolate(found, x.shape[2:])


def striped(x: Tensor) -> Tensor:
    """Noise that has the image's dims in part, of a tensor that nothing else looks at."""
    other = F.relu(x)
    row, stripes = other.new_empty((x.shape[0], 1, 1, 1)), other.new_empty((x.shape[0], 1, x.shape[2], 1))
    return x * row.bernoulli_(0.5) * stripes.uniform_()


DRAWS: dict[str, tuple[nn.Module, ...]] = {
    "rows, then batch": (ROW, BATCH),
    "rows, then batch, as timm does": (StochasticDepth("row", like=True), StochasticDepth("batch", like=True)),
    "buffers": (BufferNoise(), ROW),
}
for function in (shuffled, unused, of_a_mean, of_channels, of_low_channels, by_values, attended, striped):
    DRAWS[function.__name__] = Drawn(function), ROW, Drawn(function)


FEW = ("rows, then batch", "rows, then batch, as timm does", "of_a_mean")


@pytest.mark.parametrize("name", [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in DRAWS])
def test_streamed_and_kept_draw_alike(name: str) -> None:
    """Calls on plain tensors drew from a seed of their own, and what came after them other numbers as well."""
    model = residual_net(*DRAWS[name])
    kept = trained(model, mural.Plan())
    assert largest_gap(trained(model, TILES), kept) < 1e-10


def drawn_on_the_host(x: Tensor) -> Tensor:
    return x * torch.rand(4, 1, 1).to(x)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_both_generators() -> None:
    """Keys and what is drawn on the host come from one generator, what is drawn on the GPU from another."""
    model = residual_net(ROW, Drawn(drawn_on_the_host), BATCH).cuda()
    assert largest_gap(trained(model, TILES), trained(model, mural.Plan())) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["all", "none"])
def test_whatever_is_kept(keep: str) -> None:
    model = residual_net(ROW, Drawn(striped), BATCH)
    assert largest_gap(trained(model, TILES, keep=keep), trained(model, mural.Plan())) < 1e-10


@pytest.mark.slow
def test_recomputed_blocks_draw_alike() -> None:
    model = residual_net(ROW, Drawn(shuffled))
    plan = mural.Plan(stream=(12, 10), recompute="all")
    assert largest_gap(trained(model, plan), trained(model, mural.Plan())) < 1e-10


@pytest.mark.slow
def test_a_loss_that_draws() -> None:
    model = residual_net(ROW)
    assert largest_gap(trained(model, TILES, drawing_loss), trained(model, mural.Plan(), drawing_loss)) < 1e-10


def from_own_generator(x: Tensor) -> Tensor:
    return x * torch.rand(4, 1, 1, generator=GENERATOR, dtype=x.dtype)


def as_a_mean_has_it(x: Tensor) -> Tensor:
    return x * torch.poisson(x.detach().abs().mean().reshape(1))


def after_unpooling(x: Tensor) -> Tensor:
    low = F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), (2, 2))
    return F.interpolate(F.dropout(low, 0.4), x.shape[2:])


def from_python(x: Tensor) -> Tensor:
    return x * 2 if random.random() < 0.5 else x


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (from_own_generator, "generator of the model's own"),
        (as_a_mean_has_it, "only tiles can tell"),
        (after_unpooling, "max_unpool2d"),
        (from_python, "draws from or counts on \\['random'\\]"),
    ],
)
def test_refused_where_others_would_be_drawn(function: Callable[[Tensor], Tensor], words: str) -> None:
    with pytest.raises(UnsupportedOp, match=words):
        trained(residual_net(Drawn(function), ROW), TILES)


def test_what_draws_last_may_draw_any_number() -> None:
    """Nothing comes after it that would find another state."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), Drawn(as_a_mean_has_it)).double()
    assert largest_gap(trained(model, TILES), trained(model, mural.Plan())) < 1e-10
