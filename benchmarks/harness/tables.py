"""Tables and figures for a page: markdown between two marks of a README, numbers with their units."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from harness.case import GIB, Case
from harness.results import Record

NONE = "–"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table.

    >>> print(markdown(["a", "b"], [["1", "2|3"]]))
    | a | b |
    | --- | --- |
    | 1 | 2/3 |
    """
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def place(readme: Path, name: str, text: str) -> None:
    """Put a text into the page, between the marks of that name."""
    begin, end = f"<!-- {name}: written by run.py --page -->", f"<!-- end of {name} -->"
    page = readme.read_text()
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise SystemExit(f"{readme.name} needs the line {begin!r} and then {end!r}, once each")
    before, rest = page.split(begin)
    readme.write_text(f"{before}{begin}\n\n{text}\n\n{end}{rest.split(end)[1]}")


def gib(value: float | None, digits: int = 2) -> str:
    """Bytes in GiB."""
    return NONE if value is None else f"{value / GIB:.{digits}f}"


def ms(values: Sequence[float] | None) -> str:
    """The median of seconds, in milliseconds; with three digits or as many as it has."""
    if not values:
        return NONE
    middle = 1000 * statistics.median(values)
    return f"{middle:.0f}" if middle >= 100 else f"{middle:.3g}"


def ratio(value: float | None, digits: int = 2) -> str:
    """A ratio, or a dash."""
    return NONE if value is None else f"{value:.{digits}f}"


def environment(records: Sequence[Record]) -> str:
    """Where the numbers come from: device, versions, dates and commands."""
    headers = [r for r in records if r["kind"] == "header"]
    versions = next((r for r in records if r["kind"] == "versions"), {})
    at: dict[str, Any] = headers[-1]["machine"] if headers else {}
    device = versions.get("device", "a device")
    if versions.get("device_memory"):
        tf32 = "in TF32" if versions["convolutions_in_tf32"] else "in full float32"
        device += f" ({gib(versions['device_memory'], 0)} GiB), driver {at.get('driver') or 'unknown'}, "
        device += f"cuDNN {versions['cudnn']}, float32 convolutions {tf32}"
    dates = sorted({h["date"][:10] for h in headers})
    commits = sorted({h["machine"]["commit"] for h in headers if h["machine"]["commit"]})
    return (
        f"{device}; {at.get('cpu')}, {at.get('cores')} cores; torch {versions.get('torch')}, "
        f"Python {at.get('python')}; allocator: {at.get('allocator')}; {', '.join(dates)}"
        f"{', commit ' + ', '.join(commits) if commits else ''}.{commands_of(headers)}"
    )


def commands_of(headers: Sequence[Record]) -> str:
    """What was typed, each command once, to follow a sentence: another one, or a list that a reader may open.

    >>> commands_of([{"command": "mural bench cost"}, {"command": "mural bench cost"}])
    ' Command: `mural bench cost`.'
    >>> print(commands_of([{"command": "mural bench cost"}, {"command": "mural bench cost --device cuda"}]))
    <BLANKLINE>
    <BLANKLINE>
    <details><summary>2 commands</summary>
    <BLANKLINE>
    - `mural bench cost`
    - `mural bench cost --device cuda`
    <BLANKLINE>
    </details>
    """
    typed = list(dict.fromkeys(f"`{header['command']}`" for header in headers))
    if len(typed) == 1:
        return f" Command: {typed[0]}."
    lines = "\n".join(f"- {command}" for command in typed)
    return f"\n\n<details><summary>{len(typed)} commands</summary>\n\n{lines}\n\n</details>"


class Found:
    """Results by what they are about."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = records

    def of(self, kind: str, **values: Any) -> list[tuple[Case, Record]]:
        """The records of a kind, with their cases, whose case has these values."""
        return [
            (case, record)
            for record in self.records
            if record["kind"] == kind and "case" in record
            for case in [Case.decode(record["case"])]
            if all(getattr(case, key) == value for key, value in values.items())
        ]

    def one(self, kind: str, case: Case, cap: int | None) -> Record | None:
        """The last record of a kind about a case under a cap."""
        return next(
            (r for c, r in reversed(self.of(kind, model=case.model)) if c == case and r.get("cap") == cap), None
        )

    def named(self, kind: str, name: str) -> list[Record]:
        """The records of a kind with a name."""
        return [r for r in self.records if r["kind"] == kind and r.get("name") == name]
