"""Programs, predictions and chosen plans are as they were accepted: `python tests/replay/accept.py` accepts others."""

from __future__ import annotations

import pytest

from replay.compare import check, kept
from replay.expectations import EXPECTED, expectations

SLOW = ("program-batchnorm", "program-groupnorm", "plan-offload", "plan-unet")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in EXPECTED])
def test_as_accepted(name: str) -> None:
    check("expectations", name, expectations(name))


def test_every_text_belongs_to_an_expectation() -> None:
    assert sorted(path.stem for path in kept("expectations", "any").parent.glob("*.txt")) == sorted(EXPECTED)
