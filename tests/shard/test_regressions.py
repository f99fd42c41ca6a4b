"""A test for each bug, saying what it was."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mural
from law import Expr, Grid, difference, holds, image, raises
from ranks import run_on

EXPRESSIONS = {
    "a stride left a rim of a halo unread": "F.conv2d(F.pad(x, (0, 0, 0, 1)), image(2, 4, 1, 1), stride=2, padding=1)",
    "a chain with such a stride": (
        "F.conv2d(F.conv2d(x[..., :6, :6], image(4, 4, 4, 1), padding=(2, 0)), image(4, 4, 2, 1), stride=2, padding=1)"
    ),
    "cat of slices of one position that different ranks own failed": "torch.cat([x[:, :, 6:7], x[:, :, 7:8]], 1)",
    "axis= was ignored, and everything reduced": "x.sum(axis=1), x.mean(axis=(2, 3)), x.var(axis=2), x.amax(axis=1)",
    "keepdims= was ignored": "x.sum(2, keepdims=True), x.std(dim=1, keepdims=True)",
    "stack(axis=) stacked on dim 0": "torch.stack([x, y], axis=1)",
    "max(other=) gave the global maximum": "torch.max(x, other=y)",
    "input= as a keyword failed": (
        "torch.flatten(input=x, start_dim=2), F.linear(input=x, weight=image(5, 11)), torch.chunk(input=x, chunks=2)"
    ),
    "bernoulli(p=) was ignored": "x * torch.bernoulli(x.detach(), p=1.0)",
    "narrow from a negative start": "x.narrow(2, -3, 2)",
    "std of a constant had a NaN gradient": "(x * 0).std((2, 3))",
    "amax of −∞ was NaN": "x.masked_fill(y > -99, float('-inf')).amax((2, 3)).exp()",
    "NaN was lost in max along a cut dim": "x.masked_fill(y > 1.5, float('nan')).max(2)",
    "NaN was lost in the global maximum": "F.adaptive_max_pool2d(x.masked_fill(y > 1.5, float('nan')), 1)",
    "a plain src of scatter was not cut": "x.scatter(1, (y > 0).long(), image(2, 4, 13, 11))",
    "extremes of booleans failed": "(x > 0).amax(2) * x.sum(2), (x > 0).max() * x.sum()",
    "any of bytes had another type": "(x > 0).byte().any(2), x.sum()",
    "cosine similarity with a plain tensor failed": (
        "F.cosine_similarity(x, image(2, 4, 13, 11)), F.cosine_similarity(image(2, 4, 13, 11), x)"
    ),
    "a 0-dim index tensor was refused": "x[:, torch.tensor(1)]",
    "padding of booleans on an empty rank had another type": "F.pad(x > 0, (1, 1), value=True) * F.pad(x, (1, 1))",
}


@pytest.mark.parametrize("grid", [Grid((2, 1)), Grid((2, 1), cuts=((0, 13),)), Grid((1, 2), data=2)], ids=str)
@pytest.mark.parametrize("bug", EXPRESSIONS)
def test_expression(bug: str, grid: Grid) -> None:
    holds(Expr(EXPRESSIONS[bug]), [image(2, 4, 13, 11), image(2, 4, 13, 11, seed=1)], grid)


def assignments() -> list[float]:
    """Writes through a list of positions, and through a mask of the leading dims, were lost or misplaced."""
    grid, found = Grid((2, 1)), []
    for index in ([0, 2], torch.tensor([1]), torch.tensor([True, False, True, False])):
        plain, sharded = image(4, 4, 12, 11), grid.shard(image(4, 4, 12, 11))
        for x in (plain, sharded):
            x[:, index] = 0.0
            x[:, index] = x[:, index] + 3
        found.append(difference(sharded.full(), plain))
    plain, sharded = image(4, 4, 4, 4), grid.shard(image(4, 4, 4, 4))
    mask = image(4, 4, seed=3) > 0
    plain[mask], sharded[mask] = 0.0, 0.0
    return [*found, difference(sharded.full(), plain)]


def test_assignments() -> None:
    assert run_on(2, assignments) == [[0.0] * 4] * 2


def leaves() -> list[float]:
    """Leaves that came to require a gradient by other ways than requires_grad_() had another scale."""
    grid = Grid((2, 1))
    x = grid.shard(image(1, 2, 8, 8))
    piece = x.local.clone().requires_grad_()
    box = tuple((i.start, i.stop) for i in x.box)
    toggled = x.detach().requires_grad_().requires_grad_(False).requires_grad_()
    made = [
        torch.zeros_like(x, requires_grad=True),
        x.new_zeros(x.shape, requires_grad=True),
        mural.shard(piece, grid.mesh(), box=box),
        toggled,
    ]
    found = []
    for z in made:
        (z * 3).sum().backward()
        found.append(float(z.grad.full().mean()))
    return found


def test_scale_of_leaves() -> None:
    assert run_on(2, leaves) == [[3.0] * 4] * 2


def copies() -> float:
    """`.contiguous()` of a slice was the slice itself on the rank that held all of it."""
    plain, sharded = image(2, 4, 14, 11), Grid((2, 1)).shard(image(2, 4, 14, 11))
    for x in (plain, sharded):
        (x[:, :, :7].contiguous() * 1).mul_(2)
        x[:, :, :7].clone().mul_(2)
    return difference(sharded.full(), plain)


def test_contiguous_copies() -> None:
    assert run_on(2, copies) == [0.0, 0.0]


def write_to_contiguous() -> None:
    Grid((2, 1)).shard(image(2, 4, 14, 11))[:, :, :7].contiguous().mul_(2)


def test_write_to_what_torch_may_have_copied_raises() -> None:
    raises("contiguous", mural.LayoutError, write_to_contiguous)


def autocast_loss() -> float:
    """Under autocast a rank without positions sent a loss of another type, and the process was aborted."""
    grid = Grid((2, 1), cuts=((0, 13),))
    conv = nn.Conv2d(4, 3, 3, padding=1)
    target = torch.zeros(2, 13, 11, dtype=torch.long)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(conv(grid.shard(image(2, 4, 13, 11).float())), target)
    loss.backward()
    return float(loss)


def test_loss_under_autocast_with_an_empty_rank() -> None:
    first, second = run_on(2, autocast_loss)
    assert first == second


def autocast_types() -> list[str]:
    """Resampling that mural does itself had bfloat16 results where torch's are float32."""
    grid, wrong = Grid((2, 1)), []
    x = image(2, 4, 13, 11).float()
    for dtype in (torch.float32, torch.bfloat16):
        for code in (
            "F.adaptive_avg_pool2d(x, (3, 5))", "F.adaptive_avg_pool2d(x, 1)", "F.adaptive_max_pool2d(x, (3, 5))",
            "F.interpolate(x, size=(5, 6), mode='area')", "F.interpolate(x, size=(7, 23), mode='bilinear')",
            "F.interpolate(x, size=(7, 23), mode='bicubic')", "F.interpolate(x, size=(7, 23))",
            "F.pad(x, (1, 1, 1, 1), mode='reflect')", "F.pad(x, (1, 1))",
            "F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)",
            "F.mse_loss(x, x * 2)", "x.softmax(2)", "x.mean((2, 3))", "x.sum(2)", "x.norm(dim=2)",
        ):  # fmt: skip
            with torch.autocast("cpu", dtype=torch.bfloat16):
                expected, got = Expr(code)(x.to(dtype)), Expr(code)(grid.shard(x.to(dtype)))
            if got.dtype != expected.dtype:
                wrong.append(f"{code} of {dtype}: {got.dtype} for {expected.dtype}")
    return wrong


