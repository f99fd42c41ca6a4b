"""The roofline of a call: what its time is made of, in times of a device that reaches its rates, and as which variant.

A fitted model weighs these terms for each variant: seconds = Σ weight × term. The weight of a term is how much slower
than its rate the device is there; a constant stands for starting a kernel.
"""

from __future__ import annotations

from math import ceil, log2

from mural.cost.call_features import PRODUCTS, CallFeatures
from mural.cost.rates import Rates

START = 1e-6
"""The unit of the constant: a microsecond."""
BY_KIND = frozenset(["pointwise", "softmax", "loss", "copy"])
UNFOLDED = log2(20480)
"""On one CPU thread, torch unfolds images whose first four extents have no larger product, and calls no oneDNN."""
TILE, DEPTH = 128, 32
"""Products are computed in tiles of about that many rows and columns, and that many channels at a time."""


def terms(work: CallFeatures, rates: Rates, back: bool) -> list[float]:
    """The terms of a call in seconds; the same number of them for all calls of a family."""
    f = work.features
    found = [START, work.read / rates.bandwidth, work.written / rates.bandwidth]
    if back:
        found.append(work.gradients / rates.bandwidth)
    if work.family in PRODUCTS or work.family.endswith("pool"):
        rate = rates.of(work.dtype, work.family)
        # Backward of a product is two of them, one without a gradient of its input.
        times = 1 + f["gradient"] if back and work.family != "attention" else 1
        operations = work.operations * times
        found.append(operations / rate)
        if work.family in ("conv", "transposed"):
            found += conv_terms(work, operations / rate, rate, rates.units)
        elif work.family in ("linear", "matmul"):
            tiles = 2 ** f["many"] * ceil(2 ** f["each"] / TILE) * ceil(2 ** f["c_out"] / TILE)
            found.append(waves(tiles, rates.units) * 2 ** f["c_in"] * TILE**2 * 2 * rates.units / rate)
    if "groups" in f and "each" in f:
        # Each statistic is computed by one multiprocessor: few of them leave the others idle.
        found.append(2 ** f["each"] * max(1.0, 2 ** f["groups"] / rates.units) * rates.units * 4 / rates.bandwidth)
    if work.family == "interpolate":
        found.append(2 ** f["each"] * 1e-9)
    return found


def conv_terms(work: CallFeatures, seconds: float, rate: float, units: int) -> list[float]:
    """What a convolution takes when its channels are filled up to whole tiles, and its tiles to whole waves."""
    f = work.features
    if f["groups"]:
        return [0.0, 0.0, 0.0]
    inputs, outputs = 2 ** f["c_in_group"], 2 ** f["c_out_group"]
    filled = [seconds * up(inputs, n) / inputs * up(outputs, n) / outputs for n in (DEPTH, TILE)]
    tiles = ceil(2 ** f["rows"] / TILE) * ceil(outputs / TILE)
    each = up(inputs, DEPTH) * 2 ** f["kernel"] * TILE**2 * 2 * units / rate
    return [*filled, waves(tiles, units) * each]


def up(value: float, step: int) -> float:
    """The next multiple.

    >>> up(48, 32)
    64
    """
    return ceil(value / step) * step


def waves(tiles: float, units: int) -> int:
    """How often all multiprocessors get a tile, until all tiles are done."""
    return ceil(tiles / units)


def variant(work: CallFeatures) -> str:
    """Which kernels run a call, as far as its arguments tell: each variant has weights of its own."""
    f, word = work.features, ""
    if work.family == "conv":
        if f["groups"]:
            word = "depthwise" if f["c_in_group"] == 0 else "grouped"
        else:
            word = "thin" if f["c_in"] < log2(8) else "k1" if f["kernel"] == 0 else "dense"
        word += "" if f["dims"] == 2 else f" in {f['dims']:.0f} dims"
        if word.startswith("dense in 3") and f["four"] <= UNFOLDED:
            word += ", small"
    elif work.family == "interpolate":
        word = "smooth" if f["smooth"] else "nearest"
    elif work.family in BY_KIND:
        word = f"{f['kind']:.0f}"
    elif "broadcast" in f:
        word = "broadcast" if f["broadcast"] else "even"
    return f"{work.family} {word} {'half' if f['half'] else 'full'}"


def mix(work: CallFeatures, found: list[float]) -> float:
    """Whether operations or bytes take longer, as a logarithm: another feature for what the weights leave."""
    moved = found[1] + found[2]
    computed = found[4 if len(found) > 4 else 3] if work.operations and len(found) > 3 else 0.0
    return log2((computed + 1e-9) / (moved + 1e-9))
