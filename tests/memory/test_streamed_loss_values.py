"""What a value of a streamed step is in the loss: a part of each tile, a total, or the same on all tiles."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mural
from ranks import run_on
from streamed_law import apart, check_steps, differences, images, streamed, wrong

EXTENTS = {1: (33,), 2: (20, 23), 3: (8, 9, 10)}
TILES = {1: (12,), 2: (8, 9), 3: (5, 5, 6)}


class Heads(nn.Module):
    """Scores of positions, gates and scores of images, a code with its variance, a map of lower resolution."""

    def __init__(self, dims: int, norm: bool = False):
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        bn = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1]
        self.conv, self.head = conv(2, 4, 3, padding=1), conv(4, 3, 1)
        self.norm, self.norm_of_images = (bn(4), nn.BatchNorm1d(4)) if norm else (nn.Identity(), nn.Identity())
        self.image, self.code, self.spread = nn.Linear(4, 3), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        dims = tuple(range(2, x.ndim))
        y = self.norm(self.conv(x)).tanh()
        seen = self.norm_of_images(y.mean(dims))
        return {
            "scores": self.head(y), "gate": seen.sigmoid()[:, :3], "image": self.image(seen), "code": self.code(seen),
            "spread": self.spread(seen), "batch": y.mean((0, *dims)), "number": y.mean(), "deviation": y.std(dims),
        }  # fmt: skip


def targets(images_: int, extents: tuple[int, ...]) -> dict[str, Tensor]:
    """A mask, a class and a weight for each image, and several labels for each image."""
    generator = torch.Generator().manual_seed(4)
    return {
        "mask": torch.randint(0, 3, (images_, *extents), generator=generator),
        "class": torch.randint(0, 3, (images_,), generator=generator),
        "weight": torch.rand(images_, generator=generator, dtype=torch.float64),
        "labels": torch.rand(images_, 3, generator=generator, dtype=torch.float64),
    }


def loss_of(code: str) -> Callable[[dict[str, Tensor], dict[str, Tensor]], Tensor]:
    """A loss from an expression of results `o` and targets `t`; `ce` is the cross entropy of positions."""
    compiled = compile(code, "<loss>", "eval")

    def loss(o: dict[str, Tensor], t: dict[str, Tensor]) -> Tensor:
        y, dims = o["scores"], tuple(range(2, o["scores"].ndim))
        each = F.cross_entropy(y, t["mask"], reduction="none")
        wide = [x.view(*x.shape, *(1,) * (y.ndim - x.ndim)) for x in (o["gate"], t["weight"])]
        names = {"o": o, "t": t, "y": y, "gate": o["gate"], "dims": dims, "each": each, "F": F, "torch": torch}
        return eval(compiled, names | {"ce": F.cross_entropy(y, t["mask"]), "wide": wide[0], "weight": wide[1]})

    return loss


LOSSES = [
    "ce + 0.1 * gate.mean()",
    "ce * (1 + gate.mean()) + gate.square().sum().sqrt()",
    "ce + F.cross_entropy(o['image'], t['class'])",
    "ce - 0.5 * (1 + o['spread'] - o['code'] ** 2 - o['spread'].exp()).sum(1).mean()",
    "ce + 1 - (2 * (gate * t['labels']).sum() + 1) / (gate.sum() + t['labels'].sum() + 1)",
    "ce + (1 - (2 * (gate * t['labels']).sum(0) + 1) / (gate.sum(0) + t['labels'].sum(0) + 1)).mean()",
    "ce * t['weight'].sum() + t['weight'].mean()",
    "(each.flatten(1).mean(1) * t['weight']).sum() / t['weight'].sum()",
    "(each * weight[:, 0]).sum() / t['weight'].sum()",
    "torch.stack([ce, gate.mean(), o['image'].sum(), o['number'], y.mean()]).sum()",
    "F.cross_entropy(y * wide, t['mask']) + gate.abs().mean() + gate.std()",
    "((y - wide) ** 2).mean() + o['batch'].norm() * o['deviation'].mean()",
    "ce + F.binary_cross_entropy(gate, t['labels']) + F.smooth_l1_loss(o['image'][:, 0], t['weight'])",
]


@pytest.mark.parametrize(("number", "code"), [*enumerate(LOSSES)])
def test_values_that_all_tiles_hold(number: int, code: str) -> None:
    """They were counted once for each tile: gates, codes, scores of images, sums over labels and weights of images."""
    check(code, (2, 3, 2, 1)[number % 4], 2 + number % 2, bool(number % 3), None if number % 2 else "none")


@pytest.mark.slow
@pytest.mark.parametrize("keep", [None, "none", "all"])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_all_values_that_all_tiles_hold(dims: int, norm: bool, keep: str | None) -> None:
    for code in LOSSES:
        if dims == 1 and "sum(0)" in code:
            continue  # three labels of an image are taken for a mask of three positions, which a sum over images keeps
        check(code, dims, 3, norm, keep)


def check(code: str, dims: int, images_: int, norm: bool, keep: str | None) -> None:
    """Check two steps."""
    torch.manual_seed(1)
    target = targets(images_, EXTENTS[dims])
    given = [(x, target) for x in images(images_, EXTENTS[dims])]
    check_steps(Heads(dims, norm).double(), loss_of(code), given, mural.Plan(stream=TILES[dims]), keep)


class Seen(nn.Module):
    """Scores of positions, and numbers of each image from a part that sees the whole tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.conv(x).tanh()
        whole = F.avg_pool2d(y, 4).flip(2)
        return {"scores": self.head(y), "gate": whole.mean((2, 3)).sigmoid()[:, :3], "image": y.mean((2, 3))}


