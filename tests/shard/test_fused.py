"""Fused halos: one exchange for several layers, the same result; learned in the first run, used in the next."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import astuple
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mural
from law import TOLERANCE, Grid, difference, full, image, loss_of, raises, tensors_of
from mural.models import CNN2D, FCN2D
from mural.shard.fuse import fusing
from mural.shard.fusecost import Constants
from ranks import run_on

GRIDS = [
    Grid((2, 1)),
    Grid((2, 2)),
    Grid((3, 1)),
    Grid((2, 1), cuts=((0, 9, 24),)),
    Grid((1, 2), data=2),
    Grid((2, 2), cuts=((0, 14, 24), (0, 9, 22))),
]


def step(plain: nn.Module, sharded: nn.Module, x: Tensor, grid: Grid, needs_grad: bool) -> dict[str, Any]:
    """Differences of everything after one step of both, and the messages that this rank sent forward and backward."""
    plain.zero_grad()
    sharded.zero_grad()
    a = x.clone().requires_grad_(needs_grad)
    b = grid.shard(x)
    if needs_grad:
        b.requires_grad_()
    expected = plain(a)
    with b.mesh.transport.record() as forward:
        got = sharded(b)
    found: dict[str, Any] = {
        f"output {i}": difference(full(g), e)
        for i, (e, g) in enumerate(zip(tensors_of(expected), tensors_of(got), strict=True))
    }
    loss_of(expected).backward()
    loss = loss_of(got)
    with b.mesh.transport.record() as backward:
        loss.backward()
    mural.reduce_gradients(sharded, grid.mesh())
    if needs_grad:
        found["input gradient"] = difference(b.grad.full(), a.grad)
    for (name, p), q in zip(plain.named_parameters(), sharded.parameters(), strict=True):
        found[f"gradient of {name}"] = difference(q.grad, p.grad)
    for (name, p), q in zip(plain.named_buffers(), sharded.buffers(), strict=True):
        found[f"buffer {name}"] = difference(q, p)
    return {"wrong": {k: v for k, v in found.items() if not v <= TOLERANCE},
            "forward": forward.messages, "backward": backward.messages}  # fmt: skip


def steps(
    module: nn.Module, sizes: list[tuple[int, ...]], grid: Grid, on: bool | None, needs_grad: bool = True
) -> list[dict[str, Any]]:
    """Several steps on images of these sizes, fused as told."""
    plain, sharded = deepcopy(module), deepcopy(module)
    with fusing(on):
        return [step(plain, sharded, image(*size, seed=i), grid, needs_grad) for i, size in enumerate(sizes)]


def law(
    module: nn.Module, size: tuple[int, ...], grid: Grid, on: bool | None = True, needs_grad: bool = True
) -> list[tuple[int, int]]:
    """Check three steps on every rank; messages forward (rank 0) of the first, which learns, and of the last."""
    found = run_on(grid.world, steps, module.double(), [size] * 3, grid, on, needs_grad)
    for rank, of_rank in enumerate(found):
        for number, one in enumerate(of_rank):
            assert not one["wrong"], f"rank {rank}, step {number} of {grid}: {one['wrong']}"
    return [(one["forward"], one["backward"]) for one in found[0]]


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def chain() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Conv2d(6, 4, 3, padding=1),
    )  # fmt: skip


CHAINS: dict[str, Callable[[], nn.Module]] = {
    "convolutions": chain,
    "strides": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3, 2, 1), nn.GELU(), nn.Conv2d(4, 4, 3, 1, 1), nn.Conv2d(4, 4, 5, 1, 2)
    ),
    "dilation and groups": lambda: nn.Sequential(
        nn.Conv2d(3, 6, 3, dilation=2, padding=2), nn.SiLU(inplace=True), nn.Conv2d(6, 6, 3, padding=1, groups=3),
        nn.LeakyReLU(0.1, inplace=True), nn.Conv2d(6, 2, (3, 1), padding=(1, 0)), nn.Conv2d(2, 2, (1, 3), padding="same"),
    ),
    "even kernels": lambda: nn.Sequential(nn.Conv2d(3, 4, 4, 1, 2), nn.Tanh(), nn.Conv2d(4, 4, 2), nn.Conv2d(4, 4, 3)),
    "asymmetric pads": lambda: nn.Sequential(
        nn.ConstantPad2d((1, 2, 0, 3), 0.5), nn.Conv2d(3, 4, 3), nn.ZeroPad2d((2, 0, 1, 0)), nn.Conv2d(4, 4, 3),
    ),
    "other borders": lambda: nn.Sequential(
        nn.ReflectionPad2d(2), nn.Conv2d(3, 4, 5), nn.ReplicationPad2d(1), nn.Conv2d(4, 4, 3), nn.CircularPad2d(1),
        nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3, padding=1),
    ),
    "pools": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(3, 1, 1), nn.AvgPool2d(3, 1, 1), nn.Conv2d(4, 4, 3, padding=1),
        nn.AvgPool2d(3, 2, ceil_mode=True), nn.MaxPool2d(3, 1, 1, ceil_mode=True),
    ),
    "transposed": lambda: nn.Sequential(
        nn.ConvTranspose2d(3, 4, 3, 2, 1, 1), nn.PReLU(4), nn.ConvTranspose2d(4, 4, 3, 1, 1), nn.Conv2d(4, 3, 3, 2, 1)
    ),
    "interpolation": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(4, 4, 3, padding=1),
        nn.Upsample(scale_factor=2), nn.Conv2d(4, 4, 3, padding=1), nn.PixelUnshuffle(2), nn.Conv2d(16, 4, 3, padding=1),
        nn.PixelShuffle(2), nn.Conv2d(1, 4, 3, padding=1),
    ),
    "frozen norms": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU6(inplace=True), nn.Conv2d(4, 4, 3, padding=1),
        nn.BatchNorm2d(4, affine=False), nn.Hardtanh(inplace=True), nn.Conv2d(4, 4, 3, padding=1), nn.Dropout(0.5),
    ).eval(),
}  # fmt: skip


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", CHAINS)
def test_chains(name: str, grid: Grid) -> None:
    first, _, last = law(seeded(CHAINS[name]), (2, 3, 24, 22), grid)
    assert last[0] < first[0] and last[1] < first[1], (first, last)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_one_exchange_serves_the_chain(grid: Grid) -> None:
    first, second, third = law(seeded(chain), (2, 3, 24, 22), grid)
    assert 3 * second[0] == first[0] and second == third


class Residual(nn.Module):
    """x + f(x) in the ways that models write it, with a branch that reads further than the other."""

    def __init__(self, how: str):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.a, self.b = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.wide, self.one = nn.Conv2d(4, 4, 7, padding=3), nn.Conv2d(4, 4, 1)
        self.last = nn.Conv2d(4, 4, 3, padding=1)
        self.how = how

    def forward(self, x: Tensor) -> Any:
        return getattr(self, self.how)(self.stem(x))

    def residual(self, x: Tensor) -> Tensor:
        return self.last(F.relu(x + self.b(F.relu(self.a(x)))))

    def in_place(self, x: Tensor) -> Tensor:
        y = self.b(F.relu(self.a(x), inplace=True))
        y += x
        return self.last(F.relu_(y))

    def branches(self, x: Tensor) -> Tensor:
        return self.last(self.a(x) * torch.sigmoid(self.wide(x)) + self.one(x))

    def scaled(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.one(x.mean((2, 3), keepdim=True)))
        return self.last(self.a(x * gate) + self.b.bias.view(-1, 1, 1) * 2)

    def many_readers(self, x: Tensor) -> tuple[Any, ...]:
        y = self.a(x)
        return y.mean(), y[:, 1:3], self.b(y), torch.cat([y, x], 1), y.detach().square(), y.softmax(1), self.last(y)

    def one_side_only(self, x: Tensor) -> Tensor:
        return self.last(self.a(x) + x.cumsum(1))

    def repeated(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = torch.tanh(self.a(x))
        return x

    def loops(self, x: Tensor) -> Tensor:
        for _ in range(12):
            x = x + 0.1 * self.a(x)
        return x

    def recast(self, x: Tensor) -> Tensor:
        return self.last(self.a(x).double().clone().to(x.dtype))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("how", [n for n in vars(Residual) if n[0] != "_" and n != "forward"])
def test_residuals_and_branches(how: str, grid: Grid) -> None:
    first, _, last = law(seeded(lambda: Residual(how)), (2, 3, 24, 22), grid)
    assert last[0] < first[0], (first, last)


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


@pytest.mark.parametrize("grid", GRIDS[:2], ids=str)
@pytest.mark.parametrize(
    "how",
    ["assignment", "mask", "view", "view of a view", "part", "detached", "dropout", "other layout", "plain", "copy",
     "read before", "view before"],
)  # fmt: skip
def test_writes_in_between(how: str, grid: Grid) -> None:
    law(seeded(lambda: Writes(how)), (2, 3, 24, 22), grid)


def norm_in_between() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(True),
        nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1),
    )  # fmt: skip


def test_statistics_of_the_batch_end_a_run_of_layers() -> None:
    first, _, last = law(seeded(norm_in_between), (2, 3, 24, 22), Grid((2, 1)))
    assert first[0] - last[0] == 2, (first, last)


@pytest.mark.parametrize("on", [True, None], ids=["forced", "by cost"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: CNN2D(in_channels=3, classes=4, width=3, depth=3),
        lambda: CNN2D(in_channels=3, classes=4, width=3, depth=2, head="positions"),
        lambda: FCN2D(classes=3, width=1, dropout=0.0),
    ],
    ids=["CNN2D", "CNN2D positions", "FCN2D"],
)
def test_models(make: Callable[[], nn.Module], on: bool | None) -> None:
    for grid in (Grid((2, 1)), Grid((2, 2))):
        first, _, last = law(seeded(make), (1, 3, 64, 48), grid, on)
        assert on is None or last[0] < first[0], (first, last)


def test_volumes_and_signals() -> None:
    def three() -> nn.Module:
        return nn.Sequential(nn.Conv3d(2, 3, 3, padding=1), nn.ReLU(True), nn.MaxPool3d(2), nn.Conv3d(3, 3, 3, padding=1))

    def one() -> nn.Module:
        return nn.Sequential(nn.Conv1d(2, 3, 5, padding=2), nn.ReLU(True), nn.MaxPool1d(2), nn.Conv1d(3, 3, 3, padding=1))

    for make, size, grid in ((three, (1, 2, 16, 14, 9), Grid((2, 2, 1))), (one, (2, 2, 40), Grid((3,)))):
        first, _, last = law(seeded(make), size, grid)
        assert last[0] < first[0]


def test_never() -> None:
    first, _, last = law(seeded(chain), (2, 3, 24, 22), Grid((2, 1)), on=False)
    assert first == last


def test_without_a_gradient_of_the_input() -> None:
    law(seeded(chain), (2, 3, 24, 22), Grid((2, 2)), needs_grad=False)


def test_shards_thinner_than_the_composed_halo() -> None:
    """The halo of all layers together would reach past the neighbour: fewer layers share an exchange."""
    for grid in (Grid((3, 1), cuts=((0, 9, 12, 24),)), Grid((3, 1), cuts=((0, 1, 23, 24),))):
        law(nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(6))), (1, 3, 24, 8), grid)


def test_empty_pieces() -> None:
    law(seeded(chain), (1, 3, 24, 22), Grid((3, 1), cuts=((0, 0, 12, 24),)))
    law(seeded(chain), (1, 3, 24, 22), Grid((2, 1), data=2))


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
        grid, y = learned(a, b, c)
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
        grid, y = learned(a, b, c)
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
    for grid in (Grid((2, 1)), Grid((2, 2))):
        law(seeded(lambda: Modes(how)), (2, 3, 24, 22), grid, needs_grad=how != "frozen start")


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


def test_images_of_changing_sizes() -> None:
    sizes = [(1, 3, 24, 22), (1, 3, 26, 20), (1, 3, 24, 22), (2, 3, 24, 22), (1, 3, 26, 20), (2, 3, 24, 22)]
    for grid in (Grid((2, 1)), Grid((2, 2))):
        for of_rank in run_on(grid.world, steps, seeded(chain).double(), sizes, grid, True):
            assert not any(one["wrong"] for one in of_rank), of_rank
            assert of_rank[2]["forward"] < of_rank[0]["forward"] and of_rank[4]["forward"] < of_rank[1]["forward"]


class Turns(nn.Module):
    """A part that runs only at times: it is expected, then forgotten, then learned again."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        y = self.b(self.a(x))
        return self.c(y) if self.runs < 3 or self.runs > 8 else y * self.c.bias.view(-1, 1, 1) * self.c.weight.sum()


