"""Makespan, bubbles and memory of every schedule, and what stages are worth on real cores: `mural bench schedules`.

Three parts: `simulated` (every schedule on the timeline; no ranks, a few seconds) writes `results/simulated.json`;
`measured` (training under data, stages, both, and GEMS) and `splits` (models cut by layers, time and memory) run on CPU
ranks of one thread each and write `results/cpu.jsonl` and `results/splits.jsonl`, a line as soon as it is measured.
`--collect` puts files of one of these parts together as `results/cpu.json` or `results/splits.json`, and `--page`
writes README.md's tables and the figures from `results/*.json`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import measured
import page
import problems
import simulated
import split_steps
import splits
import torch
from harness.rank_jobs import on_ranks
from harness.results import Log, collect, command_line, machine, read, rounded
from harness.selection import add_files, add_selection, listing, matching

HERE = Path(__file__).resolve().parent
PARTS = ("simulated", "measured", "splits")
NUMBERS = {
    "ranks": (16, 2, "ranks of the largest plans, each with a core of its own"),
    "stages": (4, 2, "stages of the plans with stages"),
    "microbatches": (problems.MICROBATCHES, 2, "micro-batches of the plans with stages"),
    "images": (8, 2, "images of a step for each rank"),
    "rounds": (3, 1, "steps that are measured at most, after one that is not"),
    "seconds": (6, 1, "how long steps are measured; at least one is"),
    "limit": (300, 60, "seconds that a rank waits for another before it gives up"),
}


def arguments() -> argparse.Namespace:
    """The options; --quick is for trying the benchmark out, and writes a file only where --output names a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="simulated,measured", help=f"of {','.join(PARTS)} (simulated,measured)")
    parser.add_argument("--models", help="what is trained or split, with commas (all)")
    for name, (full, quick, what) in NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, help=f"{what} ({full}; with --quick {quick})")
    parser.add_argument(
        "--batch", type=int, default=0, help="images of a step, all ranks together, instead of --images"
    )
    parser.add_argument("--quick", action="store_true", help="toy sizes, and no file: to try it out")
    add_selection(parser)
    add_files(parser, 60, "folder of the results, or a file .jsonl for one part, which goes on where it was stopped")
    parser.add_argument("--collect", type=Path, nargs="+", help="only put files of the part together, for the page")
    parser.add_argument("--page", action="store_true", help="only write README.md and the figures from results/")
    options = parser.parse_args()
    for name, (full, quick, _) in NUMBERS.items():
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else full)
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, but is {getattr(options, name)}")
    options.parts = options.parts.split(",")
    every = dict.fromkeys([*problems.PROBLEMS, *splits.NETS])
    options.models = options.models.split(",") if options.models else list(every)
    for chosen, known in ((options.parts, PARTS), (options.models, every)):
        if unknown := set(chosen) - set(known):
            parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return options


# -- jobs on ranks -----------------------------------------------------------------------------------------------------


