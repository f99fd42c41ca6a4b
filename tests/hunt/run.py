"""The hunt: `make hunt MINUTES=30`, or python tests/hunt/run.py --minutes 30 --seed 7 --only models --output found.json

Each search gets its part of the time. What breaks the promise is printed at once, with a script that shows it; the exit
code is 1 if there was anything.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FOLDERS = ("..", "../comm", "../collectives", "../train", "../checkpoint", "../pipeline")
os.environ.setdefault("MURAL_TEST_TIMEOUT", "90")
sys.path[:0] = [str((HERE / folder).resolve()) for folder in FOLDERS if str((HERE / folder).resolve()) not in sys.path]

from hunt.findings import Finding, Search, Tally  # noqa: E402, after the folders of helpers are known

SEARCHES: dict[str, tuple[str, float]] = {
    "rules": ("hunt.rules", 0.3),
    "models": ("hunt.models", 0.4),
    "adjoint": ("hunt.adjoint", 0.05),
    "kills": ("hunt.kills", 0.25),
}
"""The module whose `search` it is, and its part of the time."""
KINDS = ("incorrect", "crashed", "hung")


def found_searches() -> dict[str, tuple[Search, float]]:
    """The searches, each with its part of the time."""
    return {name: (importlib.import_module(module).search, part) for name, (module, part) in SEARCHES.items()}


def hunt(
    searches: dict[str, tuple[Search, float]], minutes: float, seed: int, say: Callable[[str], None]
) -> list[Tally]:
    """What all searches found, each in its part of the time; one that raises is a finding itself."""
    whole, tallies = sum(part for _, part in searches.values()), list[Tally]()
    for number, (name, (search, part)) in enumerate(searches.items()):
        seconds = 60 * minutes * part / whole
        say(f"[{name}] {seconds:.0f} seconds")
        try:
            tallies.append(search(seed + number, seconds, partial(labelled, say, name)))
        except Exception as error:
            finding = Finding(name, "crashed", f"the search itself, seed {seed + number}", repr(error))
            tallies.append(Tally(name, findings=(finding,)))
            say(f"[{name}] the search itself crashed: {error!r}")
    return tallies


def labelled(say: Callable[[str], None], name: str, text: str) -> None:
    """Print what a search says."""
    say(f"[{name}] {text}")


def with_scripts(tallies: Sequence[Tally], folder: Path) -> list[dict[str, Any]]:
    """The findings as data, their scripts written to files of their own."""
    found: list[dict[str, Any]] = []
    for tally in tallies:
        for number, finding in enumerate(tally.findings):
            path = folder / f"{tally.search}_{number}.py"
            if finding.script:
                folder.mkdir(parents=True, exist_ok=True)
                path.write_text(finding.script)
            found.append(asdict(finding) | {"script": str(path) if finding.script else ""})
    return found


def row(tally: Tally) -> dict[str, Any]:
    """A search in numbers."""
    counts = {kind: sum(finding.kind == kind for finding in tally.findings) for kind in KINDS}
    numbers = {"cases": tally.cases, "exact": tally.exact, "refused": tally.refused, **counts}
    return {"search": tally.search, **numbers, "missing": len(tally.missing)}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The searches in lines."""
    names = ("search", "cases", "exact", "refused", *KINDS)
    lines = [" ".join(f"{name:>10}" for name in names)]
    return "\n".join([*lines, *(" ".join(f"{row[name]:>10}" for name in names) for row in rows)])


def versions() -> dict[str, str]:
    """What ran: mural's commit, Python, torch."""
    torch: Any = importlib.import_module("torch")
    git = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=8"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    return {"mural": commit, "python": platform.python_version(), "torch": str(torch.__version__)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Hunt; 1 if something was found."""
    parser = argparse.ArgumentParser(description="Search for cases that are neither exact nor refused by name.")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, help="of all random cases; a fresh one is drawn and printed")
    parser.add_argument("--only", nargs="+", choices=list(SEARCHES), help="these searches alone")
    parser.add_argument("--output", type=Path, help="a JSON file for the results")
    parser.add_argument("--folder", type=Path, help="where scripts of findings go")
    told = parser.parse_args(arguments)
    seed = random.randrange(10**6) if told.seed is None else told.seed
    folder = told.folder or Path(tempfile.mkdtemp(prefix="mural-hunt-"))
    begun = datetime.now(UTC)
    say = partial(print, flush=True)
    say(f"hunting for {told.minutes:g} minutes, seed {seed}; scripts of what is found go to {folder}")
    searches = {name: value for name, value in found_searches().items() if not told.only or name in told.only}
    before = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tallies = hunt(searches, told.minutes, seed, say)
    rows, findings = [row(tally) for tally in tallies], with_scripts(tallies, folder)
    say(f"\n{table(rows)}")
    for finding in findings:
        say(f"{finding['kind']}: {finding['case']}\n    {finding['script']}")
    missing = [f"{tally.search}: {name}" for tally in tallies for name in tally.missing]
    if told.output:
        about = {"date": begun.strftime("%Y-%m-%d %H:%M UTC"), "minutes": round((time.monotonic() - before) / 60, 1)}
        values = {**about, "seed": seed, **versions(), "searches": rows, "findings": findings, "missing": missing}
        told.output.write_text(json.dumps(values, indent=1) + "\n")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
