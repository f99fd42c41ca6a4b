"""What a training script does around the model: checkpoint, autocast, hooks, DDP, penalties, copies, gradients."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mural
from law import Grid, compare, difference, holds, image, raises
from ranks import run_on

GRIDS = [Grid((2, 1)), Grid((2, 2)), Grid((3, 1), cuts=((1, 1, 10),)), Grid((1, 2), data=2)]


class Residual(nn.Module):
    """A residual block whose branch runs through `around`."""

    def __init__(self, around: str = ""):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.branch = nn.Sequential(
            nn.Conv2d(4, 4, 3, padding=1, bias=False),  # before a batch norm a bias's gradient is rounding alone
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.MaxPool2d(3, 1, 1),
            nn.Conv2d(4, 4, 3, padding=1),
        )
        self.around = around

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return x + getattr(self, self.around or "plain")(x)

    def plain(self, x: Tensor) -> Tensor:
        return self.branch(x)

    def checkpointed(self, x: Tensor) -> Tensor:
        return checkpoint(self.branch, x, use_reentrant=False)

    def reentrant(self, x: Tensor) -> Tensor:
        return checkpoint(self.branch, x, use_reentrant=True)

    def hidden(self, x: Tensor) -> Tensor:
        return Hidden.apply(self.stem.weight, lambda: x * 2)

    def custom(self, x: Tensor) -> Tensor:
        return Doubled.apply(self.branch(x))

    def custom_loss(self, x: Tensor) -> Tensor:
        return SumOf.apply(x)


class Hidden(torch.autograd.Function):
    """Makes a sharded tensor that it did not get as an argument."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, run: Callable[[], Tensor]) -> Tensor:
        return run()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class SumOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.expand(ctx.shape)


@pytest.mark.slow
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("needs_grad", [True, False], ids=["input gradient", "no input gradient"])
def test_checkpoint(grid: Grid, needs_grad: bool) -> None:
    holds(Residual("checkpointed").double(), image(2, 3, 12, 11), grid, needs_grad=needs_grad)


def whole_model_checkpointed() -> dict[str, float]:
    return compare(WholeCheckpoint(), [image(2, 3, 12, 11)], Grid((3, 1), cuts=((0, 1, 11),)), False)


