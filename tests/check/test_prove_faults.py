"""Each silent fault that was found once, put back on purpose, stops a run before its first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from put_back import FAULTS, Probe
from torch import Tensor

import mural
from mural.errors import ProofError
from ranks import run_on


def batch(labels: bool) -> tuple[Tensor, Any]:
    draws = torch.Generator().manual_seed(1)
    masks = torch.randint(3, (2, 70, 70), generator=draws)
    target = (torch.randint(1, 5, (2,), generator=draws), masks) if labels else masks
    return torch.rand(2, 2, 70, 70, generator=draws), target


def proved(name: str, folder: Path, broken: bool) -> str:
    torch.manual_seed(0)
    fault = FAULTS[name]
    pm = mural.parallelize(Probe(fault.feature), fault.plan, fault.loss, prove=folder)
    given = batch(fault.loss.__name__ == "labelled")
    if not broken:
        return str(pm.prove(*given))
    with fault.put_back():
        try:
            return str(pm.prove(*given))
        except ProofError as error:
            return f"ProofError: {error}"


QUICK = ("a hook on", "a sum over labels", "huber_loss", "torch.normal")


@pytest.mark.parametrize(
    "name", [name if name.startswith(QUICK) else pytest.param(name, marks=pytest.mark.slow) for name in FAULTS]
)
def test_a_fault_that_is_put_back_is_found(name: str, tmp_path: Path) -> None:
    world = FAULTS[name].plan.devices
    call = (lambda *args: [proved(*args)]) if world == 1 else lambda *args: run_on(world, proved, *args)
    for text in call(name, tmp_path / "broken", True):
        assert text.startswith("ProofError: "), text
        module = FAULTS[name].module
        assert f"whose values differ is {module} " in text or not module, text
    for text in call(name, tmp_path, False):
        assert text.startswith("proved "), text
