"""Seconds of calls in half precision on channels-last tensors: a roofline.

The fitted models know tensors in torch's usual order, which convolutions in half precision first bring into another.
Channels-last tensors are in that order, and the classic U-Net takes half the time.
"""

from __future__ import annotations

from mural.cost.call_features import CallFeatures
from mural.cost.fitted_model import SHORTEST, Phase
from mural.cost.rates import Rates

PRODUCTS_REACH, COPIES_REACH = 0.5, 0.65
"""What convolutions and other calls reach of a device's rates: on an H200, a step of the classic U-Net on 4096² in
bfloat16 takes 17.5 ms for each megapixel."""
INDEX = 4
"""How many times the bytes of a pool's result its indices take."""


def channels_last_seconds(work: CallFeatures, rates: Rates, phase: Phase) -> float:
    """Seconds of one call; none for one that only makes a view."""
    if work.family == "view":
        return 0.0
    norm, products = work.features.get("training", 0.0), work.operations
    more = INDEX * work.written if work.family == "max_pool" else 0
    moved = work.read * (1 + norm) + work.written + more
    if phase == "backward":
        products *= 1 + work.features.get("gradient", 0.0)
        both = work.read + work.written
        twice = both if norm else work.written if products else 0  # both gradients of a product read that of its result
        moved = both + twice + work.gradients + more
    reached = PRODUCTS_REACH * rates.of(work.dtype, work.family)
    return max(SHORTEST, products / reached, moved / (COPIES_REACH * rates.bandwidth))
