"""The smallest case that fails as a larger one does, without the layers, terms, fields and numbers it does not need."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from hunt.recipe import SIMPLEST, Layer, Recipe

ARGUMENT = re.compile(r", \w+=(?:\([^()]*\)|\[[^\[\]]*\]|'[^']*'|[^,()\[\]]+)(?=[,)])")
"""A keyword argument in a line, with the comma before it."""


def shrunk(recipe: Recipe, fails: Callable[[Recipe], bool], seconds: float) -> Recipe:
    """Take the first smaller case that still fails, again and again, until there is none or the time is over."""
    until, known = time.monotonic() + seconds, {recipe.title()}
    again = True
    while again:
        again = False
        for smaller in simpler(recipe):
            if time.monotonic() > until:
                return recipe
            key = repr(smaller)
            if key in known:
                continue
            known.add(key)
            if fails(smaller):
                recipe, again = smaller, True
                break
    return recipe


def simpler(recipe: Recipe) -> Iterator[Recipe]:
    """Cases that are a little smaller, the boldest first."""
    if len(recipe.layers) > 2:
        half = len(recipe.layers) // 2
        yield replace(recipe, layers=recipe.layers[half:])
        yield replace(recipe, layers=recipe.layers[:half])
    yield from (replace(recipe, layers=layers) for layers in fewer(recipe.layers))
    yield from simpler_results(recipe)
    yield from simpler_plans(recipe)
    yield from simpler_sizes(recipe)
    yield from (replace(recipe, layers=layers) for layers in plainer(recipe.layers))


def simpler_results(recipe: Recipe) -> Iterator[Recipe]:
    """Without further results, terms or options."""
    for i, extra in enumerate(recipe.extras):
        others = recipe.extras[:i], recipe.extras[i + 1 :]
        yield replace(recipe, extras=(*others[0], *others[1]))
        for j in range(len(extra.terms)):
            fewer_terms = replace(extra, terms=extra.terms[:j] + extra.terms[j + 1 :])
            yield replace(recipe, extras=(*others[0], fewer_terms, *others[1]))
    for i in range(len(recipe.loss)):
        if len(recipe.loss) > 1:
            yield replace(recipe, loss=recipe.loss[:i] + recipe.loss[i + 1 :])
    if recipe.loss != (SIMPLEST,):
        yield replace(recipe, loss=(SIMPLEST,))
    if recipe.container != "tuple" and recipe.extras:
        yield replace(recipe, container="tuple")
    if recipe.head != "pixels":
        yield replace(recipe, head="pixels")
    for name, value in recipe.options.items():
        if name == "steps" and value > 1:
            yield replace(recipe, options=recipe.options | {"steps": value - 1})
        elif name not in ("steps", "inference"):
            yield replace(recipe, options={key: v for key, v in recipe.options.items() if key != name})
    if recipe.options.get("inference", True):
        yield replace(recipe, options=recipe.options | {"inference": False})


def simpler_plans(recipe: Recipe) -> Iterator[Recipe]:
    """With fewer fields of the plan, or fewer ranks."""
    for name, value in recipe.plan.items():
        yield replace(recipe, plan={key: v for key, v in recipe.plan.items() if key != name})
        if type(value) is int and value > 2:
            yield replace(recipe, plan=recipe.plan | {name: value - 1})
        if name in ("spatial", "stream", "offload") and len(value) > 1:
            smaller = {"spatial": [(2, 1), (1, 2)], "stream": [(value[0], 40), (40, value[1]), (6, 40)]}
            for other in smaller.get(name, [value[:1]]):
                if other != value:
                    yield replace(recipe, plan=recipe.plan | {name: other})


def simpler_sizes(recipe: Recipe) -> Iterator[Recipe]:
    """With fewer or smaller images."""
    if len(recipe.sizes) > 1:
        yield replace(recipe, sizes=recipe.sizes[:1])
    if recipe.images > 1:
        yield replace(recipe, images=1)
        yield replace(recipe, images=recipe.images - 1)
    if len(recipe.sizes) == 1:
        h, w = recipe.sizes[0]
        for smaller in ((8, 8), (h // 2, w), (h, w // 2), (8, w), (h, 8), (h - 1, w), (h, w - 1)):
            if min(smaller) >= 2 and smaller[0] <= h and smaller[1] <= w and smaller != (h, w):
                yield replace(recipe, sizes=(smaller,))


def fewer(layers: tuple[Layer, ...]) -> Iterator[tuple[Layer, ...]]:
    """Without one layer, with what is inside one in its place, or with fewer layers inside one."""
    for i, layer in enumerate(layers):
        before, after = layers[:i], layers[i + 1 :]
        yield (*before, *after)
        if layer.inside:
            yield (*before, *layer.inside, *after)
        yield from ((*before, replace(layer, inside=inside), *after) for inside in fewer(layer.inside))


def plainer(layers: tuple[Layer, ...]) -> Iterator[tuple[Layer, ...]]:
    """With one keyword argument less in one line, or with one line less."""
    for i, layer in enumerate(layers):
        before, after = layers[:i], layers[i + 1 :]
        for field in ("init", "forward"):
            lines: tuple[str, ...] = getattr(layer, field)
            for number, line in enumerate(lines):
                rest = [line[: found.start()] + line[found.end() :] for found in ARGUMENT.finditer(line)]
                changed = [*((text,) for text in rest), *([()] if len(lines) > 1 and line.strip() != "..." else [])]
                for new in changed:
                    yield (*before, replace(layer, **{field: (*lines[:number], *new, *lines[number + 1 :])}), *after)
        yield from ((*before, replace(layer, inside=inside), *after) for inside in plainer(layer.inside))
