"""All-reduce: every algorithm against the backend's own, over slow links, and what it does to training.

Four parts, each with a file in results/: `measured` (seconds against bytes and ranks, with predictions), `network`
(where a ring overtakes a tree, over links of a set delay and bandwidth; needs the rights of root), `digits` (the same
accuracy by every algorithm) and `faults` (what loses accuracy). `elapsed` (seconds of the digits' training on 2 to 80
processes) and `sockets` (the same calls over gloo and over MPI) write a line for each measurement to a file .jsonl,
which goes on where it was stopped; `--name sixteen --collect` makes results/sixteen-elapsed.json of such files,
`--parts sockets --collect` results/sockets.json. `--page` writes README.md's tables and the figures.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import digits
import elapsed
import elapsed_page
import faults
import measured
import network
import page
import sockets
import sockets_page
import torch
from harness.options import numbers
from harness.rank_jobs import on_ranks
from harness.results import Log, collect, command_line, machine, read, rounded
from harness.selection import add_files, add_selection, listing, matching

from mural.ranks import run_local

HERE = Path(__file__).resolve().parent
SIZES = tuple(2**n for n in (10, 13, 16, 18, 20, 22, 24, 26, 28))
GAUGED = (2**10, 2**14, 2**17, 2**20, 2**23)
ELAPSED, SOCKETS = "elapsed", "sockets"
LINKS = {"hosts": (4, 4, 0.002, 25e6), "nodes": (4, 2, 0.002, 25e6), "far": (4, 4, 0.01, 25e6)}
"""Ranks, hosts, seconds between two hosts, and bytes a second of a host's link."""


def arguments() -> argparse.Namespace:
    """The options; --quick is for trying the benchmark out, and writes files only where --output names a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parts", default=",".join(PARTS), help=f"what is done, or {ELAPSED} or {SOCKETS} alone ({','.join(PARTS)})"
    )
    parser.add_argument("--ranks", type=numbers, help="numbers of ranks (2,4,8; with --quick 2)")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each size in `measured` (4)")
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="bytes of the largest tensor (268435456)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each training (3)")
    parser.add_argument("--kinds", default="weights,gradients", help="what `digits` averages (weights,gradients)")
    parser.add_argument("--widths", type=numbers, default=(8, 32, 128), help="of the second hidden layer (8,32,128)")
    parser.add_argument("--quick", action="store_true", help="toy sizes, and no files: to try it out")
    add_selection(parser)
    add_files(parser, 8, f"folder of the results; of {ELAPSED} and {SOCKETS}, a file .jsonl")
    parser.add_argument("--collect", type=Path, nargs="+", help="only put such files .jsonl together, for the page")
    parser.add_argument("--name", default="", help="put before the name of a file of results: another machine's")
    parser.add_argument("--page", action="store_true", help="only write README.md and the figures from results/")
    options = parser.parse_args()
    options.parts = options.parts.split(",")
    options.ranks = options.ranks or ((2,) if options.quick else (2, 4, 8))
    if options.parts not in ([ELAPSED], [SOCKETS]) and (unknown := set(options.parts) - set(PARTS)):
        known = f"{', '.join(PARTS)}, or one of {', '.join(LINES)}"
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {known}")
    if min(*options.ranks, options.seeds) < 1 or options.seconds <= 0:
        parser.error("--ranks and --seeds are at least 1, --seconds is more than 0")
    return options


def do_measured(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every number of ranks, the largest first."""
    sizes = [2**10, 2**16] if options.quick else [size for size in SIZES if size <= options.largest]
    seconds, gauged = (0.2, GAUGED[:2]) if options.quick else (options.seconds, GAUGED)
    records: list[dict[str, Any]] = []
    for ranks in sorted((n for n in options.ranks if n > 1), reverse=True):
        found = run_local(measured.measure, ranks, sizes, seconds, list(gauged), threads=1)
        records += [{"ranks": ranks, "constants": found["constants"]}, *found["records"]]
    return records


