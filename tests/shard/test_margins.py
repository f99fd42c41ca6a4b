"""What meets a margin: in-place writes, gradients that are asked for, and modes of torch. All stays as without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mural
from law import TOLERANCE, Grid, difference, full, image, loss_of, raises
from mural.shard.halo.fuse import fusing
from ranks import run_on
from repeats import holds_in_steps, seeded

GRIDS = [Grid((2, 1)), Grid((2, 2))]


class Writes(nn.Module):
    """In-place writes between two convolutions, of all kinds, to the tensor and to views of it, from the second run on.

    The first run teaches that a convolution follows, so that there is a margin when the write comes.
    """

    def __init__(self, how: str):
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))
        self.how, self.runs = how, 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.a(x))
        self.runs += 1
        if self.runs == 1:
            return self.c(y)
        z = y.mean() if self.how == "read before" else 0
        if self.how == "assignment":
            y[:, :, 3:7] = 0.5
        elif self.how == "mask":
            y[y > 0] = 0.1
        elif self.how == "view":
            y[:, :2].mul_(2)
        elif self.how == "view of a view":
            y[:, :2].permute(0, 2, 3, 1)[..., 0].add_(1)
        elif self.how == "part":
            y[:, :, :2].zero_()
        elif self.how == "detached":
            with torch.no_grad():
                y.detach().mul_(1.5)
        elif self.how == "dropout":
            F.dropout(y, 0.0, True, True)
        elif self.how == "other layout":
            y.add_(x)
        elif self.how == "plain":
            y.mul_(torch.linspace(0, 1, y.shape[3], dtype=y.dtype))
        elif self.how == "copy":
            y.copy_(x)
        elif self.how == "read before":
            y.relu_()
        elif self.how == "view before":
            view = y[:, :1]
            y.relu_()
            z = view.sum()
        return self.c(y) + z


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize(
    "how",
    ["assignment", "mask", "view", "view of a view", "part", "detached", "dropout", "other layout", "plain", "copy",
     "read before", "view before"],
)  # fmt: skip
def test_writes_in_between(how: str, grid: Grid) -> None:
    holds_in_steps(seeded(lambda: Writes(how)), (2, 3, 24, 22), grid)


def gradient_queries(when: str) -> dict[str, float]:
    """Gradients of an intermediate tensor, asked for before or after a margin of it was read."""
    grid = Grid((2, 2))
    torch.manual_seed(0)
    a, b = nn.Conv2d(3, 3, 3, padding=1).double(), nn.Conv2d(3, 3, 3, padding=1).double()
    x, found = image(1, 3, 24, 22), {}
    for number in range(3):
        got: list[list[Tensor]] = []
        for sharded in (False, True):
            with fusing(True):
                leaf = (grid.shard(x) if sharded else x.clone()).requires_grad_()
                seen: list[Tensor] = []
                middle = a(leaf)
                last = b(middle) if when == "after" else None
                middle.retain_grad()
                middle.register_hook(lambda g, seen=seen: seen.append(full(g).clone()))
                middle.register_hook(lambda g: g * 2)
                last = b(middle) if last is None else last
                loss = loss_of((last, middle.square()))
                seen += torch.autograd.grad(loss, [middle, leaf], retain_graph=True)
                loss.backward()
                seen += [middle.grad, leaf.grad]
            got.append([full(t) for t in seen])
        for i, (plain, other) in enumerate(zip(*got, strict=True)):
            found[f"run {number}, {i}"] = difference(other, plain)
    return found


@pytest.mark.parametrize("when", ["before", "after"])
def test_gradients_of_an_intermediate_tensor(when: str) -> None:
    for found in run_on(4, gradient_queries, when):
        assert max(found.values()) <= TOLERANCE, found


def learned(*modules: nn.Module, size: tuple[int, ...] = (1, 3, 24, 22)) -> tuple[Grid, mural.ShardedTensor]:
    """A grid on which these modules ran one after the other, and the result of the next run of the first of them."""
    grid = Grid((2, 1))
    net = nn.Sequential(*modules)
    net(grid.shard(image(*size)))
    return grid, modules[0](grid.shard(image(*size)))


def three() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Conv2d(3, 3, 3, padding=1).double() for _ in range(3)]


def written_through_local() -> None:
    with fusing(True):
        a, b, c = three()
        _, y = learned(a, b, c)
        y.local.mul_(2)
        b(y)


def test_a_write_through_local_raises() -> None:
    raises("was written in place through .local", mural.LayoutError, written_through_local)


def alone_on_one_rank() -> list[Any]:
    """What one rank looks at by itself, without messages, does not put it out of step."""
    with fusing(True):
        a, b, c = three()
        _, y = learned(a, b, c)
        head = nn.Conv2d(3, 3, 1).double()
        if y.mesh.rank == 0:
            for _ in range(5):
                y.detach().local.mean(), y[:, 0], y.relu(), F.max_pool2d(head(y), 2, ceil_mode=True), repr(y), y.local
        with y.mesh.transport.record() as record:
            z = c(b(y))
        plain = nn.Sequential(a, b, c)(image(1, 3, 24, 22))
        return [record.messages, difference(z.full(), plain) <= TOLERANCE]


def test_one_rank_may_look_by_itself() -> None:
    assert run_on(2, alone_on_one_rank) == [[0, True]] * 2


def piece_is_plain() -> list[Any]:
    """The piece of a tensor with a margin is as that of any other: contiguous, no view, with a history."""
    with fusing(True):
        a, b, c = three()
        _, y = learned(a, b, c)
        margin = y.margin is not None
        with torch.no_grad():
            piece = y.local
        return [margin, piece.is_contiguous(), piece._is_view(), piece.requires_grad, y.requires_grad, y.is_leaf,
                tuple(piece.shape) == y.placement.local_shape, y.contiguous() is y]  # fmt: skip


def test_the_own_piece() -> None:
    assert run_on(2, piece_is_plain) == [[True, True, False, True, True, False, True, True]] * 2


class Modes(nn.Module):
    """Layers in a mode of torch that margins must not, or need not, meet."""

    def __init__(self, how: str):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(4))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.a(x))
        if self.how == "checkpoint":
            x = checkpoint(self.inner, x, use_reentrant=False)
        elif self.how == "nested checkpoint":
            x = checkpoint(self.outer, x, use_reentrant=False)
        elif self.how == "frozen start":
            with torch.no_grad():
                x = self.b(self.a(x.detach()))
            x = self.inner(x.requires_grad_())
        elif self.how == "offload":
            with torch.autograd.graph.save_on_cpu():
                x = self.inner(x)
        elif self.how == "mixed":
            with torch.no_grad():
                y = self.inner(x)
            x = self.inner(x) * y
        return self.d(self.c(x))

    def outer(self, x: Tensor) -> Tensor:
        return x.sigmoid() + checkpoint(self.inner, x * 2, use_reentrant=False)

    def inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.b(torch.relu(self.a(x))))


@pytest.mark.parametrize("how", ["checkpoint", "nested checkpoint", "frozen start", "offload", "mixed"])
def test_modes(how: str) -> None:
    for grid in GRIDS:
        holds_in_steps(seeded(lambda: Modes(how)), (2, 3, 24, 22), grid, needs_grad=how != "frozen start")


def inference(mode: str) -> list[Any]:
    grid, found = Grid((2, 1)), []
    net = nn.Sequential(*three())
    x = image(1, 3, 24, 22)
    with fusing(True), torch.no_grad() if mode == "no_grad" else torch.inference_mode():
        for _ in range(3):
            y = grid.shard(x)
            with y.mesh.transport.record() as record:
                z = net(y)
            found += [record.messages, difference(z.full(), net(x)) <= TOLERANCE]
    return found


def test_inference() -> None:
    assert run_on(2, inference, "no_grad") == [[3, True, 1, True, 1, True]] * 2
    assert run_on(2, inference, "inference_mode") == [[3, True] * 3] * 2


def autocast() -> list[Any]:
    grid, found = Grid((2, 1)), []
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(True), nn.MaxPool2d(3, 1, 1), nn.Conv2d(4, 4, 3, padding=1)
    )
    x = image(1, 3, 24, 22).float()
    for _ in range(2):
        with fusing(True), torch.autocast("cpu", dtype=torch.bfloat16):
            y = grid.shard(x)
            with y.mesh.transport.record() as record:
                got = net(y)
            expected = net(x)
        got.square().mean().backward()
        found += [record.messages, got.dtype == expected.dtype, difference(got.full(), expected) < 0.02]
    return found


def test_autocast() -> None:
    assert run_on(2, autocast) == [[3, True, True, 1, True, True]] * 2


def channels_last() -> list[bool]:
    grid = Grid((2, 2))
    net = nn.Sequential(*three()).to(memory_format=torch.channels_last)
    x = image(2, 3, 24, 22).contiguous(memory_format=torch.channels_last)
    found = []
    with fusing(True):
        for _ in range(2):
            first = net[0](grid.shard(x))
            y = net[2](net[1](first))
            found += [t.local.is_contiguous(memory_format=torch.channels_last) for t in (first, y)]
    return found


def test_channels_last_is_kept() -> None:
    assert run_on(4, channels_last) == [[True] * 4] * 4


def second_derivative() -> None:
    with fusing(True):
        a, b, c = three()
        _, y = learned(a, b, c)
        c(b(y)).sum().backward(create_graph=True)


def test_second_derivatives_raise() -> None:
    raises("second derivatives", mural.UnsupportedOp, second_derivative)


def deterministic() -> list[int]:
    net, grid, found = nn.Sequential(*three()), Grid((2, 1)), []
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(3):
            y = grid.shard(image(1, 3, 24, 22))
            with y.mesh.transport.record() as record:
                net(y)
            found.append(record.messages)
    finally:
        torch.use_deterministic_algorithms(False)
    return found


def test_nothing_is_measured_where_runs_have_to_be_alike() -> None:
    assert run_on(2, deterministic) == [[3, 3, 3]] * 2
