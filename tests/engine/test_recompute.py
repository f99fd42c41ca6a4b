"""Blocks that are computed again: the same losses, gradients and state, whatever a block does to what it is given."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from io import BytesIO
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import mural
from ranks import run_on

PLANS = [
    mural.Plan(recompute="all"),
    mural.Plan(recompute="all", offload=("activations",)),
    mural.Plan(recompute="all", offload=("activations", "parameters", "optimizer"), memory="10KB"),
]
NAMES = ["recompute", "with offload", "with a limit"]


class Between(nn.Module):
    """A block between two layers; `block` makes of 4 channels as many."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.first, self.block, self.last = nn.Conv2d(2, 4, 3, padding=1), block, nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.block(self.first(x)))


class Block(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.one(x).relu())


class Skipping(Between):
    """Uses what it gave to the block, to which the block writes."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.last(self.block(y) + y)


class Appending(Between):
    """Gives its block a list, to which the block appends."""

    class Inner(Block):
        def forward(self, found: list[Tensor]) -> Tensor:  # type: ignore[override]
            found.append(super().forward(found[-1]))
            return found[0] + found[-1]

    def __init__(self) -> None:
        super().__init__(self.Inner())

    def forward(self, x: Tensor) -> Tensor:
        found = [self.first(x)]
        return self.last(self.block(found) * found[-1].tanh())


class Generated(nn.Module):
    """Runs a model with weights that it makes of others."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Sequential(Between(Block())), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        weights = {name: p * (1.5 + self.scale) for name, p in self.inner.named_parameters()}
        return functional_call(self.inner, weights, (x,))


class Averaging(Block):
    """Moves a buffer at its end, where a second run has stopped already."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x - self.average.clone().view(4, 1, 1))
        self.average.mul_(0.9).add_(y.detach().mean((0, 2, 3)), alpha=0.1)
        return y


class Moved(Between):
    """Moves a buffer of its block after the block's forward."""

    class Inner(Block):
        factor: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("factor", torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.factor.clone()

    def __init__(self) -> None:
        super().__init__(self.Inner())

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.block.factor.mul_(1.1)  # type: ignore[operator, union-attr]
        return y


class Turned(Between):
    """Runs its block in evaluation mode, and in training mode again."""

    class Inner(Block):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.norm(x) * (1.0 + self.training))

    def __init__(self) -> None:
        super().__init__(self.Inner())

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        self.block.eval()
        z = self.block(y)
        self.block.train()
        return self.last(self.block(y) + z)


