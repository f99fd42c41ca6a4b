"""mural's data parallelism beside torch's, and where each rank's time goes: `mural bench data_parallel`.

Three parts, each on ranks of its own with one thread each: `pairs` (both libraries in alternating steps), `shares`
(computing, communicating and idle, per rank; CPU alone) and `scaling` (the document's experiment; CPU alone). They
write `results/cpu.json` or `results/cuda.json`.

Three more for a machine with a core for each rank, up to 16: `servers` (training efficiency with a parameter server and
with a ring), `norms` (what weight norm and batch norm cost) and `processes` (`scaling` again). They write one line for
each measurement to a file .jsonl, which goes on where it was stopped; `--collect` makes `results/sixteen.json` of it.
`sharing` (the same batch on 1 to 8 ranks of one GPU, explained) writes such a file too; `--parts sharing --collect`
makes `results/sharing.json` of it. `--page` writes README.md's tables and the figure from all these files.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import efficiency
import many_ranks_page
import norms
import page
import pairs
import scaling
import shares
import sharing
import sharing_page
import torch
from harness.options import DEVICES, device_of
from harness.rank_jobs import on_ranks as measure_jobs
from harness.results import Log, collect, command_line, machine, read, rounded
from harness.selection import add_files, add_selection, listing, matching

from mural.ranks import run_local

HERE = Path(__file__).resolve().parent
MESHES = (("data 2", 2, 1), ("data 4", 4, 1), ("data 2 × spatial 2", 2, 2))
NUMBERS = {
    "rounds": (15, 3, "steps of each variant in a repeat"),
    "repeats": (3, 1, "fresh processes for each comparison"),
    "steps": (10, 2, "steps whose time is shared out, and iterations of the document's experiment × 10"),
    "ranks": (2, 2, "ranks of the comparison with DistributedDataParallel"),
}
PARTS = ("pairs", "shares", "scaling")
JOBS: dict[str, Callable[[int, bool], Sequence[Any]]] = {
    "servers": efficiency.server_jobs,
    "norms": norms.jobs,
    "processes": efficiency.process_jobs,
}
SHARING = "sharing"
TURNS, QUICK_TURNS = 6, 2
"""Of each variant in the parts that write lines."""


def arguments() -> argparse.Namespace:
    """The options; --quick is for trying the benchmark out, and writes a file only where --output names one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=DEVICES, default="auto", help="auto: cuda where there is a GPU")
    parser.add_argument("--models", default="resnet18,unet", help="what is trained (resnet18,unet)")
    every = (*PARTS, *JOBS, SHARING)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {','.join(every)} (the first three)")
    for name, (full, quick, what) in NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, help=f"{what} ({full}; with --quick {quick})")
    parser.add_argument("--quick", action="store_true", help="toy sizes, and no file: to try it out")
    parser.add_argument("--backend", help="of the comparison with DDP: gloo where ranks share a GPU, or nccl")
    add_selection(parser)
    add_files(parser, 15, "file of the results; .jsonl for all but the first three parts")
    parser.add_argument("--collect", type=Path, nargs="+", help="only put such files .jsonl together, for the page")
    parser.add_argument("--page", action="store_true", help="only write README.md and the figure from results/")
    options = parser.parse_args()
    for name, (full, quick, _) in NUMBERS.items():
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else full)
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, but is {getattr(options, name)}")
    options.models = options.models.split(",")
    options.parts = options.parts.split(",")
    kinds = (PARTS, tuple(JOBS), (SHARING,))
    if unknown := set(options.parts) - {*every}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(every)}")
    if sum(bool({*options.parts} & {*kind}) for kind in kinds) > 1:
        together = "; ".join(", ".join(kind) for kind in kinds)
        parser.error(f"these have files of different kinds, ask for them one by one: {together}")
    return options


def on_ranks(function: Callable[..., None], ranks: int, *given: Any, **more: Any) -> dict[str, Any]:
    """What the ranks wrote, by the name of the file."""
    with tempfile.TemporaryDirectory(prefix="mural-data-parallel-") as folder:
        run_local(function, ranks, folder, *given, threads=1, **more)
        return {path.stem: json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))}


