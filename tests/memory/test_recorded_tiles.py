"""Tiles from a tape: the same numbers, and only where nothing depends on the place of a tile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mural
from mural.memory import recorded_tiles
from mural.memory.tape import Tape
from streamed_law import check_steps, images, streamed

EXTENTS = (60, 66)
Middle = Callable[["Sandwich", Tensor], Tensor]


class Sandwich(nn.Module):
    """Two convolutions with something between them."""

    def __init__(self, middle: Middle):
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.norm, self.middle = nn.BatchNorm2d(3), middle
        self.rows, self.all = nn.Parameter(torch.rand(1, 3, 60, 1)), nn.Parameter(torch.rand(1, 3, *EXTENTS))
        self.register_buffer("columns", torch.rand(66))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self, F.relu(self.first(x))))


ANYWHERE: dict[str, Middle] = {
    "nothing": lambda model, x: x,
    "norm": lambda model, x: model.norm(x),
    "mean": lambda model, x: x / x.mean((2, 3), keepdim=True),
    "bilinear": lambda model, x: F.interpolate(F.max_pool2d(x, 2), scale_factor=2, mode="bilinear"),
    "average": lambda model, x: F.avg_pool2d(x, 3, 1, 1, count_include_pad=False),
    "in place": lambda model, x: (x * 2).mul_(x).relu_(),
}
BY_PLACE: dict[str, Middle] = {
    "rows": lambda model, x: x * model.rows,
    "columns": lambda model, x: x * model.columns,
    "all": lambda model, x: x + model.all,
    "numbered": lambda model, x: x * torch.arange(66, dtype=x.dtype) / 66,
    "aligned": lambda model, x: F.interpolate(
        F.max_pool2d(x, 2), size=EXTENTS, mode="bilinear", align_corners=True
    ),
}  # fmt: skip
RANDOM: dict[str, Middle] = {"dropout": lambda model, x: F.dropout(x, 0.3)}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many tiles ran from a tape, and under one."""
    found: Counter[str] = Counter()

    def counted(home: Any, name: str) -> None:
        plain = getattr(home, name)

        def run(*given: Any) -> Any:
            found[name] += 1
            return plain(*given)

        monkeypatch.setattr(home, name, run)

    counted(recorded_tiles, "note")
    counted(recorded_tiles.RecordedTiles, "replayed")
    return found


def steps(middle: Middle, **plan: Any) -> None:
    """Three steps, compared with those of the plain model."""
    torch.manual_seed(3)
    model = Sandwich(middle).double()
    target = torch.randint(3, (1, *EXTENTS))
    check_steps(
        model, F.cross_entropy, [(x, target) for x in images(1, EXTENTS, 3)], mural.Plan(stream=(11, 11), **plan),
        weights=(1.0, 1.0, 1.0),
    )  # fmt: skip


@pytest.mark.parametrize("name", ANYWHERE)
def test_tiles_from_a_tape(name: str, ran: Counter[str]) -> None:
    steps(ANYWHERE[name])
    assert ran["replayed"] > 2 * ran["note"] > 0


@pytest.mark.parametrize("name", BY_PLACE)
def test_what_depends_on_the_place_is_found(name: str, ran: Counter[str]) -> None:
    """A tile cuts its part out of a whole tensor: an offset in it would be that of another tile."""
    steps(BY_PLACE[name])
    assert ran["note"] > 0


def test_random_tiles_have_no_tape(ran: Counter[str]) -> None:
    model = Sandwich(RANDOM["dropout"]).double()
    pm = streamed(model, F.cross_entropy, mural.Plan(stream=(11, 11)), None)
    pm.step(images(1, EXTENTS, 1)[0], torch.randint(3, (1, *EXTENTS)))
    assert not ran


def test_blocks_that_are_computed_again(ran: Counter[str]) -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 3, 3, padding=1))
            self.last = nn.Conv2d(3, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.block(x))

    target = torch.randint(3, (1, *EXTENTS))
    check_steps(
        Blocks().double(), F.cross_entropy, [(x, target) for x in images(1, EXTENTS, 2)],
        mural.Plan(stream=(11, 11), recompute="all"),
    )  # fmt: skip
    assert ran["replayed"]


def test_parameters_that_stop_learning(ran: Counter[str]) -> None:
    """Tapes with a gradient of a parameter are not those of a step without it."""
    model = Sandwich(ANYWHERE["norm"]).double()
    pm = streamed(model, F.cross_entropy, mural.Plan(stream=(11, 11)), None)
    given = images(1, EXTENTS, 1)[0], torch.randint(3, (1, *EXTENTS))
    for wanted in (True, False, True):
        pm.plain.first.weight.requires_grad_(wanted)
        pm.zero_grad()
        pm.step(*given)
        assert (pm.plain.first.weight.grad is not None) == wanted
        assert pm.plain.first.bias.grad is not None


