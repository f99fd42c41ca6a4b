"""Models that write to slices in place, in stages that mural cuts by itself: each objective finds exact stages."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from stage_cases import TOLERANCE, Case, compared
from torch import Tensor, nn

import mural
from mural import cost
from mural.engine.stage_starts import stage_starts
from mural.graph import capture
from ranks import run_on

WRITES = [
    "y = x.clone(); y[:, 2:] += x[:, :2]",
    "y = torch.zeros_like(x); y[:, :2] = x[:, 2:]; y[:, 2:] = y[:, :2]",
    "y = x * 1.0; y[:, :2] *= 2.0; y[..., 1:] -= 1",
    "y = x.clone(); y[:, :, ::2] += 1; y[:, :, 1::2] = y[:, :, 1::2] * 2",
    "y = x.clone(); y[:, :2] += x[:, 2:]; y[:, 2:] *= x[:, :2]",
    "y = x + 0; y[:, 0] = 0.5; v = y[:, 1:3]; v += x[:, :2]; v *= 2",
]


class Written(nn.Module):
    """Convolutions, and in-place calls between them."""

    def __init__(self, code: str) -> None:
        super().__init__()
        self.code = code
        self.a, self.b, self.c = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        names: dict[str, Any] = {"x": self.a(x), "torch": torch}
        exec(self.code, names)
        return self.c(self.b(names["y"]).relu())


def made(code: str) -> Written:
    torch.manual_seed(4)
    return Written(code).double()


@pytest.mark.parametrize("code", WRITES)
def test_calls_that_write_to_slices_have_a_time(code: str) -> None:
    """`y[:2] += x` gives the slice and all of y: its cost once ended in «zip() argument 2 is longer»."""
    graph = capture(Written(code), (1, 3, 32, 32))
    for hardware in ("cpu", "h200"):
        assert all(0 <= s.forward + s.backward < math.inf for s in cost.seconds(graph, hardware))
    for cuts in ("time", "layers", "memory", "both"):
        assert stage_starts(graph, mural.Plan(stage=2, cuts=cuts, memory="1GiB"))[0] == 0


def in_stages(cuts: str) -> dict[str, float]:
    """The largest differences from one device, of all models."""
    found: dict[str, float] = {}
    for code in WRITES:
        plan = mural.Plan(stage=2, cuts=cuts, schedule="1f1b", microbatches=2)
        case = Case(made(code), plan, sizes=((12, 10),) * 2)
        pm = mural.parallelize(made(code), plan)
        found |= {f"{code}: {k}": v for k, v in compared(case, made(code), pm).items() if not v <= TOLERANCE}
    return found


def test_stages_cut_by_time_are_exact_where_slices_are_written() -> None:
    assert run_on(2, in_stages, "time") == [{}, {}]
