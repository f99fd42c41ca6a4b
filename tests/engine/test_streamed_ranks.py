"""Streaming on ranks: each goes through its own piece of the image in tiles, and all of them equal the plain model."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mural
from law import Grid
from mural.memory.window_source import HeldImage
from ranks import run_on
from streamed_law import apart, differences, images, streamed, wrong
from streamed_losses import LOSSES, target_for
from streamed_models import CLASSES, Spec
from streamed_oddities import Attending, Pyramid, Summary, TwoHeads, WholeNorm

MODELS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: Spec(norm="batch", depth=2, block="residual", up="linear").build(),
    "frozen": lambda: Spec(norm="frozen", block="depthwise", up="transposed 3", down="max 3").build(),
    "group norm": lambda: Spec(norm="group", block="squeeze", up="nearest", down="avg").build(),
    "reflect": lambda: Spec(norm="instance", padding="reflect", up="aligned", down="strided", depth=2).build(),
    "classifier": lambda: Spec(norm="batch", head="classes", depth=2).build(),
    "attention": lambda: made(lambda: Attending(norm=True)),
    "pyramid": lambda: made(Pyramid),
    "whole norm": lambda: made(WholeNorm),
    "summary": lambda: made(lambda: Summary(batch=False)),
    "summary of all": lambda: made(lambda: Summary(batch=True)),
    "two heads": lambda: made(lambda: TwoHeads(norm=True)),
}


def made(build: Callable[[], nn.Module]) -> nn.Module:
    """A model in float64, the same on every rank."""
    torch.manual_seed(4)
    return build().double()


@dataclass(frozen=True)
class RankCase:
    """A model under a plan."""

    model: str
    spatial: tuple[int, ...] = ()
    data: int = 1
    loss: str = "cross entropy"
    given: str = "tensor"
    keep: str | None = None
    extents: tuple[int, int] = (37, 29)
    tile: tuple[int, int] = (11, 9)
    count: int = 2
    """How many images a batch has."""

    @property
    def world(self) -> int:
        return Grid(self.spatial, self.data).world

    def check(self) -> None:
        for rank, found in enumerate(run_on(self.world, compared, self)):
            assert not wrong(found), f"rank {rank} of {self}: {wrong(found)}"


def compared(case: RankCase) -> dict[str, float]:
    """How far two steps are apart from those of the plain model, on this rank."""
    model, loss = MODELS[case.model](), LOSSES[case.loss]
    plan = mural.Plan(spatial=case.spatial, data=case.data, stream=case.tile)
    pm, plain = streamed(model, loss, plan, case.keep), deepcopy(model)
    plain_loss = deepcopy(loss) if isinstance(loss, nn.Module) else loss
    grid = Grid(case.spatial, case.data)
    found: dict[str, float] = {}
    for number, x in enumerate(images(case.count, case.extents)):
        pixels = case.model not in ("classifier", "two heads")
        target = target_for(case.loss, (case.count, CLASSES, *(case.extents if pixels else ())), "a tile", number)
        theirs = x.clone().requires_grad_()
        expected = plain_loss(plain(theirs), target)
        expected.backward()
        image, goal, gradient = given(case, grid, x, target)
        got = pm.step(image, goal)
        found[f"loss {number}"] = apart(got, expected)
        pairs = [] if gradient is None else [(gradient(), theirs.grad)]
        found |= {f"{k} {number}": v for k, v in differences(pm, plain, plain_loss, pairs).items()}
    return found


def given(case: RankCase, grid: Grid, x: Tensor, target: Tensor) -> tuple[Any, Any, Callable[[], Tensor] | None]:
    """An image and a target as a step takes them, and how the image's gradient is read."""
    if case.given == "sources":
        sources = [HeldImage(one) for one in x]
        masks = [HeldImage(one[None].to(torch.uint8)) for one in target]
        return sources, masks if target.ndim > 1 else target, None
    ours = x.clone()
    if case.given == "sharded":
        image = grid.shard(ours).requires_grad_()
        return image, target, lambda: image.grad.full()
    ours.requires_grad_()
    return ours, target, lambda: ours.grad


CASES = [
    RankCase("batch norm", (2, 1), loss="dice and cross entropy"),
    RankCase("frozen", (1, 2), loss="weighted", given="sharded"),
    RankCase("classifier", (1, 2)),
    RankCase("attention", (2, 1), given="sources"),
    RankCase("pyramid", (1, 2), loss="dice", given="sharded"),
    RankCase("frozen", data=2, loss="uncertain", given="sources"),
    RankCase("batch norm", data=2, loss="dice", keep="none"),
    RankCase("batch norm", (2, 1), keep="host", tile=(5, 29)),
    RankCase("batch norm", data=2, given="sources", count=1),  # a rank has no image
    RankCase("summary", (2, 1)),
    RankCase("summary", data=2),
    RankCase("summary of all", (1, 2)),
    RankCase("summary of all", data=2),
]
SLOW = [
    RankCase("batch norm", (4, 1), extents=(8, 6), tile=(3, 3)),  # some ranks have nothing of the lowest level
    RankCase("frozen", (2, 2), extents=(7, 5), tile=(3, 3)),
    RankCase("classifier", (4, 1), extents=(9, 9), tile=(4, 4), keep="host"),
    RankCase("batch norm", (1, 2), keep="none"),
    RankCase("attention", data=2, loss="dice", given="sources", count=1, keep="host"),
    RankCase("classifier", (1, 2), data=2, given="sources", count=1),
    RankCase("frozen", data=2, loss="per image", count=1),
    RankCase("frozen", (2, 1), loss="ignoring", given="sources"),
    RankCase("group norm", (2, 1), loss="dice", given="sharded"),
    RankCase("whole norm", data=2),
    RankCase("reflect", (1, 2), loss="per image", given="sharded", tile=(32, 8)),
    RankCase("classifier", data=2, loss="weighted", keep="none"),
    RankCase("batch norm", (2, 2), loss="dice per image"),
    RankCase("batch norm", (2, 1), data=2, keep="none"),
    RankCase("frozen", (2, 2), loss="bce", given="sharded"),
    RankCase("group norm", (4, 1), loss="root", extents=(40, 21)),
    RankCase("attention", (2, 2), loss="dice", given="sources"),
    RankCase("pyramid", (2, 1), data=2, given="sharded"),
    RankCase("whole norm", (1, 2), data=2, loss="summed", keep="none"),
    RankCase("classifier", (2, 2), loss="scaled"),
    RankCase("two heads", (2, 1), loss="weighted"),
    RankCase("two heads", (1, 2), data=2, loss="scaled", keep="none"),
    RankCase("reflect", (2, 2), loss="uncertain", tile=(7, 30)),
]


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(c, marks=pytest.mark.slow) for c in SLOW)], ids=repr)
def test_ranks_that_stream(case: RankCase) -> None:
    """Gradients were halved on two ranks where the last pass is one, and doubled where ranks compute the same."""
    case.check()
