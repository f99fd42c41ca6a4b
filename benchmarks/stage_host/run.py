"""What a step with two stages takes on the host: `mural bench stage_host`.

U-Net, ResNet-50 and DenseNet-121 on small images, on two ranks of this machine. With `--other FOLDER`, the `src` of a
second checkout is measured in turns with this one, several times each: the fastest turn counts, as what disturbs a
measurement makes it longer. Writes `results/cpu.json` or
`results/cuda.json`; `--page` writes README.md's table from these files.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from harness.results import command_line, machine, rounded
from harness.tables import markdown, place

HERE = Path(__file__).resolve().parent
OWN = HERE.parents[1] / "src"


def arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=20, help="steps of each measurement (20)")
    parser.add_argument("--turns", type=int, default=2, help="how often each version is measured (2)")
    parser.add_argument("--other", type=Path, help="the folder src of another checkout, to compare with")
    parser.add_argument("--output", type=Path, default=HERE / "results", help="folder of the results")
    parser.add_argument("--page", action="store_true", help="only write the table of README.md")
    return parser.parse_args()


def rows_of(source: Path, device: str, rounds: int) -> list[dict[str, Any]]:
    """What a version of mural takes, in a process of its own."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(HERE / "worker.py"), "--device", device, "--rounds", str(rounds)]
    found = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    return [json.loads(line) for line in found.splitlines() if line.startswith("{")]


def main() -> int:
    """The exit code."""
    given = arguments()
    if given.page:
        write_page()
        return 0
    versions = {"now": OWN} | ({"before": given.other} if given.other else {})
    times: dict[tuple[str, str], dict[str, list[float]]] = {}
    rows: list[dict[str, Any]] = []
    for turn in range(given.turns):
        for version, source in versions.items():
            for row in rows_of(source, given.device, given.rounds):
                times.setdefault((row["model"], row["plan"]), {}).setdefault(version, []).append(row["milliseconds"])
            print(f"turn {turn + 1} of {given.turns}: {version} measured", flush=True)
        rows = save(times, given)  # after each turn: what was measured stays if the next one is stopped
    print(table(rows))
    return 0


def save(times: dict[tuple[str, str], dict[str, list[float]]], given: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of the table so far, which are written to a file."""
    rows = [
        {"model": model, "plan": plan} | {version: min(found) for version, found in by.items()}
        for (model, plan), by in times.items()
    ]
    header = machine() | {
        "command": command_line("stage_host", sys.argv[1:]),
        "date": str(datetime.now(UTC).date()),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if given.device == "cuda" else "",
    }
    given.output.mkdir(parents=True, exist_ok=True)
    path = given.output / f"{given.device}.json"
    path.write_text(json.dumps({"header": header, "rows": rounded(rows)}, indent=1) + "\n", encoding="utf-8")
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Milliseconds of a step, as Markdown."""
    lines: list[tuple[str, ...]] = []
    for row in rows:
        before = row.get("before")
        ratio = f"{row['now'] / before:.2f}" if before else "–"
        lines.append((row["model"], row["plan"], f"{before:.1f}" if before else "–", f"{row['now']:.1f}", ratio))
    return markdown(("model", "plan", "before, ms", "now, ms", "now ÷ before"), lines)


def write_page() -> None:
    """Put the tables of all results into README.md."""
    parts: list[str] = []
    for path in sorted((HERE / "results").glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        header = found["header"]
        where = f"{header['cpu']}, {header['cores']} cores, torch {header['torch']}, {header['gpu'] or 'no GPU'}"
        parts += [f"{where}, {header['date']}, `{header['command']}`:", table(found["rows"])]
    place(HERE / "README.md", "times", "\n\n".join(parts))


if __name__ == "__main__":
    sys.exit(main())
