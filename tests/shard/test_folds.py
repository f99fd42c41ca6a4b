"""Reshapes that merge and split cut dims: exact, and without moving data where the cuts allow it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import mural
from law import Expr, Grid, holds, image, some, tensors_of
from mural.shard.folds.regroup import groups, spans
from ranks import run_on

GRIDS = [Grid((2, 1)), Grid((1, 2)), Grid((2, 2)), Grid((1, 2), data=2), Grid((2, 2), cuts=((3, 5), (7, 5)))]
FLAT = "x.flatten(2)"
CASES = [
    f"{FLAT}.transpose(1, 2)", f"{FLAT}.transpose(1, 2).transpose(1, 2).view(x.shape)", f"{FLAT}.softmax(1)",
    f"{FLAT}.softmax(-1)", f"{FLAT}.mean(-1)", f"{FLAT}.sum((0, 2), keepdim=True)", f"{FLAT}.std(-1)",
    f"{FLAT}.norm(dim=-1)", f"{FLAT}.amax(-1)", f"{FLAT}.max(-1).values", f"{FLAT}.max(-1).indices * 1.0",
    f"F.layer_norm({FLAT}.transpose(1, 2), (3,), image(3), image(3))", f"F.layer_norm({FLAT}, (96,))",
    f"{FLAT}[:, 1:]", f"{FLAT}[:, 0]", f"{FLAT}[..., None, :]", f"{FLAT}[:, :, 5:70]", f"{FLAT}[:, :, 7]",
    f"torch.cat([{FLAT}, {FLAT} * 2], 1)", f"torch.cat([{FLAT}, x.flatten(2)[..., :3]], 2)",
    f"torch.cat([{FLAT}.transpose(1, 2), image(2, 1, 3)], 1)", f"torch.stack([{FLAT}, {FLAT}], 1)",
    f"{FLAT} + image(96)", f"{FLAT} * image(1, 3, 1)", f"{FLAT} + x.reshape(2, 3, 96) * x.flatten(1).view(2, 3, 96)",
    f"{FLAT}.clone().relu_()", f"{FLAT}.clone().masked_fill_(image(96) > 0, 2.0)", f"{FLAT}.unbind(1)[0]",
    f"{FLAT}.chunk(3, 1)[1]", f"{FLAT}.view(2, 3, 4, 24)", f"{FLAT}.view(2, 3, 48, 2)",
    f"{FLAT}.expand(2, 3, 96)", f"{FLAT}.unsqueeze(1).expand(2, 4, 3, 96)", f"{FLAT}.repeat(1, 2, 1)",
    f"F.batch_norm({FLAT}, None, None, training=True)", f"F.instance_norm({FLAT})", f"F.group_norm({FLAT}, 3)",
    f"F.batch_norm({FLAT}.transpose(1, 2).reshape(-1, 3), None, None, training=True)",
    f"F.adaptive_avg_pool1d({FLAT}, 1)", f"F.conv1d({FLAT}, image(4, 3, 3), padding=1)", "x.reshape(-1)",
    f"{FLAT}.transpose(1, 2).reshape(-1, 3).softmax(-1)", f"torch.where({FLAT} > 0, {FLAT}, image(3, 1))",
    f"F.mse_loss({FLAT}, image(2, 3, 96))", f"{FLAT}.flip(1)", f"{FLAT}.roll(1, 1)", f"{FLAT}.double().contiguous()",
    f"{FLAT}.new_zeros(2, 3, 96) + {FLAT}", f"torch.zeros_like({FLAT}) + {FLAT}", f"{FLAT}.cumsum(1)",
    # windows: split, merged with the batch, and back
    "x.permute(0, 2, 3, 1).reshape(2, 4, 2, 3, 4, 3).permute(0, 1, 3, 2, 4, 5).reshape(-1, 8, 3).softmax(1)",
    "x.view(2, 3, 4, 2, 3, 4).permute(0, 2, 4, 3, 5, 1).reshape(24, 8, 3).softmax(1)"
    ".view(2, 4, 3, 2, 4, 3).permute(0, 5, 1, 3, 2, 4).reshape(2, 3, 8, 12) + x",
    "x.view(2, 3, 4, 2, 6, 2).permute(0, 2, 4, 3, 5, 1).flatten(3) @ image(12, 5)",
    "torch.nn.functional.pixel_unshuffle(x, 2).flatten(2)",
]  # fmt: skip


@pytest.mark.parametrize("grid", some(GRIDS, 1, 4), ids=str)
@pytest.mark.parametrize("code", CASES)
def test_merged_dims(code: str, grid: Grid) -> None:
    holds(Expr(code), image(2, 3, 8, 12), grid)


class Reshapes(nn.Module):
    """Some reshapes one after the other, with work between them."""

    def __init__(self, shapes: list[tuple[int, ...]]):
        super().__init__()
        self.shapes = shapes

    def forward(self, x: Tensor) -> Tensor:
        for shape in self.shapes:
            x = (x * 1.5).reshape(shape) + 1
        return x


@st.composite
def factorised(draw: st.DrawFn, number: int) -> tuple[int, ...]:
    """A random shape with that many positions."""
    found = []
    while number > 1:
        found.append(draw(st.sampled_from([d for d in range(2, number + 1) if number % d == 0])))
        number //= found[-1]
        if draw(st.booleans()):
            found.append(1)
    return tuple(found) or (1,)


@given(data=st.data())
def test_reshape_law(data: st.DataObject) -> None:
    shape = (2, 2, data.draw(st.sampled_from([4, 6, 9])), data.draw(st.sampled_from([1, 4, 5])))
    number = shape[0] * shape[1] * shape[2] * shape[3]
    shapes = data.draw(st.lists(factorised(number), min_size=1, max_size=3))
    spatial, ranks = data.draw(st.sampled_from([((2, 1), 1), ((1, 2), 1), ((2, 2), 1), ((2, 1), 2), ((3, 1), 1)]))
    cuts = tuple(
        None if n == 1 else tuple(sorted(data.draw(st.lists(st.integers(0, e), min_size=n - 1, max_size=n - 1))))
        for n, e in zip(spatial, shape[2:], strict=True)
    )
    holds(Reshapes(shapes), image(*shape), Grid(spatial, data=ranks, cuts=cuts))


def messages(code: str, cuts: object) -> int:
    x = Grid((2, 2), cuts=cuts).shard(image(1, 4, 16, 16))
    with x.mesh.transport.record() as record:
        tensors_of(Expr(code)(x))
    return record.messages


@pytest.mark.parametrize(
    ("code", "moves"),
    [
        ("x.flatten(2).transpose(1, 2).softmax(-1).transpose(1, 2).view(x.shape).relu() + x", False),
        ("F.layer_norm(x.flatten(2).mT @ image(4, 6), (6,))", False),
        ("x.view(1, 4, 4, 4, 4, 4).permute(0, 2, 4, 3, 5, 1).reshape(-1, 16, 4).softmax(1)", False),
        ("x.reshape(1, 4, 2, 8, 2, 8).mean((3, 5))", False),
        ("x.reshape(1, 4, 1, 16, 1, 16).mean((3, 5))", True),
        ("x.flatten(2)[..., 3:200]", True),
    ],
)
def test_what_moves(code: str, moves: bool) -> None:
    assert all((n > 0) == moves for n in run_on(4, messages, code, None))


def test_windows_off_the_cut_move_a_strip_only() -> None:
    """Cuts at 7 rows and 8 columns, windows of 4: one row of a piece goes to its neighbour, nothing is gathered."""
    assert run_on(4, strip_bytes) == [0, 0, 4 * 8 * 8, 4 * 8 * 8]


def strip_bytes() -> int:
    x = Grid((2, 2), cuts=((7, 9), None)).shard(image(1, 4, 16, 16))
    with x.mesh.transport.record() as record:
        x.view(1, 4, 4, 4, 4, 4).permute(0, 2, 4, 3, 5, 1).reshape(-1, 16, 4)
    return record.bytes


def gradients() -> list[float]:
    x = Grid((2, 2)).shard(image(1, 3, 8, 8)).requires_grad_()
    seen: list[tuple[int, ...]] = []
    y = (x * 2).flatten(2)
    y.register_hook(lambda grad: seen.append(tuple(grad.shape)) or grad * 3)
    y.retain_grad()
    (y * image(1, 3, 64)).sum().backward()
    assert seen == [(1, 3, 64)]
    assert y.grad is not None
    assert y.grad.shape == (1, 3, 64)
    want = image(1, 3, 64).view(1, 3, 8, 8) * 6
    return [float((x.grad.full() - want).abs().max())]  # type: ignore[union-attr]


def test_hooks_and_gradients_of_merged_dims() -> None:
    for found in run_on(4, gradients):
        assert max(found) < 1e-12


def test_groups_are_as_short_as_possible() -> None:
    assert groups((2, 3, 4), (6, 2, 2)) == [([0, 1], [0]), ([2], [1, 2])]
    assert groups((1, 5), (5,)) == [([0, 1], [0])]
    assert spans((2, 1, 3)) == [(0, 2), (2, 3), (3, 6)]


def test_a_folded_tensor_says_what_it_is() -> None:
    for text, shape in run_on(4, describe):
        assert shape == (1, 3, 64)
        assert "shape=(1, 3, 64)" in text


def describe() -> tuple[str, tuple[int, ...]]:
    x = Grid((2, 2)).shard(image(1, 3, 8, 8)).flatten(2)
    assert isinstance(x, mural.ShardedTensor)
    assert torch.equal(x.full(), image(1, 3, 8, 8).flatten(2))
    return repr(x), tuple(x.shape)
