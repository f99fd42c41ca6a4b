"""Random recipes: layers within layers, heads and further results, losses, options."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from hunt.drawn_plans import plan_of
from hunt.layers_shapes import NESTED, SHAPES
from hunt.layers_state import AROUND, STATE
from hunt.layers_values import VALUES
from hunt.outputs_losses import BESIDE, extras_of, head_of, target_of
from hunt.recipe import Layer, Recipe

LEAVES: dict[str, tuple[Callable[[Random], Layer], float]] = {**VALUES, **SHAPES, **STATE}
INNER: dict[str, tuple[Callable[[Random, Any], Layer], float]] = {**NESTED, **AROUND}
OPTIONS: tuple[tuple[str, Any, float], ...] = (
    ("optimizer", "adam", 0.3), ("accumulate", 2, 0.15), ("clip", True, 0.15), ("input_gradients", True, 0.15),
    ("image", True, 0.5),
)  # fmt: skip
"""What a case may do besides steps, and how often."""
ROWS, COLUMNS = (6, 7, 9, 10, 12, 13, 16, 17, 21), (5, 8, 9, 11, 12, 15, 16, 19)


def drawn(d: Random, kinds: dict[str, tuple[Any, float]]) -> Any:
    """One of some kinds, each as often as it says."""
    return d.choices([make for make, _ in kinds.values()], [often for _, often in kinds.values()])[0]


def layers_of(d: Random, most: int) -> tuple[Layer, ...]:
    """Some layers, some of them with others inside."""
    found: list[Layer] = []
    for _ in range(d.randint(1, most)):
        if most > 1 and d.random() < 0.22:
            found.append(drawn(d, INNER)(d, lambda d: layers_of(d, max(1, most // 2))))
        else:
            found.append(drawn(d, LEAVES)(d))
    return tuple(found)


def recipe_of(d: Random) -> Recipe:
    """A random case."""
    layers, head = layers_of(d, d.choice([2, 4, 6])), head_of(d)
    target, criterion = target_of(d, head)
    extras = extras_of(d, head, target)
    kinds = set[str]().union(*(layer.kinds() for layer in layers))
    options: dict[str, Any] = {"steps": d.choice([1, 2, 3])}
    options |= {name: value for name, value, often in OPTIONS if d.random() < often}
    return Recipe(
        layers,
        plan_of(d, ["head"], "batch norm" in kinds, not extras),
        (criterion, d.choice(BESIDE)) if d.random() < 0.3 else (criterion,),
        target,
        head,
        d.choice(["tuple", "list", "dict", "named", "record"]),
        extras,
        tuple((d.choice(ROWS), d.choice(COLUMNS)) for _ in range(d.choice([1, 1, 1, 2]))),
        d.choice([1, 2, 2, 3, 4, 5]),
        options,
        d.randrange(1000),
    )
