"""Makespan, bubbles and memory of every schedule, and what stages are worth on real cores: `mural bench schedules`.

Two parts: `simulated` (every schedule on the timeline; no ranks, a few seconds) writes `results/simulated.json`, and
`measured` (training under data, stages, both, and GEMS, on CPU ranks of one thread each) writes `results/cpu.json`,
anew after each division, so that what ends a run early loses nothing. `--collect` puts the files of several such runs
together as `results/cpu.json`, and `--page` writes README.md's tables and the figures from `results/`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import measured
import page
import problems
import simulated
import torch
from harness.results import command_line, machine, rounded, scrubbed

from mural.comm import run_local
from mural.errors import MuralError

HERE = Path(__file__).resolve().parent
PARTS = ("simulated", "measured")
NUMBERS = {
    "ranks": (16, 2, "ranks of the largest plans, each with a core of its own"),
    "stages": (4, 2, "stages of the plans with stages"),
    "microbatches": (8, 2, "micro-batches of the plans with stages"),
    "batch": (32, 4, "images of a step, all ranks together"),
    "rounds": (3, 1, "steps that are measured, after one that is not"),
    "limit": (300, 60, "seconds that a rank waits for another before it gives up"),
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
    parser.add_argument("--collect", type=Path, nargs="+", help="only put measured files together, as results/cpu.json")
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


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every model under every division of the ranks, one after the other; a division that fails says why."""
    settings = {name: getattr(options, name) for name in (*NUMBERS, "quick")}
    for name in options.models:
        for division in problems.divisions(options.ranks, options.stages):
            about = {"model": name, "division": division.words, "ranks": division.ranks, "data": division.data}
            yield about | {"batch": options.batch} | answer_of(name, division, settings)


def answer_of(name: str, division: problems.Division, settings: dict[str, Any]) -> dict[str, Any]:
    """What the ranks of one division measured, or the error that ended them."""
    with tempfile.TemporaryDirectory(prefix="mural-schedules-") as folder:
        try:
            given = (folder, name, division, settings)
            run_local(measured.measure, division.ranks, *given, threads=1, timeout=float(settings["limit"]))
            return json.loads((Path(folder) / "measured.json").read_text())
        except (MuralError, OSError) as error:
            return {"error": scrubbed(str(error).strip())}


def line_of(record: dict[str, Any]) -> str:
    """A record in a few words, for whoever waits."""
    about = f"{record['model']}, {record['division']}"
    return f"{about}: {record['error']}" if "error" in record else f"{about}: {min(record['seconds']):.3g} s a step"


def carry_out(part: str, options: argparse.Namespace, folder: Path | None) -> None:
    """Do one part, and write its file after each record."""
    results: dict[str, Any] = {
        "command": command_line("schedules", sys.argv[1:]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "load_at_start": os.getloadavg()[0],
        "torch": torch.__version__,
        "settings": {key: getattr(options, key) for key in NUMBERS},
        "records": simulated.measure(options.quick) if part == "simulated" else [],
    }
    for record in measure(options) if part == "measured" else ():
        print(line_of(record), flush=True)
        results["records"].append(record)
        save(results, part, folder)
    save(results, part, folder)
    print(page.TEXTS[part](results))


def save(results: dict[str, Any], part: str, folder: Path | None) -> None:
    """Write what there is so far."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / page.FILES[part]).write_text(page.as_json(rounded(results)))


def main() -> None:
    """Do the parts, print, write; or only write the page."""
    options = arguments()
    if options.collect:
        files = [json.loads((path / page.FILES["measured"]).read_text()) for path in options.collect]
        save(page.collected(files), "measured", HERE / "results")
    elif options.page:
        page.write(HERE)
    else:
        for part in options.parts:
            carry_out(part, options, options.output or (None if options.quick else HERE / "results"))


if __name__ == "__main__":
    main()
