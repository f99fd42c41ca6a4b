"""What came out of a comparison: differences, what rounding explains of each, and a verdict in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

TITLES = {"output": "output", "loss": "loss", "gradient": "gradients", "update": "updates", "buffer": "buffers"}
"""The kinds of values, and what tables call them."""


@dataclass(frozen=True)
class Row:
    """One value of the model: how far the plan is from one device, and what rounding explains of it.

    Both are relative to the largest entry that the value has on one device.
    """

    kind: str
    name: str
    step: int
    difference: float
    limit: float
    words: str = ""
    """What is wrong where the two cannot be subtracted."""
    share: float = 0.0
    """The difference, relative to the largest entry of all values of its kind."""
    how: str = ""
    """What was left out where it was found, in parentheses."""

    @property
    def excess(self) -> float:
        """How many times the limit the difference is."""
        return self.difference / self.limit if self.limit else inf if self.difference else 0.0

    @property
    def differs(self) -> bool:
        """Whether rounding does not explain the difference."""
        return not self.excess <= 1.0

    @property
    def rank(self) -> tuple[float, ...]:
        """The sort key of rows, the worst last: a difference in an early step comes after those in later steps."""
        return self.differs, -self.step if self.differs else 0, self.excess, self.difference

    def title(self) -> str:
        """What the value is called."""
        joint = {"output": "", "loss": "", "buffer": " "}.get(self.kind, " of ")
        return f"{self.kind}{joint}{self.name}{self.how}"

    def __str__(self) -> str:
        how = self.words or f"by {self.difference:.1e} where rounding explains {self.limit:.0e}"
        return f"{self.title()} {how} (step {self.step + 1})"


class Comparison(dict[str, float]):
    """The largest relative differences of "output", "loss", "gradients" and "buffers", with a verdict.

    Each is relative to the largest entry of its kind in the model, over all steps, and infinite where something is
    missing or not a number; "gradients" covers the updates that they make. `exact` says whether rounding explains all
    of it, `rows` hold each value in its worst step, the worst first, and `str()` is the verdict and a table.

    >>> found = Comparison([Row("gradient", "0.bias", 1, 0.2, 1e-6, share=0.1)], steps=3)
    >>> found["gradients"], found.exact
    (0.1, False)
    >>> found.verdict
    'differs: gradient of 0.bias by 2.0e-01 where rounding explains 1e-06 (step 2)'
    """

    def __init__(self, rows: Iterable[Row], steps: int, notes: Sequence[str] = ()):
        self.rows = tuple(sorted(rows, key=lambda row: row.rank, reverse=True))
        self.steps, self.notes = steps, tuple(notes)
        keys = {"output": "output", "loss": "loss", "gradient": "gradients", "update": "gradients", "buffer": "buffers"}
        super().__init__(dict.fromkeys(("output", "loss", "gradients", "buffers"), 0.0))
        for row in self.rows:
            self[keys[row.kind]] = max(self[keys[row.kind]], row.share)

    def __reduce__(self) -> tuple[object, ...]:
        return Comparison, (self.rows, self.steps, self.notes)

    @property
    def exact(self) -> bool:
        """Whether rounding explains every difference."""
        return not any(row.differs for row in self.rows)

    @property
    def worst(self) -> Row | None:
        """The value whose difference rounding explains least."""
        return self.rows[0] if self.rows else None

    @property
    def verdict(self) -> str:
        """What was found, in a line."""
        times = f"{self.steps} step{'s' if self.steps > 1 else ''}"
        wrong = [row for row in self.rows if row.differs]
        if not wrong:
            return f"exact: over {times}, rounding explains every difference of {len(self.rows)} values"
        others = f"; {len(wrong)} of {len(self.rows)} values differ" if len(wrong) > 1 else ""
        return f"differs: {wrong[0]}{others}"

    def __str__(self) -> str:
        lines = [f"{'':10} {'difference':>10}  {'rounding':>8}  step  worst"]
        for kind, title in TITLES.items():
            row = next((row for row in self.rows if row.kind == kind), None)
            if row is not None:
                mark = "  differs" if row.differs else ""
                what = (row.name or row.kind) + row.how
                lines.append(f"{title:10} {row.difference:10.1e}  {row.limit:8.0e}  {row.step + 1:4}  {what}{mark}")
        return "\n".join([self.verdict, *lines, *self.notes])
