"""A test for each bug of merged dims, products and attention, saying what it was."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mural
from law import Expr, Grid, holds, image, raises
from ranks import run_on

GRIDS = [Grid((1, 1)), Grid((2, 1)), Grid((1, 2)), Grid((2, 2))]
T = "x.flatten(2).transpose(1, 2)"
AX = "(x * 1).permute(0, 2, 3, 1).reshape(16, 12, 4)"
EXPRESSIONS = {
    "a kept reduction of a merged dim came first": f"(lambda t: t.mean(1, keepdim=True) + t)({T})",
    "the same through a layer": f"(lambda t: torch.sigmoid(t.mean(1, keepdim=True) @ image(4, 4)) * t)({T})",
    "the same of a norm": f"(lambda t: t.norm(dim=1, keepdim=True) * t + t.var(1, keepdim=True))({T})",
    "the same in a product": f"(lambda t: torch.einsum('bnc,bnc->bn', t.mean(1, keepdim=True), t))({T})",
    "the same in attention": f"(lambda w: F.scaled_dot_product_attention(w.mean(0, keepdim=True), w, w))({AX})",
    "few queries lost their finite gradient where a rank's keys are hidden": (
        "F.scaled_dot_product_attention(image(2, 2, 4), "
        f"{T}, {T}, attn_mask=torch.zeros(2, 96).double().masked_fill(torch.arange(96) > 10, float('-inf')))"
    ),
    "no key at all": (
        f"F.scaled_dot_product_attention(image(2, 2, 4), {T}, {T}, attn_mask=torch.zeros(1, 96).bool()) + x.sum() * 0"
    ),
    "a write to a reshape that torch copies reached the original": (
        "(lambda a: (lambda y: [y.mul_(2), a * 1])(a.permute(0, 2, 3, 1).reshape(16, 12, 4)))(x * 1)"
    ),
    "assignment to a slice was lost": f"(lambda y: [y.__setitem__((..., 0), 0), y][1] * 1)({AX} * 1)",
    "group norm of cut channels": "F.group_norm(x.transpose(1, 2), 2), F.group_norm(x.permute(0, 3, 1, 2), 3)",
    "batch norm of cut channels": "F.batch_norm(x.transpose(1, 2), None, None, image(8), image(8), True)",
    "convolution of cut channels": "F.conv2d(x.transpose(1, 2), image(3, 8, 3, 3), padding=1)",
    "token dropping refused": f"{T}[:, [3, 90, 17]], {T}.index_select(1, torch.tensor([5, 60]))",
    "complex numbers refused": "torch.view_as_real(torch.view_as_complex(x.unflatten(3, (6, 2))) * 2j)",
    "queries with fewer batch dims": f"F.scaled_dot_product_attention(image(3, 4), {T}, {T})",
    "a mask of one dim": f"F.scaled_dot_product_attention({T}, {T}, {T}, attn_mask=image(96))",
}


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_expressions(name: str, grid: Grid) -> None:
    holds(Expr(EXPRESSIONS[name]), image(2, 4, 8, 12), grid)


@pytest.mark.parametrize(
    "code", [f"F.batch_norm({T}.reshape(-1, 4), None, None, training=True)", f"{T}.reshape(-1, 4)"]
)
def test_a_cut_dim_of_one_position_cut_the_channels(code: str) -> None:
    holds(Expr(code), image(2, 4, 1, 1), Grid((2, 1)))


def half(value: float) -> Tensor:
    x = Grid((2, 1)).shard(torch.full((1, 4, 8, 4), value, dtype=torch.float16))
    t = x.flatten(2).transpose(1, 2)
    found = F.scaled_dot_product_attention(torch.full((1, 1, 4), value, dtype=torch.float16), t, t * 0 + 3)
    return found.full()  # type: ignore[attr-defined]


def test_large_scores_of_half_precision_did_not_count() -> None:
    for found in run_on(2, half, 200.0):
        assert torch.equal(found, torch.full_like(found, 3))


class Encoder(nn.Module):
    """torch's encoder in evaluation, with a padding mask."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.net = nn.TransformerEncoder(layer, 1)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(2, 96, dtype=torch.bool)
        mask[:, 50:] = True
        return self.net(x.flatten(2).transpose(1, 2), src_key_padding_mask=mask)[:, :50]


def test_the_encoder_in_evaluation_asked_for_nested_tensors() -> None:
    torch.manual_seed(0)
    holds(Encoder().double().eval(), image(2, 4, 8, 12), Grid((2, 1)))


def gradients_of_merged() -> float:
    x = Grid((2, 2)).shard(image(1, 4, 8, 8)).requires_grad_()
    t = (x * 2).flatten(2)
    (found,) = torch.autograd.grad((t * image(1, 4, 64)).sum(), t)
    return float((found.full() - image(1, 4, 64)).abs().max())  # type: ignore[attr-defined]


def test_autograd_of_a_merged_input_said_that_it_was_unused() -> None:
    assert max(run_on(4, gradients_of_merged)) < 1e-12


def drawn(grid: Grid) -> Tensor:
    torch.manual_seed(3)
    x = grid.shard(image(2, 4, 8, 12))
    noise = torch.zeros_like(x.permute(0, 2, 3, 1).reshape(16, 12, 4))
    noise.normal_()
    return noise.full()  # type: ignore[attr-defined]


def test_random_values_written_to_a_merged_tensor_were_lost() -> None:
    (one,) = run_on(1, drawn, Grid((1, 1)))
    assert 0.9 < float(one.std()) < 1.1
    for grid in GRIDS[1:]:
        assert all(torch.equal(found, one) for found in run_on(grid.world, drawn, grid))


def reshapes_in_place(name: str) -> None:
    getattr(Grid((2, 1)).shard(image(1, 4, 8, 8)).flatten(2), name)(*((1, 2) if name == "transpose_" else (0,)))


@pytest.mark.parametrize("name", ["transpose_", "squeeze_", "unsqueeze_"])
def test_a_shape_changed_in_place_was_lost(name: str) -> None:
    raises("in place", mural.UnsupportedOp, reshapes_in_place, name)


def writes_to_a_reshaped_slice(code: str) -> None:
    Expr(code)(Grid((2, 1)).shard(image(2, 4, 12, 8)))


@pytest.mark.parametrize("code", ["x[:, :, :6].flatten(1).add_(1)", "x[:, :, :6].reshape(2, 4, -1).mul_(2)"])
def test_a_write_to_a_reshaped_slice_reached_the_original_where_a_rank_owned_it_all(code: str) -> None:
    """A copy in torch, but the piece of the rank that owns the whole slice could be seen without a copy."""
    raises("cannot tell whether torch would have copied", mural.LayoutError, writes_to_a_reshaped_slice, code)
