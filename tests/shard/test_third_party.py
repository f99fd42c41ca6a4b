"""Other people's models, as their authors wrote them, under the law."""

from __future__ import annotations

import pytest

from law import Grid, holds, image
from ranks import only
from zoo import ZOO, Named
from zoo_of_queries import MODELS, OfQueries

QUICK = ["monai SegResNet", "monai AttentionUnet", "transformers SegFormer", "timm swin_tiny"]
# Deep networks with norms at few positions amplify rounding: float64 leaves about 1e-9 there.
TOLERANCE = 2e-8


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_on_two_ranks(name: str) -> None:
    holds(Named(name), image(*ZOO[name][1]), Grid((2, 1)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("grid", [Grid((2, 1)), Grid((2, 2))], ids=["2 ranks", "4 ranks"])
def test_the_zoo(name: str, grid: Grid) -> None:
    only(grid.world)
    holds(Named(name), image(*ZOO[name][1]), grid, tolerance=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("grid", [Grid((2, 1)), Grid((2, 2)), Grid((1, 1), data=2)], ids=["rows", "both", "data"])
def test_models_of_queries_and_tokens(name: str, grid: Grid) -> None:
    """They ended in torch's words: `reshape(shape=)`, slices written in place, lists of positions."""
    pytest.importorskip(name.split()[0])
    holds(OfQueries(name), image(*MODELS[name][1]), grid, tolerance=TOLERANCE)
