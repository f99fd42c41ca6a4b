"""Bad input and failing ranks: a clear error on every rank, and no hang."""

from __future__ import annotations

import time

import pytest
import torch
import torch.nn.functional as F

import mural
from law import Expr, Grid, image, raises
from ranks import RankError, restart, run_on

UNSUPPORTED = [
    "torch.fft.fft2(x)", "torch.linalg.inv(x)", "x[x > 0]", "x.tolist()", "x.unique()",
    "F.interpolate(x, scale_factor=0.5, mode='bilinear', antialias=True)", "torch.einsum('nchh->nch', x)",
    "x.__setitem__((slice(None), slice(None), [1, 9]), 0.0)",
    "torch.save(x, '/dev/null')", "x.numpy()", "x.to_sparse()", "torch.linalg.svd(x)", "torch.cdist(x, x)",
]  # fmt: skip


def run_expression(code: str) -> None:
    Expr(code)(Grid((2, 1)).shard(image(1, 4, 12, 12)))


@pytest.mark.parametrize("code", UNSUPPORTED)
def test_operations_without_a_rule_raise(code: str) -> None:
    raises("", mural.UnsupportedOp, run_expression, code)


def test_the_error_names_operation_and_place_to_extend() -> None:
    raises("fft_fft2", mural.UnsupportedOp, run_expression, "torch.fft.fft2(x)")
    raises("src/mural/shard/ops/", mural.UnsupportedOp, run_expression, "torch.fft.fft2(x)")


def bad_grid() -> None:
    mural.init(spatial=(3, 2))


def bad_cut() -> None:
    Grid((2, 1), cuts=((5, 5),)).shard(image(1, 3, 12, 12))


def bad_dims() -> None:
    mural.shard(image(1, 12, 12), Grid((2, 1)).mesh())


def other_mesh() -> None:
    a, b = mural.init(spatial=(2, 1)), mural.init(spatial=(1, 2))
    mural.shard(image(1, 3, 8, 8), a) + mural.shard(image(1, 3, 8, 8), b)


def different_shapes() -> None:
    mesh = Grid((2, 1)).mesh()
    mural.shard(image(1, 3, 8 + mesh.rank, 8), mesh)


def overlapping_boxes() -> None:
    mesh = Grid((2, 1)).mesh()
    rows = (0, 5) if mesh.rank == 0 else (4, 8)
    mural.shard(image(1, 3, rows[1] - rows[0], 8), mesh, box=((0, 1), (0, 3), rows, (0, 8)))


def wrong_target() -> None:
    F.cross_entropy(Grid((2, 1)).shard(image(1, 3, 8, 8)), torch.zeros(1, 8, 9, dtype=torch.long))


def does_not_broadcast() -> None:
    Grid((2, 1)).shard(image(1, 3, 8, 8)) + image(1, 3, 7, 8)


def does_not_fit() -> None:
    Grid((2, 1)).shard(image(1, 3, 8, 8)).copy_(image(1, 3, 7, 8))


@pytest.mark.parametrize(
    ("function", "kind", "text"),
    [
        (bad_grid, mural.PlanError, "needs 6 ranks, but 2 run"),
        (bad_cut, mural.LayoutError, "do not divide an extent of 12 into 2 parts"),
        (bad_dims, mural.LayoutError, "dims=(1, 2)"),
        (other_mesh, mural.LayoutError, "two meshes"),
        (different_shapes, mural.LayoutError, "same tensor on every rank"),
        (overlapping_boxes, mural.LayoutError, "do not tile"),
        (wrong_target, mural.LayoutError, "target has shape"),
        (does_not_broadcast, mural.LayoutError, "do not broadcast"),
        (does_not_fit, mural.LayoutError, "do not broadcast"),
    ],
)
def test_bad_input(function: object, kind: type[Exception], text: str) -> None:
    raises(text, kind, function)


def symmetric_error_then_work() -> float:
    """An error that all ranks raise and catch leaves the mesh usable."""
    x = Grid((2, 1)).shard(image(1, 3, 8, 8))
    for _ in range(3):
        with pytest.raises(mural.UnsupportedOp):
            torch.fft.fft2(x)
        if x.mesh.rank == 0:
            time.sleep(0.6)
        y = F.conv2d(x, image(3, 3, 3, 3), padding=1)
    return float((y.full() - F.conv2d(image(1, 3, 8, 8), image(3, 3, 3, 3), padding=1)).abs().max())


def test_a_caught_error_on_all_ranks_leaves_the_mesh_usable() -> None:
    assert max(run_on(2, symmetric_error_then_work)) < 1e-12


def lone_error() -> str:
    """Rank 1 raises inside an operation while rank 0 waits for its halo."""
    x = Grid((2, 1)).shard(image(1, 3, 8, 8))
    begun = time.perf_counter()
    try:
        if x.mesh.rank == 1:
            torch.fft.fft2(x)
        for _ in range(3):
            F.conv2d(x, image(3, 3, 3, 3), padding=1)
    except mural.MuralError as error:
        return f"{type(error).__name__} after {time.perf_counter() - begun:.0f} s: {error}"
    return "no error"


def test_a_rank_that_raises_alone_ends_the_wait_of_the_others() -> None:
    first, second = run_on(2, lone_error)
    restart(2)
    assert second.startswith("UnsupportedOp")
    assert first.startswith("PeerError")
    assert "rank 1 raised UnsupportedOp" in first


