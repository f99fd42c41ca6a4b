"""The predictor of document `001`: a polynomial over channels, kernel and image size, by scikit-learn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from fit import Sample

from mural.cost.call_features import CallFeatures

DEGREE = 3


def inputs_of(work: CallFeatures) -> list[float]:
    """What the document's polynomial knows of a convolution; the batch is added, which was fixed there."""
    f = work.features
    extent = 2 ** (f["extent_in"] / f["dims"])
    return [2 ** f["c_in"], 2 ** f["c_out"], f["longest"], extent, 2 ** f["batch"]]


class Polynomial:
    """Seconds of convolutions, forward or backward, fitted by least squares as the document does it."""

    def __init__(self, samples: Sequence[Sample], phase: str) -> None:
        try:
            from sklearn.linear_model import LinearRegression  # noqa: PLC0415
            from sklearn.pipeline import make_pipeline  # noqa: PLC0415
            from sklearn.preprocessing import PolynomialFeatures, StandardScaler  # noqa: PLC0415
        except ImportError as error:
            raise SystemExit('the polynomial needs scikit-learn: pip install "mural-train[test]"') from error
        self.models: dict[str, Any] = {}
        for dtype in sorted({each.work.dtype for each in samples}):
            chosen = [each for each in samples if each.work.family == "conv" and each.work.dtype == dtype]
            table = np.array([inputs_of(each.work) for each in chosen])
            target = np.array([each.seconds[phase] for each in chosen])
            steps = StandardScaler(), PolynomialFeatures(DEGREE), LinearRegression()
            self.models[dtype] = make_pipeline(*steps).fit(table, target)

    def seconds(self, work: CallFeatures) -> float:
        """The predicted time, never negative."""
        return max(0.0, float(self.models[work.dtype].predict([inputs_of(work)])[0]))


def polynomials(samples: Sequence[Sample]) -> Mapping[str, Polynomial]:
    """One for each direction."""
    return {phase: Polynomial(samples, phase) for phase in ("forward", "backward")}
