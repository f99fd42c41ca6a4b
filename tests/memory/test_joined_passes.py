"""Passes whose backward is one: the gradients of two, with one sweep through the convolutions between them."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mural
from mural.memory import joined_passes
from mural.memory.sweeps import sweeps_of
from mural.memory.tile_sweeps import TileSweeps
from streamed_law import Case, check_steps, images
from streamed_losses import LOSSES
from streamed_models import Spec

NORMS = ("batch", "group", "instance")


@pytest.fixture
def swept(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """The number of the pass and the name of each sweep."""
    found: list[tuple[int, str]] = []
    told = TileSweeps._told

    def noted(self: TileSweeps, one: Any, name: str) -> Any:
        found.append((one.number, name))
        return told(self, one, name)

    monkeypatch.setattr(TileSweeps, "_told", noted)
    return found


def stack(norm: str = "batch") -> nn.Module:
    """Three convolutions with norms between them; the last is a head."""
    normed = {
        "batch": nn.BatchNorm2d, "group": lambda width: nn.GroupNorm(2, width), "instance": nn.InstanceNorm2d,
    }[norm]  # fmt: skip
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1), normed(6), nn.ReLU(True),
        nn.Conv2d(6, 6, 3, padding=1), normed(6), nn.ReLU(True), nn.Conv2d(6, 3, 1),
    ).double()  # fmt: skip


@pytest.mark.parametrize("norm", ["batch", *(pytest.param(norm, marks=pytest.mark.slow) for norm in NORMS[1:])])
def test_the_last_pass_is_joined(norm: str, swept: list[tuple[int, str]]) -> None:
    target = torch.randint(0, 3, (2, 20, 23), generator=torch.Generator().manual_seed(1))
    check_steps(stack(norm), F.cross_entropy, [(x, target) for x in images(2, (20, 23))], mural.Plan(stream=(8, 9)))
    once = [(0, "forward"), (1, "forward"), (2, "forward and adjoints"), (5, "backward"), (0, "backward")]
    assert swept == 2 * once


@pytest.mark.parametrize("in_one", [True, False])
def test_the_sweeps_of_a_step_are_foreseen(in_one: bool, swept: list[tuple[int, str]]) -> None:
    """Where the loss has several totals, its sweep in one is tried, and the pass goes forward and back apart."""
    loss = F.cross_entropy if in_one else LOSSES["dice"]
    pm: Any = mural.parallelize(stack(), mural.Plan(stream=(8, 9)), loss)
    pm.step(images(1, (20, 23), 1)[0], torch.zeros(1, 20, 23).long())
    (program,) = pm.way.programs.values()
    joins = joined_passes.joined_passes(program.passes)
    keys = [(sweep.one.number, sweep.kind) for sweep in sweeps_of(program.passes, joins, in_one)]
    last, tried = [(2, "forward"), (2, "adjoints")], [(2, "forward and adjoints")]
    assert keys == [(0, "forward"), (1, "forward"), *(tried if in_one else last), (5, "backward"), (0, "backward")]
    assert swept == (keys if in_one else [*keys[:2], *tried, *keys[2:]])
    assert [(sweep.one.number, sweep.kind) for sweep in pm.way.predicted.peak.sweeps] == keys


JOINED = [("batch", "dice", "none")]
OTHERS = [
    case for case in product(NORMS, ("cross entropy", "ignoring", "dice", "per image", "uncertain"),
                             (None, "none", "all", "host")) if case not in JOINED
]  # fmt: skip


@pytest.mark.parametrize(
    ("norm", "loss", "keep"), [*JOINED, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)]
)
def test_all_that_can_be_joined(
    norm: str, loss: str, keep: str | None, swept: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it saves work or not."""
    monkeypatch.setattr(joined_passes, "saves", lambda *_: True)
    spec = Spec(norm=norm, depth=2, block="residual")
    Case(spec, (22, 26), (9, 8), loss, "a tile", count=2, keep=keep, weights=(1.0, 0.5)).check()
    assert any("adjoints" in name for _, name in swept) or keep in ("all", "host")


@pytest.mark.parametrize("weights", [(0.0, 1.0), (1.0, 0.0)])
def test_steps_that_count_for_nothing(weights: tuple[float, ...], swept: list[tuple[int, str]]) -> None:
    target = torch.randint(0, 3, (1, 20, 23), generator=torch.Generator().manual_seed(1))
    batches = [(x, target) for x in images(1, (20, 23))]
    check_steps(stack(), LOSSES["cross entropy"], batches, mural.Plan(stream=(8, 9)), None, weights)
    assert any("adjoints" in name for _, name in swept)


def test_random_layers_are_not_joined(swept: list[tuple[int, str]]) -> None:
    """A second sweep would have to draw the same numbers at the same places; each pass does, but for itself."""
    model = nn.Sequential(*stack()[:-1], nn.Dropout(0.5), nn.Conv2d(6, 3, 1)).double()
    pm = mural.parallelize(model, mural.Plan(stream=(8, 9)))
    pm.step(images(1, (20, 23), 1)[0], torch.zeros(1, 20, 23).long())
    assert not any("adjoints" in name for _, name in swept)


def test_recomputed_blocks(swept: list[tuple[int, str]]) -> None:
    target = torch.randint(0, 3, (1, 20, 23), generator=torch.Generator().manual_seed(1))
    batches = [(x, target) for x in images(1, (20, 23))]
    check_steps(stack(), F.cross_entropy, batches, mural.Plan(stream=(8, 9), recompute="all"))
    assert any("adjoints" in name for _, name in swept)


def test_no_convolution_is_gone_through_twice() -> None:
    """The operations of a step with the joined passes, and without."""
    counts = []
    for joins in (True, False):
        pm: Any = mural.parallelize(stack(), mural.Plan(stream=(8, 9)))
        with pytest.MonkeyPatch.context() as patch:
            if not joins:
                patch.setattr(joined_passes, "saves", lambda *_: False)
            pm.step(images(1, (20, 23), 1)[0], torch.zeros(1, 20, 23).long())
            counts.append(pm.way.report()["predicted_flops"])
    assert counts[0] < 0.85 * counts[1]