def test_autocast_types_of_own_kernels() -> None:
    assert run_on(2, autocast_types) == [[], []]


def test_average_pool_with_an_overhanging_last_window() -> None:
    """The kernel on the own pixels counted padding behind the image that ceil_mode does not count."""
    for include in (True, False):
        holds(nn.AvgPool2d((3, 1), None, 0, True, include), image(1, 4, 11, 3), Grid((2, 1), align=4))


def test_average_pool_of_pieces_thinner_than_the_kernel() -> None:
    """In three dims torch refuses them, although padding makes up for what is missing."""
    holds(nn.AvgPool3d((3, 1, 4), (1, 3, 1), (1, 0, 1)), image(1, 2, 4, 4, 4), Grid((2, 1, 1)))


def test_unbatched_image() -> None:
    """The data axis kept the channels' extent of an image without a batch dim."""
    holds(nn.Conv2d(3, 4, 3, padding=1).double(), image(3, 12, 11), Grid((2, 1), dims=(1, 2)))


def refusals() -> list[str]:
    x = Grid((2, 1)).shard(image(2, 4, 13, 11))
    answers = []
    for code in (
        "torch.where(x[0, 0, :, 0] > -99)",
        "x.renorm(2, 1, 1.0)",
        "x.stride()",
    ):
        try:
            Expr(code)(x)
            answers.append(f"{code} gave an answer")
        except mural.UnsupportedOp:
            continue
    return answers


