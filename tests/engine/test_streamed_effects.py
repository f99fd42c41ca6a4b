"""What a forward does besides computing, under `stream`: the same as without a plan, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mural
from streamed_law import check_steps, images

Function = Callable[[Any, Tensor], Tensor]
PLAN = mural.Plan(stream=(8, 8))


class Around(nn.Module):
    """A function of itself and of the result of its first layer."""

    def __init__(self, function: Function):
        super().__init__()
        self.one, self.mid, self.two = (nn.Conv2d(a, b, 3, padding=1) for a, b in ((2, 4), (4, 4), (4, 3)))
        self.norm, self.scale, self.function = nn.BatchNorm2d(4), nn.Parameter(torch.ones(4, 1, 1)), function
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.function(self, self.one(x)))


def steps(function: Function) -> None:
    """Check two steps with a function."""
    torch.manual_seed(1)
    batches = [(x, torch.randint(0, 3, (2, 24, 20))) for x in images(2, (24, 20))]
    check_steps(Around(function).double(), F.cross_entropy, batches, PLAN)


# -- hooks and backwards -----------------------------------------------------------------------------------------------


def hooked(model: Any, x: Tensor) -> Tensor:
    x.register_hook(lambda grad: 2 * grad)
    return x * 1


def hooked_parameter(model: Any, x: Tensor) -> Tensor:
    model.scale.register_hook(lambda grad: 2 * grad)
    return x * model.scale


def hooked_accumulation(model: Any, x: Tensor) -> Tensor:
    model.scale.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(2) and None)
    return x * model.scale


def retained(model: Any, x: Tensor) -> Tensor:
    x.retain_grad()
    return x


def hooked_node(model: Any, x: Tensor) -> Tensor:
    x.grad_fn.register_prehook(lambda grads: tuple(2 * grad for grad in grads))  # type: ignore[union-attr]
    return x


def hooked_several(model: Any, x: Tensor) -> Tensor:
    torch.autograd.graph.register_multi_grad_hook([x], print)
    return x


def hooked_module(model: Any, x: Tensor) -> Tensor:
    handle = model.mid.register_full_backward_hook(lambda module, given, made: (2 * given[0],))
    y = model.mid(x)
    handle.remove()
    return y


def other_saved(model: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: 2 * t, lambda t: t):
        return x * x


def reentrant(model: Any, x: Tensor) -> Tensor:
    return checkpoint(model.mid, x, use_reentrant=True)


def went_back(model: Any, x: Tensor) -> Tensor:
    (x.detach() * model.scale).square().mean().backward()
    return x * model.scale


def went_back_by_name(model: Any, x: Tensor) -> Tensor:
    torch.autograd.backward([model.scale.square().sum()])
    return x * model.scale


def differentiated(model: Any, x: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad((x * model.scale).square().mean(), model.scale)
    return x * grad


def differentiated_alone(model: Any, x: Tensor) -> Tensor:
    y = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad(y.pow(3).sum(), y)
    return x + grad


def functional(model: Any, x: Tensor) -> Tensor:
    return x + torch.func.grad(lambda z: z.square().sum())(x)


def vectorized(model: Any, x: Tensor) -> Tensor:
    return torch.func.vmap(lambda z: 2 * z)(x)


def inferred(model: Any, x: Tensor) -> Tensor:
    with torch.inference_mode():
        y = model.mid(x)
    return x + y.mean()


def frozen(model: Any, x: Tensor) -> Tensor:
    model.scale.requires_grad_(False)
    y = x * model.scale
    model.scale.requires_grad_(True)
    return y


def cleared(model: Any, x: Tensor) -> Tensor:
    model.scale.grad = None
    return x * model.scale


def forbidden(model: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        return x * x


# -- writes ------------------------------------------------------------------------------------------------------------


def other_memory(model: Any, x: Tensor) -> Tensor:
    y = x * 1
    y.data = y.data * 0.5
    return y


def past_autograd(model: Any, x: Tensor) -> Tensor:
    y = x * model.scale
    model.scale.data.mul_(0.9)
    return y


def saved_past_autograd(model: Any, x: Tensor) -> Tensor:
    y = x * 1
    spread = y.std((2, 3), keepdim=True)
    y.data.clamp_(-0.1, 0.1)
    return y * spread


def slice_doubled(model: Any, x: Tensor) -> Tensor:
    y = x * 1
    y[:, :, 1::2] *= 2
    return model.mid(y)


def slice_written(model: Any, x: Tensor) -> Tensor:
    mask = torch.ones_like(x)
    mask[:, :, ::2].mul_(0.5)
    return x * mask


def chunk_written(model: Any, x: Tensor) -> Tensor:
    y = x * 1
    y.detach().chunk(2, 2)[0].mul_(2)
    return y


def split_clamped(model: Any, x: Tensor) -> Tensor:
    y = x * 1
    y.detach().split(5, 3)[1].clamp_(-0.1, 0.1)
    return y


# -- generators and state ----------------------------------------------------------------------------------------------


def seeded(model: Any, x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return F.dropout(x, 0.5)


def forked(model: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        y = x * torch.rand(4, 1, 1, dtype=x.dtype)
    return y * torch.rand(4, 1, 1, dtype=x.dtype)


def initialized(model: Any, x: Tensor) -> Tensor:
    return x + nn.init.trunc_normal_(torch.empty(4, 1, 1, dtype=x.dtype))


def initialized_tile(model: Any, x: Tensor) -> Tensor:
    return x + nn.init.normal_(torch.empty_like(x))


def norm_again_twice(model: Any, x: Tensor) -> Tensor:
    """In backward, its second call comes first."""
    y = checkpoint(lambda y: model.norm(model.mid(y)).relu(), x, use_reentrant=False)
    return checkpoint(lambda y: model.mid(model.norm(y)), y, use_reentrant=False)


REFUSED: dict[Function, str] = {
    hooked: "registers a hook on a gradient",
    hooked_parameter: "registers a hook on a gradient",
    hooked_accumulation: "registers a hook on a gradient",
    retained: "retain_grad",
    hooked_node: "grad_fn",
    hooked_several: "grad_fn|hook",
    hooked_module: "backward hooks",
    other_saved: "saved_tensors_hooks",
    reentrant: "use_reentrant=True",
    went_back: "backward",
    went_back_by_name: "autograd.backward",
    differentiated: "autograd.grad",
    differentiated_alone: "autograd.grad",
    functional: "torch.func",
    vectorized: "not seen",
    inferred: "inference_mode",
    frozen: "gradients of a parameter on or off",
    cleared: r"sets the \.grad",
    forbidden: "not here",
    other_memory: r"other memory \(\.data",
    past_autograd: r"past autograd \(\.data\)",
    saved_past_autograd: r"past autograd \(\.data\)",
    slice_doubled: "slice of the image",
    slice_written: "mul_ at .* slice of the image",
    chunk_written: "mul_ at .* slice of the image",
    split_clamped: "clamp_ at .* slice of the image",
    seeded: "generator .* before dropout",
    forked: "generator .* before rand",
    initialized: "trunc_normal_",
    initialized_tile: "torch.nn.init",
    norm_again_twice: "batch_norm .* inside torch's checkpoint",
}


@pytest.mark.parametrize("function", REFUSED, ids=lambda f: f.__name__)
def test_what_a_step_would_lose(function: Function) -> None:
    """Hooks were dropped, writes and updates of buffers were lost, gradients of a reentrant checkpoint were None, other
    numbers were drawn; `torch.autograd.grad`, `torch.func` and `inference_mode` ended in torch's words.
    """
    pm = mural.parallelize(Around(function).double(), PLAN, loss=F.cross_entropy)
    with pytest.raises((mural.UnsupportedOp, mural.PlanError), match=REFUSED[function]):
        pm.step(images(2, (24, 20), 1)[0], torch.zeros(2, 24, 20).long())


# -- what is exact -----------------------------------------------------------------------------------------------------


def view_written(model: Any, x: Tensor) -> Tensor:
    y = x * 1
    part = y[:, :1]
    part.mul_(2)
    return model.mid(y) + part


def detached_view(model: Any, x: Tensor) -> Tensor:
    """Two windows of one memory: the write was seen in the smaller one alone."""
    y = x * 1
    z = y.detach()
    z[:, :1] = 0
    return model.mid(y) + y + z


def low_resolution(model: Any, x: Tensor) -> Tensor:
    """What a rule gave was a part of another tensor, to which autograd let nobody write."""
    y = F.interpolate(x, scale_factor=2)
    y[:, :1].mul_(2)
    y.data.clamp_(-1, 1)
    return F.avg_pool2d(y, 2)


def assigned(model: Any, x: Tensor) -> Tensor:
    """A write through a view of another tensor was lost."""
    y = x * 1
    y.detach()[:, :, 1::2] = 0.7
    y[:, 1, 2:-2, 3] = 0
    y[0, :, :, -1] = 0.1
    mask = torch.ones_like(x)
    mask[..., :5] = 0
    return model.mid(y) * mask


def modes(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = checkpoint(lambda y: model.norm(model.mid(y)).relu(), x, use_reentrant=False)
        with torch.enable_grad():
            other = checkpoint(model.mid, x, use_reentrant=True) if not x.requires_grad else model.mid(x)
    return x * gate.sigmoid() + other


def hooked_forward(model: Any, x: Tensor) -> Tensor:
    handle = model.mid.register_forward_hook(lambda module, given, made: 2 * made)
    y = model.mid(x)
    handle.remove()
    return y


def norm_again(model: Any, x: Tensor) -> Tensor:
    return checkpoint(lambda y: model.norm(model.mid(y)).relu(), x, use_reentrant=False)


def counted_again(model: Any, x: Tensor) -> Tensor:
    def block(y: Tensor) -> Tensor:
        model.count.add_(1)
        return model.mid(y)

    return checkpoint(block, x, use_reentrant=False)


def norm_partly_again(model: Any, x: Tensor) -> Tensor:
    """A checkpoint ends as soon as it has what backward needs."""
    y = checkpoint(lambda y: (model.mid(y).relu(), model.count.add_(1), model.norm(y))[0], x, use_reentrant=False)
    return model.mid(y)


def norm_again_low(model: Any, x: Tensor) -> Tensor:
    """On whole tensors, and in a checkpoint inside another one."""

    def inner(y: Tensor) -> Tensor:
        return checkpoint(lambda z: model.norm(model.mid(z)).relu(), y, use_reentrant=False)

    y = F.avg_pool2d(x, 4).flip(2)
    return x + F.interpolate(checkpoint(inner, y, use_reentrant=False), x.shape[2:])


def norm_not_again(model: Any, x: Tensor) -> Tensor:
    return x + checkpoint(lambda y: model.norm(y).relu(), x, use_reentrant=False).detach()


EXACT = (
    norm_again,
    counted_again,
    norm_partly_again,
    norm_again_low,
    norm_not_again,
    view_written,
    detached_view,
    low_resolution,
    assigned,
    modes,
    hooked_forward,
)


@pytest.mark.parametrize("function", EXACT, ids=lambda f: f.__name__)
def test_what_a_step_does_alike(function: Function) -> None:
    steps(function)


class Asking(nn.Module):
    """Goes by whether the gradient of the image is wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(2, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(2 * x if x.requires_grad else x)


def test_a_forward_that_asks_for_gradients_of_the_image() -> None:
    """A recording took the image for one without."""
    batches = [(x, torch.randint(0, 3, (2, 16, 12))) for x in images(2, (16, 12))]
    check_steps(Asking().double(), F.cross_entropy, batches, PLAN)
