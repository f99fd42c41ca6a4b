"""Attention and products over all positions, under the law."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import mural
from law import Expr, Grid, holds, image, some
from ranks import run_on

GRIDS = [Grid((2, 1)), Grid((2, 2)), Grid((3, 1)), Grid((1, 2), data=2), Grid((2, 1), cuts=((1, 4), None))]
TOKENS = "x.flatten(2).transpose(1, 2)"
HEADS = f"{TOKENS}.unflatten(-1, (2, 2)).transpose(1, 2)"
ATTENTION = [
    f"(lambda t: F.scaled_dot_product_attention(t, t * 2, t + 1{more}))({HEADS})"
    for more in (
        "",
        ", is_causal=True",
        ", attn_mask=image(35, 35)",
        ", attn_mask=image(2, 1, 35, 35) > 0",
        ", attn_mask=image(2, 2, 35, 35), scale=0.3",
    )
] + [
    # few queries for many keys, many queries for few keys, and queries and keys cut differently
    f"F.scaled_dot_product_attention(image(2, 3, 4), {TOKENS}, {TOKENS} * 3)",
    f"F.scaled_dot_product_attention(image(2, 3, 4), {TOKENS}, {TOKENS}, attn_mask=image(3, 35) > 0.5)",
    f"F.scaled_dot_product_attention(image(2, 2, 4), {TOKENS}, {TOKENS}, attn_mask=image(2, 2, 35))",
    f"F.scaled_dot_product_attention({TOKENS}, image(2, 3, 4), image(2, 3, 4, seed=2))",
    f"F.scaled_dot_product_attention({TOKENS}, *[x[..., :3, :2].flatten(2).transpose(1, 2)] * 2)",
    f"F.scaled_dot_product_attention(x[..., :2, :1].flatten(2).transpose(1, 2), {TOKENS}, {TOKENS})",
    # grouped queries; written out by hand; with a token before the others
    "(lambda t: F.scaled_dot_product_attention(t, t[:, :1], t[:, 1:], enable_gqa=True))"
    f"({HEADS})",
    f"(lambda t: (t @ t.transpose(-2, -1) * 0.5 + image(35, 35)).softmax(-1) @ t)({HEADS})",
    f"(lambda t: torch.softmax(torch.einsum('bnc,bmc->bnm', t, t), -1))({TOKENS})",
    f"(lambda t: F.scaled_dot_product_attention(t, t, t)[:, 0])(torch.cat([image(2, 1, 4), {TOKENS}], 1))",
]  # fmt: skip
PRODUCTS = [
    f"F.linear({TOKENS}, image(5, 4), image(5))",
    "F.linear(x.flatten(1), image(5, 140), image(5))",
    "x.flatten(1) @ image(140, 5)",
    "F.linear(x, image(3, 7))",
    "x @ image(7, 3)",
    "image(6, 5) @ x",
    "x @ x.transpose(-2, -1)",
    "torch.bmm(x.flatten(0, 1), x.flatten(0, 1).mT)",
    "torch.baddbmm(image(8, 5, 5), x.flatten(0, 1), x.flatten(0, 1).mT, beta=2, alpha=0.5)",
    "torch.einsum('bchw,bcxy->bhwxy', x, x)",
    "torch.einsum('bchw,oc->bohw', x, image(6, 4))",
    "torch.einsum('bchw,bchw->b', x, x)",
    "torch.einsum('bchw->c', x)",
    "torch.einsum('...hw,w,h->...', x, image(7), image(5))",
    "torch.einsum('bchw,bcHW->bhwHW', x, x[:, :, :2, :3])",
]


@pytest.mark.parametrize("grid", some(GRIDS, 1, 4), ids=str)
@pytest.mark.parametrize("code", ATTENTION + PRODUCTS)
def test_attention_and_products(code: str, grid: Grid) -> None:
    holds(Expr(code), image(2, 4, 5, 7), grid)


class Drawn(nn.Module):
    """Self- or cross-attention of an image with drawn arguments."""

    def __init__(self, heads: int, keys: int, mask: str, scale: float | None):
        super().__init__()
        self.heads, self.keys, self.mask, self.scale = heads, keys, mask, scale

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        q = tokens.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k = q if not self.keys else x[:, :, : self.keys].flatten(2).transpose(1, 2).unflatten(-1, (self.heads, -1))
        k = k if not self.keys else k.transpose(1, 2)
        rows, columns = q.shape[-2], k.shape[-2]
        mask = {
            "none": None,
            "bias": image(1, self.heads, rows, columns),
            "bool": image(rows, columns) > -0.5,
            "row": image(1, columns),
        }[self.mask]
        y = nn.functional.scaled_dot_product_attention(q, k, k * 2, attn_mask=mask, scale=self.scale)
        return y.transpose(1, 2).flatten(2).transpose(1, 2).reshape(x.shape)


@given(data=st.data())
def test_attention_law(data: st.DataObject) -> None:
    height, width = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 6))
    spatial = data.draw(st.sampled_from([(2, 1), (1, 2), (2, 2), (3, 1)]))
    heads = data.draw(st.sampled_from([1, 2]))
    keys = data.draw(st.integers(0, height))
    mask = data.draw(st.sampled_from(["none", "bias", "bool", "row"]))
    module = Drawn(heads, keys, mask, data.draw(st.sampled_from([None, 0.7])))
    cuts = tuple(
        None if n == 1 else tuple(sorted(data.draw(st.lists(st.integers(0, e), min_size=n - 1, max_size=n - 1))))
        for n, e in zip(spatial, (height, width), strict=True)
    )
    holds(module, image(data.draw(st.integers(1, 2)), 4, height, width), Grid(spatial, cuts=cuts))


class Heads(nn.Module):
    """torch's own module, with weights and without, and its encoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.apart = nn.MultiheadAttention(4, 2, kdim=3, vdim=3, bias=False, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> list[Tensor]:
        t = x.flatten(2).transpose(1, 2)
        y, weights = self.attention(t, t, t, attn_mask=image(35, 35) > 1.5)
        z, every = self.attention(t, t * 2, t, average_attn_weights=False, key_padding_mask=image(2, 35) > 1.5)
        w, _ = self.apart(t, t[..., :3], t[..., 1:], need_weights=False)
        return [y, weights, z, every, w, self.layer(t)]


