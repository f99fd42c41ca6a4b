"""Data, stages and space at once, in 3D on eight ranks: the same training as on one device."""

from __future__ import annotations

import pytest
from stage_cases import Case, holds

import mural
from ranks import only

PRODUCTS = [
    {"spatial": (2, 1, 1), "schedule": "1f1b", "microbatches": 2},
    {"spatial": (1, 2, 1), "schedule": "sequential", "microbatches": 1},
    {"spatial": (1, 1, 2), "schedule": "gpipe", "microbatches": 2, "recompute": "stages"},
    {"spatial": (2, 1, 1), "schedule": "gems", "microbatches": 2},
]


@pytest.mark.slow
@pytest.mark.parametrize("options", PRODUCTS, ids=str)
def test_data_stages_and_space_in_3d(options: dict[str, object]) -> None:
    only(8)
    plan = mural.Plan(data=2, stage=2, **options)  # type: ignore[arg-type]
    holds(Case("unet3d", plan, images=5, sizes=((8, 7, 10), (12, 9, 8), (8, 8, 8))))