def test_a_tape_under_autocast(ran: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Casts of weights are on the tape, and those of an earlier tile are not taken for it."""
    torch.manual_seed(0)
    plain = Sandwich(ANYWHERE["norm"])
    given = images(1, EXTENTS, 1)[0].float(), torch.randint(3, (1, *EXTENTS))
    grads = []
    for by_rules in (False, True):
        if by_rules:
            monkeypatch.setattr(recorded_tiles.RecordedTiles, "run", lambda _, tile, given: tile(given))
        pm = streamed(plain, F.cross_entropy, mural.Plan(stream=(11, 11), precision="bfloat16"), None)
        pm.step(*given)
        grads.append([p.grad for p in pm.parameters() if p.grad is not None])
    assert ran["replayed"]
    assert all(a.equal(b) for a, b in zip(*grads, strict=True))


def test_an_image_of_a_batch_has_its_own_totals(ran: Counter[str]) -> None:
    target = torch.randint(3, (2, *EXTENTS))
    check_steps(
        Sandwich(lambda model, x: F.instance_norm(x)).double(), F.cross_entropy,
        [(x, target) for x in images(2, EXTENTS, 2)], mural.Plan(stream=(11, 11)),
    )  # fmt: skip
    assert ran["replayed"]


# -- tapes -------------------------------------------------------------------------------------------------------------


def noted(function: Callable[..., list[Tensor]], *given: Tensor) -> Tape:
    """The tape of a function."""
    tape = Tape(given)
    with tape:
        made = function(*given)
    tape.end(made)
    return tape


def gradients(x: Tensor, w: Tensor) -> list[Tensor]:
    """The gradients of a small net."""
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    y = F.relu(F.conv2d(x, w, padding=1))
    halves = y[..., :3], y.chunk(2, dim=-1)[1] + 1
    loss = (halves[0].exp() * torch.tensor([1.0, 2.0, 3.0])).sum() + halves[1].mul_(2).mean()
    return list(torch.autograd.grad(loss, [x, w]))


def test_a_tape_runs_on_other_tensors() -> None:
    first, second = ((torch.rand(1, 2, 5, 6), torch.rand(2, 2, 3, 3)) for _ in range(2))
    tape = noted(gradients, *first)
    assert not tape.failed
    replay = tape.replay(tape.steps)
    for given in (first, second, second):
        with torch.no_grad():
            found = replay(*given)
        assert all(a.equal(b) for a, b in zip(found, gradients(*given), strict=True))
    assert tape.same(noted(gradients, *second))


ELSEWHERE = torch.rand(3)
FAILING: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "a number is read off": lambda x: [x * float(x.sum())],
    "is random": lambda x: [x + torch.rand(3)],
    "comes from elsewhere": lambda x: [x + ELSEWHERE],
}


@pytest.mark.parametrize("why", FAILING)
def test_what_no_tape_holds(why: str) -> None:
    assert why in noted(FAILING[why], torch.rand(3)).failed


def test_tapes_differ_in_their_numbers() -> None:
    def times(numbers: list[float]) -> Tape:
        return noted(lambda x: [x * torch.tensor(numbers[:1]) + numbers[1]], torch.rand(3))

    assert times([1.0, 2.0]).same(times([1.0, 2.0]))
    assert times([1.0, float("nan")]).same(times([1.0, float("nan")]))
    assert not times([1.0, 2.0]).same(times([1.5, 2.0]))
    assert not times([1.0, 2.0]).same(times([1.0, 2.5]))


def test_constants_are_not_written_to() -> None:
    def function(x: Tensor) -> list[Tensor]:
        return [torch.tensor([1.0, 2.0, 3.0]).add_(x)]

    replay = (tape := noted(function, torch.zeros(3))).replay(tape.steps)
    assert [replay(torch.ones(3))[0].tolist() for _ in range(2)] == [[2.0, 3.0, 4.0]] * 2


def test_views_that_change_nothing_are_not_run_again() -> None:
    """A tile's slices and detached tensors are such views, and each takes the host as long as a small kernel."""

    def function(x: Tensor) -> list[Tensor]:
        same = x.detach()[:, :].view(x.shape)
        same.mul_(2)  # which x sees, too
        turned, part, numbers = same.t(), same[:, :1], same.view(torch.int32)
        return [x + 1, turned, part, numbers]

    tape = noted(function, torch.rand(2, 2))
    assert [str(func) for func, *_ in tape.steps] == [
        "aten.mul_.Tensor", "aten.t.default", "aten.slice.Tensor", "aten.view.dtype", "aten.add.Tensor",
    ]  # fmt: skip
    given = torch.rand(2, 2)
    expected = function(given.clone())
    assert all(a.equal(b) for a, b in zip(tape.replay(tape.steps)(given), expected, strict=True))