@pytest.mark.parametrize("grid", GRIDS[:4], ids=str)
def test_torchs_own_modules(grid: Grid) -> None:
    torch.manual_seed(0)
    holds(Heads().double(), image(2, 4, 5, 7), grid)


def bytes_of(queries: int, keys: int) -> int:
    mesh = Grid((2, 1)).mesh()
    q = mural.shard(image(1, 8, queries, 1), mesh).flatten(2).transpose(1, 2)
    k = mural.shard(image(1, 8, keys, 1), mesh).flatten(2).transpose(1, 2)
    with mesh.transport.record() as record:
        torch.nn.functional.scaled_dot_product_attention(q, k, k)
    return record.bytes


def test_what_moves_less_moves() -> None:
    """Keys and values of 2·8 numbers each, or queries of 8 and two results of 9."""
    assert run_on(2, bytes_of, 64, 64) == [64 * 16 * 4] * 2
    few = run_on(2, bytes_of, 4, 256)
    assert max(few) <= 4 * (8 + 2 * 9) * 8 < 256 * 16 * 4


def dropped(grid: Grid) -> Tensor:
    torch.manual_seed(4)
    x = mural.shard(image(1, 4, 6, 8), grid.mesh())
    t = x.flatten(2).transpose(1, 2)
    y = torch.nn.functional.scaled_dot_product_attention(t, t, t, dropout_p=0.4)
    return torch.nn.functional.dropout(y, 0.3).full()


def test_dropout_of_scores_and_tokens_does_not_depend_on_the_grid() -> None:
    (one,) = run_on(1, dropped, Grid((1, 1)))
    for grid in (Grid((2, 1)), Grid((1, 2)), Grid((2, 2))):
        for got in run_on(grid.world, dropped, grid):
            assert torch.allclose(got, one, rtol=0, atol=1e-12)
