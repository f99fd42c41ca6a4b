"""Cases in which streamed steps were once wrong: each says what it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mural
from law import Expr, image
from mural.engine.result_tiles import ResultTile
from mural.memory.choice import Room, Speeds
from mural.memory.host_memory import HostMemory, HostRows
from mural.models import UNet
from streamed_law import Case, Loss, check_steps, images, streamed
from streamed_losses import IGNORED, LOSSES, both
from streamed_models import Spec
from streamed_oddities import (
    Attending,
    Pyramid,
    Shared,
    Summary,
    Supervised,
    WholeNorm,
    supervise,
)


def test_norm_of_which_a_pass_needs_less_than_its_own_part() -> None:
    """An odd image that is halved is not needed whole by passes that do not measure it: norms asked for all of it."""
    spec = Spec(block="residual", norm="batch", up="transposed 3")
    Case(spec, (25, 27), (12, 12), "mse", keep="none", count=2).check()


def test_tile_without_outputs() -> None:
    """Tiles at the end of a small image have no positions at low resolution: convolutions of nothing failed."""
    spec = Spec(dims=3, block="squeeze", norm="group", down="max ceil", up="size", padding="reflect")
    Case(spec, (11, 7, 6), (12, 12, 5), "bce", keep="none").check()


@pytest.mark.parametrize("loss", ["ignoring", "weighted"])
@pytest.mark.parametrize("head", ["pixels", "classes"])
def test_nothing_counts(loss: str, head: str) -> None:
    """Where all positions are ignored, torch's gradients are 0; streamed ones were not a number."""
    x = images(2, (20, 20), 1)[0]
    target = torch.full((2, 20, 20) if head == "pixels" else (2,), IGNORED)
    check_steps(Spec(head=head).build(), LOSSES[loss], [(x, target)], mural.Plan(stream=(8, 8)))


@pytest.mark.parametrize("head", ["pixels", "classes"])
def test_nothing_counts_in_a_later_step(head: str) -> None:
    """A first tile that counts for nothing was left out where the last pass was known, and no total was there."""
    shape = (1, 20, 20) if head == "pixels" else (1,)
    some, none = torch.ones(shape, dtype=torch.long), torch.full(shape, IGNORED)
    given = [*zip(images(1, (20, 20), 4), (some, none, some, none), strict=True)]
    check_steps(Spec(head=head).build(), LOSSES["ignoring"], given, mural.Plan(stream=(8, 8)), weights=(1.0,) * 4)


def test_losses_whose_totals_are_known_after_different_passes() -> None:
    """Gradients of totals that the loss itself gave were scaled along with those of the last pass: all were wrong."""
    torch.manual_seed(1)
    x, mask, label = images(2, (26, 31), 1)[0], torch.randint(0, 3, (2, 26, 31)), torch.randint(0, 2, (2,))
    check_steps(Supervised().double(), supervise, [(x, {"mask": mask, "label": label})], mural.Plan(stream=(12, 10)))


@pytest.mark.parametrize("norm", ["none", "batch"])
def test_losses_with_one_number_for_each_image(norm: str) -> None:
    """Each image has a gradient of its own, but one was taken for all, and none was found: gradients were 0."""
    Case(Spec(norm=norm), (20, 22), (8, 9), "per image", count=3).check()


@pytest.mark.parametrize("keep", [None, "none"])
def test_merged_dims(keep: str | None) -> None:
    """Merged dims of the image, as losses do it with `view(n, c, -1)`, had the extents of other dims."""
    Case(Spec(norm="batch"), (20, 22), (8, 9), "flat", count=2, keep=keep).check()


def oddity(
    make: Callable[[], nn.Module], keep: str | None, loss: Loss = both, extents: tuple[int, int] = (26, 31)
) -> None:
    """Check two steps of a model of `streamed_oddities`."""
    torch.manual_seed(1)
    batches = [(x, torch.randint(0, 3, (2, *extents))) for x in images(2, extents)]
    check_steps(make().double(), loss, batches, mural.Plan(stream=(12, 10)), keep)


@pytest.mark.parametrize("keep", [None, "none"])
def test_norm_that_is_called_twice(keep: str | None) -> None:
    """Its second call was not counted."""
    oddity(Shared, keep)


