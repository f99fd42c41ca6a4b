"""Predicted against measured: time and memory of layers, blocks and models.

mural bench cost --output FILE.jsonl           measures: the held-out list, the twelve convolutions, the sweep
mural bench cost --collect FILE.jsonl …        puts such files into results/, for the fit and the page
mural bench cost --fit                         fits the predictor of a device on the sweep in results/
mural bench cost --page                        writes README.md's tables and the figures from results/
mural bench cost --refit FILE.json             fits a model of this machine, for `Hardware(…, model="FILE.json")`

A run that was stopped goes on where it was if it is started again with the same --output. --device cpu or cuda names
the kind of device, for all of these.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import measured
import torch
import twelve
from harness.options import DEVICES, device_of
from harness.results import Log, identity, read
from host import host_seconds
from refit import model_of, refit
from sweep import sweep
from trials import release, try_case

import mural.cost
from mural.cost.clock import clock_of
from mural.cost.rates import rates

HERE = Path(__file__).resolve().parent
PARTS = ("rates", "held", "twelve", "host", "layers", "spaces", "sweep")
DONE: set[tuple[str, str]] = set()
ITERATIONS = {"cuda": (8, 50, twelve.SIZE), "cpu": (1, 8, twelve.SIZE), "quick": (1, 4, 64)}
"""Of the twelve convolutions: the batch, the iterations, the extent."""
COUNTS = {"cuda": 9000, "cpu": 2600}


def arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=DEVICES, default="auto", help="auto: cuda where there is a GPU")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"what is measured, in order ({','.join(PARTS)})")
    parser.add_argument("--minutes", type=float, default=12.0, help="stop the sweep after about this long (12)")
    parser.add_argument("--repeats", type=int, default=7, help="steps of each held-out model (7)")
    parser.add_argument("--seed", type=int, default=0, help="of the sweep; another seed adds to it (0)")
    parser.add_argument("--output", type=Path, help="file of the measurements, one line for each")
    parser.add_argument(
        "--known", type=Path, nargs="*", default=[], help="files of measurements that need not come again"
    )
    parser.add_argument("--quick", action="store_true", help="a few of each, to try it out: the numbers mean nothing")
    parser.add_argument("--collect", type=Path, nargs="+", help="only put files of measurements into results/")
    parser.add_argument("--fit", action="store_true", help="only fit the predictor, from results/")
    parser.add_argument(
        "--refit", type=Path, nargs="?", const=Path(), metavar="FILE.json",
        help="only measure a sweep for --minutes and fit a model of this machine; into mural's cache without a name",
    )  # fmt: skip
    parser.add_argument("--page", action="store_true", help="only write README.md and the figures, from results/")
    options = parser.parse_args()
    options.parts = [part for part in options.parts.split(",") if part in PARTS]
    return options


def attempt(log: Log, kind: str, name: str, work: Any) -> None:
    """Write what a measurement found, unless it is known; one that fails is written too, and does not end the run."""
    if (kind, name) in DONE:
        return
    DONE.add((kind, name))
    begin = time.perf_counter()
    try:
        found = work()
    except Exception as error:
        log.write("failed", name=name, what=kind, error=f"{type(error).__name__}: {str(error)[:300]}")
        log.say(f"{kind} {name} FAILED: {type(error).__name__} {str(error)[:200]}")
        release()
        return
    log.write(kind, name=name, **found, load=os.getloadavg()[0])
    if kind != "sweep":
        log.say(f"{kind} {name}: {time.perf_counter() - begin:.2f} s")


def measure(log: Log, device: str, options: argparse.Namespace) -> None:
    """Everything that was asked for, until the time is over."""
    entries = measured.entries(device)[:: 6 if options.quick else 1]
    clock = clock_of(device)
    if "rates" in options.parts:
        attempt(log, "rates", device, lambda: asdict(rates(device)))
    if "held" in options.parts:
        for entry in entries:
            work = lambda entry=entry: measured.step(*entry, clock, options.repeats)  # noqa: E731
            attempt(log, "held", measured.key_of(*entry), work)
    if "twelve" in options.parts:
        given = (device, *ITERATIONS["quick" if options.quick else device])
        attempt(log, "twelve", device, lambda: twelve.measure(*given))
    if "host" in options.parts:
        attempt(log, "host", device, lambda: {"seconds": host_seconds(device)})
    if "layers" in options.parts:
        known: dict[str, Any] = {}
        for entry in entries:
            attempt(log, "layers", measured.key_of(*entry), lambda entry=entry: found_layers(entry, clock, known))
    cases = sweep(device, 20 if options.quick else COUNTS[device], options.seed)
    names = [f"{options.seed}.{number}" for number in range(len(cases))]
    if "spaces" in options.parts and device == "cpu" and ("spaces", names[-1]) not in DONE:
        with measured.returning() as pool:
            for name, (ahead, back) in zip(names, pool.apply(measured.spaces, (cases,)), strict=True):
                log.write("spaces", name=name, forward_bytes=ahead, backward_bytes=back)
        log.say(f"spaces of {len(cases)} layers")
    if "sweep" in options.parts:
        release()
        for number, case in enumerate(cases):
            if log.left < 0:
                break
            attempt(
                log,
                "sweep",
                names[number],
                lambda case=case: {"case": case.encode()} | try_case(case, clock).encode(),
            )
            if device == "cuda" and number % 100 == 99:
                release()


def found_layers(entry: Any, clock: Any, known: dict[str, Any]) -> dict[str, Any]:
    found = measured.layers(*entry, clock, known)
    known |= found
    return {"found": found}


def main() -> None:
    """Measure, fit, or write the page."""
    options = arguments()
    device = device_of(options)
    if options.collect:
        collect(options.collect, device)
        return
    if options.refit is not None:
        path = refit(device, options.minutes, options.refit if options.refit.name else None, options.seed)
        print(f'{path}: Hardware(…, model="{path}") predicts with it')
        return
    if options.fit or options.page:
        import page  # noqa: PLC0415 (needs matplotlib and scikit-learn)

        if options.fit:
            model = model_of(page.records_of(HERE, device), device, page.MODELS[device])
            model.save(Path(mural.cost.__file__).parent / "data" / f"{page.MODELS[device]}.json")
        else:
            page.write(HERE)
        return
    if device == "cpu":
        torch.set_num_threads(1)
    log = Log("cost", options.output, options.known, options.minutes)
    DONE.update((record["kind"], record.get("name", "")) for record in log.records)
    log.write("versions", name=device, **versions(device))
    measure(log, device, options)
    log.say(f"finished: {len(log.records)} records")


def collect(files: Sequence[Path], device: str) -> None:
    """Put the records of files together; of two about the same, the later counts. The sweep has a file of its own."""
    found = {
        identity(record): record
        for file in files
        for record in read(file)
        if record["kind"] not in ("failed", "skipped")
    }
    swept = [record for record in found.values() if record["kind"] in ("sweep", "spaces")]
    others = [record for record in found.values() if record["kind"] not in ("sweep", "spaces")]
    (HERE / "results").mkdir(exist_ok=True)
    text = ",\n  ".join(json.dumps(record) for record in others)
    (HERE / "results" / f"{device}.json").write_text(f'{{\n "records": [\n  {text}\n ]\n}}\n')
    with gzip.GzipFile(HERE / "results" / f"sweep-{device}.jsonl.gz", "wb", mtime=0) as file:
        file.write("".join(json.dumps(record) + "\n" for record in swept).encode())
    print(f"{len(others)} records and {len(swept)} of the sweep in results/")


def versions(device: str) -> dict[str, Any]:
    """What the numbers depend on."""
    found: dict[str, Any] = {"torch": torch.__version__, "threads": torch.get_num_threads(), "device": "cpu"}
    if device == "cuda":
        found |= {
            "device": torch.cuda.get_device_name(),
            "device_memory": torch.cuda.get_device_properties(0).total_memory,
            "cudnn": torch.backends.cudnn.version(),
            "convolutions_in_tf32": torch.backends.cudnn.allow_tf32,
            "products_in_tf32": torch.backends.cuda.matmul.allow_tf32,
        }
    return found


if __name__ == "__main__":
    main()
