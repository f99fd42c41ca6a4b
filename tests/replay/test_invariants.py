"""Messages, boxes, actions, draws and losses of models under plans are what they were."""

from __future__ import annotations

import pytest
import torch

from replay.compare import alike, check, kept
from replay.pairs import PAIRS, Pair
from replay.steps import STEPS, invariants
from replay.watch import number

SLOW = ("spatial-grid", "spatial-odd", "stream-ranks", "stages-spatial")
"""Pairs that others are like, and that take seconds."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in PAIRS])
def test_nothing_changed(name: str) -> None:
    check("invariants", name, invariants(name))


OTHERWISE = frozenset([
    "data-spatial-dropout", "stages-dropout", "stream-dropout", "stream-fcn", "spatial-rank-norm", "stages-tied",
    "domain",
])  # fmt: skip
"""Pairs that one device computes otherwise: they draw, or their plan says whose statistics norms take."""


def on_one_device(pair: Pair) -> list[str]:
    """The losses, and the norm of the gradients after each, on one device without any plan."""
    model = pair.model()
    loss = pair.loss(model)
    found: list[str] = []
    for step in range(1, STEPS + 1):
        image, target = pair.batch(step)
        value = loss(model(*image) if isinstance(image, tuple) else model(image), target)
        value.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        found += [number(value.item(), pair.exact), f"norm {number(norm.item(), False)}"]
    return found


def section(name: str, title: str) -> list[str]:
    """The lines of a section that is kept for a pair, as far as all ranks have the same."""
    lines = kept("invariants", name).read_text(encoding="utf-8").splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith(f"[{title}]")) + 1
    return lines[at : lines.index("", at)]


@pytest.mark.parametrize("name", [name for name in PAIRS if name not in OTHERWISE])
def test_what_is_kept_is_what_one_device_computes(name: str) -> None:
    """Else a wrong text might be accepted: one was, with gradients that instance norms lost."""
    found = on_one_device(PAIRS[name])
    assert all(map(alike, section(name, "losses"), found[::2])), found[::2]
    if not PAIRS[name].exact and PAIRS[name].plan.channel == 1:
        norms = [section(name, f"gradients of step {step}")[0] for step in range(1, STEPS + 1)]
        assert all(map(alike, norms, found[1::2])), (norms, found[1::2])


def test_every_text_belongs_to_a_pair() -> None:
    assert sorted(path.stem for path in kept("invariants", "any").parent.glob("*.txt")) == sorted(PAIRS)