def test_what_was_answered_wrongly_is_refused() -> None:
    assert run_on(2, refusals) == [[], []]


def view_in_place() -> float:
    """In-place writes to one image of a batch that is not cut were refused though nothing moves."""
    plain, sharded = image(2, 4, 13, 11), Grid((2, 1)).shard(image(2, 4, 13, 11))
    for x in (plain, sharded):
        x[0].mul_(2)
        x[:1].squeeze(0).add_(1)
    return difference(sharded.full(), plain)


def test_write_to_a_view_that_stayed_in_place() -> None:
    assert run_on(2, view_in_place) == [0.0, 0.0]


def pooled_under_autocast(largest: bool) -> float:
    """Averages of whole images had weights that autocast had rounded: their gradients were not torch's."""
    x, y = image(2, 4, 13, 11).float().requires_grad_(), image(2, 4, 13, 11).float()
    sharded = Grid((1,), data=2).shard(y).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        for given in (x, sharded):
            pool = F.adaptive_max_pool2d if largest else F.adaptive_avg_pool2d
            pool(given, 3).float().square().sum().backward()
    assert x.grad is not None
    assert isinstance(sharded.grad, mural.ShardedTensor)
    return difference(sharded.grad.full(), x.grad)


@pytest.mark.parametrize("largest", [False, True])
def test_adaptive_pools_of_whole_images_are_torchs(largest: bool) -> None:
    assert run_on(2, pooled_under_autocast, largest) == [0.0, 0.0]


def trained_under_autocast(code: str) -> float:
    """The largest difference of a weight's gradient from torch's, over the largest of its numbers."""
    grads: list[torch.Tensor] = []
    for place in (lambda x: x, Grid((2, 1)).shard):
        weight = image(4, 4, 3, 3).float().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            x = F.conv2d(place(image(2, 4, 13, 11).float()), weight, padding=1)  # type: ignore[no-untyped-call]
            Expr(code)(x).float().square().sum().backward()
        assert weight.grad is not None
        grads.append(weight.grad)
    mural.reduce_gradients([weight], Grid((2, 1)).mesh())
    return float((grads[0] - weight.grad).abs().max() / grads[0].abs().max())


@pytest.mark.parametrize(
    "code",
    [
        "F.pad(x, (1, 1, 1, 1), mode='reflect')", "F.interpolate(x, scale_factor=2, mode='bilinear')",
        "F.interpolate(x, size=(7, 5), mode='bicubic')", "F.max_pool2d(x, 3)", "F.adaptive_avg_pool2d(x, 3)",
        "F.grid_sample(x, image(2, 5, 5, 2).float().tanh())",
    ],
)  # fmt: skip
def test_casts_of_autocast_let_gradients_through(code: str) -> None:
    """Where torch runs an operation in another type, the cast was made without gradients: nothing before it learned."""
    assert max(run_on(2, trained_under_autocast, code)) < 3e-2
