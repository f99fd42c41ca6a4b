"""The largest image that fits: which size to try next, from the peaks that were seen. Pure arithmetic.

Memory grows linearly with the positions of the image, so two peaks tell where the limit lies. A size that fits costs
a second, one that does not costs the ranks: they are started anew. So the search comes from below.
"""

from __future__ import annotations

from collections.abc import Mapping

HEADROOM = 0.97
"""The share of the memory that the prediction fills: fragments of freed memory take the rest."""


def floor_to(value: float, step: int) -> int:
    """The largest multiple of the step that is not above the value, but at least one step.

    >>> floor_to(1000, 256), floor_to(3, 256)
    (768, 256)
    """
    return max(step, int(value) // step * step)


def predicted(peaks: Mapping[int, float], cap: float, dims: int) -> float:
    """The extent at which the peak reaches the cap, by a line through the last two peaks over the positions.

    >>> round(predicted({10: 100.0}, 400.0, 2)), round(predicted({10: 150.0, 20: 450.0}, 1650.0, 2))
    (20, 40)
    """
    *_, last = sizes = sorted(peaks)
    per_position, fixed = peaks[last] / last**dims, 0.0
    if len(sizes) > 1:
        before = sizes[-2]
        slope = (peaks[last] - peaks[before]) / (last**dims - before**dims)
        if slope > 0:
            per_position, fixed = slope, max(0.0, peaks[last] - slope * last**dims)
    return (max(0.0, cap - fixed) / per_position) ** (1 / dims)


def next_size(
    peaks: Mapping[int, float], failed: set[int], *, guess: float, step: int, cap: float, dims: int
) -> int | None:
    """The extent to try next, a multiple of the step; None once a step above the largest that fits has failed.

    >>> next_size({}, set(), guess=1000, step=256, cap=1.0, dims=2)
    768
    >>> next_size({1536: 9.0}, {1792}, guess=1000, step=256, cap=16.0, dims=2)
    """
    if not peaks and not failed:
        return floor_to(guess, step)
    if not peaks:
        return None if min(failed) <= step else floor_to(min(failed) / 2, step)
    largest = max(peaks)
    above = min((size for size in failed if size > largest), default=None)
    if above is not None and above - largest <= step:
        return None
    if above is not None and len([size for size in failed if size > largest]) > 1:
        return max(largest + step, floor_to((largest + above) / 2, step))  # the prediction was wrong: halve the gap
    # From a small image, far predictions are uncertain: at most twice the extent at once.
    aim = min(floor_to(predicted(peaks, HEADROOM * cap, dims), step), 2 * largest)
    return max(largest + step, aim if above is None else min(aim, above - step))