class WholeCheckpoint(nn.Module):
    """A checkpoint whose last layer saves nothing (interpolation), on ranks of which one is empty."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(2), nn.Upsample(size=(25, 9), mode="bilinear")
        )
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.net, x, use_reentrant=False) * 2


def test_checkpoint_with_an_empty_piece_ends() -> None:
    for found in run_on(3, whole_model_checkpointed):
        assert max(found.values()) < 1e-10, found


def residual_step(around: str) -> None:
    grid = Grid((2, 1))
    model = Residual(around).double()
    (model(grid.shard(image(1, 3, 12, 11)))).square().mean().backward()


@pytest.mark.parametrize(
    ("around", "node"), [("hidden", "HiddenBackward"), ("reentrant", "CheckpointFunctionBackward")]
)
def test_what_bypasses_the_wrapper_in_a_residual_branch_raises(around: str, node: str) -> None:
    raises(node, mural.UnsupportedOp, residual_step, around)


@pytest.mark.parametrize("around", ["custom", "custom_loss"])
def test_a_custom_function_in_a_residual_branch_lost_gradients(around: str) -> None:
    holds(Residual(around).double(), image(2, 3, 12, 11), Grid((2, 1)))


def past_the_pieces() -> None:
    x = Residual().double()(Grid((2, 1)).shard(image(1, 3, 12, 11)))
    checkpoint(torch.sum, x, use_reentrant=True).backward()


def test_a_gradient_past_the_pieces_raises() -> None:
    raises("a gradient reached a sharded tensor", mural.UnsupportedOp, past_the_pieces)


def full_hook_step() -> None:
    grid = Grid((2, 1))
    model = Residual().double()
    model.branch.register_full_backward_hook(lambda *_: None)
    model(grid.shard(image(1, 3, 12, 11))).square().mean().backward()


def test_full_backward_hooks_raise() -> None:
    raises("", mural.UnsupportedOp, full_hook_step)


def hooks() -> list[str]:
    grid, seen = Grid((2, 1)), []
    model = Residual().double()
    model.branch.register_forward_pre_hook(lambda m, a: seen.append(f"pre {tuple(a[0].shape)}"))
    model.branch.register_forward_hook(lambda m, a, out: seen.append(f"post {tuple(out.shape)}"))
    y = model(grid.shard(image(1, 3, 12, 11)))
    y.register_hook(lambda grad: seen.append(f"grad {tuple(grad.shape)} {float(grad.sum()):.6f}"))
    y.sum().backward()
    return seen


def test_forward_hooks_and_tensor_hooks_see_global_tensors() -> None:
    expected = ["pre (1, 4, 12, 11)", "post (1, 4, 12, 11)", f"grad (1, 4, 12, 11) {4 * 12 * 11:.6f}"]
    assert run_on(2, hooks) == [expected] * 2


def ddp() -> dict[str, float]:
    grid = Grid((2, 2))
    grid.mesh()
    torch.manual_seed(0)
    model = Residual().double()
    plain = deepcopy(model)
    wrapped = nn.parallel.DistributedDataParallel(model)
    x = image(2, 3, 12, 11)
    wrapped(grid.shard(x)).square().mean().backward()
    plain(x).square().mean().backward()
    return {
        n: difference(q.grad, p.grad) for (n, p), q in zip(plain.named_parameters(), model.parameters(), strict=True)
    }


def test_ddp_around_the_model() -> None:
    for found in run_on(4, ddp):
        assert max(found.values()) < 1e-10, found


def fsdp() -> str:
    from torch.distributed.fsdp import fully_shard

    grid = Grid((2, 1))
    grid.mesh()
    torch.manual_seed(0)
    model = Residual().double()
    plain = deepcopy(model)
    fully_shard(model.branch)
    fully_shard(model)
    x = image(2, 3, 12, 11)
    try:
        model(grid.shard(x)).square().mean().backward()
    except mural.UnsupportedOp as error:
        return f"raises {error}"
    plain(x).square().mean().backward()
    worst = max(
        difference(q.grad.full_tensor(), p.grad) for p, q in zip(plain.parameters(), model.parameters(), strict=True)
    )
    return "exact" if worst < 1e-10 else f"wrong by {worst}"


def test_fsdp2_works_or_raises() -> None:
    answers = run_on(2, fsdp)
    assert all(a == "exact" or a.startswith("raises") for a in answers), answers


def penalty() -> dict[str, float]:
    grid = Grid((2, 1))
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    ).double()
    plain = deepcopy(model)
    x, t = image(2, 3, 12, 11), torch.tensor([0, 1])

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        return F.cross_entropy(m(x), t) + 0.1 * sum(p.square().sum() for p in m.parameters())

    loss(model, grid.shard(x)).backward()
    for _ in range(2):
        mural.reduce_gradients(model, grid.mesh())
    before = [p.grad.clone() for p in model.parameters()]
    mural.reduce_gradients(model, grid.mesh())
    same = all(torch.equal(a, p.grad) for a, p in zip(before, model.parameters(), strict=True))
    loss(plain, x).backward()
    found = {
        n: difference(q.grad, p.grad) for (n, p), q in zip(plain.named_parameters(), model.parameters(), strict=True)
    }
    return found | {"idempotent": 0.0 if same else 1.0}


def test_penalty_on_plain_parameters_and_idempotent_reduction() -> None:
    for found in run_on(2, penalty):
        assert max(found.values()) < 1e-12, found


def gradients() -> dict[str, float]:
    """x.grad, retain_grad, autograd.grad and backward(gradient), all at true scale."""
    grid = Grid((2, 1))
    x = image(1, 3, 12, 11)
    conv = nn.Conv2d(3, 2, 3, padding=1).double()
    torch.nn.init.constant_(conv.weight, 0.3)
    torch.nn.init.constant_(conv.bias, 0.3)
    seed = image(1, 2, 12, 11, seed=4)
    plain = x.clone().requires_grad_()
    middle = conv(plain)
    (gx, gm) = torch.autograd.grad((middle.square() * seed).sum(), (plain, middle))
    found = {}
    y = grid.shard(x).requires_grad_()
    mid = conv(y)
    out = mid.square()
    ga, gb = torch.autograd.grad((out * seed).sum(), (y, mid), retain_graph=True)
    mid.retain_grad()
    found["autograd.grad leaf"], found["autograd.grad middle"] = difference(ga.full(), gx), difference(gb.full(), gm)
    out.backward(seed, retain_graph=True)
    found["backward leaf"], found["retained"] = difference(y.grad.full(), gx), difference(mid.grad.full(), gm)
    y.grad = None
    out.backward(grid.shard(seed))
    found["backward with a sharded gradient"] = difference(y.grad.full(), gx)
    copied = deepcopy(y)
    found["deepcopy"] = difference(copied.grad.full(), gx) + difference(copied.full(), x)
    full = y.detach().requires_grad_()
    (full.full() * x).sum().backward()
    found["through full()"] = difference(full.grad.full(), x)
    with torch.no_grad():
        found["no_grad"] = float(conv(y).local.requires_grad)
    return found


def test_gradients_have_the_true_scale() -> None:
    for found in run_on(2, gradients):
        assert max(found.values()) < 1e-12, found


def autocast(dtype: torch.dtype) -> list[str]:
    grid, wrong = Grid((2, 1)), []
    torch.manual_seed(0)
    x = image(2, 4, 12, 11).float()
    modules = [
        nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, stride=2), nn.ConvTranspose2d(4, 4, 2, 2), nn.BatchNorm2d(4),
        nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True), nn.LayerNorm((12, 11)), nn.MaxPool2d(2),
        nn.AvgPool2d(3, 1, 1),
        nn.Upsample(scale_factor=2, mode="bilinear"), nn.Softmax(1), nn.Softmax(2), nn.AdaptiveAvgPool2d(1), nn.GELU(),
    ]  # fmt: skip
    for first in (nn.Identity(), nn.Conv2d(4, 4, 1)):
        for module in modules:
            net = nn.Sequential(first, module)
            with torch.autocast("cpu", dtype=dtype):
                expected, got = net(x), net(grid.shard(x))
                a, b = expected.square().mean(), got.square().mean()
            if (
                got.dtype != expected.dtype
                or a.dtype != b.dtype
                or difference(got.full().float(), expected.float()) > 0.02
            ):
                wrong.append(f"{net}: {got.dtype} for {expected.dtype}, {difference(got.full(), expected)}")
            if b.requires_grad:
                b.backward()
    return wrong


def test_autocast_gives_plain_torchs_types() -> None:
    assert run_on(2, autocast, torch.bfloat16) == [[], []]


def channels_last() -> list[bool]:
    grid = Grid((2, 2))
    x = image(1, 4, 12, 12).contiguous(memory_format=torch.channels_last)
    y = grid.shard(x)
    net = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)).double()
    net = net.to(memory_format=torch.channels_last)
    return [
        y.local.is_contiguous(memory_format=torch.channels_last),
        net(y).local.is_contiguous(memory_format=torch.channels_last),
    ]


def test_channels_last_is_kept() -> None:
    assert run_on(4, channels_last) == [[True, True]] * 4


def test_float32() -> None:
    torch.manual_seed(0)
    model = Residual()
    holds(model, image(1, 3, 24, 22).float(), Grid((2, 2)), tolerance=1e-4)


def aliases(what: str) -> None:
    x = Grid((2, 1)).shard(image(1, 3, 12, 11))
    if what == "reshape":
        x.reshape(1, 3, 11, 12).add_(1)
    else:
        x[:, :, 3].mul_(2)


@pytest.mark.parametrize("what", ["reshape", "index"])
def test_inplace_write_to_a_lost_alias_raises(what: str) -> None:
    raises("had to communicate", mural.LayoutError, aliases, what)


def writes() -> dict[str, float]:
    grid = Grid((2, 2))
    found = {}
    for name in ("slice", "mask", "view"):
        plain, sharded = image(2, 3, 12, 11), grid.shard(image(2, 3, 12, 11))
        for x in (plain, sharded):
            if name == "slice":
                x[:, :, 2:9, ::2] = 7.0
                x[:, 1:2] = x[:, :1] * 2
            elif name == "mask":
                x[x > 0.5] = -1.0
            else:
                x[:, :, 4:8].mul_(3)
                x.permute(0, 2, 3, 1)[..., 0].add_(1)
                x.flatten(2).mul_(2)
                x.flatten(2)[:, 1].add_(1)
                x.view(2, -1)[:, 3:50] = 0
        found[name] = difference(sharded.full(), plain)
    return found


def test_writes_through_slices_masks_and_views() -> None:
    for found in run_on(4, writes):
        assert max(found.values()) == 0.0, found


class Nested(nn.Module):
    """A checkpoint inside a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.MaxPool2d(3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.outer, x, use_reentrant=False)

    def outer(self, x: Tensor) -> Tensor:
        return x.sigmoid() + checkpoint(self.block, x * 2, use_reentrant=False)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_nested_checkpoint(grid: Grid) -> None:
    model = Nested().double()
    model.block[0].bias = None
    holds(model, image(2, 3, 12, 11), grid)


