"""Compares a replayed text with the one that is kept, and shows where they differ."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher, unified_diff
from pathlib import Path

ROUNDED = 1e-11
"""How far decimal numbers may be apart, relative to the larger: kernels for other CPUs round otherwise."""
DECIMAL = re.compile(r"(?<![\w.])-?\d+\.\d+e[+-]\d+")
FOLDER = Path(__file__).parent
KINDS = ("invariants", "expectations")
CONTEXT = 2


def kept(kind: str, name: str) -> Path:
    """Where the text of a pair is kept."""
    return FOLDER / kind / f"{name}.txt"


def difference(expected: str, found: str, name: str = "") -> str:
    """A unified diff of two texts, under the title of each place's section; empty if they say the same.

    What is behind a # helps a reader, and is not compared.
    """
    before, after = expected.splitlines(), as_before(expected.splitlines(), found.splitlines())
    if before == after:
        return ""
    lines = unified_diff(before, after, f"{name}, kept", f"{name}, found", n=CONTEXT, lineterm="")
    return "\n".join(with_titles(lines, before)) + "\n"


def as_before(before: Sequence[str], after: Sequence[str]) -> list[str]:
    """The lines found, written as they were before where they say the same."""
    keys = [[key_of(line) for line in lines] for lines in (before, after)]
    same = SequenceMatcher(None, *keys, autojunk=False)
    made: list[str] = []
    for tag, a, b, c, d in same.get_opcodes():
        if tag == "equal":
            made += before[a:b]
        elif tag == "replace" and b - a == d - c:
            made += [x if alike(x, y) else y for x, y in zip(before[a:b], after[c:d], strict=True)]
        else:
            made += after[c:d]
    return made


def key_of(line: str) -> str:
    """What is compared of a line."""
    return line.partition("  # ")[0].rstrip()


def alike(expected: str, found: str) -> bool:
    """Whether two lines say the same, but for the last digits of decimal numbers."""
    one, other = key_of(expected), key_of(found)
    if DECIMAL.sub("", one) != DECIMAL.sub("", other):
        return False
    pairs = zip(map(float, DECIMAL.findall(one)), map(float, DECIMAL.findall(other)), strict=True)
    return all(abs(a - b) <= ROUNDED * max(abs(a), abs(b)) for a, b in pairs)


def with_titles(diff: Iterable[str], before: Sequence[str]) -> list[str]:
    """A diff whose places name the section of the text: `@@ -31,5 +31,5 @@ [messages of step 1] rank 0`."""
    made: list[str] = []
    for line in diff:
        place = re.match(r"@@ -(\d+)", line)
        titles = [title for title in before[: int(place[1])] if title.startswith("[")] if place else []
        made.append(f"{line} {titles[-1]}" if titles else line)
    return made


def check(kind: str, name: str, found: str) -> None:
    """Raise unless a text is the one that is kept."""
    path = kept(kind, name)
    if not path.exists():
        raise AssertionError(f"{path} is missing: python tests/replay/accept.py {name} writes it")
    shown = difference(path.read_text(encoding="utf-8"), found, name)
    if shown:
        flag = " --invariants" if kind == "invariants" else ""
        why = "no refactor changes these" if flag else "look whether this is what the change was for"
        command = f"python tests/replay/accept.py {name}{flag}"
        raise AssertionError(f"{kind} of {name} differ ({why}):\n{shown}accept by: {command}")