def settings_of(options: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """What the work on ranks asks for."""
    return {name: getattr(options, name) for name in (*NUMBERS, "batch", "quick")} | more


def training_jobs(options: argparse.Namespace) -> list[problems.Job]:
    """Every model under every division of the ranks, few ranks first."""
    divided = sorted(problems.divisions(options.ranks, options.stages), key=lambda division: division.ranks)
    found: list[problems.Job] = []
    for ranks, same in groupby(divided, lambda division: division.ranks):
        batch, cases = options.batch or ranks * options.images, list(same)
        models = [name for name in options.models if name in problems.PROBLEMS]
        models = [name for name in models if not options.quick or name in problems.QUICK]
        found += [problems.Job(name, case, batch, options.microbatches) for name in models for case in cases]
    return chosen(found, options)


def split_cells(options: argparse.Namespace) -> list[splits.Cell]:
    """The cells of the models that were asked for."""
    return chosen([cell for cell in splits.cells(options.quick) if cell.model in options.models], options)


def chosen(jobs: Sequence[Any], options: argparse.Namespace) -> list[Any]:
    """Those that --only names, in their own order: jobs of as many ranks share processes."""
    names = set(matching([job.name for job in jobs], options.only))
    return [job for job in jobs if job.name in names]


def measure(options: argparse.Namespace, path: Path) -> list[dict[str, Any]]:
    """Train the jobs that are not known."""
    log = Log("schedules", path, options.known, options.minutes)
    known = {record["name"] for record in log.records if record["kind"] == "step" and "error" not in record}
    log.write("versions", torch=torch.__version__, load=os.getloadavg()[0])
    jobs = [job for job in training_jobs(options) if job.name not in known]
    settings = settings_of(options)
    on_ranks(log, jobs, measured.measured, settings, limit=options.limit, failed="step", line=measured.line)
    return read(path)


def split(options: argparse.Namespace, path: Path) -> list[dict[str, Any]]:
    """Measure the layers of each model and cut it, each model in a process of its own; then run the cuts."""
    log = Log("schedules", path, options.known, options.minutes)
    log.write("versions", torch=torch.__version__, device="CPU, one thread a rank", load=os.getloadavg()[0])
    wanted = split_cells(options)
    models = dict.fromkeys(cell.model for cell in wanted)
    new = [model for model in models if log.find("nodes", name=model) is None]
    # Layers are measured once, so all cells are cut, those of a later run included.
    fresh = {model: [cell for cell in splits.cells(options.quick) if cell.model == model] for model in new}
    if fresh:
        with multiprocessing.get_context("spawn").Pool(min(len(fresh), os.cpu_count() or 1)) as pool:
            found = pool.starmap(splits.prepared, [(model, mine, options.quick) for model, mine in fresh.items()])
        for model, answer in zip(fresh, found, strict=True):
            log.write("nodes", name=model, seconds=answer["nodes"], took=answer["took"])
            for name, cuts in answer["cuts"].items():
                log.write("cuts", name=name, **cuts)
            log.say(f"{model}: measured and cut in {answer['took']:.0f} s")
    records = {cell.name: log.find("cuts", name=cell.name) or {} for cell in wanted}
    nodes = {model: (log.find("nodes", name=model) or {})["seconds"] for model in models}
    done = {(r["model"], r["stages"], tuple(r["names"])) for r in log.records if r["kind"] == "split"}
    jobs = [each for each in splits.splits(wanted, records) if (each.model, each.stages, each.names) not in done]
    settings = settings_of(options, nodes=nodes)
    on_ranks(log, jobs, split_steps.measured, settings, limit=options.limit, line=measured.line)
    return read(path)


def seconds_of(options: argparse.Namespace) -> dict[str, float]:
    """What each job of the parts takes, and what is done before."""
    rounds, budget = options.rounds, options.seconds
    found: dict[str, float] = {}
    if "measured" in options.parts:
        jobs = training_jobs(options)
        found |= {f"start {ranks} ranks": 10.0 for ranks in dict.fromkeys(job.ranks for job in jobs)}
        found |= {job.name: job.expected(rounds, budget) for job in jobs}
    if "splits" in options.parts:
        wanted = split_cells(options)
        found |= {"measure layers and cut": splits.PREPARING}
        found |= {f"start {stages} stages": splits.STARTING for stages in dict.fromkeys(c.stages for c in wanted)}
        found |= {cell.name: splits.expected(cell, rounds, budget) for cell in wanted}
    return found


# -- parts -------------------------------------------------------------------------------------------------------------

RUNS = {"measured": (measure, page.measured_text), "splits": (split, page.splits_text)}


def carry_out(part: str, options: argparse.Namespace, output: Path) -> None:
    """Do one part, print it, and write its files."""
    one = output.suffix == ".jsonl"
    (output.parent if one else output).mkdir(parents=True, exist_ok=True)
    if part in RUNS:
        path = output if one else output / page.FILES[part].replace(".json", ".jsonl")
        if not one:
            path.unlink(missing_ok=True)
        do, text = RUNS[part]
        print(text(do(options, path)))
        if not one:
            collect([path], output / page.FILES[part])
        return
    results: dict[str, Any] = {
        "command": command_line("schedules", sys.argv[1:]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "records": simulated.measure(options.quick),
    }
    print(page.simulated_text(results))
    (output / page.FILES[part]).write_text(page.as_json(rounded(results)))


def main() -> None:
    """Do the parts, print, write; or only list, put files together, or write the page."""
    options = arguments()
    if options.list:
        print(listing(seconds_of(options)))
        return
    if options.collect:
        part = "splits" if "splits" in options.parts else "measured"
        print(collect(options.collect, HERE / "results" / page.FILES[part]), "records in", page.FILES[part])
        return
    if options.page:
        page.write(HERE)
        return
    with tempfile.TemporaryDirectory(prefix="mural-schedules-") as nowhere:
        for part in options.parts:
            carry_out(part, options, options.output or (Path(nowhere) if options.quick else HERE / "results"))


if __name__ == "__main__":
    main()
