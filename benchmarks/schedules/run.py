"""Makespan, bubbles and memory of every schedule, and what stages are worth on real cores: `mural bench schedules`.

Two parts: `simulated` (every schedule on the timeline; no ranks, a few seconds) writes `results/simulated.json`, and
`measured` (training under data, stages, both, and GEMS, on CPU ranks of one thread each) writes `results/cpu.json`.
`--page` writes README.md's tables and the figures from these files.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import measured
import page
import problems
import simulated
import torch
from harness.results import command_line, machine, rounded

from mural.comm import run_local

HERE = Path(__file__).resolve().parent
PARTS = ("simulated", "measured")
NUMBERS = {
    "ranks": (16, 2, "ranks of the largest plans, each with a core of its own"),
    "stages": (4, 2, "stages of the plans with stages"),
    "microbatches": (8, 2, "micro-batches of the plans with stages"),
    "batch": (32, 4, "images of a step, all ranks together"),
    "rounds": (3, 1, "steps that are measured, after one that is not"),
}


def arguments() -> argparse.Namespace:
    """The options; --quick is for trying the benchmark out, and writes a file only where --output names a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"what is done ({','.join(PARTS)})")
    parser.add_argument("--models", default=",".join(problems.PROBLEMS), help="what is trained, with commas")
    for name, (full, quick, what) in NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, help=f"{what} ({full}; with --quick {quick})")
    parser.add_argument("--quick", action="store_true", help="toy sizes, and no file: to try it out")
    parser.add_argument("--output", type=Path, help="folder of the results")
    parser.add_argument("--page", action="store_true", help="only write README.md and the figures from results/")
    options = parser.parse_args()
    for name, (full, quick, _) in NUMBERS.items():
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else full)
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, but is {getattr(options, name)}")
    options.parts, options.models = options.parts.split(","), options.models.split(",")
    for chosen, known in ((options.parts, PARTS), (options.models, problems.PROBLEMS)):
        if unknown := set(chosen) - set(known):
            parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return options


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every model under every division of the ranks."""
    settings = {name: getattr(options, name) for name in (*NUMBERS, "quick")}
    found: list[dict[str, Any]] = []
    for name in options.models:
        for division in problems.divisions(options.ranks, options.stages):
            print(f"measured: {name}, {division.words}", flush=True)
            with tempfile.TemporaryDirectory(prefix="mural-schedules-") as folder:
                run_local(measured.measure, division.ranks, folder, name, division, settings, threads=1)
                answer = json.loads((Path(folder) / "measured.json").read_text())
            about = {"model": name, "division": division.words, "ranks": division.ranks, "data": division.data}
            found.append(about | {"batch": options.batch} | answer)
    return found


def main() -> None:
    """Do the parts, print, write; or only write the page."""
    options = arguments()
    if options.page:
        page.write(HERE)
        return
    folder = options.output or (None if options.quick else HERE / "results")
    for part in options.parts:
        results: dict[str, Any] = {
            "command": command_line("schedules", sys.argv[1:]),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "load_at_start": os.getloadavg()[0],
            "torch": torch.__version__,
            "settings": {key: getattr(options, key) for key in NUMBERS},
        }
        results["records"] = simulated.measure(options.quick) if part == "simulated" else measure(options)
        print(page.TEXTS[part](results))
        if folder is not None:
            file = folder / page.FILES[part]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(page.as_json(rounded(results)))
            print(f"written: {file.name}")


if __name__ == "__main__":
    main()