def measure_pairs(options: argparse.Namespace, device: str) -> dict[str, Any]:
    """For each model, what each repeat found."""
    found: dict[str, Any] = {}
    for name in options.models:
        for repeat in range(options.repeats):
            print(f"pairs: {name}, repeat {repeat + 1} of {options.repeats}", flush=True)
            given = (name, device, options.rounds, options.quick)
            answer = on_ranks(pairs.measure, options.ranks, *given, device=device, backend=options.backend)
            found.setdefault(name, []).append(answer["pairs"])
    return found


def measure_shares(options: argparse.Namespace, device: str) -> dict[str, Any]:
    """For each model and mesh, with and without overlap, the seconds of each rank."""
    found: dict[str, Any] = {}
    for name in options.models if device == "cpu" else ():
        for title, data, spatial in MESHES[: 1 if options.quick else None]:
            for overlap in (True, False):
                print(f"shares: {name}, {title}, {'in' if overlap else 'after'} backward", flush=True)
                given = (name, data, spatial, overlap, options.steps, options.quick)
                traces = on_ranks(shares.measure, data * spatial, *given)
                key = f"{name}/{title}/{'overlap' if overlap else 'behind'}"
                found[key] = shares.shares([traces[f"rank{rank}"] for rank in range(data * spatial)])
    return found


def measure_scaling(options: argparse.Namespace, device: str) -> dict[str, Any]:
    """Seconds of iterations by the number of ranks."""
    found: dict[str, Any] = {}
    for ranks in range(1, (2 if options.quick else 4) + 1) if device == "cpu" else ():
        print(f"scaling: {ranks}", flush=True)
        found[str(ranks)] = on_ranks(scaling.measure, ranks, 10 * options.steps, options.quick)["scaling"]
    return found


def jobs_of(options: argparse.Namespace) -> list[Any]:
    """The jobs of the parts that write lines, as far as they were asked for; few ranks first."""
    turns = QUICK_TURNS if options.quick else TURNS
    every = [job for part in options.parts if part in JOBS for job in JOBS[part](turns, options.quick)]
    if SHARING in options.parts:
        every = sharing.jobs(turns, options.quick, device_of(options))
    names = set(matching([job.name for job in every], options.only))
    return sorted((job for job in every if job.name in names), key=lambda job: job.ranks)


def file_of(options: argparse.Namespace) -> str:
    """The name of the published file of the parts that write lines."""
    return SHARING if SHARING in options.parts else "sixteen"


def carry_out(options: argparse.Namespace) -> None:
    """Measure the jobs that are not known, and print the tables."""
    shared = SHARING in options.parts
    page_of = sharing_page if shared else many_ranks_page
    output = options.output or (None if options.quick else HERE / "results" / f"{file_of(options)}.jsonl")
    with tempfile.TemporaryDirectory(prefix="mural-data-parallel-") as nowhere:
        log = Log("data_parallel", output or Path(nowhere) / "quick.jsonl", options.known, options.minutes)
        cuda = shared and device_of(options) == "cuda"
        device = f"{torch.cuda.get_device_name()} shared by all ranks" if cuda else "CPU, one thread a rank"
        log.write("versions", torch=torch.__version__, device=device, load=os.getloadavg()[0])
        done = {record["name"] for record in log.records if record["kind"] in page_of.KINDS}
        jobs = [job for job in jobs_of(options) if job.name not in done]
        measure_jobs(log, jobs, line=page_of.line)
        print(page_of.text_of([*log.records, *read(log.path)]))


def main() -> None:
    """Measure, print, write; or only list, put files together, or write the page."""
    options = arguments()
    if options.page:
        page.write(HERE)
        return
    if options.collect:
        name = f"{file_of(options)}.json"
        print(collect(options.collect, HERE / "results" / name), "records in", name)
        return
    if options.list:
        print(listing({job.name: job.expected for job in jobs_of(options)}))
        return
    if options.parts[0] in {*JOBS, SHARING}:
        carry_out(options)
        return
    device = device_of(options)
    results: dict[str, Any] = {
        "command": command_line("data_parallel", sys.argv[1:]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "load_at_start": os.getloadavg()[0],
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "backend": options.backend or "gloo",
        "settings": {key: getattr(options, key) for key in NUMBERS},
    }
    parts = {"pairs": measure_pairs, "shares": measure_shares, "scaling": measure_scaling}
    for part in options.parts:
        results[part] = parts[part](options, device)
    print(page.text_of(results))
    output = options.output or (None if options.quick else HERE / "results" / f"{device}.json")
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(rounded(results), indent=1) + "\n")
        print(f"written: {output.name}")


if __name__ == "__main__":
    main()
