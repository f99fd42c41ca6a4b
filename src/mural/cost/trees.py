"""Regression trees as plain data: a prediction needs numpy alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
LEAF = -1


@dataclass(frozen=True)
class Trees:
    """A sum of trees, all in three lists: for each node its feature, its number, and how far on its right child is.

    A value that is at most the number goes left, to the next node, else right. A leaf has the feature −1, and its
    number is what it adds. `starts` says where each tree begins.

        0: x0 ≤ 3 ──┬── 1: leaf 0.5        feature (0, -1, -1)
                    └── 2: leaf 0.7        number (3, 0.5, 0.7)     right (2, 0, 0)
    """

    start: float
    starts: Sequence[int] = ()
    feature: Sequence[int] = ()
    number: Sequence[float] = field(default=(), repr=False)
    right: Sequence[int] = field(default=(), repr=False)

    @cached_property
    def _arrays(self) -> tuple[NDArray[np.intp], NDArray[np.intp], Numbers, NDArray[np.intp]]:
        feature = np.asarray(self.feature, dtype=np.intp)
        at = np.arange(len(feature), dtype=np.intp)
        onward = at + np.asarray(self.right, dtype=np.intp)
        return np.asarray(self.starts, dtype=np.intp), feature, np.asarray(self.number, dtype=np.float64), onward

    def predict(self, rows: Numbers) -> Numbers:
        """The sum of all trees for each row of features.

        >>> Trees(1.0, [0], [0, -1, -1], [3.0, 0.5, 0.7], [2, 0, 0]).predict(np.array([[2.0], [4.0]]))
        array([1.5, 1.7])
        """
        starts, feature, number, onward = self._arrays
        if not len(starts):
            return np.full(len(rows), self.start)
        at = np.tile(starts, (len(rows), 1))
        place = np.arange(len(rows))[:, None]
        while True:
            which = feature[at]
            inner = which != LEAF
            if not inner.any():
                return self.start + number[at].sum(axis=1)
            left = rows[place, np.maximum(which, 0)] <= number[at]
            at = np.where(inner, np.where(left, at + 1, onward[at]), at)

    def encode(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "start": round(self.start, 6),
            "starts": list(self.starts),
            "feature": list(self.feature),
            "number": [float(f"{value:.5g}") for value in self.number],
            "right": list(self.right),
        }
