"""Data, model and hybrid parallelism, by document `004`: `mural bench hybrid`.

Parts: `traffic` (what a step sends, layer by layer, counted beside the document's formulas), `master` (one rank that
updates for all, beside an all-reduce, and what averaged errors do), `training` (the document's tables), `inference`
(latency) and `profile` (where the time of a node goes, and when bytes leave it). Each writes results/PART-DEVICE.json,
or PART-NAME.json for another machine; a measurement that is repeated replaces the one of the same name, and `--resume`
measures only those that are missing. `--collect` adds such files, of this kind or .jsonl, to those in results/.
`--page` writes README.md's tables and the figures from these files. `over_mpi.py` is training over MPI.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import averaged_errors
import latency
import masters
import page
import profiles
import sending
import torch
import training
from durations import expected
from harness.options import DEVICES, device_of
from harness.rank_jobs import on_ranks, side_by_side
from harness.results import Log, collect, read
from harness.selection import listing

HERE = Path(__file__).resolve().parent
NUMBERS: dict[str, tuple[float, float, str]] = {
    "iterations": (400, 4, "iterations of each training run"),
    "width": (8, 4, "channels of the first convolution in training; 32 is Caffe's network"),
    "rate": (0.01, 0.01, "learning rate"),
    "rounds": (20, 3, "steps or inferences that are measured, after some that are not"),
    "limit": (600, 120, "seconds that a rank waits for another before it gives up"),
}
WHOLE = ("iterations", "width", "rounds", "limit")


@dataclass(frozen=True)
class Noted:
    """A job of a part, in a run that began at some date."""

    job: Any
    part: str
    run: str

    @property
    def name(self) -> str:
        """Results of the same name replace each other."""
        return self.job.name

    @property
    def ranks(self) -> int:
        """How many."""
        return self.job.ranks

    @property
    def about(self) -> dict[str, Any]:
        """What a record of it begins with."""
        kind = type(self.job).__name__.lower()
        return {"kind": kind, "part": self.part, "name": self.name, "run": self.run, **vars(self.job)}

    def measure(self) -> dict[str, Any]:
        """On each rank: what rank 0 writes down. Collective."""
        return self.job.measure()


PARTS: dict[str, Callable[[argparse.Namespace], Sequence[Any]]] = {
    "traffic": lambda o: sending.jobs(quick=o.quick),
    "master": lambda o: [
        *averaged_errors.jobs(quick=o.quick),
        *masters.jobs(quick=o.quick, device=o.device, rounds=o.rounds),
    ],
    "training": lambda o: training.jobs(
        quick=o.quick, device=o.device, iterations=o.iterations, width=o.width, rate=o.rate
    ),
    "inference": lambda o: latency.jobs(quick=o.quick, device=o.device, rounds=o.rounds),
    "profile": lambda o: profiles.jobs(quick=o.quick, device=o.device, rounds=o.rounds),
}


def arguments() -> argparse.Namespace:
    """The options; --quick is for trying the benchmark out, and writes a file only where --output names a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"what is done ({','.join(PARTS)})")
    parser.add_argument("--device", choices=DEVICES, default="auto", help="auto: cuda where there is a GPU")
    parser.add_argument(
        "--only", nargs="+", default=[], help="only names with one of these texts, or patterns with a star"
    )
    for name, (full, quick, what) in NUMBERS.items():
        kind = int if name in WHOLE else float
        parser.add_argument(f"--{name}", type=kind, help=f"{what} ({full:g}; with --quick {quick:g})")
    parser.add_argument("--resume", action="store_true", help="leave out what the results have already")
    parser.add_argument("--quick", action="store_true", help="toy sizes, and no file: to try it out")
    parser.add_argument("--list", action="store_true", help="only print the names, with the seconds that each takes")
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after about this long (60)")
    parser.add_argument(
        "--cores", type=int, default=0, help="run several at a time, as long as each rank has one of these (0: one)"
    )
    parser.add_argument("--name", default="", help="instead of the device in the names of files: another machine")
    parser.add_argument("--output", type=Path, help="folder of the results")
    parser.add_argument("--collect", type=Path, nargs="+", help="only add files PART-NAME.json to results/")
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


