"""Choosing what to measure: names that match patterns, and a list of names with the seconds that each takes."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

OUTPUT = "file of the results, one line for each measurement"


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose and list."""
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", default=[], help="names, or patterns as 'unet/*', in order"
    )
    parser.add_argument("--list", action="store_true", help="only print the names, with the seconds that each takes")


def add_files(parser: argparse.ArgumentParser, minutes: float, output: str = OUTPUT) -> None:
    """Add the options of a run that is bounded in time, and of its files."""
    parser.add_argument("--minutes", type=float, default=minutes, help=f"stop after about this long ({minutes:g})")
    parser.add_argument("--known", type=Path, nargs="*", default=[], help="files of results that need not come again")
    parser.add_argument("--output", type=Path, help=output)


def matching(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """The names that match a pattern, in the order of the patterns; all of them where there is none.

    >>> matching(["unet/2", "unet/4", "vgg/2"], ["vgg/*", "unet/4"]), matching(["a", "b"], [])
    (['vgg/2', 'unet/4'], ['a', 'b'])
    """
    every = list(names)
    found = dict.fromkeys(every) if not patterns else {}
    for pattern in patterns:
        mine = [name for name in every if fnmatchcase(name, pattern)]
        if not mine:
            raise SystemExit(f"nothing is called {pattern!r}: --list prints the {len(every)} names")
        found |= dict.fromkeys(mine)
    return list(found)


def listing(seconds: Mapping[str, float]) -> str:
    """A line for each name with its seconds, and one for all.

    >>> print(listing({"a": 90.0, "b": 30.0}))
        90 s  a
        30 s  b
       120 s  all 2 together: 2.0 minutes
    """
    lines = [f"{each:6.0f} s  {name}" for name, each in seconds.items()]
    total = sum(seconds.values())
    return "\n".join([*lines, f"{total:6.0f} s  all {len(seconds)} together: {total / 60:.1f} minutes"])