class Twice(Between):
    """Gives its block a tensor twice, the second time as a `view` of it; the block writes to the first."""

    class Inner(Block):
        def forward(self, x: Tensor, skip: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(F.leaky_relu(x, 0.1, inplace=True)) * skip

    def __init__(self, view: Callable[[Tensor], Tensor]) -> None:
        super().__init__(self.Inner())
        self.view = view

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.last(self.block(y, self.view(y)))


class Decaying(Block):
    """Writes to a parameter at its begin, and to one at its end."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.one.weight.mul_(0.9)
        y = super().forward(x).tanh()
        with torch.no_grad():
            self.one.bias.mul_(0.5)  # type: ignore[union-attr]
        return y


class Codes(Block):
    """Moves a table by averages of what it sees, past torch's counts, as the quantizer of MONAI's VQVAE does."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, 4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.permute(0, 2, 3, 1)
        found = self.table[(flat.detach().unsqueeze(-2) - self.table).square().sum(-1).argmin(-1)]
        self.table.data.mul_(0.9).add_(flat.detach().mean((0, 1, 2)), alpha=0.1)
        return super().forward((flat * found).permute(0, 3, 1, 2))


class Counting:
    """An object whose hook counts its calls."""

    calls = 0

    def __call__(self, _: nn.Module, given: tuple[Tensor]) -> Tensor:
        self.calls += 1
        return given[0] * self.calls

    def after(self, _: nn.Module, __: Any, made: Tensor) -> Tensor:
        self.calls += 1
        return made * self.calls


def growing(by: float) -> Callable[..., Tensor]:
    """A function that counts its calls."""
    factor = 1.0

    def grow(*given: Any) -> Tensor:
        nonlocal factor
        factor += by
        return given[-1] * factor

    return grow


def hooked(*hooks: Any) -> nn.Module:
    """A model with a hook after each layer of its block, and one before the last."""
    block = Block()
    block.one.register_forward_hook(hooks[0])
    block.other.register_forward_hook(hooks[1])
    block.other.register_forward_pre_hook(Counting())
    return Between(block)


class Grown(Block):
    """Has two functions that one function made."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = growing(0.5), growing(0.25)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(super().forward(self.before(x)).tanh())


class Sensitive(Between):
    """Goes back through its block in forward already."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x) * 1.0
        z = self.block(y).sigmoid()
        (grad,) = torch.autograd.grad(z.square().sum(), y, retain_graph=True)
        return self.last(z + grad.tanh())


def doubled(grad: Tensor) -> Tensor:
    return 2 * grad


class Hooked(Block):
    """Has hooks on gradients of what it takes, makes and gives, and of a parameter, one of which is not linear."""

    def forward(self, x: Tensor) -> Tensor:
        x.register_hook(doubled)
        y = self.one(x).relu()
        y.register_hook(lambda grad: grad.tanh())
        z = self.other(y)
        z.register_hook(doubled)
        self.one.bias.register_hook(doubled)  # type: ignore[union-attr]
        return z


class HookedAlso(Block):
    """Has hooks on several tensors, on the accumulation of a parameter, and one that is removed again."""

    def forward(self, x: Tensor) -> Tensor:
        self.one.weight.register_post_accumulate_grad_hook(halve)
        handle = x.register_hook(doubled)
        y = self.one(x).relu()
        handle.remove()
        x.retain_grad()
        x.register_hook(torch.tanh)
        return self.other(y)


def halve(p: Tensor) -> None:
    assert p.grad is not None
    p.grad.mul_(0.5)


class HookedBefore(Between):
    """Has a hook on what it gives its block, and on what it takes from it."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y.register_hook(doubled)
        z = self.block(y)
        z.register_hook(doubled)
        return self.last(z)


def in_place(act: nn.Module) -> nn.Module:
    return nn.Sequential(act, nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dropout in place": lambda: Between(in_place(nn.Dropout(0.3, inplace=True))),
    "activation in place": lambda: Between(in_place(nn.LeakyReLU(0.1, inplace=True))),
    "activation in place, used again": lambda: Skipping(in_place(nn.LeakyReLU(0.1, inplace=True))),
    "list": Appending,
    "generated weights": Generated,
    "buffer moved at the end": lambda: Between(Averaging()),
    "buffer moved from outside": Moved,
    "modes": Turned,
    "given twice": lambda: Twice(lambda y: y),
    "given with a view": lambda: Twice(lambda y: y.transpose(2, 3).transpose(2, 3)),
    "parameters that move": lambda: Between(Decaying()),
    "parameter that moves uncounted": lambda: Between(Codes()),
    "hooks that are functions": lambda: hooked(growing(0.5), growing(0.25)),
    "hooks of objects": lambda: hooked(Counting().after, Counting().after),
    "functions of one function": lambda: Between(Grown()),
    "hooks on gradients": lambda: Between(Hooked()),
    "hooks on sums of gradients": lambda: Between(HookedAlso()),
    "hooks outside": lambda: HookedBefore(Block()),
    "backward twice": lambda: Sensitive(Block()),
    "backward twice, activation in place": lambda: Sensitive(in_place(nn.LeakyReLU(0.1, inplace=True))),
}


def steps(make: Callable[[], nn.Module], plan: mural.Plan, between: Callable[[Any, int], Any] | None = None) -> Any:
    """Losses, gradients and the state after some steps."""
    torch.manual_seed(0)
    pm = mural.parallelize(make().double(), plan)
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.1, momentum=0.9)
    found: list[Any] = []
    for step in range(4):
        draws = torch.Generator().manual_seed(step)
        if between is not None:
            between(pm, step)
        optimizer.zero_grad()
        image = torch.randn(2, 2, 12, 11, generator=draws, dtype=torch.float64)
        found.append(pm.step(image, torch.randint(0, 3, (2, 12, 11), generator=draws)).item())
        found += [p.grad.tolist() for p in pm.parameters() if p.grad is not None]
        optimizer.step()
    return [*found, {name: value.tolist() for name, value in pm.state_dict().items()}]


@pytest.mark.parametrize("plan", PLANS, ids=NAMES)
@pytest.mark.parametrize("name", MODELS)
def test_what_a_block_does_to_what_it_is_given(name: str, plan: mural.Plan) -> None:
    """What a block wrote to its input in place, it was computed again from: the weights of the classifier of MNASNet
    and EfficientNet, which begins with a dropout in place, had gradients that were 1.25 times too large; with offload,
    torch's words. Lists that a block appended to were copies. Under `functional_call` it was computed again with the
    model's own weights. What it wrote to a buffer at its end was lost, and so was what others wrote there. Hooks on the
    gradient of what a block takes ran twice.

    Two tensors in one memory were copied apart. What a block wrote to a parameter, it wrote again. Counts of hooks went
    on in backward; those of functions that one function had made were mixed up. A second backward raised.
    """
    assert steps(MODELS[name], plan) == steps(MODELS[name], mural.Plan())


@pytest.mark.parametrize("plan", PLANS, ids=NAMES)
def test_training_and_evaluation(plan: mural.Plan) -> None:
    """A dropout in place writes in one of them alone."""

    def turned(pm: Any, step: int) -> None:
        pm.train(step % 2 == 1)

    make = MODELS["dropout in place"]
    assert steps(make, plan, turned) == steps(make, mural.Plan(), turned)


class Written(Between):
    """Writes to a parameter of its block after the block's forward."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        with torch.no_grad():
            self.block.one.bias.mul_(0.5)  # type: ignore[operator, union-attr]
        return y


def test_a_parameter_that_is_written_to_before_backward_is_refused() -> None:
    """The block was computed again with the new numbers."""
    assert steps(lambda: Written(Block()), mural.Plan())
    with pytest.raises(mural.PlanError, match=r"one\.bias of a block in recompute was written to"):
        steps(lambda: Written(Block()), PLANS[0])


class Sometimes(Block):
    """Writes to its input in some calls."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x.mul_(2.0) if self.calls % 3 == 0 else x)


class GoingBack(Block):
    """Goes back through its own calls."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).tanh()
        (grad,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
        return y + grad


class Forbidding(Block):
    """Turns hooks on saved tensors off."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
            return super().forward(x)


@pytest.mark.parametrize(
    ("block", "words"),
    [(GoingBack, "own calls in its forward"), (Forbidding, "hooks on saved tensors off")],
)
def test_a_block_that_cannot_be_computed_again_is_refused(block: type[Block], words: str) -> None:
    """It ended in torch's words, or in Python's."""
    assert steps(lambda: Between(block()), mural.Plan())
    with pytest.raises(mural.PlanError, match=words):
        steps(lambda: Between(block()), PLANS[0])


class InTwoTypes(nn.Module):
    """Gives its block complex numbers, and the real ones in their memory."""

    class Inner(Block):
        def __init__(self, writes: bool):
            super().__init__()
            self.writes = writes

        def forward(self, parts: Tensor, whole: Tensor) -> Tensor:  # type: ignore[override]
            scaled = parts.mul_(0.5) if self.writes else parts * 0.5
            return super().forward(scaled[..., 0] + whole.abs())

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Conv2d(2, 4, 3, padding=1), self.Inner(writes), nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        whole = torch.complex(y, y + 1.0)
        return self.last(self.block(torch.view_as_real(whole), whole))


def test_a_block_that_writes_to_memory_of_two_types_is_refused() -> None:
    """Its copies were apart, so that what was written to one was not in the other: silently wrong gradients."""
    assert steps(lambda: InTwoTypes(False), PLANS[0]) == steps(lambda: InTwoTypes(False), mural.Plan())
    with pytest.raises(mural.PlanError, match=r"one memory in several types \(torch\.complex128, torch\.float64\)"):
        steps(lambda: InTwoTypes(True), PLANS[0])


def test_a_block_that_writes_now_and_then_is_refused() -> None:
    with pytest.raises(mural.PlanError, match="Sometimes, a block in recompute, writes to what it takes"):
        steps(lambda: Between(Sometimes()), PLANS[0])


@dataclass
class Given:
    """What a block is given."""

    image: Tensor
    draws: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))


class Wrapping(Between):
    """Gives its block an object, which the block changes, or a function does after the block's forward."""

    class Inner(Block):
        change: Any = None

        def forward(self, given: Given) -> Tensor:  # type: ignore[override]
            if self.change is not None:
                self.change(given)
            return super().forward(given.image)

    def __init__(self, change: Any = None, later: Any = None) -> None:
        super().__init__(self.Inner())
        self.block.change, self.later = change, later  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        given = Given(self.first(x) * 1.0)
        y = self.block(given)
        if self.later is not None:
            self.later(given)
        return self.last(y)


def drawn(given: Given) -> None:
    given.image = given.image * torch.rand((), generator=given.draws, dtype=torch.float64)


def rectified(given: Given) -> None:
    given.image.relu_()


def redrawn(given: Given) -> None:
    given.draws.manual_seed(1)


@pytest.mark.parametrize("change", [drawn, rectified, redrawn])
def test_an_object_that_a_block_takes_and_that_changes_is_refused(change: Any) -> None:
    """Tensors in lists and dicts are seen; an object was the same one when the block was computed again."""
    assert steps(Wrapping, PLANS[1]) == steps(Wrapping, mural.Plan())
    with pytest.raises(mural.PlanError, match="Inner, a block in recompute, takes a Given that changed"):
        steps(lambda: Wrapping(change), PLANS[0])
    with pytest.raises(mural.PlanError, match="Inner, a block in recompute, takes a Given that changed"):
        steps(lambda: Wrapping(later=change), PLANS[0])


class Late(Block):
    """Writes to a parameter in its third call."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3:
            with torch.no_grad():
                self.one.weight.mul_(0.9)
        return super().forward(x)


def test_a_block_that_writes_to_a_parameter_now_and_then_is_refused() -> None:
    with pytest.raises(mural.PlanError, match=r"Late, a block in recompute, writes to one\.weight in some calls"):
        steps(lambda: Between(Late()), PLANS[0])


@pytest.mark.parametrize("plan", PLANS, ids=NAMES)
def test_copies_of_the_model(plan: mural.Plan) -> None:
    """A copy ran the blocks of the model that it was made of, so that averaged weights were not used."""
    torch.manual_seed(0)
    pm = mural.parallelize(Between(Block()).double(), plan)
    image, target = torch.randn(2, 2, 12, 11, dtype=torch.float64), torch.ones(2, 12, 11).long()
    copy, plain = deepcopy(pm.module), Between(Block()).double()
    plain.load_state_dict(pm.state_dict())
    expected = plain(image)
    pm.step(image, target)
    torch.optim.SGD(pm.parameters(), lr=10.0).step()
    assert torch.equal(copy(image), expected)
    copy(image).sum().backward()
    expected.sum().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(copy.parameters(), plain.parameters(), strict=True))  # type: ignore[arg-type]
    file = BytesIO()
    torch.save(copy, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(image), expected)


RANKED = ["given twice", "given with a view", "parameters that move", "hooks of objects", "backward twice"]


def apart(one: Any, other: Any) -> float:
    """The largest difference of two results."""
    if isinstance(one, dict):
        return apart([*one.values()], [*other.values()])
    if isinstance(one, list):
        return max([0.0, *(apart(a, b) for a, b in zip(one, other, strict=True))])
    return abs(one - other)


def on_ranks(name: str, plan: mural.Plan) -> float:
    """How far steps under a plan are apart from those that keep everything."""
    return apart(steps(MODELS[name], plan), steps(MODELS[name], replace(plan, recompute=(), offload=())))


ON_RANKS = [name for name in MODELS if name != "modes"]  # torch refuses it there: statistics count as written to
OFTEN = ("dropout in place", "activation in place, used again", "list", *RANKED)


@pytest.mark.parametrize("name", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.slow) for n in ON_RANKS])
@pytest.mark.parametrize("kinds", [(), ("activations",)])
def test_on_ranks(name: str, kinds: Any) -> None:
    """Gradients are added up in another order than without."""
    assert max(run_on(2, on_ranks, name, mural.Plan(spatial=(2, 1), recompute="all", offload=kinds))) < 1e-12