def jobs_of(part: str, options: argparse.Namespace) -> list[Any]:
    """The jobs of a part whose names were asked for, few ranks first."""
    every = PARTS[part](options)
    found = [job for job in every if not options.only or any(asks(text, job.name) for text in options.only)]
    return sorted(found, key=lambda job: job.ranks)


def asks(text: str, name: str) -> bool:
    """Whether a text is in a name; one with a star has to match it as a whole.

    >>> asks("batch 10", "batch 100"), asks("batch 10*float64", "batch 10, float64"), asks("batch*", "a batch")
    (True, True, False)
    """
    return fnmatchcase(name, text) if "*" in text else text in name


def carry_out(part: str, options: argparse.Namespace, folder: Path, load: float) -> None:
    """Measure one part, and add it to its file; what fails is recorded with its error, and the rest goes on.

    The load is that before all parts: later ones would find that of the parts before them.
    """
    device = "cpu" if part == "traffic" else options.device
    target = folder / f"{part}-{options.name or device}.json"
    before = [target] if target.is_file() else []
    known = {r["name"] for r in (read(target) if before else []) if r.get("part") == part and "error" not in r}
    jobs = [job for job in jobs_of(part, options) if not (options.resume and job.name in known)]
    if not jobs:
        print(f"{part}: nothing is missing")
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = target.with_suffix(".jsonl")
    log = Log("hybrid", path, [], options.minutes)
    begun = next(r for r in reversed(log.records) if r["kind"] == "header")["date"]
    cores = {"cores": options.cores} if options.cores else {}
    log.write("versions", name=begun, torch=torch.__version__, load=load, device=device_name(device), **cores)
    noted = [Noted(job, part, begun) for job in jobs]
    try:
        if options.cores:
            longest = sorted(noted, key=lambda each: -expected(each.job, page.results_of(HERE)))
            side_by_side(log, longest, options.cores, device=device, limit=options.limit, line=page.line)
        else:
            on_ranks(log, noted, device=device, limit=options.limit, line=page.line)
    finally:
        print(collect([*before, path], target), "records in", target.name)
        path.unlink()


def gather(files: Sequence[Path]) -> None:
    """Add files of results, each named after its part and its device or machine, to those in results/."""
    for file in files:
        target = HERE / "results" / f"{file.stem}.json"
        if file.stem.partition("-")[0] not in (*PARTS, "mpi"):
            raise SystemExit(f"{file.name} is not named PART-NAME.json, as training-cuda.json: rename it")
        print(collect([*([target] if target.is_file() else []), file], target), "records in", target.name)


def device_name(device: str) -> str:
    """What computes, in words."""
    return torch.cuda.get_device_name() if device == "cuda" else "CPU, one thread a rank"


def main() -> None:
    """Do the parts, print, write; or only list, add files, or write the page."""
    options = arguments()
    if options.page:
        page.write(HERE)
        return
    if options.collect:
        gather(options.collect)
        return
    if options.list:
        known = page.results_of(HERE)
        jobs = [job for part in options.parts for job in jobs_of(part, options)]
        seconds = {job.name: expected(job, known) for job in jobs}
        print(listing(seconds))
        if options.cores:
            work = sum(min(job.ranks, options.cores) * seconds[job.name] for job in jobs) / options.cores
            print(f"{max(work, *seconds.values()):6.0f} s  or more, side by side on {options.cores} cores")
        return
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="mural-hybrid-") as nowhere:
        for part in options.parts:
            carry_out(part, options, options.output or (Path(nowhere) if options.quick else HERE / "results"), load)


if __name__ == "__main__":
    main()