@pytest.mark.parametrize("keep", [None, "none"])
def test_norm_of_a_part_that_runs_on_whole_tensors(keep: str | None) -> None:
    """It learned twice in a step, in forward and again in backward."""
    oddity(WholeNorm, keep)


@pytest.mark.parametrize("keep", [None, "none"])
def test_attention_at_low_resolution(keep: str | None) -> None:
    """A call that gathers its tensor was taken for one that runs on tiles, and failed on the first one."""
    oddity(lambda: Attending(norm=True), keep)


class Writing(nn.Module):
    """A running mean that is written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, padding=1)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        self.seen.mul_(0.9).add_(0.1 * x.detach().mean((0, 2, 3)))
        return x


def test_buffers_that_the_model_writes() -> None:
    """What a forward wrote into a buffer was lost, or written once for each tile."""
    pm = mural.parallelize(Writing().double(), mural.Plan(stream=(8, 8)))
    with pytest.raises(mural.UnsupportedOp, match=r"writes \['model.seen'\]"):
        pm.step(images(1, (20, 20), 1)[0], torch.zeros(1, 20, 20).long())


class Between(nn.Module):
    """An expression of x between two convolutions."""

    def __init__(self, code: str):
        super().__init__()
        self.one, self.two, self.code = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1), Expr(code)

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(self.two(self.code(self.one(x))), x.shape[2:])


@pytest.mark.parametrize(
    "code",
    [
        # Windows of one call that lie next to each other were taken for windows that follow each other.
        "torch.stack([p * (i + 1) for i, p in enumerate(x[:, :, :24].split(8, 2))]).sum(0)",
        "x.chunk(2, 3)[1]",
        "F.fold(F.unfold(x, 3, padding=1), x.shape[2:], 3, padding=1)",
        "x - x.mean((2, 3), keepdim=True)",
        "x[:, :, 2:-2, 3::2]",
        "torch.einsum('nchw,nkhw->nck', x, x)[:, :, :1, None] * x",
        "x * torch.linspace(0, 1, x.shape[3], dtype=x.dtype, device=x.device)",
        "F.local_response_norm(x, 3) + F.lp_pool2d(F.pad(x, (0, 1, 0, 1)), 2, 2, 1)",
    ],
)
def test_calls_on_tiles(code: str) -> None:
    oddity(lambda: Between(code), None, extents=(26, 30))


def test_whole_results_without_a_layout() -> None:
    """What a whole pass made without a known layout was missing where totals come together."""
    torch.manual_seed(1)
    model = Between("F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2)").double()
    batches = [(x, image(2, 3, 26, 30, seed=9)) for x in images(2, (26, 30))]
    check_steps(model, LOSSES["mse"], batches, mural.Plan(stream=(12, 10)))


@pytest.mark.parametrize("keep", [None, "none"])
def test_a_batch_without_weight(keep: str | None) -> None:
    """Its gradients were divided by a factor of 0."""
    spec = Spec(norm="batch", block="dense", down="strided", up="size")
    Case(spec, (32, 28), (34, 14), "summed", count=2, keep=keep, weights=(0.0, 1.0), accumulate=True).check()


@pytest.mark.parametrize("head", ["pixels", "classes"])
def test_kept_on_the_host(head: str) -> None:
    """Windows narrower than the image were read as whole rows, and windows of nothing disturbed the order of rows."""
    Case(Spec(depth=2, block="depthwise", norm="instance", up="nearest", head=head), (30, 23), (21, 21), "l1",
         count=2, keep="host").check()  # fmt: skip
    Case(Spec(depth=2, block="in place", norm="group", down="avg ceil", head=head), (17, 21), (6, 6), "mse",
         count=2, keep="host").check()  # fmt: skip


def test_two_whole_passes_read_what_is_kept_on_the_host() -> None:
    """The gradient of the second one replaced that of the first."""
    oddity(Pyramid, "host")


class TwoWeights(nn.Module):
    """Two parameters with one gradient, and one whose gradient is expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Parameter(torch.rand(3, 2, 3, 3)) for _ in range(2))
        self.scale = nn.Parameter(torch.rand(3))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.one + self.two, padding=1) * self.scale.sum()


def test_parameters_that_share_a_gradient() -> None:
    """Both had the sum of both, tile by tile: autograd gives them one tensor, which was added to in place."""
    target = torch.randint(3, (1, 33, 30), generator=torch.Generator().manual_seed(5))
    batches = [(x, target) for x in images(1, (33, 30))]
    check_steps(TwoWeights().double(), F.cross_entropy, batches, mural.Plan(stream=(8, 8)))