def do_network(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every network."""
    sizes = [2**10, 2**16] if options.quick else [2**n for n in (10, 12, 14, 15, 16, 17, 18, 20, 22)]
    links = {"hosts": LINKS["hosts"]} if options.quick else LINKS
    records: list[dict[str, Any]] = []
    for name, (ranks, hosts, delay, bandwidth) in links.items():
        print(f"network: {name}", flush=True)
        try:
            records.append(
                {"name": name} | network.measure(ranks, hosts, delay, bandwidth, sizes, 2 if options.quick else 7)
            )
        except OSError as error:
            raise SystemExit(f"network namespaces and TUN devices need the rights of root: {error}") from error
    return records


def do_digits(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every number of ranks, beyond the cores of the machine too; one rank is what they are compared with."""
    records: list[dict[str, Any]] = []
    widths, seeds = list(options.widths), list(range(options.seeds))
    kinds = {"weights": widths, "gradients": widths[len(widths) // 2 :][:1]}
    kinds = {what: mine for what, mine in kinds.items() if what in options.kinds.split(",")}
    if options.quick:
        kinds, seeds = {"weights": widths[:1], "gradients": widths[:1]}, [0]
    for ranks in (1, *(n for n in options.ranks if n > 1)):
        epochs = 2 if options.quick else digits.EPOCHS
        records += run_local(digits.measure, ranks, kinds, seeds, epochs, threads=1)
    return records


def do_faults(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every fault on eight simulated ranks, and on forty."""
    torch.set_num_threads(1)
    seeds = [0] if options.quick else list(range(options.seeds))
    if options.quick:
        return faults.measure(2, 32, seeds, ["weights"], 2)
    few = faults.measure(8, 32, seeds, ["weights", "gradients"], digits.EPOCHS)
    return few + faults.measure(40, 32, seeds, ["weights"], digits.EPOCHS)


PARTS: dict[str, Callable[[argparse.Namespace], list[dict[str, Any]]]] = {
    "measured": do_measured,
    "network": do_network,
    "digits": do_digits,
    "faults": do_faults,
}


LINES = {ELAPSED: (elapsed, elapsed_page), SOCKETS: (sockets, sockets_page)}
"""The parts that write lines, with their tables."""


def lines_of(options: argparse.Namespace) -> str:
    """The part that writes lines, if it was asked for alone; else, the one that was there first."""
    return options.parts[0] if options.parts[0] in LINES else ELAPSED


def jobs_of(options: argparse.Namespace) -> list[Any]:
    """Those that were asked for, few ranks first."""
    every = LINES[lines_of(options)][0].jobs(options.quick)
    names = set(matching([job.name for job in every], options.only))
    return [job for job in every if job.name in names]


def write_lines(options: argparse.Namespace) -> None:
    """Measure the jobs that are not known; print, and write each result at once."""
    part = lines_of(options)
    text = LINES[part][1]
    output = options.output or (None if options.quick else HERE / "results" / f"{part}.jsonl")
    with tempfile.TemporaryDirectory(prefix="mural-allreduce-") as nowhere:
        log = Log("allreduce", output or Path(nowhere) / "quick.jsonl", options.known, options.minutes)
        log.write("versions", torch=torch.__version__, device="CPU, one thread a rank", load=os.getloadavg()[0])
        done = {record["name"] for record in log.records if record["kind"] in text.KINDS}
        jobs = [job for job in jobs_of(options) if job.name not in done]
        if part == SOCKETS:
            sockets.carry_out(log, jobs, text.line, options.quick)
        else:
            on_ranks(log, jobs, line=text.line)
        print(text.text_of([*log.records, *read(log.path)]))


def file_name(options: argparse.Namespace, part: str) -> str:
    """The file of a part in results/: those of other machines have names of their own."""
    named = options.name and part in ("measured", *LINES)
    return f"{options.name}-{part}.json" if named else f"{part}.json"


def main() -> None:
    """Do the parts, print, write; or only list, put files together, or write the page."""
    options = arguments()
    if options.page:
        page.write(HERE)
        return
    if options.collect:
        name = file_name(options, lines_of(options))
        print(collect(options.collect, HERE / "results" / name), "records in", name)
        return
    if options.list:
        print(listing({job.name: job.expected for job in jobs_of(options)}))
        return
    if options.parts[0] in LINES:
        write_lines(options)
        return
    folder = options.output or (None if options.quick else HERE / "results")
    for part in options.parts:
        results: dict[str, Any] = {
            "command": command_line("allreduce", sys.argv[1:]),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "load_at_start": os.getloadavg()[0],
            "torch": torch.__version__,
        }
        results["records"] = PARTS[part](options)
        print(page.TEXTS[part](results))
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            file = folder / file_name(options, part)
            file.write_text(page.as_json(rounded(results)))
            print(f"written: {file.name}")


if __name__ == "__main__":
    main()
