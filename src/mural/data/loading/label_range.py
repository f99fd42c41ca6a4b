"""The labels that a loss takes: an error for any other value names its file and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mural.errors import UnfitData

SHOWN = 5
"""Values that a message lists."""
COMPARED = {
    torch.bool: torch.uint8, torch.uint16: torch.int64, torch.uint32: torch.int64, torch.uint64: torch.int64
}  # fmt: skip
"""Types that torch does not compare, and those of the same values that it does."""


@dataclass(frozen=True)
class LabelRange:
    """Whole numbers from 0 to `classes` - 1, and one that is `ignored`; without classes, any value from 0 to 1."""

    classes: int | None = None
    ignored: int | None = None

    def check(
        self, values: Tensor, name: str, renamed: Mapping[int, int], *, label: bool = False, at: Sequence[int] = ()
    ) -> None:
        """Raise unless all values are labels.

        `name` is the file's, `at` where the values begin in it, `renamed` what values were made others before.
        """
        strange = self.strange(values)
        if not strange:
            return
        shown = ", ".join(map(_number, strange[:SHOWN])) + (", …" if len(strange) > SHOWN else "")
        several = "values" if len(strange) > 1 else "value"
        found = (
            f"the label is {shown}" if label else f"the mask holds the {several} {shown}{place_of(values, strange, at)}"
        )
        given = {old: new for old, new in renamed.items() if new in strange}
        made = f" (data.labels makes {_pairs(given)} of them)" if given else ""
        raise UnfitData(f"{name}: {found}{made}, but {self.rule}: {self.fix(values, strange)}", name)

    def strange(self, values: Tensor) -> list[float]:
        """The values that are not labels, each once, ascending."""
        if not values.numel():
            return []
        plain = values.to(COMPARED.get(values.dtype, values.dtype))
        most = 1 if self.classes is None else self.classes - 1
        low, high = torch.aminmax(plain)
        if low >= 0 and high <= most:
            return []
        outside = plain[(plain < 0) | (plain > most) | (plain != plain)]
        found: list[float] = outside.unique().tolist()
        return [value for value in found if value != self.ignored]

    @property
    def rule(self) -> str:
        """What labels there are, in words."""
        if self.classes is None:
            return "binary cross-entropy takes values from 0 to 1"
        ignored = f" ({self.ignored} is ignored)" if self.ignored is not None else ""
        return f"the model has {self.classes} classes, 0 to {self.classes - 1}{ignored}"

    def fix(self, values: Tensor, strange: Sequence[float]) -> str:
        """What a user can do about it."""
        if self.classes is None:
            return f"rename values, as by data.labels = {_pairs({_whole(max(strange)): 1})}"
        unused = [n for n in range(1, self.classes) if not bool((values == n).any())]
        renamed = dict(zip(map(_whole, strange), unused or [self.classes - 1], strict=False))
        most = _whole(max(strange)) + 1
        more = f", give the model {most} classes" if self.classes < most <= 2 * self.classes + SHOWN else ""
        first = _number(strange[-1])
        return (
            f"rename values, as by data.labels = {_pairs(renamed)}{more}, or leave such positions out by "
            f"loss.arguments = {{ignore_index = {first}}}"
        )


def place_of(values: Tensor, strange: Sequence[float], at: Sequence[int]) -> str:
    """Where in a file the first strange value is, in words.

    >>> place_of(torch.tensor([[[0, 0], [0, 9]]]), [9.0], [10, 20])
    ' (first at (11, 21))'
    """
    if not at:
        return ""
    plain = values.to(COMPARED.get(values.dtype, values.dtype))
    there = torch.stack([plain == value if value == value else plain != plain for value in strange]).any(0)
    first: list[int] = there.nonzero()[0, -len(at) :].tolist()
    return f" (first at ({', '.join(str(a + b) for a, b in zip(at, first, strict=True))}))"


def _whole(value: float) -> int:
    return int(value) if value == value and abs(value) != float("inf") else 0


def _number(value: float) -> str:
    return str(int(value)) if value == value and float(value).is_integer() else str(value)


def _pairs(table: Mapping[int, int]) -> str:
    return "{" + ", ".join(f"{old} = {new}" for old, new in table.items()) + "}"
