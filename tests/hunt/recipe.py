"""A random case as data: layers, output, loss, plan and sizes, all of which print as one plain Python script.

    image ─ inward ─ layer ─ layer ─ … ─ head ─ (logits, extras) ─ loss

Every layer takes `x`, four channels of some extents, and leaves `x`, four channels of some extents: so any of them can
be left out, and what remains is a model. In a layer's lines `#` is its number, and a line `...` stands for the layers
inside it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from hunt import compared

COMPARER = Path(compared.__file__).read_text().split("import annotations\n", 1)[1]
IMPORTS = """from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
"""


SIMPLEST = "y.square().mean()"
"""The loss to which cases are shrunk."""


@dataclass(frozen=True)
class Layer:
    """Lines of `__init__` and of `forward`, and definitions at the top of the module that they need."""

    kind: str
    init: tuple[str, ...] = ()
    forward: tuple[str, ...] = ()
    inside: tuple[Layer, ...] = ()
    needs: str = ""
    random: bool = False
    block: bool = False  # the layers inside are a module of their own: `self.block#`

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers, or one inside it does."""
        return self.random or any(layer.draws for layer in self.inside)

    def kinds(self) -> set[str]:
        """The kinds of layers that it is made of."""
        return {self.kind}.union(*(layer.kinds() for layer in self.inside))


@dataclass(frozen=True)
class Extra:
    """A further part of the result, and terms of the loss that read it as `e`; both in one line each."""

    kind: str
    value: str
    init: tuple[str, ...] = ()
    terms: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recipe:
    """Everything that a case is."""

    layers: tuple[Layer, ...]
    plan: dict[str, Any]
    loss: tuple[str, ...] = ("F.cross_entropy(y, t)",)
    target: str = "labels"
    head: str = "pixels"
    container: str = "tuple"
    extras: tuple[Extra, ...] = ()
    sizes: tuple[tuple[int, int], ...] = ((12, 12),)
    images: int = 2
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    seed: int = 0

    @property
    def draws(self) -> bool:
        """Whether the model draws random numbers."""
        return any(layer.draws for layer in self.layers)

    def ingredients(self) -> frozenset[str]:
        """What the case is made of, in words: those of a smaller case with the same fault are among them."""
        layers = set[str]().union(*(layer.kinds() for layer in self.layers))
        extras = {extra.kind for extra in self.extras} | {term for extra in self.extras for term in extra.terms}
        named = {*layers, *extras, *self.loss, *self.plan, self.head, *self.options}
        return frozenset(named - {"pixels", "steps", "inference", SIMPLEST})

    def title(self) -> str:
        """The case in one line."""
        plan = ", ".join(f"{name}={value!r}" for name, value in self.plan.items())
        layers = "+".join(layer.kind for layer in self.layers) or "no layers"
        extras = "".join(f", {extra.kind}" for extra in self.extras)
        head = f"{self.head}{extras}{f' in a {self.container}' if extras else ''}"
        return f"{layers} → {head} | {' + '.join(self.loss)} | Plan({plan}) | {self.images}×{self.sizes}"


HEADS = {
    "pixels": ("nn.Conv2d(4, 3, 1)", "self.head(x)"),
    "resized": ("nn.Conv2d(4, 3, 1)", "F.interpolate(self.head(x), image.shape[2:], mode='bilinear')"),
    "classes": ("nn.Linear(4, 3)", "self.head(x.mean((2, 3)))"),
    "pooled": ("nn.Linear(16, 3)", "self.head(F.adaptive_avg_pool2d(x, 2).flatten(1))"),
    "largest": ("nn.Linear(4, 3)", "self.head(F.adaptive_max_pool2d(x, 1).flatten(1))"),
}
"""The module `head`, and the logits that it makes of `x`."""
RECORDS = {
    "named": "class Result(NamedTuple):\n",
    "record": "@dataclass\nclass Result:\n",
}


def numbered(lines: tuple[str, ...], number: int) -> list[str]:
    """Lines with the layer's number in them."""
    return [line.replace("#", str(number)) for line in lines]


