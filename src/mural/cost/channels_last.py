"""Seconds of calls on channels-last tensors: a roofline.

The fitted models know tensors in torch's usual order, which convolutions on a GPU first bring into another. Tensors
with channels last are in that order: in half precision, the classic U-Net takes half the time.
"""

from __future__ import annotations

from mural.cost.call_features import CallFeatures
from mural.cost.fitted_model import SHORTEST, Phase
from mural.cost.rates import Rates

PRODUCTS_REACH, COPIES_REACH = {2: 0.7, 4: 0.7}, 0.8
"""What products, by the bytes of a number, and other calls reach of a device's rates: from the kernels of each sweep of
the classic U-Net at 8192², streamed with training norms in bfloat16 on an H200, which are predicted 5% too long."""
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
    reached = PRODUCTS_REACH[2 if work.features.get("half") else 4] * rates.of(work.dtype, work.family)
    return max(SHORTEST, products / reached, moved / (COPIES_REACH * rates.bandwidth))