def test_layers_that_do_not_follow_any_more() -> None:
    found = run_on(2, steps, seeded(Turns).double(), [(1, 3, 24, 22)] * 11, Grid((2, 1)), True)
    for of_rank in found:
        assert not any(one["wrong"] for one in of_rank), of_rank
    assert [one["forward"] for one in found[0]] == [3, 1, 1, 1, 1, 1, 1, 1, 2, 1, 1]


def weight_normed() -> list[int]:
    torch.manual_seed(0)
    normed = torch.nn.utils.parametrizations.weight_norm
    net = nn.Sequential(*(normed(nn.Conv2d(3, 3, 3, padding=1)) for _ in range(3))).double()
    grid, messages = Grid((2, 1)), []
    for i in range(3):
        x = image(1, 3, 24, 22, seed=i)
        with fusing(True), grid.mesh().transport.record() as record:
            y = net(grid.shard(x))
        messages.append(record.messages - 1)  # one of them is that of `shard`
        assert difference(y.full(), net(x)) <= TOLERANCE
    return messages


def test_weights_that_are_computed_anew() -> None:
    """Weight norm gives a convolution another weight tensor in each run."""
    assert run_on(2, weight_normed) == [[3, 1, 1]] * 2


def autocast() -> list[Any]:
    grid, found = Grid((2, 1)), []
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(True), nn.MaxPool2d(3, 1, 1), nn.Conv2d(4, 4, 3, padding=1))
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
        grid, y = learned(a, b, c)
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


def by_cost(width: int, size: int, constants: Constants | None) -> list[int]:
    """Messages of two runs of a chain, as the cost decides."""
    torch.manual_seed(0)
    net = nn.Sequential(
        *(m for _ in range(4) for m in (nn.Conv2d(width, width, 3, padding=1), nn.ReLU(True)))
    )
    grid, found = Grid((2, 1)), []
    for _ in range(2):
        y = grid.shard(torch.ones(1, width, size, size))
        with fusing(None, constants), y.mesh.transport.record() as record:
            net(y).sum().backward()
        found.append(record.messages)
    return found


def test_small_images_are_fused_by_their_cost_and_large_ones_are_not() -> None:
    for first, second in run_on(2, by_cost, 8, 32, Constants()):
        assert second < first
    for first, second in run_on(2, by_cost, 32, 256, Constants()):
        assert second == first


def test_the_ranks_agree_on_measured_costs() -> None:
    found = run_on(2, by_cost, 4, 24, None)
    assert found[0] == found[1]
    constants = run_on(2, known)
    assert constants[0] == constants[1]
    assert all(value > 0 for one in constants[0] for value in astuple(one))


def known() -> list[Constants]:
    return list(Grid((2, 1)).mesh().transport.memory.constants.values())
