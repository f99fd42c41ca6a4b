"""The report: sections of items, as data, as JSON and on a terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

State = Literal["found", "missing", "failed"]
STYLES: dict[State, str] = {"found": "", "missing": "yellow", "failed": "red"}


@dataclass(frozen=True)
class Finding:
    """One fact; `number` and `unit` where it was measured. A failed one has its reason as text."""

    name: str
    text: str
    state: State = "found"
    number: float | None = None
    unit: str = ""


@dataclass(frozen=True)
class Section:
    """Facts that belong together."""

    title: str
    items: tuple[Finding, ...]


@dataclass(frozen=True)
class Report:
    """Everything that was found, seen from one rank; only rank 0 shows it."""

    sections: tuple[Section, ...]
    rank: int = 0

    def section(self, title: str) -> Section:
        """The section of that title."""
        return next(section for section in self.sections if section.title == title)

    def data(self) -> dict[str, Any]:
        """The report as plain data."""
        return asdict(self)

    def json(self) -> str:
        """The report as JSON."""
        return json.dumps(self.data(), indent=2, ensure_ascii=False)

    def show(self, console: Console, as_json: bool = False) -> None:
        """Print the report once: on rank 0."""
        if self.rank != 0:
            return
        if as_json:
            console.out(self.json(), highlight=False)
            return
        width = max(len(item.name) for section in self.sections for item in section.items)
        for section in self.sections:
            table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
            table.add_column(width=width, no_wrap=True)
            table.add_column(overflow="fold")
            for item in section.items:
                table.add_row(item.name, Text(item.text, style=STYLES[item.state]))
            console.print(Text(section.title, style="bold"))
            console.print(table)
            console.print()


def found(name: str, ask: Callable[[], str | Finding | Iterable[Finding]]) -> tuple[Finding, ...]:
    """What asking gives, as items; an error becomes an item with its reason."""
    try:
        answer = ask()
        if isinstance(answer, str):
            return (Finding(name, answer),)
        return (answer,) if isinstance(answer, Finding) else tuple(answer)
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        return (Finding(name, f"{type(error).__name__}: {reason}" if reason else type(error).__name__, "failed"),)
