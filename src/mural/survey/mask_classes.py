"""Classes from the values of masks: how many there are, which values are renamed, and which one is ignored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mural.errors import DataError
from mural.survey.mask_values import MaskValues

RARE = 0.01
"""The part of all positions below which a class is rare."""
MANY, MOST = 64, 256
"""With more values than this, they may not be classes; with more than that, they are none."""
LOSSY = (".jpg", ".jpeg")
SHOWN = 6


@dataclass(frozen=True)
class MaskClasses:
    """The classes 0 to `count` - 1 of masks, and the part of the positions that each has."""

    count: int
    shares: tuple[float, ...] = ()
    labels: dict[int, int] = field(default_factory=dict[int, int])
    """Values that become other numbers."""
    ignored: int | None = None
    """A value that stands for no class."""
    odd: tuple[str, ...] = ()

    @property
    def rare(self) -> list[int]:
        """Classes that occur seldom."""
        return [number for number, share in enumerate(self.shares) if share < RARE]

    @property
    def weights(self) -> list[float]:
        """A weight for each class with which rare ones count more: by the root of how seldom they are, 1 on average."""
        roots = [max(share, 1e-6) ** -0.5 for share in self.shares]
        return [round(root * len(roots) / sum(roots), 3) for root in roots]


def classes_of(found: MaskValues, endings: Sequence[str]) -> MaskClasses:
    """The classes that masks with these values, in files with these endings, stand for; DataError where they do not."""
    check_classes(found, endings)
    values = [int(value) for value in found.values]
    ignored = ignored_value(values)
    kept = [value for value in values if value != ignored]
    odd = list(oddities(found, kept, ignored))
    if renumbered(kept, found.sampled):
        labels = {value: number for number, value in enumerate(kept) if value != number}
        count = len(kept)
        odd.append(f"masks hold {shown(kept)}, not classes from 0 on: data.labels renames them to 0 to {count - 1}")
    else:
        labels, count = {}, kept[-1] + 1
    numbers = {labels.get(value, value): found.counts[value] for value in kept}
    total = max(1, sum(numbers.values()))
    # A loss and the scores need two classes, also where masks are empty.
    shares = tuple(numbers.get(number, 0) / total for number in range(max(2, count)))
    return MaskClasses(max(2, count), shares, labels, ignored, tuple(odd))


def check_classes(found: MaskValues, endings: Sequence[str]) -> None:
    """Raise where values of masks are no classes."""
    values = found.values
    if any(value != value or abs(value) == float("inf") for value in values):
        raise DataError("the masks hold values that are not finite: write the number of a class for each position")
    if found.fractions:
        raise DataError(
            f"the masks hold fractions ({shown(values)}), which are not classes: write the number of a class for each "
            f'position; to learn values, write a run with data.mask = "channels" and loss.name = "mse" by hand'
        )
    if any(ending.lower() in LOSSY for ending in endings) and len(values) > 2:
        raise DataError(
            f"the masks are JPEG, which does not keep numbers: they hold {len(values)} values ({shown(values)}). Save "
            f"the originals as PNG or TIFF; if there are none, round each value to its class first"
        )
    if len(values) > MOST or (len(values) > MANY and values[-1] >= MOST):
        raise DataError(
            f"the masks hold {len(values)} values{' or more' if found.sampled else ''} from {values[0]:.0f} to "
            f"{values[-1]:.0f}, too many for classes. If they number objects, write the class of each object instead "
            f"(1 where the mask is above 0) and run this again"
        )


def ignored_value(values: Sequence[int]) -> int | None:
    """The value next to a row of classes from 0 on that usually stands for no class: -1, 255 or -100.

    >>> ignored_value([0, 1, 255]), ignored_value([0, 255]), ignored_value([-1, 0, 1]), ignored_value([0, 128, 255])
    (255, None, -1, None)
    """
    for candidate in (-1, 255, -100):
        rest = [value for value in values if value != candidate]
        if len(rest) < len(values) and len(rest) > 1 and rest == list(range(len(rest))):
            return candidate
    return None


def renumbered(values: Sequence[int], sampled: bool) -> bool:
    """Whether values have to become others to be 0, 1, 2, …

    In a sample, a small number that was not seen may be there; it would be taken for another that was given its place.

    >>> renumbered([0, 1, 3], False), renumbered([0, 1, 3], True), renumbered([0, 255], True), renumbered([0], False)
    (True, False, True, False)
    """
    if list(values) == list(range(len(values))):
        return False
    return values[0] < 0 or not sampled or values[-1] >= MANY


def oddities(found: MaskValues, kept: Sequence[int], ignored: int | None) -> list[str]:
    """What is unusual about masks that do hold classes."""
    odd: list[str] = []
    floating = [str(d).removeprefix("torch.") for d in found.dtypes if d.is_floating_point]
    if floating:
        odd.append(f"masks are stored as {floating[0]}, with whole numbers in them: uint8 takes less room")
    if len(found.dtypes) > 1:
        names = ", ".join(str(d).removeprefix("torch.") for d in found.dtypes)
        odd.append(f"masks are of several types: {names}")
    if len(kept) == 1:
        odd.append(f"masks hold nothing but {kept[0]}: there is nothing to learn")
    if len(kept) > MANY:
        odd.append(f"masks hold {len(kept)} values: if they number objects, write the class of each object instead")
    if ignored is not None:
        share = 100 * found.counts[ignored] / max(1, found.positions)
        odd.append(f"masks hold {ignored} next to 0 to {kept[-1]}: taken for 'no class' ({share:.1f} %) and ignored")
    return odd


def shown(values: Sequence[float]) -> str:
    """The first few values.

    >>> shown([0, 0.5, 1]), shown(list(range(9)))
    ('0, 0.5, 1', '0, 1, 2, 3, 4, 5, …')
    """
    return ", ".join(f"{value:g}" for value in values[:SHOWN]) + (", …" if len(values) > SHOWN else "")


def share_in_words(share: float) -> str:
    """A part of all positions in percent.

    >>> share_in_words(0.5), share_in_words(0.0001), share_in_words(0)
    ('50.0 %', '<0.1 %', '0 %')
    """
    return "0 %" if not share else "<0.1 %" if share < 0.0005 else f"{100 * share:.1f} %"
