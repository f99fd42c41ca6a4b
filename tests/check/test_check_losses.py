"""`check` trains a loss's parameters on both sides, on copies: the loss that it is given stays as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mural
from mural.check.copies import copied
from ranks import run_on
from trained_losses import LOSSES, batch, segmenter


def checked(plan: mural.Plan, make: Any) -> tuple[str, bool]:
    model = segmenter()
    loss, terms = make(model)
    before = [term.detach().clone() for term in terms]
    found = mural.check(model, plan, *batch(0), loss)
    names = [row.name for row in found.rows if row.kind == "gradient" and row.name.startswith("loss.")]
    same = all(torch.equal(term, old) and term.grad is None for term, old in zip(terms, before, strict=True))
    return "" if found.exact and names else str(found), same


@pytest.mark.parametrize("make", LOSSES, ids=lambda make: make.__name__)
def test_a_check_compares_parameters_of_the_loss(make: Any) -> None:
    assert run_on(2, checked, mural.Plan(spatial=(2, 1)), make) == [("", True)] * 2


@pytest.mark.parametrize("make", LOSSES, ids=lambda make: make.__name__)
def test_a_copy_of_a_loss_holds_copies(make: Any) -> None:
    model = segmenter()
    loss, terms = make(model)
    other, copy = copied(model, loss)
    x, target = batch(0)
    copy(other(x), target).backward()
    assert all(p.grad is None for p in (*model.parameters(), *terms))
    assert any(p.grad is not None for p in other.parameters())