def test_a_norm_with_a_bias_alone() -> None:
    """It had no gradient: the weight was asked whether there is one."""

    class Model(nn.Conv2d):
        def forward(self, input: Tensor) -> Tensor:
            return F.batch_norm(self._conv_forward(input, self.weight, None), None, None, None, self.bias, True)

    target = torch.randint(3, (1, 26, 30), generator=torch.Generator().manual_seed(5))
    batches = [(x, target) for x in images(1, (26, 30))]
    check_steps(Model(2, 3, 3, padding=1).double(), F.cross_entropy, batches, mural.Plan(stream=(8, 8)))


def test_nothing_is_held_between_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values on the host stayed there after inference, and bands on the device."""
    made: list[HostRows] = []
    take = HostMemory.rows
    monkeypatch.setattr(HostMemory, "rows", lambda *given: made.append(rows := take(*given)) or rows)
    model = UNet(in_channels=2, width=2, depth=2, classes=3).double()
    pm = streamed(model, F.cross_entropy, mural.Plan(stream=(12, 10)), "host")
    x, target = images(1, (40, 36), 1)[0], torch.randint(3, (1, 40, 36))
    for run in (lambda: pm.evaluate(x, target), lambda: pm(x), lambda: pm.step(x, target)):
        run()
        memory = pm.way.hosted
        assert not memory.bands.bands
        assert all(not rows.users for rows in made)
        assert made


class Told:
    """A sink that counts positions."""

    def __init__(self) -> None:
        self.positions = 0

    def begin(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        assert shape == (1, 3, 40, 36)

    def take(self, tile: ResultTile) -> None:
        self.positions += tile.output.numel()


def test_results_that_are_delivered_need_no_room() -> None:
    """They counted as kept, and on the host for large images, for which tiles become narrow bands."""
    model = UNet(in_channels=2, width=2, depth=2, classes=3).double().eval()
    pm: Any = mural.parallelize(model, mural.Plan(stream=(12, 10)), F.cross_entropy)
    pm.way._room = lambda: Room(0, 2**40, 8, Speeds(link=1e18))
    told = Told()
    pm.evaluate_into(images(1, (40, 36), 1)[0], torch.randint(3, (1, 40, 36)), told)
    assert told.positions == 3 * 40 * 36
    (program,) = pm.way.programs.values()
    assert not program.kept.host


def test_parameters_that_share_a_gradient_of_the_loss() -> None:
    """Totals give them one tensor, or an expanded one, and the next step added to it in place."""

    class Penalty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = (nn.Parameter(torch.rand(3)) for _ in range(2))

        def forward(self, scores: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(scores, target) + (self.one + self.two).square().sum() + self.one.sum()

    target = torch.randint(3, (1, 26, 30), generator=torch.Generator().manual_seed(5))
    batches = [(x, target) for x in images(1, (26, 30), 3)]
    check_steps(
        nn.Conv2d(2, 3, 3, padding=1).double(), Penalty().double(), batches, mural.Plan(stream=(8, 8)),
        weights=(1.0, 1.0, 1.0), accumulate=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    "code", ["x / x.std((2, 3), keepdim=True)", "x - torch.var_mean(x, (0, 2, 3), keepdim=True)[0]"]
)
def test_prediction_with_a_total_that_needs_another_one(code: str) -> None:
    """Without gradients, nothing told that a variance needs the mean of all tiles: each took its own."""
    model, x = Between(code).double(), images(2, (26, 30), 1)[0]
    pm = mural.parallelize(model, mural.Plan(stream=(8, 8)), loss=both)
    torch.testing.assert_close(pm(x).full(), model(x), rtol=1e-10, atol=1e-10)
    with torch.inference_mode():
        torch.testing.assert_close(pm(x).full(), model(x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "code",
    [
        "x * torch.complex(x, 2 * x).mean((2, 3), keepdim=True).abs()",
        "x + F.interpolate(torch.fft.irfft2(torch.fft.rfft2(F.avg_pool2d(x, 3)), s=(8, 10)), x.shape[2:])",
        "x + F.interpolate(torch.fft.fft2(torch.complex(*[F.avg_pool2d(x, 3)] * 2)).abs(), x.shape[2:])",
    ],
)
def test_complex_values(code: str) -> None:
    """They were taken for values without a gradient."""
    oddity(lambda: Between(code), None, extents=(26, 30))


def test_a_loss_of_a_complex_total() -> None:
    """The gradient of a complex number was guessed, but gradients are not proportional to it."""
    batches = [(x, image(2, 3, 26, 30, seed=9)) for x in images(2, (26, 30))]

    def loss(y: Tensor, target: Tensor) -> Tensor:
        return torch.complex(y[:, 0] - target[:, 0], y[:, 1]).mul(1 + 2j).mean().abs()

    check_steps(nn.Conv2d(2, 3, 3, padding=1).double(), loss, batches, mural.Plan(stream=(8, 8)))


class Blind(nn.Module):
    """Statistics, a net and a part on whole tensors that have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Conv2d(2, 3, 3, padding=1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        with torch.no_grad():
            scale, other = y.std((2, 3), keepdim=True), self.two(x).relu()
            low = F.avg_pool2d(self.three(x), 4).flip(2)
            y.mul_(2)
        return y / scale + other * y + F.interpolate(low, x.shape[2:])


@pytest.mark.parametrize("keep", [None, "none", "host"])
def test_what_the_model_computes_without_gradients(keep: str | None) -> None:
    """`torch.no_grad` inside of a model was lost: its calls had gradients."""
    oddity(Blind, keep)


def test_inputs_and_parameters_as_results() -> None:
    """Nobody kept them, which was an internal error."""

    class Model(nn.Conv2d):
        def forward(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return super().forward(input), input, self.weight

    model, x = Model(2, 3, 3, padding=1).double(), images(2, (26, 30), 1)[0]
    scores, given, weight = mural.parallelize(model, mural.Plan(stream=(8, 8)), loss=both)(x)
    torch.testing.assert_close(scores.full(), model(x)[0])
    assert given.full().equal(x)
    assert weight.equal(model.weight)
    pm = mural.parallelize(nn.Identity(), mural.Plan(stream=(8, 8)), loss=both)
    with pytest.raises(mural.UnsupportedOp, match="nothing is computed"):
        pm(x)


def test_weights_from_the_image() -> None:
    """A convolution with such weights was an internal error."""
    code = "F.conv2d(x, x.mean((0, 2, 3)).expand(4, 4)[:, :, None, None])"
    pm = mural.parallelize(Between(code).double(), mural.Plan(stream=(8, 8)), loss=both)
    with pytest.raises(mural.PlanError, match=r"conv2d at .* is computed from the image"):
        pm.step(images(1, (26, 30), 1)[0], torch.zeros(1, 26, 30).long())


@pytest.mark.parametrize("keep", [None, "none", "host"])
@pytest.mark.parametrize("batch", [False, True])
def test_gradients_of_what_all_tiles_make(batch: bool, keep: str | None) -> None:
    """A kept vector has one gradient, but each tile, or each image, of the pass that made it counted it."""
    oddity(lambda: Summary(batch), keep, F.cross_entropy)


@pytest.mark.parametrize("tile", [(40, 40), (10, 8)])
def test_a_maximum_that_no_loss_reads(tile: tuple[int, int]) -> None:
    """It is found on whole tensors after all tiles, and the loss was looked for there: a KeyError."""

    class Model(nn.Conv2d):
        def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
            y = super().forward(input)
            return y, y.amax((2, 3))

    batches = [(x, torch.randint(3, (2, 13, 11))) for x in images(2, (13, 11))]
    model = Model(2, 3, 3, padding=1).double()
    check_steps(model, lambda y, t: F.cross_entropy(y[0], t), batches, mural.Plan(stream=tile))


def test_a_whole_image_under_a_loss_of_single_values() -> None:
    """A loss of every position, after a call on whole tensors, looked for a target that no pass had: a KeyError."""

    class Model(nn.Conv2d):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).transpose(2, 3)

    def loss(y: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(y, t, reduction="none").flatten(1).mean(1).square().mean()

    pm = mural.parallelize(Model(2, 3, 3, padding=1).double(), mural.Plan(stream=(40, 40)), loss=loss)
    with pytest.raises(mural.UnsupportedOp, match=r"cross_entropy at .* that a pass over tiles does not have"):
        pm.step(images(1, (3, 2), 1)[0], torch.zeros(1, 2, 3).long())
