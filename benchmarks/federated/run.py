"""Clinics that keep their samples, against one that has them all: `mural bench federated`.

scikit-learn's digits are divided among clinics by size and, skewed, by class too. Each clinic is a process. Writes
`results/cpu.json`; `--page` writes README.md's tables from it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing as mp
import os
import statistics
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from clinic import Setting, alone, central, take_part
from harness.results import command_line, machine, rounded
from harness.tables import markdown, place

from mural.ranks import free_port

HERE = Path(__file__).resolve().parent
WAYS: dict[str, dict[str, Any]] = {
    "five clinics of equal size": {"shares": (1, 1, 1, 1, 1)},
    "five of unequal size": {"shares": (1, 2, 4, 8, 16)},
    "the same, masked": {"shares": (1, 2, 4, 8, 16), "masked": True},
    "the same, each sits out a fifth of the rounds": {"shares": (1, 2, 4, 8, 16), "away": 0.2},
    "unequal, and half of each clinic's samples of two classes": {"shares": (1, 2, 4, 8, 16), "skew": 0.5},
}


def arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="rounds of one local epoch each (30)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each way (3)")
    parser.add_argument("--quick", action="store_true", help="few rounds, and no file: to try it out")
    parser.add_argument("--output", type=Path, help="file of the results")
    parser.add_argument("--page", action="store_true", help="only write README.md's tables from results/")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.seeds = 2, 1
    return options


def federate(setting: Setting) -> list[dict[str, Any]]:
    """What each clinic of a federation ended with."""
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="mural-clinics-") as folder:
        address = f"127.0.0.1:{free_port()}"
        processes = [
            context.Process(target=take_part, args=(number, setting, address, folder))
            for number in range(len(setting.shares))
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise SystemExit("a clinic failed: see above")
        return [json.loads((Path(folder) / f"{n}.json").read_text()) for n in range(len(processes))]


def measure(rounds: int, seeds: int) -> dict[str, Any]:
    """Accuracies of every way, for every seed."""
    found: dict[str, Any] = {}
    for name, way in WAYS.items():
        runs: list[dict[str, Any]] = []
        for seed in range(seeds):
            setting = Setting(seed=seed, rounds=rounds, **way)
            ends = federate(setting)
            runs.append(
                {
                    "central": central(setting),
                    "federated": ends[0]["accuracy"],
                    "agree": len({end["digest"] for end in ends}) == 1,
                    "alone": [alone(number, setting) for number in range(len(setting.shares))],
                    "samples": [end["samples"] for end in ends],
                    "rounds": [end["rounds"] for end in ends],
                }
            )
        found[name] = runs
        print(*row(name, runs), sep=" · ", flush=True)
    return found


def proof(rounds: int) -> dict[str, Any]:
    """What clinics hand to the network, with their own samples and with noise in their place, at a rate of 0."""
    digests = []
    for noise in (False, True):
        setting = Setting(seed=0, rounds=rounds, shares=(1, 2, 4), rate=0.0, noise=noise)
        ends = federate(setting)
        handed = "".join(end["handed"] for end in ends)
        digests.append(hashlib.sha256(handed.encode()).hexdigest())
    values = ends[0]["values"]
    return {"equal": digests[0] == digests[1], "tensors": ends[0]["tensors"], "values": values, "rounds": rounds}


def row(name: str, runs: list[dict[str, Any]]) -> list[str]:
    """A row of the table."""
    alone_worst = statistics.mean(min(run["alone"]) for run in runs)
    alone_best = statistics.mean(max(run["alone"]) for run in runs)
    return [
        name,
        ", ".join(map(str, runs[0]["samples"])),
        spread([run["central"] for run in runs]),
        f"**{spread([run['federated'] for run in runs])}**",
        f"{alone_worst:.1%} to {alone_best:.1%}",
        "yes" if all(run["agree"] for run in runs) else "no",
    ]


def spread(values: list[float]) -> str:
    """The mean, with the smallest and the largest.

    >>> spread([0.9, 0.92])
    '91.0% (90.0 to 92.0)'
    """
    return f"{statistics.mean(values):.1%} ({min(values) * 100:.1f} to {max(values) * 100:.1f})"


def page() -> None:
    """Put the tables into README.md."""
    results = json.loads((HERE / "results" / "cpu.json").read_text())
    head = ["clinics", "samples", "central", "federated", "each alone, worst to best", "all end with the same bits"]
    about = results["machine"]
    text = f"{about['cpu']}, {about['cores']} cores; torch {results['torch']}; {results['date'][:10]}, commit "
    text += f"{about['commit']}. Command: `{results['command']}`.\n\n"
    place(HERE / "README.md", "accuracy", text + markdown(head, [row(*item) for item in results["ways"].items()]))
    found = results["proof"]
    words = "the same bytes" if found["equal"] else "**other bytes**"
    place(
        HERE / "README.md",
        "proof",
        f"In {found['rounds']} rounds a clinic handed {found['tensors']} tensors to the network, {found['values']:,} "
        f"values in all: {words} with its samples as with noise in their place.",
    )


def main() -> None:
    """Measure, print, write; or only write the page."""
    options = arguments()
    if options.page:
        page()
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    results = {
        "command": command_line("federated", sys.argv[1:]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "torch": torch.__version__,
        "ways": measure(options.rounds, options.seeds),
        "proof": proof(3),
    }
    print(f"proof: {results['proof']}")
    target = options.output or (None if options.quick else HERE / "results" / "cpu.json")
    if target is not None:
        target.write_text(json.dumps(rounded(results), indent=1) + "\n")
        print(f"written: {target.name}")


if __name__ == "__main__":
    main()