def dies() -> None:
    x = Grid((2, 1)).shard(image(1, 3, 8, 8))
    if x.mesh.rank == 1:
        import os

        os._exit(3)
    F.conv2d(x, image(3, 3, 3, 3), padding=1)


def test_a_rank_that_dies_ends_the_wait_of_the_others() -> None:
    begun = time.perf_counter()
    with pytest.raises((RankError, EOFError)):
        run_on(2, dies)
    assert time.perf_counter() - begun < 50


REFUSED_BY_TORCH = """
F.conv2d(x, image(4, 4, 3, 3), padding=-1)
F.conv2d(x, image(4, 3, 3, 3))
F.conv2d(x, image(4, 4, 3, 3), image(3))
F.conv2d(x, image(5, 2, 3, 3), groups=2)
F.conv2d(x, image(4, 4, 30, 3))
F.conv2d(x, image(4, 4, 3, 3).float())
F.conv2d(x, image(4, 4, 3, 3), image(4).float())
F.conv1d(x, image(6, 4, 3, 3), padding=1)
F.conv_transpose1d(x, image(4, 4, 3, 3))
F.conv_transpose2d(x, image(4, 4, 3, 3), image(1))
F.conv_transpose2d(x, image(4, 4, 3, 3), padding=-1)
F.conv_transpose2d(x, image(4, 4, 3, 3), stride=2, output_padding=2)
F.max_pool2d(x, 3, padding=2)
F.adaptive_avg_pool1d(x, 3)
F.interpolate(x, size=5, mode='linear')
F.interpolate(x)
F.interpolate(x.long(), size=5)
F.interpolate(x, size=5, mode='bilinear', recompute_scale_factor=True)
F.pad(x, (1, 1), mode='reflect')
F.pad(x, (1, 1, 1, 1), mode='reflect', value=1)
F.pad(x, (12, 0, 0, 0), mode='reflect')
F.pad(x, (1,))
F.batch_norm(x, None, None, image(3), training=True)
F.batch_norm(x, None, None, training=True, eps=-1.0)
F.group_norm(x, 2, image(8), image(8))
F.group_norm(x, 3)
F.instance_norm(x, weight=image(3))
F.layer_norm(x, (12, 12), image(1, 12))
F.layer_norm(x, (11,))
x.mean(7)
x.long().mean()
x.reshape(5, 5)
x.sum(dims=1)
torch.cat([x, x[:, :, :, :3]], 1)
x.narrow(2, 10, 5)
x[:, 9]
x.softmax(9)
F.mse_loss(x, x, reduction='median')
F.cross_entropy(x, x[:, 0].long(), weight=image(3))
F.pixel_shuffle(x, 3)
F.dropout(x, 1.5)
F.linear(x, image(3, 5))
x.relu().copy_(image(2, 2))
x.flatten(2).copy_(image(1, 4, 12, 12))
torch.addmm(image(12, 3), x[0, 0, 0], image(12, 3))
torch.addmm(image(2, 12, 3), x[0, 0], image(12, 3))
torch.baddbmm(image(4, 12, 3), x[0, 0], image(4, 12, 3))
""".strip().splitlines()


@pytest.mark.parametrize("code", REFUSED_BY_TORCH)
def test_what_torch_refuses_is_refused_on_every_rank(code: str) -> None:
    with pytest.raises(Exception):  # noqa: B017, PT011 - whatever torch raises
        Expr(code)(image(1, 4, 12, 12))
    raises("", Exception, run_expression, code)


def differs(what: str) -> None:
    """Ranks that bring different arguments to a collective call."""
    mesh = Grid((2, 1)).mesh()
    second = mesh.rank == 1
    x = image(1, 3, 12, 12)
    if what == "cuts":
        mural.shard(x, mesh, cuts=(5, 7) if second else (6, 6))
    elif what == "align":
        mural.shard(x, mesh, align=4 if second else 1, cuts=None)
    elif what == "dims":
        mural.shard(x, mesh, dims=(3, 2) if second else (2, 3))
    elif what == "bad cuts on one rank":
        mural.shard(x, mesh, cuts=(5, 6) if second else (6, 6))
    elif what == "requires_grad":
        mural.shard(x.requires_grad_(second), mesh)
    elif what == "dims of the tensor":
        mural.shard(x[0] if second else x, mesh)
    elif what == "box":
        rows = (0, 6) if not second else (6, 12)
        mural.shard(x[:, :, :5] if second else x[:, :, :6], mesh, box=((0, 1), (0, 3), rows, (0, 12)))
    elif what == "parameters":
        weights = [torch.ones(2, requires_grad=True) for _ in range(2 + second)]
        mural.reduce_gradients(weights, mesh)


DIFFERENCES = ["cuts", "align", "dims", "bad cuts on one rank", "requires_grad", "dims of the tensor", "box"]


@pytest.mark.parametrize("what", [*DIFFERENCES, "parameters"])
def test_ranks_that_disagree(what: str) -> None:
    raises("", mural.LayoutError, differs, what)


def uneven_reduce() -> float:
    """A gradient that one rank alone added to since the last reduction made the other rank miss the collective."""
    mesh = Grid((2, 1)).mesh()
    weights = [torch.ones(2, requires_grad=True) for _ in range(2)]
    for w in weights:
        w.grad = torch.ones(2)
    mural.reduce_gradients(weights, mesh)
    if mesh.rank == 0:
        weights[0].grad += 2
    mural.reduce_gradients(weights, mesh)
    return float(weights[0].grad[0])


def test_reduce_after_one_rank_added() -> None:
    assert run_on(2, uneven_reduce) == [2.0, 2.0]