class Writer:
    """Writes the modules of a recipe, inner ones first."""

    def __init__(self) -> None:
        self.numbers, self.needs, self.classes = count(), list[str](), list[str]()

    def layers(self, layers: tuple[Layer, ...]) -> tuple[list[str], list[str]]:
        """The lines of `__init__` and of `forward`."""
        init, forward = list[str](), list[str]()
        for layer in layers:
            number = next(self.numbers)
            if layer.needs and layer.needs not in self.needs:
                self.needs.append(layer.needs)
            inner_init, inner = self.layers(layer.inside)
            if layer.block:
                self.module(f"Block{number}", inner_init, inner)
                inner_init, inner = [f"self.block{number} = Block{number}()"], []
            init += [*inner_init, *numbered(layer.init, number)]
            for line in numbered(layer.forward, number):
                indent = line[: len(line) - len(line.lstrip())]
                forward += [indent + part for part in inner] if line.strip() == "..." else [line]
        return init, forward

    def module(self, name: str, init: list[str], forward: list[str], ends: str = "x", given: str = "x") -> None:
        """A module of some lines."""
        lines = [f"class {name}(nn.Module):", "    def __init__(self):", "        super().__init__()"]
        lines += ["        " + line for line in init]
        lines += ["", f"    def forward(self, {given}):", *("        " + line for line in forward)]
        self.classes.append("\n".join([*lines, f"        return {ends}"]))


def result_of(recipe: Recipe) -> tuple[str, str]:
    """The model's result in a line, and the lines of the loss that take it apart."""
    _, logits = HEADS[recipe.head]
    if not recipe.extras:
        return logits, "y = output"
    names = [f"e{i}" for i in range(len(recipe.extras))]
    values = [extra.value.replace("#", f"_e{i}") for i, extra in enumerate(recipe.extras)]
    if recipe.container == "dict":
        pairs = ", ".join(f"'{name}': {value}" for name, value in zip(["y", *names], [logits, *values], strict=True))
        return f"{{{pairs}}}", "; ".join(f"{name} = output['{name}']" for name in ["y", *names])
    if recipe.container in RECORDS:
        return f"Result({', '.join([logits, *values])})", "; ".join(f"{n} = output.{n}" for n in ["y", *names])
    ends = "[{}]" if recipe.container == "list" else "({})"
    return ends.format(", ".join([logits, *values])), f"{', '.join(['y', *names])} = output"


def script(recipe: Recipe, about: str = "A case of the hunt.") -> str:
    """The whole case as a program: it ends with 1 while the case is neither exact nor refused by name."""
    writer, (result, apart) = Writer(), result_of(recipe)
    init, forward = writer.layers(recipe.layers)
    extra_init = [line.replace("#", f"_e{i}") for i, extra in enumerate(recipe.extras) for line in extra.init]
    init = ["self.inward = nn.Conv2d(3, 4, 3, padding=1)", *init, f"self.head = {HEADS[recipe.head][0]}", *extra_init]
    if recipe.extras and recipe.container in RECORDS:
        names = ["y", *(f"e{i}" for i in range(len(recipe.extras)))]
        writer.needs.append(RECORDS[recipe.container] + "\n".join(f"    {name}: object" for name in names))
    forward = ["x = early = self.inward(image)", *forward]
    writer.module("Model", init, forward, ends=result, given="image")
    terms = [*recipe.loss]
    for i, extra in enumerate(recipe.extras):
        terms += [re.sub(r"\be\b", f"e{i}", term) for term in extra.terms]
    body = "\n".join(f"        total = {'total + ' if n else ''}{term}" for n, term in enumerate(terms))
    body = f"        {apart}\n{body}\n        return total"
    loss = f"def loss_of(model):\n    def loss(output, t):\n{body}\n\n    return loss"
    plan = ", ".join(f"{name}={value!r}" for name, value in recipe.plan.items())
    about = about.replace("\\", "/").replace('"""', "'''")
    case = (
        f"CASE = Case(\n    Model,\n    loss_of,\n    mural.Plan({plan}),\n    sizes={recipe.sizes!r},\n"
        f"    images={recipe.images},\n    target={recipe.target!r},\n    random={recipe.draws!r},\n"
        f"    seed={recipe.seed},\n    options={recipe.options!r},\n)"
    )
    parts = [*writer.needs, *writer.classes, loss, case]
    ends = 'if __name__ == "__main__":\n    main(CASE)\n'
    return f'"""{about}"""\n\n{IMPORTS}{COMPARER}\n\n' + "\n\n\n".join([*parts, ends])
