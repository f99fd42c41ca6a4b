"""Data, model and hybrid parallelism, by document `004`: `mural bench hybrid`.

Parts: `traffic` (what a step sends, layer by layer, counted beside the document's formulas), `master` (one rank that
updates for all, beside an all-reduce, and what averaged errors do), `training` (the document's tables) and `inference`
(latency). Each writes `results/PART-DEVICE.json`; a measurement that is repeated replaces the one of the same name, and
`--resume` measures only those that are missing. `--page` writes README.md's tables and the figures from these files.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import averaged_errors
import latency
import masters
import page
import sending
import torch
import training
from harness.options import DEVICES, device_of
from harness.results import Log, collect, read, rounded, scrubbed

from mural.errors import MuralError
from mural.ranks import run_local

HERE = Path(__file__).resolve().parent
NUMBERS: dict[str, tuple[float, float, str]] = {
    "iterations": (400, 4, "iterations of each training run"),
    "width": (8, 4, "channels of the first convolution in training; 32 is Caffe's network"),
    "rate": (0.01, 0.01, "learning rate"),
    "rounds": (20, 3, "steps or inferences that are measured, after some that are not"),
    "limit": (600, 120, "seconds that a rank waits for another before it gives up"),
}
WHOLE = ("iterations", "width", "rounds", "limit")


class Job(Protocol):
    """Something to measure on some ranks."""

    @property
    def name(self) -> str:
        """What it is, in a few words: results of the same name replace each other."""
        ...

    @property
    def ranks(self) -> int:
        """How many."""
        ...

    def measure(self) -> dict[str, Any]:
        """On each of them: what rank 0 writes down. Collective."""
        ...


PARTS: dict[str, Callable[[argparse.Namespace], Sequence[Job]]] = {
    "traffic": lambda o: sending.jobs(quick=o.quick),
    "master": lambda o: [
        *averaged_errors.jobs(quick=o.quick),
        *masters.jobs(quick=o.quick, device=o.device, rounds=o.rounds),
    ],
    "training": lambda o: training.jobs(
        quick=o.quick, device=o.device, iterations=o.iterations, width=o.width, rate=o.rate
    ),
    "inference": lambda o: latency.jobs(quick=o.quick, device=o.device, rounds=o.rounds),
}


def arguments() -> argparse.Namespace:
    """The options; --quick is for trying the benchmark out, and writes a file only where --output names a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"what is done ({','.join(PARTS)})")
    parser.add_argument("--device", choices=DEVICES, default="auto", help="auto: cuda where there is a GPU")
    parser.add_argument("--only", nargs="+", default=[], help="only measurements whose name has one of these texts")
    for name, (full, quick, what) in NUMBERS.items():
        kind = int if name in WHOLE else float
        parser.add_argument(f"--{name}", type=kind, help=f"{what} ({full:g}; with --quick {quick:g})")
    parser.add_argument("--resume", action="store_true", help="leave out what the results have already")
    parser.add_argument("--quick", action="store_true", help="toy sizes, and no file: to try it out")
    parser.add_argument("--output", type=Path, help="folder of the results")
    parser.add_argument("--page", action="store_true", help="only write README.md and the figures from results/")
    options = parser.parse_args()
    for name, (full, quick, _) in NUMBERS.items():
        if getattr(options, name) is None:
            setattr(options, name, (int if name in WHOLE else float)(quick if options.quick else full))
        if getattr(options, name) <= 0:
            parser.error(f"--{name} must be above 0, but is {getattr(options, name)}")
    options.parts, options.device = options.parts.split(","), device_of(options)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return options


def serve(rank: int, path: str, part: str, begun: str, jobs: Sequence[Job]) -> None:
    """On a rank: all jobs, one after the other; rank 0 adds a record of each to the file, and says so."""
    for job in jobs:
        record = {"kind": type(job).__name__.lower(), "part": part, "name": job.name, "run": begun, **vars(job)}
        record |= job.measure()
        if rank == 0:
            with Path(path).open("a") as file:
                file.write(json.dumps(rounded(record)) + "\n")
            print(page.line(record), flush=True)


def carry_out(part: str, options: argparse.Namespace, folder: Path, load: float) -> None:
    """Measure one part, and add it to its file; what fails is recorded with its error, and the rest goes on.

    The load is that before all parts: later ones would find that of the parts before them.
    """
    device = "cpu" if part == "traffic" else options.device
    target = folder / f"{part}-{device}.json"
    before = [target] if target.is_file() else []
    known = {r["name"] for r in (read(target) if before else []) if r.get("part") == part and "error" not in r}
    jobs = [job for job in PARTS[part](options) if not options.only or any(text in job.name for text in options.only)]
    jobs = [job for job in jobs if not (options.resume and job.name in known)]
    if not jobs:
        print(f"{part}: nothing is missing")
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{part}-{device}.jsonl"
    log = Log("hybrid", path, [], minutes=0.0)
    begun = next(r for r in reversed(log.records) if r["kind"] == "header")["date"]
    log.write("versions", name=begun, torch=torch.__version__, load=load, device=device_name(device))
    try:
        for ranks, same in groupby(sorted(jobs, key=lambda job: job.ranks), lambda job: job.ranks):
            measure(list(same), ranks, part, device, log, path, begun, options.limit)
    finally:
        print(collect([*before, path], target), "records in", target.name)
        path.unlink()


def measure(
    jobs: list[Job], ranks: int, part: str, device: str, log: Log, path: Path, begun: str, limit: float
) -> None:
    """All jobs of as many ranks in the same processes; after a failure, the rest in new ones."""
    while jobs:
        before = len(read(path))
        try:
            run_local(serve, ranks, str(path), part, begun, jobs, threads=1, device=device, timeout=float(limit))
            return
        except (MuralError, OSError) as error:
            failed = jobs[len(read(path)) - before]
            log.write("failure", part=part, name=failed.name, run=begun, error=scrubbed(str(error).strip()))
            print(f"{failed.name}: {error}", flush=True)
            jobs = jobs[len(read(path)) - before :]


def device_name(device: str) -> str:
    """What computes, in words."""
    return torch.cuda.get_device_name() if device == "cuda" else "CPU, one thread a rank"


def main() -> None:
    """Do the parts, print, write; or only write the page."""
    options = arguments()
    if options.page:
        page.write(HERE)
        return
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="mural-hybrid-") as nowhere:
        for part in options.parts:
            carry_out(part, options, options.output or (Path(nowhere) if options.quick else HERE / "results"), load)


if __name__ == "__main__":
    main()
