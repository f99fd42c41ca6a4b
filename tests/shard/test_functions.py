"""Custom autograd Functions on sharded tensors: exact, forward and backward, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import mural
from law import Grid, difference, holds, image, raises, since, some
from ranks import run_on

GRIDS = [Grid((2, 1)), Grid((2, 2)), Grid((3, 1), cuts=((1, 1, 10),)), Grid((1, 2), data=2), Grid(data=2), Grid((1,))]
FEW = some(GRIDS, 0, 3)


class Rounds(Function):
    """A straight-through estimator, which looks at whether a gradient is asked for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: float) -> Tensor:
        assert len(ctx.needs_input_grad) == 2
        ctx.limit = 2 * step
        ctx.save_for_backward(x)
        return (x / step).round() * step

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * (x.abs() <= ctx.limit) if ctx.needs_input_grad[0] else None, None


class Reverses(Function):
    """Gradient reversal: the input itself is returned."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.neg() * ctx.scale, None


class Swish(Function):
    """Swish that keeps its input alone, in the form with `setup_context`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, beta: float = 1.0) -> Tensor:
        return x * torch.sigmoid(beta * x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.beta = inputs[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(ctx.beta * x)
        return grad * (s + ctx.beta * x * s * (1 - s)), None


class Scales(Function):
    """An affine map per channel: the gradients of its parameters are sums over the whole batch and image."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight.view(1, -1, 1, 1) + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        # The bias has the shape (C, 1, 1): torch adds up the dims in which it was broadcast.
        return grad * weight.view(1, -1, 1, 1), (grad * x).sum((0, 2, 3)), grad


class Convolves(Function):
    """A convolution and a positional weight whose gradients are computed by operations that communicate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, place)
        return F.conv2d(x * place, weight, padding=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, place = ctx.saved_tensors
        inner = F.conv_transpose2d(grad, weight, padding=1)
        with torch.enable_grad():
            again = weight.detach().requires_grad_()
            y = F.conv2d((x * place).detach(), again, padding=1)
            # Gradients of a parameter inside are those of this rank's piece until they are averaged.
            (found,) = torch.autograd.grad((y * grad).sum(), again)
        return inner * place, found, inner * x


class Splits(Function):
    """Several inputs and outputs: one in whole numbers, one that is not differentiable, one plain, one no tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, power: int) -> Any:
        high, low = torch.maximum(x, y), torch.minimum(x, y)
        where = x >= y
        ctx.save_for_backward(where, high)
        ctx.mark_non_differentiable(low)
        return high**power, where.long(), low, (x * y).mean(), "kept"

    @staticmethod
    def backward(ctx: Any, high: Tensor, where: Tensor, low: Tensor, mean: Tensor, kept: None) -> Any:
        assert kept is None
        assert not low.any()
        chosen, value = ctx.saved_tensors
        grad = high * 2 * value + mean / value.numel() * value
        return grad * chosen, grad * ~chosen, None


class Skips(Function):
    """Undefined gradients stay None, and are returned for an input that asks for one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x + y, x - y

    @staticmethod
    def backward(ctx: Any, plus: Tensor | None, minus: Tensor | None) -> Any:
        assert minus is None
        return plus, None


class Fills(Function):
    """torch's own example of a rectifier: a mask written into a copy of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        grad = grad.clone()
        grad[x < 0] = 0
        return grad


class Writes(Function):
    """A rectifier in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.clamp_(min=0)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * (y > 0)


class Clips(Function):
    """A gradient scaled by its own norm: right on the single-device gradient alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / (1 + grad.square().sum().sqrt())


class Pools(Function):
    """The mean over the image: a result that every rank holds, and one that is a plain number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.shape = x.shape
        return x.mean((2, 3)), x.sum()

    @staticmethod
    def backward(ctx: Any, mean: Tensor, total: Tensor) -> Tensor:
        n = ctx.shape[2] * ctx.shape[3]
        return (mean / n)[:, :, None, None] + total.expand(ctx.shape)


class Flips(Function):
    """The batch, laid out otherwise, with merged dims inside and outside."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x.flatten(2).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * grad.transpose(1, 2).reshape(ctx.shape)


class Recomputes(Function):
    """A block that runs again in backward, as invertible networks do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: nn.Module) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            ctx.block(x).backward(grad)
        return x.grad, None


class Inside(nn.Module):
    """A block around a custom Function, with parameters before and behind it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.name = name
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.last = nn.Conv2d(4, 3, 3, padding=1)
        self.weight = nn.Parameter(torch.randn(4))
        self.bias = nn.Parameter(torch.randn(4, 1, 1))
        self.kernel = nn.Parameter(torch.randn(4, 4, 3, 3))
        self.place = nn.Parameter(torch.randn(1, 1, 12, 11))
        self.block = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Tanh())
        self.double()

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        return self.last(x + getattr(self, self.name)(x))

    def rounds(self, x: Tensor) -> Tensor:
        return Rounds.apply(x, 0.25)

    def reverses(self, x: Tensor) -> Tensor:
        return Reverses.apply(x, 0.7)

    def swish(self, x: Tensor) -> Tensor:
        return Swish.apply(x) + Swish.apply(x, 0.5)

    def named(self, x: Tensor) -> Tensor:
        return Swish.apply(x, beta=0.5)

    def scales(self, x: Tensor) -> Tensor:
        return Scales.apply(x, self.weight, self.bias)

    def convolves(self, x: Tensor) -> Tensor:
        return Convolves.apply(x, self.kernel, self.place)

    def splits(self, x: Tensor) -> Tensor:
        high, where, low, mean, kept = Splits.apply(x, x.roll(1, 2), 2)
        assert kept == "kept"
        assert not where.is_floating_point()
        assert not low.requires_grad
        return high * mean + where * low

    def skips(self, x: Tensor) -> Tensor:
        return Skips.apply(x, x.tanh())[0]

    def fills(self, x: Tensor) -> Tensor:
        return Fills.apply(x)

    def writes(self, x: Tensor) -> Tensor:
        y = x * 2
        z = Writes.apply(y)
        assert z is y
        return y + z

    def clips(self, x: Tensor) -> Tensor:
        return Clips.apply(x)

    def pools(self, x: Tensor) -> Tensor:
        mean, total = Pools.apply(x)
        return x * mean[:, :, None, None] + x * total

    def merged(self, x: Tensor) -> Tensor:
        return Flips.apply(x).transpose(1, 2).reshape(x.shape) + Clips.apply(x.flatten(2)).view(x.shape)

    def recomputes(self, x: Tensor) -> Tensor:
        return Recomputes.apply(x, self.block)

    def checkpointed(self, x: Tensor) -> Tensor:
        return checkpoint(lambda v: Convolves.apply(Swish.apply(v), self.kernel, self.place), x, use_reentrant=False)


NAMES = [
    "rounds", "reverses", "swish", "scales", "convolves", "splits", "skips", "fills", "writes", "clips", "pools",
    "merged", "recomputes", "checkpointed", *since("2.13", "named"),
]  # fmt: skip


@pytest.mark.parametrize("grid", FEW, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_custom_functions_keep_the_law(name: str, grid: Grid) -> None:
    holds(Inside(name), image(2, 3, 12, 11), grid)


class Moves(Function):
    """Gathers, cuts and plain values of all kinds as gradients: each is brought to the layout of its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, where: str) -> Tensor:
        ctx.where = where
        return x + y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        other = {
            "turned": lambda: grad.flip(2).transpose(2, 3).contiguous().transpose(2, 3),
            "gathered": lambda: grad.sort(2).values,
            "merged": lambda: grad.flatten(1).flip(1).view(grad.shape),
            "plain": lambda: torch.arange(grad.numel(), dtype=grad.dtype, device=grad.device).view(grad.shape),
            "wide": lambda: torch.stack([grad, 2 * grad]),
            "full": lambda: (grad.full() if isinstance(grad, mural.ShardedTensor) else grad).cumsum(3),
        }[ctx.where]()
        return grad * 3, other, None