@pytest.mark.parametrize(
    "code",
    [
        "ce + 0.1 * gate.mean()", "ce * gate.square().sum() + y.std()",
        "torch.stack([ce, gate.mean(), y.mean()]).prod()",
        "ce + (o['image'] @ o['image'].T).mean() + o['image'].cumsum(0).square().mean() * ce",
        "((y * wide).square().mean() + ce) * t['weight'].sum()", "0.1 * gate.mean()",
    ],
)  # fmt: skip
@pytest.mark.parametrize("keep", [None, "host"])
def test_values_of_whole_tensors(code: str, keep: str | None) -> None:
    """A loss of a total and of a number that comes from a whole tensor was refused."""
    torch.manual_seed(1)
    target = targets(2, EXTENTS[2])
    given = [(x, target) for x in images(2, EXTENTS[2])]
    check_steps(Seen().double(), loss_of(code), given, mural.Plan(stream=TILES[2]), keep)


def on_ranks(code: str, seen: bool, plan: mural.Plan, count: int) -> dict[str, float]:
    """What is wrong on this rank after two steps."""
    torch.manual_seed(1)
    model, loss, target = (Seen() if seen else Heads(2)).double(), loss_of(code), targets(count, EXTENTS[2])
    pm, plain, found = streamed(model, loss, plan, None), deepcopy(model), dict[str, float]()
    for number, x in enumerate(images(count, EXTENTS[2])):
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        expected = loss(plain(theirs), target)
        expected.backward()
        found[f"loss {number}"] = apart(pm.step(ours, target), expected)
        of_image: list[Any] = [(ours.grad, theirs.grad)]
        pairs = differences(pm, plain, loss, of_image)
        found |= {f"{name} {number}": value for name, value in pairs.items()}
    return wrong(found)


@pytest.mark.parametrize(
    ("code", "seen", "plan", "count"),
    [
        (LOSSES[0], False, mural.Plan(spatial=(2, 1), stream=TILES[2]), 2),
        (LOSSES[4], False, mural.Plan(data=2, stream=TILES[2]), 1),  # a rank has no image
        (LOSSES[9], False, mural.Plan(data=2, stream=TILES[2]), 3),
        ("ce * gate.square().sum() + y.std()", True, mural.Plan(data=2, stream=TILES[2]), 1),
        ("ce + (o['image'] @ o['image'].T).mean() * ce", True, mural.Plan(spatial=(1, 2), stream=TILES[2]), 2),
    ],
)
def test_values_that_all_tiles_hold_on_ranks(code: str, seen: bool, plan: mural.Plan, count: int) -> None:
    """The first tile counts, which is one rank's: others have to know, and take part in all messages."""
    for rank, found in enumerate(run_on(2, on_ranks, code, seen, plan, count)):
        assert not found, f"rank {rank}: {found}"
