"""What it costs to note every wait of a step: `mural bench profile`.

On ranks of one thread each, steps of a U-Net with and without a trace take turns, under a spatial, a data and a stage
plan. Writes `results/cpu.json` or `results/cuda.json`; `--page` writes README.md's table from these files.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from harness.clock import timed
from harness.options import DEVICES, device_of
from harness.results import command_line, machine, rounded
from harness.tables import markdown, place

import mural
from mural.models import UNet
from mural.ranks import run_local

HERE = Path(__file__).resolve().parent
GOAL = 1.03
WARMUP = 3
PLANS: dict[str, dict[str, Any]] = {
    "spatial 2 × 1": {"spatial": (2, 1)},
    "data 2": {"data": 2},
    "stage 2, 1F1B, 2 micro-batches": {
        "stage": 2,
        "schedule": "1f1b",
        "microbatches": 2,
        "batchnorm": "micro",
    },
}


def arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=DEVICES, default="auto", help="auto: cuda where there is a GPU")
    parser.add_argument("--side", type=int, default=256, help="side of the images (256)")
    parser.add_argument("--rounds", type=int, default=40, help="pairs of steps (40)")
    parser.add_argument("--quick", action="store_true", help="toy sizes, and no file: to try it out")
    parser.add_argument("--output", type=Path, help="file of the results")
    parser.add_argument("--page", action="store_true", help="only write README.md's table from results/")
    options = parser.parse_args()
    if options.quick:
        options.side, options.rounds = 32, 3
    return options


def measure(rank: int, folder: str, plan: dict[str, Any], device: str, side: int, rounds: int) -> None:
    """On a rank: seconds of each step without and with a trace, and the waits noted; written by rank 0."""
    torch.manual_seed(0)
    pm = mural.parallelize(UNet(width=16, depth=3).to(device), mural.Plan(**plan), image=(3, side, side))
    image, target = torch.rand(2, 3, side, side, device=device), torch.randint(2, (2, side, side), device=device)
    transport = pm.world_mesh.transport
    seconds: dict[str, list[float]] = {"plain": [], "traced": []}
    waits = 0
    for number in range(WARMUP + rounds):
        order = ("plain", "traced") if number % 2 else ("traced", "plain")
        for kind in order:
            with transport.trace() if kind == "traced" else nullcontext() as trace:
                took = timed(lambda: pm.step(image, target), device)
            if trace is not None:
                waits = len(trace.waits)
            if number >= WARMUP:
                seconds[kind].append(took)
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps({"seconds": seconds, "waits": waits}))


def rows(results: dict[str, Any]) -> list[list[str]]:
    """A row for each plan."""
    found: list[list[str]] = []
    for name, answer in results["plans"].items():
        plain, traced = answer["seconds"]["plain"], answer["seconds"]["traced"]
        ratios = [b / a for a, b in zip(plain, traced, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        step = f"{statistics.median(plain) * 1000:.1f} ms"
        found.append([name, step, str(answer["waits"]), f"**{middle:.3f}** ({low:.3f} to {high:.3f})"])
    return found


def page() -> None:
    """Put the tables into README.md."""
    for file in sorted((HERE / "results").glob("*.json")):
        results = json.loads(file.read_text())
        about = results["machine"]
        text = markdown(["plan", "step", "waits", f"traced ÷ plain, median (quartiles); goal ≤ {GOAL}"], rows(results))
        head = f"{about['cpu']}, {about['cores']} cores; torch {results['torch']}; {results['date'][:10]}, commit "
        place(HERE / "README.md", file.stem, f"{head}{about['commit']}. Command: `{results['command']}`.\n\n{text}")


def main() -> None:
    """Measure, print, write; or only write the page."""
    options = arguments()
    if options.page:
        page()
        return
    device, plans = device_of(options), dict[str, Any]()
    for name, plan in PLANS.items():
        with tempfile.TemporaryDirectory(prefix="mural-profile-") as folder:
            run_local(measure, 2, folder, plan, device, options.side, options.rounds, device=device, threads=1)
            plans[name] = json.loads((Path(folder) / "found.json").read_text())
        print(*rows({"plans": {name: plans[name]}})[0], sep=" · ", flush=True)
    results = {
        "command": command_line("profile", sys.argv[1:]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "torch": torch.__version__,
        "plans": plans,
    }
    target = options.output or (None if options.quick else HERE / "results" / f"{device}.json")
    if target is not None:
        target.write_text(json.dumps(rounded(results), indent=1) + "\n")
        print(f"written: {target.name}")


if __name__ == "__main__":
    main()
