"""A plan compared with plain autograd: the same steps on both, and whether rounding explains how far apart they are."""

from mural.check.comparison import Comparison, Row
from mural.check.side_by_side import check

__all__ = ["Comparison", "Row", "check"]
