"""The first hour of a new user: the commands of docs/how-to/first-hour.md, typed in a new folder and timed.

python tests/first_hour.py            with the mural of this environment
python tests/first_hour.py --fresh    in a new one, installed from this checkout
python tests/first_hour.py --page     the same as --fresh, with the times written into the page
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "how-to" / "first-hour.md"
LIMIT = 1800.0
"""Seconds that one command may take."""
MARKS = "<!-- times: written by tests/first_hour.py -->", "<!-- end of times -->"


@dataclass(frozen=True)
class Typed:
    """A command, how long it took, and what it printed."""

    command: str
    seconds: float
    printed: str


def commands(page: str) -> list[str]:
    """The commands of a page: what stands in its blocks of `sh`."""
    return [
        line
        for block in re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
    ]


def typed(command: str, folder: Path, programs: Path, limit: float = LIMIT) -> Typed:
    """A command that ran in a folder, with the programs of an environment first."""
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    begin = time.monotonic()
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env={**os.environ, "PATH": path}, text=True, timeout=limit, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{command}: exit code {done.returncode}\n{done.stdout}")
    return Typed(command, time.monotonic() - begin, done.stdout)


def hour(folder: Path, programs: Path) -> list[Typed]:
    """Everything after the installation."""
    return [typed(command, folder, programs) for command in commands(PAGE.read_text(encoding="utf-8"))]


def installed(folder: Path) -> tuple[Path, Typed]:
    """A new environment with mural, as the page installs it; versions are those that are tested."""
    environment = folder / "environment"
    typed(f"{sys.executable} -m venv {environment}", folder, Path(sys.executable).parent)
    found = typed(
        f"python -m pip install --quiet --constraint {ROOT / 'constraints.txt'} {ROOT} monai", folder,
        environment / "bin",
    )  # fmt: skip
    return environment / "bin", Typed("python -m pip install . monai", found.seconds, found.printed)


def table(done: list[Typed]) -> str:
    """What was typed and how long each took, as Markdown."""
    rows = [f"| `{one.command}` | {one.seconds:.0f} |" for one in done]
    whole = f"| all together | {sum(one.seconds for one in done):.0f} |"
    machine = f"{os.cpu_count()} CPU cores, no GPU, Python {platform.python_version()}, in a new environment."
    return "\n".join([machine, "", "| typed | seconds |", "|---|---|", *rows, whole])


def main() -> None:
    """Type everything, and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fresh", action="store_true", help="install into a new environment first")
    parser.add_argument("--page", action="store_true", help="the same, and write the times into the page")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mural-hour-") as name:
        folder, programs, done = Path(name), Path(sys.executable).parent, list[Typed]()
        if options.fresh or options.page:
            programs, first = installed(folder)
            done.append(first)
        done += hour(folder, programs)
    print("\n\n".join(f"$ {one.command}\n{one.printed}" for one in done))
    print(table(done))
    if options.page:
        text = PAGE.read_text(encoding="utf-8")
        begin, end = (text.index(mark) for mark in MARKS)
        PAGE.write_text(f"{text[: begin + len(MARKS[0])]}\n\n{table(done)}\n\n{text[end:]}", encoding="utf-8")


if __name__ == "__main__":
    main()
