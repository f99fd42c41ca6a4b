"""Makespan, bubbles and memory of every schedule, and what stages are worth on real cores: `mural bench schedules`.

Two parts: `simulated` (every schedule on the timeline; no ranks, a few seconds) writes `results/simulated.json`, and
`measured` (training under data, stages, both, and GEMS, on CPU ranks of one thread each) writes `results/cpu.jsonl`, a
line as soon as a division is measured. `--collect` puts such files together as `results/cpu.json`, and `--page` writes
README.md's tables and the figures from `results/*.json`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import measured
import page
import problems
import simulated
import torch
from harness.results import Log, collect, command_line, machine, read, rounded, scrubbed

from mural.errors import MuralError
from mural.ranks import run_local

HERE = Path(__file__).resolve().parent
PARTS = ("simulated", "measured")
NUMBERS = {
    "ranks": (16, 2, "ranks of the largest plans, each with a core of its own"),
    "stages": (4, 2, "stages of the plans with stages"),
    "microbatches": (8, 2, "micro-batches of the plans with stages"),
    "images": (8, 2, "images of a step for each rank"),
    "rounds": (3, 1, "steps that are measured at most, after one that is not"),
    "seconds": (6, 1, "how long steps are measured; at least one is"),
    "limit": (300, 60, "seconds that a rank waits for another before it gives up"),
}


def arguments() -> argparse.Namespace:
    """The options; --quick is for trying the benchmark out, and writes a file only where --output names a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"what is done ({','.join(PARTS)})")
    parser.add_argument("--models", default=",".join(problems.PROBLEMS), help="what is trained, with commas")
    for name, (full, quick, what) in NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, help=f"{what} ({full}; with --quick {quick})")
    parser.add_argument(
        "--batch", type=int, default=0, help="images of a step, all ranks together, instead of --images"
    )
    parser.add_argument("--quick", action="store_true", help="toy sizes, and no file: to try it out")
    parser.add_argument("--known", type=Path, nargs="*", default=[], help="files of results that need not come again")
    parser.add_argument("--output", type=Path, help="folder of the results")
    parser.add_argument(
        "--collect", type=Path, nargs="+", help="only put files cpu.jsonl together, as results/cpu.json"
    )
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


def measure(options: argparse.Namespace, path: Path) -> list[dict[str, Any]]:
    """Every model under every division of the ranks; rank 0 adds a record to the file as soon as it has one.

    Divisions of as many ranks run in the same processes, one after the other. One that fails is recorded with its
    error, and the rest goes on in new processes.
    """
    log = Log("schedules", path, options.known, minutes=0.0)
    known = {record["name"] for record in log.records if record["kind"] == "step" and "error" not in record}
    log.write("versions", torch=torch.__version__, load=os.getloadavg()[0])
    settings = {name: getattr(options, name) for name in (*NUMBERS, "batch", "quick")}
    divisions = sorted(problems.divisions(options.ranks, options.stages), key=lambda division: division.ranks)
    for ranks, same in groupby(divisions, lambda division: division.ranks):
        cases = list(same)
        batch = options.batch or ranks * options.images
        jobs = [problems.Job(name, case, batch) for name in options.models for case in cases]
        jobs = [job for job in jobs if job.name not in known]
        while jobs:
            before = len(read(path))
            try:
                run_local(measured.measure, ranks, str(path), jobs, settings, threads=1, timeout=float(options.limit))
                break
            except (MuralError, OSError) as error:
                done = len(read(path)) - before
                log.write("step", **jobs[done].about, error=scrubbed(str(error).strip()))
                print(f"{jobs[done].name}: {error}", flush=True)
                jobs = jobs[done + 1 :]
    return read(path)


def carry_out(part: str, options: argparse.Namespace, folder: Path) -> None:
    """Do one part, print it, and write its files."""
    folder.mkdir(parents=True, exist_ok=True)
    if part == "measured":
        path = folder / "cpu.jsonl"
        path.unlink(missing_ok=True)
        print(page.measured_text(measure(options, path)))
        collect([path], folder / page.FILES[part])
        return
    results: dict[str, Any] = {
        "command": command_line("schedules", sys.argv[1:]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "records": simulated.measure(options.quick),
    }
    print(page.simulated_text(results))
    (folder / page.FILES[part]).write_text(page.as_json(rounded(results)))


def main() -> None:
    """Do the parts, print, write; or only write the page."""
    options = arguments()
    if options.collect:
        print(collect(options.collect, HERE / "results" / page.FILES["measured"]), "records")
        return
    if options.page:
        page.write(HERE)
        return
    with tempfile.TemporaryDirectory(prefix="mural-schedules-") as nowhere:
        for part in options.parts:
            carry_out(part, options, options.output or (Path(nowhere) if options.quick else HERE / "results"))


if __name__ == "__main__":
    main()