class NestedTanh(nn.Module):
    """A checkpoint of pointwise operations inside a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.outer, x * 1, use_reentrant=False)

    def outer(self, x: Tensor) -> Tensor:
        return self.conv(checkpoint(torch.tanh, x, use_reentrant=False)).relu()


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_nested_checkpoint_of_pointwise_operations_raised(grid: Grid) -> None:
    holds(NestedTanh().double(), image(2, 3, 12, 11), grid)


def second_derivative() -> None:
    grid = Grid((2, 1))
    conv = nn.Conv2d(3, 2, 3, padding=1).double()
    conv(grid.shard(image(1, 3, 12, 11)).requires_grad_()).sum().backward(create_graph=True)


def test_second_derivatives_through_a_convolution_raise() -> None:
    """Under a constant gradient, `once_differentiable` let them pass without the dependence on the weight."""
    raises("second derivatives", mural.UnsupportedOp, second_derivative)


class Intermediate(nn.Module):
    """A model that asks for the gradient of an intermediate result."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        y.requires_grad_()
        return y * 2


def test_requires_grad_of_an_intermediate_result_scaled_its_gradient() -> None:
    holds(Intermediate().double(), image(1, 3, 8, 9), Grid((2, 1)))


class LastNorm(nn.Module):
    """A checkpoint that saves nothing after its norm: torch computes the norm again, and updates its buffers twice."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.stem, self.norm, self.head = nn.Conv2d(3, 4, 3, padding=1), norm, nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.branch, self.stem(x), use_reentrant=False))

    def branch(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return x + x.roll(1, 2)


@pytest.mark.parametrize("grid", [Grid((2, 1)), Grid((1, 2), data=2)], ids=str)
def test_a_norm_at_the_end_of_a_checkpoint_updates_its_buffers_as_often_as_on_one_device(grid: Grid) -> None:
    # Its update came after the tensors that it saves, where the checkpoint stops: once instead of twice.
    holds(LastNorm(nn.BatchNorm2d(4)).double(), image(2, 3, 12, 11), grid)


def test_an_instance_norm_with_buffers_in_a_checkpoint_is_refused() -> None:
    # torch updates them once or twice, by what is saved after the norm, and ranks save more than one device.
    module = LastNorm(nn.InstanceNorm2d(4, track_running_stats=True)).double()
    raises("computed again by a checkpoint", mural.MuralError, compare, module, [image(2, 3, 12, 11)], Grid((2, 1)))


class LastRoll(LastNorm):
    """A checkpoint in which nothing is saved but the positions of a roll."""

    def branch(self, x: Tensor) -> Tensor:
        return x + x.roll(1, 2)


def test_a_roll_at_the_end_of_a_checkpoint_is_computed_again_on_all_ranks_or_none() -> None:
    # One rank chose positions, which it saved, and its peer needed none: messages of one met no partner.
    holds(LastRoll(nn.Identity()).double(), image(2, 3, 12, 11), Grid((2, 1)))
