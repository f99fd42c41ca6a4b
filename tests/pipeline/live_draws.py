"""Random cases of live models: some blocks, a kind of result, a loss, and a plan of one of the families."""

from __future__ import annotations

from random import Random
from typing import Any

from live_blocks import OWN, RANDOM
from live_cases import Case
from live_hooks import GRADIENTS
from live_losses import CRITERIA, LOSSES, MODULES, fits
from live_mixing import MIXING
from live_models import BLOCKS, OUTPUTS
from live_state import STATE

import mural

Options = dict[str, Any]
FAMILIES: dict[str, tuple[Options, ...]] = {
    "data": ({"data": 2},),
    "spatial": ({"spatial": (2, 1)}, {"spatial": (1, 2)}),
    "data × spatial": ({"data": 2, "spatial": (1, 2)},),
    "micro-batches": tuple(
        {"schedule": schedule, "microbatches": parts}
        for schedule in ("sequential", "gpipe", "1f1b")
        for parts in (2, 3)
    ),
    "data, micro-batches": ({"data": 2, "schedule": "gpipe", "microbatches": 2},),
    "spatial, micro-batches": ({"spatial": (2, 1), "schedule": "1f1b", "microbatches": 2},),
    "stages, one micro-batch": tuple(
        {"stage": 2, "schedule": schedule} for schedule in ("sequential", "gpipe", "1f1b", "interleaved")
    ),
    "stages": tuple(
        {"stage": 2, "schedule": schedule, "microbatches": parts}
        for schedule in ("sequential", "gpipe", "1f1b", "interleaved", "gems")
        for parts in (2, 3)
        if (schedule, parts) != ("gems", 3)
    ),
    "stages × data": (
        {"stage": 2, "data": 2},
        {"stage": 2, "data": 2, "schedule": "1f1b", "microbatches": 2},
    ),
    "stages × spatial": (
        {"stage": 2, "spatial": (2, 1)},
        {"stage": 2, "spatial": (2, 1), "schedule": "gpipe", "microbatches": 2},
    ),
    "recomputed": (
        {"recompute": "stages"},
        {"recompute": "stages", "schedule": "gpipe", "microbatches": 2},
        {"recompute": "stages", "data": 2},
    ),
    "recomputed stages": (
        {"recompute": "stages", "stage": 2},
        {"recompute": "stages", "stage": 2, "schedule": "1f1b", "microbatches": 2},
    ),
}
WEIGHTS = {
    "micro-batches": 3.0,
    "recomputed": 2.0,
    "stages, one micro-batch": 5.0,
    "stages": 2.0,
    "data × spatial": 0.4,
    "stages × data": 0.5,
    "stages × spatial": 0.5,
}
"""How often a family is drawn, where that is not 1: plans of four ranks take longer."""
KINDS = ((OWN, 0.5), (GRADIENTS, 0.12), (STATE, 0.28), (MIXING, 0.05), (RANDOM, 0.05))
"""From where blocks are drawn: where images mix, micro-batches have to be refused, so these are few."""
ODD = ("scalar", "no_batch", "number", "record")
"""Results that mix images, or that nobody can look into, for the same reason."""


def drawn_case(draw: Random) -> Case:
    """A case."""
    tables = draw.choices(
        [kind for kind, _ in KINDS], [weight for _, weight in KINDS], k=draw.choice((2, 2, 2, 3, 3, 4))
    )
    blocks = tuple(draw.choice(list(table)) for table in tables)
    outputs = [name for name in OUTPUTS if name not in ODD]
    output = draw.choice(("tensor", draw.choice(outputs), draw.choice(outputs if draw.random() < 0.8 else ODD)))
    loss = draw.choice(("ce", "ce", draw.choice(list(CRITERIA)), draw.choice(list(MODULES)), draw.choice(LOSSES)))
    family = draw.choices(list(FAMILIES), [WEIGHTS.get(name, 1) for name in FAMILIES])[0]
    options = draw.choice(FAMILIES[family])
    parts = options.get("microbatches", 1)
    if options.get("stage", 1) > 1:
        options = options | {"cuts": drawn_cuts(draw, blocks, mural.Plan(**options).stages)}
    images = draw.choice((5, 6)) if parts == 3 else draw.choice((4, 4, 3))
    named = "+".join(blocks)
    return Case(
        named, tuple(options.items()), output, loss if fits(loss, output) else "ce", images, draw.randrange(100)
    )


def drawn_cuts(draw: Random, blocks: tuple[str, ...], stages: int) -> str | tuple[str, ...]:
    """Where stages begin: balanced by layers, or at some blocks, convolutions or what lies inside of a block."""
    places = [name for i, block in enumerate(blocks) for name in (f"blocks.{i}", *inside(i, block), f"convs.{i}")]
    places = [*places, "head"]
    if draw.random() < 0.4 or len(places) < stages - 1:
        return "layers"
    return tuple(places[at] for at in sorted(draw.sample(range(len(places)), stages - 1)))


def inside(number: int, block: str) -> list[str]:
    """The last child of a block, where it has several and calls them all."""
    children = [name for name, _ in BLOCKS[block]().named_children()]
    return [f"blocks.{number}.{children[-1]}"] if len(children) > 1 and block not in SOMETIMES else []


SOMETIMES = {"unused", "toggled", "numpy_chance", "no_grad"}
"""Blocks with children that not every forward calls, or that it calls without gradients."""