class Drawn(nn.Module):
    """Two inputs of other shapes into one Function."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        return Moves.apply(x, x.mean((2, 3), keepdim=True) if self.where == "wide" else x.tanh(), self.where) * x


@given(
    st.sampled_from(["turned", "gathered", "merged", "plain", "wide", "full"]),
    st.sampled_from(GRIDS),
    st.integers(4, 13),
    st.integers(4, 13),
)
def test_gradients_in_any_layout(where: str, grid: Grid, height: int, width: int) -> None:
    if grid.cuts is not None:
        height = 12
    holds(Drawn(where), image(2, 2, height, width), grid)


def test_an_empty_piece() -> None:
    for name in ("convolves", "scales", "pools", "checkpointed"):
        holds(Inside(name), image(2, 3, 12, 11), Grid((3, 1), cuts=((0, 1, 11),)))


def around() -> dict[str, Any]:
    """What torch promises of a Function's result and node."""
    grid = Grid((2, 1))
    x = grid.shard(image(1, 3, 12, 11))
    y = Rounds.apply(x, 0.5)
    with torch.no_grad():
        still = Rounds.apply(grid.shard(image(1, 3, 12, 11)).requires_grad_(), 0.5)
    z = Reverses.apply(grid.shard(image(1, 3, 12, 11)).requires_grad_(), 1.0)
    joined = Joins.apply([x, x], 2.0)
    return {
        "plain": type(Rounds.apply(image(2), 0.5)) is Tensor,
        "no gradient": not y.requires_grad and not still.requires_grad,
        "node": z.local.grad_fn.name() == "ReversesBackward" and z.requires_grad,
        "in a list": difference(joined.full(), torch.cat([x.full()] * 2, 1) * 2) == 0,
    }


class Joins(Function):
    """Tensors in a list: torch does not differentiate those."""

    @staticmethod
    def forward(ctx: Any, xs: list[Tensor], by: float) -> Tensor:
        return torch.cat(xs, 1) * by

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, None


def test_results_and_nodes_are_torchs() -> None:
    for found in run_on(2, around):
        assert all(found.values()), found


class Refused(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, what: str) -> Tensor:
        ctx.what = what
        if what == "forward":
            return torch.linalg.inv(x[..., :11, :11])
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.what == "shape":
            return grad[:, :, :5], None
        if ctx.what == "count":
            return grad
        return (torch.linalg.inv(grad[..., :11, :11]) if ctx.what == "backward" else grad), None


def refused(what: str) -> None:
    x = Grid((2, 1)).shard(image(1, 3, 12, 11)).requires_grad_()
    Refused.apply(x, what).square().sum().backward(create_graph=what == "again")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("forward", "Refused.forward of a custom autograd.Function: linalg_inv has no rule"),
        ("backward", "Refused.backward of a custom autograd.Function: linalg_inv has no rule"),
        ("again", "Refused.backward of a custom autograd.Function: second derivatives"),
    ],
)
def test_refusals_name_the_function(what: str, message: str) -> None:
    raises(message, mural.UnsupportedOp, refused, what)


@pytest.mark.parametrize(
    ("what", "message"),
    [("shape", "gradient of shape (1, 3, 5, 11) was returned for an input of shape"), ("count", "1 gradients for 2")],
)
def test_wrong_gradients_raise(what: str, message: str) -> None:
    raises(message, RuntimeError, refused, what)
