"""Messages, boxes, actions, draws and losses of models under plans are what they were."""

from __future__ import annotations

import pytest
import torch

from replay.compare import check, kept
from replay.pairs import PAIRS, Pair
from replay.steps import STEPS, invariants


@pytest.mark.parametrize("name", PAIRS)
def test_nothing_changed(name: str) -> None:
    check("invariants", name, invariants(name))


def plain_losses(pair: Pair) -> list[str]:
    """The bits of the losses on one device, without any plan."""
    model = pair.model()
    loss = pair.loss(model)
    pairs = (pair.batch(step) for step in range(1, STEPS + 1))
    return [loss(model(image), target).item().hex() for image, target in pairs]


EXACT = [name for name, pair in PAIRS.items() if pair.exact and pair.build != "Dropped"]


@pytest.mark.parametrize("name", EXACT)
def test_exact_losses_have_the_bits_of_one_device(name: str) -> None:
    """What is kept for a pair without rounding can be told without running its plan."""
    torch.manual_seed(7)
    lines = kept("invariants", name).read_text(encoding="utf-8").splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("[losses]")) + 1
    assert lines[at : at + STEPS] == plain_losses(PAIRS[name])


def test_every_text_belongs_to_a_pair() -> None:
    assert sorted(path.stem for path in kept("invariants", "any").parent.glob("*.txt")) == sorted(PAIRS)
