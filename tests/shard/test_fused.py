"""Fused halos: one exchange for several layers, the same result; learned in the first run, used in the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness.vision import narrowed
from torch import Tensor, nn

from law import TOLERANCE, Grid, difference, image, some
from mural.models import CNN2D, FCN2D
from mural.shard.halo.fuse import fusing
from mural.shard.halo.fuse_cost import Constants
from ranks import run_on
from repeats import holds_in_steps, seeded, steps

GRIDS = [
    Grid((2, 1)),
    Grid((2, 2)),
    Grid((3, 1)),
    Grid((2, 1), cuts=((0, 9, 24),)),
    Grid((1, 2), data=2),
    Grid((2, 2), cuts=((0, 14, 24), (0, 9, 22))),
]


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
        nn.LeakyReLU(0.1, inplace=True), nn.Conv2d(6, 2, (3, 1), padding=(1, 0)),
        nn.Conv2d(2, 2, (1, 3), padding="same"),
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
        nn.Upsample(scale_factor=2), nn.Conv2d(4, 4, 3, padding=1), nn.PixelUnshuffle(2),
        nn.Conv2d(16, 4, 3, padding=1), nn.PixelShuffle(2), nn.Conv2d(1, 4, 3, padding=1),
    ),
    "frozen norms": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU6(inplace=True), nn.Conv2d(4, 4, 3, padding=1),
        nn.BatchNorm2d(4, affine=False), nn.Hardtanh(inplace=True), nn.Conv2d(4, 4, 3, padding=1), nn.Dropout(0.5),
    ).eval(),
}  # fmt: skip


@pytest.mark.parametrize("grid", some(GRIDS, 0, 5), ids=str)
@pytest.mark.parametrize("name", CHAINS)
def test_chains(name: str, grid: Grid) -> None:
    first, _, last = holds_in_steps(seeded(CHAINS[name]), (2, 3, 24, 22), grid)
    assert last[0] < first[0], (first, last)
    assert last[1] < first[1], (first, last)


@pytest.mark.parametrize("grid", some(GRIDS, 0, 5), ids=str)
def test_one_exchange_serves_the_chain(grid: Grid) -> None:
    first, second, third = holds_in_steps(seeded(chain), (2, 3, 24, 22), grid)
    assert 3 * second[0] == first[0]
    assert second == third


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


@pytest.mark.parametrize("grid", some(GRIDS, 0, 5), ids=str)
@pytest.mark.parametrize("how", [n for n in vars(Residual) if n[0] != "_" and n != "forward"])
def test_residuals_and_branches(how: str, grid: Grid) -> None:
    first, _, last = holds_in_steps(seeded(lambda: Residual(how)), (2, 3, 24, 22), grid)
    assert last[0] < first[0], (first, last)


def norm_in_between() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(True),
        nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1),
    )  # fmt: skip


def test_statistics_of_the_batch_end_a_run_of_layers() -> None:
    first, _, last = holds_in_steps(seeded(norm_in_between), (2, 3, 24, 22), Grid((2, 1)))
    assert first[0] - last[0] == 2, (first, last)


@pytest.mark.slow
@pytest.mark.parametrize("on", [True, None], ids=["forced", "by cost"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: CNN2D(in_channels=3, classes=4, width=3, depth=3),
        lambda: CNN2D(in_channels=3, classes=4, width=3, depth=2, head="positions"),
        lambda: FCN2D(classes=3, width=1, dropout=0.0),
        lambda: narrowed("resnet18", 32, classes=5).eval(),
    ],
    ids=["CNN2D", "CNN2D positions", "FCN2D", "frozen resnet18"],
)
def test_models(make: Callable[[], nn.Module], on: bool | None) -> None:
    for grid in (Grid((2, 1)), Grid((2, 2))):
        first, _, last = holds_in_steps(seeded(make), (1, 3, 64, 48), grid, on)
        assert on is None or last[0] < first[0], (first, last)


def test_volumes_and_signals() -> None:
    def three() -> nn.Module:
        return nn.Sequential(
            nn.Conv3d(2, 3, 3, padding=1), nn.ReLU(True), nn.MaxPool3d(2), nn.Conv3d(3, 3, 3, padding=1)
        )

    def one() -> nn.Module:
        return nn.Sequential(
            nn.Conv1d(2, 3, 5, padding=2), nn.ReLU(True), nn.MaxPool1d(2), nn.Conv1d(3, 3, 3, padding=1)
        )

    for make, size, grid in ((three, (1, 2, 16, 14, 9), Grid((2, 2, 1))), (one, (2, 2, 40), Grid((3,)))):
        first, _, last = holds_in_steps(seeded(make), size, grid)
        assert last[0] < first[0]


def test_never() -> None:
    first, _, last = holds_in_steps(seeded(chain), (2, 3, 24, 22), Grid((2, 1)), on=False)
    assert first == last


def test_without_a_gradient_of_the_input() -> None:
    holds_in_steps(seeded(chain), (2, 3, 24, 22), Grid((2, 2)), needs_grad=False)


def test_shards_thinner_than_the_composed_halo() -> None:
    """The halo of all layers together would reach past the neighbour: fewer layers share an exchange."""
    for grid in (Grid((3, 1), cuts=((0, 9, 12, 24),)), Grid((3, 1), cuts=((0, 1, 23, 24),))):
        holds_in_steps(nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(6))), (1, 3, 24, 8), grid)


def test_empty_pieces() -> None:
    holds_in_steps(seeded(chain), (1, 3, 24, 22), Grid((3, 1), cuts=((0, 0, 12, 24),)))
    holds_in_steps(seeded(chain), (1, 3, 24, 22), Grid((2, 1), data=2))


def test_images_of_changing_sizes() -> None:
    sizes = [(1, 3, 24, 22), (1, 3, 26, 20), (1, 3, 24, 22), (2, 3, 24, 22), (1, 3, 26, 20), (2, 3, 24, 22)]
    for grid in (Grid((2, 1)), Grid((2, 2))):
        for of_rank in run_on(grid.world, steps, seeded(chain).double(), sizes, grid, True):
            assert not any(one["wrong"] for one in of_rank), of_rank
            assert of_rank[2]["forward"] < of_rank[0]["forward"]
            assert of_rank[4]["forward"] < of_rank[1]["forward"]


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


def by_cost(width: int, size: int, constants: Constants | None) -> list[int]:
    """Messages of two runs of a chain, as the cost decides."""
    torch.manual_seed(0)
    net = nn.Sequential(*(m for _ in range(4) for m in (nn.Conv2d(width, width, 3, padding=1), nn.ReLU(True))))
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
