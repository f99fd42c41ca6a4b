"""Steps that run once in a sweep: those of steady tensors alone, unless somebody writes to what they made."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mural
from mural.memory.steady_steps import DividedSteps, LastingValues, SteadyGiven, SteadyValues, divided
from mural.memory.tape import Slot, Tape
from mural.models import UNet
from streamed_law import images, streamed

X, WEIGHT = Slot(0), Slot(1)
Function = Callable[[Tensor, Tensor], Tensor]


def given(weight: Tensor, stays: bool = True) -> SteadyGiven:
    """A steady tensor."""
    return SteadyGiven(WEIGHT, weight, "weight", stays)


def of(values: SteadyValues, kind: int, steps: DividedSteps, tensors: list[SteadyGiven]) -> list[Tensor]:
    """What tiles of a kind begin with."""
    numbers = values.numbered(steps, [(one.slot, one.name) for one in tensors])
    return values.of(kind, steps, numbers, tensors)


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
        found = replay(x, *of(values, 0, steps, [given(weight)]))[0]
        assert found.equal(function(x, weight))


def test_what_changes_is_computed_again() -> None:
    x, weight = torch.rand(4), torch.rand(4)
    with Tape([x, weight]) as tape:
        result = x * weight.exp()
    tape.end([result])
    steps, values = divided(tape.steps, tape.results, [WEIGHT]), SteadyValues()
    first = of(values, 0, steps, [given(weight)])[1]
    assert of(values, 0, steps, [given(weight)])[1] is first
    assert of(values, 1, steps, [given(weight)])[1] is first, "kinds share"
    other = torch.rand(4)
    assert of(values, 0, steps, [given(other)])[1].equal(other.exp())
    assert of(values, 0, steps, [given(weight)])[1].equal(first)
    weight.add_(1)
    assert of(values, 0, steps, [given(weight)])[1].equal(weight.exp())
    values.begin("another sweep")
    assert not values.values
    assert not values.given


def test_values_that_last_stay_in_their_places() -> None:
    """Of each sweep and image, at the same addresses; and no value is taken for another that has its place now."""
    x, weight = torch.rand(4), torch.rand(4)
    with Tape([x, weight]) as tape:
        result = x * weight.exp().view(4)[:2].sum()
    tape.end([result])
    steps, values, places = divided(tape.steps, tape.results, [WEIGHT]), SteadyValues(), LastingValues()
    addresses = set[tuple[int, ...]]()
    for sweep in range(3):
        values.begin(sweep, places)
        images = [torch.rand(4), torch.rand(4)]
        for image in (*images, images[0], images[0].clone()):
            for kind in range(2):
                found = of(values, kind, steps, [given(image, stays=False)])
                assert found[0].equal(image)
                assert found[1].equal(image.exp()[:2].sum())
                addresses.add(tuple(t.data_ptr() for t in found))
    assert len(addresses) == 1


def test_nothing_is_held_between_steps() -> None:
    model = UNet(in_channels=2, width=2, depth=1, classes=3).double()
    pm = streamed(model, F.cross_entropy, mural.Plan(stream=(8, 8)), None)
    x, target = images(1, (64, 64), 1)[0], torch.randint(3, (1, 64, 64))
    for _ in range(2):
        pm.step(x, target)
    (program,) = pm.way.programs.values()
    assert any(kind.program is not None and kind.program.steps.once for kind in program.recorded.kinds.values())
    assert not program.recorded.steady.values
    assert not program.recorded.steady.held
