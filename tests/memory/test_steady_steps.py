"""Steps that run once in a sweep: those of steady tensors alone, unless somebody writes to what they made."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mural
from mural.memory.steady_steps import SteadyValues, divided
from mural.memory.tape import Slot, Tape
from mural.models import UNet
from streamed_law import images, streamed

X, WEIGHT = Slot(0), Slot(1)
Function = Callable[[Tensor, Tensor], Tensor]


def written_later(x: Tensor, w: Tensor) -> Tensor:
    return (w * 2).add_(x)


def view_written_later(x: Tensor, w: Tensor) -> Tensor:
    made = w * 2
    made.view(-1)[:1].add_(x.sum())
    return made * x


def written_before(x: Tensor, w: Tensor) -> Tensor:
    return torch.zeros_like(w).add_(w).exp() * x


FUNCTIONS: dict[str, tuple[Function, int]] = {
    "a chain": (lambda x, w: x * (w.double().exp() + 1).float(), 4),
    "all of it": (lambda x, w: w.exp() * 1, 1),  # what is returned is made anew
    "several results": (lambda x, w: x * torch.stack([w, w]).unbind()[1], 2),
    "one of each": (lambda x, w: (x + 1) * (w + 1), 1),
    "written later": (written_later, 0),
    "a view written later": (view_written_later, 0),
    "written before": (written_before, 0),
    "a returned view": (lambda x, w: (w + 1).view(1, -1), 0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_divided(name: str) -> None:
    function, once = FUNCTIONS[name]
    x, weight = torch.rand(4), torch.rand(4)
    with Tape([x, weight]) as tape:
        result = function(x, weight)
    tape.end([result])
    assert not tape.failed
    steps = divided(tape.steps, tape.results, [WEIGHT])
    assert len(steps.once) == once
    replay, values = tape.replay(steps.each, steps.carried), SteadyValues()
    for _ in range(3):  # the second one does not see what the first one wrote
        x = torch.rand(4)
        found = replay(x, weight, *values.of(0, steps, [(WEIGHT, weight)]))[0]
        assert found.equal(function(x, weight))


def test_what_changes_is_computed_again() -> None:
    x, weight = torch.rand(4), torch.rand(4)
    with Tape([x, weight]) as tape:
        result = x * weight.exp()
    tape.end([result])
    steps, values = divided(tape.steps, tape.results, [WEIGHT]), SteadyValues()
    first = values.of(0, steps, [(WEIGHT, weight)])[0]
    assert values.of(0, steps, [(WEIGHT, weight)])[0] is first
    assert values.of(1, steps, [(WEIGHT, weight)])[0] is first, "kinds share"
    other = torch.rand(4)
    assert values.of(0, steps, [(WEIGHT, other)])[0].equal(other.exp())
    assert values.of(0, steps, [(WEIGHT, weight)])[0] is first
    weight.add_(1)
    assert values.of(0, steps, [(WEIGHT, weight)])[0].equal(weight.exp())
    values.begin("another sweep")
    assert not values.values
    assert not values.alive


def test_nothing_is_held_between_steps() -> None:
    model = UNet(in_channels=2, width=2, depth=1, classes=3).double()
    pm = streamed(model, F.cross_entropy, mural.Plan(stream=(8, 8)), None)
    x, target = images(1, (64, 64), 1)[0], torch.randint(3, (1, 64, 64))
    for _ in range(2):
        pm.step(x, target)
    (program,) = pm.way.programs.values()
    assert any(kind.steps is not None and kind.steps.once for kind in program.recorded.kinds.values())
    assert not program.recorded.steady.values
    assert not program.recorded.steady.held
