"""Small models made of blocks: a name says which, so that a model travels to the ranks as a string.

    image ─ inward ─┬─ block ─ conv ─ block ─ conv ─ … ─(+)─ head ─ result
                    └────────────── a skip ──────────────┘

`made("function+counter", "dict", seed=3)` has two blocks and gives a dict.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from live_blocks import CHANNELS, OWN, RANDOM, Block, mixer
from live_hooks import GRADIENTS
from live_mixing import MIXING
from live_state import STATE
from torch import Tensor, nn

CLASSES = 3
BLOCKS: dict[str, Callable[[], Block]] = {**OWN, **GRADIENTS, **STATE, **MIXING, **RANDOM}


class Two(NamedTuple):
    """A result with names, as a tuple."""

    out: Tensor
    early: Tensor


@dataclass
class Record:
    """A result with names that no library knows."""

    out: Tensor
    early: Tensor


class Live(nn.Module):
    """The model of some blocks, with a result of some kind."""

    def __init__(self, blocks: tuple[str, ...], output: str) -> None:
        super().__init__()
        self.output = output
        self.inward = nn.Conv2d(3, CHANNELS, 3, padding=1)
        self.blocks = nn.ModuleList(BLOCKS[name]() for name in blocks)
        self.convs = nn.ModuleList(mixer(3) for _ in blocks)
        self.aux = nn.Conv2d(CHANNELS, CLASSES, 1) if OUTPUTS[output].early else None
        self.head = nn.Conv2d(CHANNELS, CLASSES, 1)
        self.early: Tensor | None = None
        for block in self.blocks:
            block.meet(self)

    @property
    def watched(self) -> tuple[str, ...]:
        """The paths of attributes that training moves."""
        found = [f"blocks.{i}.{name}" for i, block in enumerate(self.blocks) for name in block.watched]
        return tuple(found)

    def forward(self, image: Tensor) -> Any:
        x = self.early = self.inward(image).tanh()
        early = x
        for block, conv in zip(self.blocks, self.convs, strict=True):
            x = conv(block(x)).tanh()
        return OUTPUTS[self.output].result(self, self.head(x + 0.5 * early), early)


@dataclass(frozen=True)
class Output:
    """A kind of result: how the model makes it, and where a loss finds logits and a further term in it."""

    result: Callable[[Live, Tensor, Tensor], Any]
    logits: Callable[[Any], Tensor]
    term: Callable[[Any], Any] = lambda result: 0.0
    labels: str = "mask"
    """ "mask": a class for each position; "class": one for each image; "batch": none, a target that is not used."""
    early: bool = False
    """Whether there is a second head on the first activation."""


def itself(result: Any) -> Any:
    return result


def second(result: Any) -> Tensor:
    return 0.3 * result[1].square().mean()


OUTPUTS: dict[str, Output] = {
    "tensor": Output(lambda m, y, x: y, itself),
    "pooled": Output(lambda m, y, x: y.mean((2, 3)), itself, labels="class"),
    "dict": Output(
        lambda m, y, x: {"out": y, "early": m.aux(x)},
        lambda r: r["out"],
        lambda r: 0.3 * r["early"].square().mean(),
        early=True,
    ),
    "tuple": Output(lambda m, y, x: (y, m.aux(x)), lambda r: r[0], second, early=True),
    "nested": Output(
        lambda m, y, x: {"out": [y], "more": (m.aux(x), {"mean": x.mean((2, 3))})},
        lambda r: r["out"][0],
        lambda r: 0.3 * r["more"][0].square().mean() + 0.1 * r["more"][1]["mean"].square().mean(),
        early=True,
    ),
    "named": Output(lambda m, y, x: Two(y, m.aux(x)), lambda r: r.out, second, early=True),
    "record": Output(
        lambda m, y, x: Record(y, m.aux(x)), lambda r: r.out, lambda r: 0.3 * r.early.square().mean(), early=True
    ),
    "constants": Output(lambda m, y, x: (y, None, 0.5, "mask"), lambda r: r[0] * r[2]),
    "penalty": Output(lambda m, y, x: (y, m.head.weight.square().sum()), lambda r: r[0], lambda r: 0.1 * r[1]),
    "classes_first": Output(lambda m, y, x: y.transpose(0, 1), lambda r: r.transpose(0, 1)),
    "scalar": Output(lambda m, y, x: (y, y.square().mean()), lambda r: r[0], lambda r: 0.2 * r[1]),
    "no_batch": Output(lambda m, y, x: y.mean(0), itself, labels="batch"),
    "number": Output(lambda m, y, x: (y - x.mean()).square().mean(), itself, labels="batch"),
}


def made(blocks: str, output: str, seed: int) -> Live:
    """The model of the blocks that a text names, joined by +, in float64, with the weights of a seed."""
    torch.manual_seed(seed)
    return Live(tuple(blocks.split("+")), output).double()
