"""What a search of the hunt returns: how many cases it tried, and those that broke the promise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

# A refusal by name is an outcome, not a finding. What remains is one of these.
Kind = Literal["incorrect", "crashed", "hung"]


@dataclass(frozen=True)
class Finding:
    """A case that was neither exact nor refused by name."""

    search: str
    kind: Kind
    case: str  # one line that names the case, the same on each run of a seed
    detail: str  # the difference, or the error's last lines
    script: str = ""  # a program of its own that shows it


@dataclass(frozen=True)
class Tally:
    """What a search tried in its time."""

    search: str
    exact: int = 0
    refused: int = 0
    findings: tuple[Finding, ...] = ()
    missing: tuple[str, ...] = ()  # operations without a rule: listed, not counted as findings

    @property
    def cases(self) -> int:
        """The number of cases tried."""
        return self.exact + self.refused + len(self.findings)


# A search draws cases from its seed until its seconds are over, and prints through `report` what it finds.
Search = Callable[[int, float, Callable[[str], None]], Tally]
