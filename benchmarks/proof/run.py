"""What it costs to prove a plan before its first step: `mural bench proof`.

Ten models, each under a plan, are proved for a batch of the real size, and again from what is remembered; on a GPU two
real steps follow. Writes `cpu.json` or `cuda.json` into `results/` or the folder that `--output` names; `--page` writes
README.md's table from these files.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from harness.options import DEVICES, device_of
from harness.results import command_line, machine, rounded
from harness.tables import markdown, place

import mural
from mural.ranks import run_local
from proof.nets import SUBJECTS

HERE = Path(__file__).resolve().parent


def arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=DEVICES, default="auto", help="auto: cuda where there is a GPU")
    parser.add_argument("--only", nargs="*", default=list(SUBJECTS), choices=list(SUBJECTS), help="some of the models")
    parser.add_argument("--steps", action="store_true", help="time real steps on a CPU, too")
    parser.add_argument("--output", type=Path, default=HERE / "results", help="folder of the results")
    parser.add_argument("--page", action="store_true", help="only write README.md's table from results/")
    return parser.parse_args()


def measure(rank: int, name: str, device: str, steps: bool, folder: str) -> dict[str, Any]:
    """On a rank: the proof of a model under its plan, in seconds, and again from memory; and a real step."""
    subject = SUBJECTS[name]
    if device == "cuda":
        device = f"cuda:{torch.cuda.current_device()}"
    found: dict[str, Any] = {"plan": str(subject.plan).replace("\n", ", "), "image": subject.image}
    image, target = subject.batch(device)
    for kind in ("proof", "remembered"):
        torch.manual_seed(0)
        extents = subject.image[1:]
        pm = mural.parallelize(subject.build().to(device), subject.plan, image=extents, prove=Path(folder))
        begin = time.perf_counter()
        proof = pm.prove(image, target)
        found[f"{kind}_seconds"] = time.perf_counter() - begin
        if kind == "proof" and proof is not None:
            found |= {"proved": proof.proved, "unproved": proof.unproved, "difference": proof.difference}
        if kind == "remembered" and steps:
            seconds(partial(pm.step, image, target))
            pm.zero_grad()
            found["step_seconds"] = seconds(partial(pm.step, image, target))
    return found


def seconds(step: Callable[[], Any]) -> float:
    """How long a step takes."""
    begin = time.perf_counter()
    float(step())
    return time.perf_counter() - begin


def attempted(name: str, device: str, steps: bool) -> dict[str, Any]:
    """What was measured of a model, or why nothing was."""
    ranks = SUBJECTS[name].plan.devices
    with tempfile.TemporaryDirectory(prefix="mural-proof-") as folder:
        try:
            if ranks == 1:
                return measure(0, name, device, steps, folder)
            return run_local(measure, ranks, name, device, steps, folder, device=device, threads=1)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"[:400]}


def rows(results: dict[str, Any]) -> list[list[str]]:
    """A row for each model."""
    found: list[list[str]] = []
    for name, answer in results["models"].items():
        if "error" in answer:
            found.append([name, answer["error"], "", "", "", ""])
            continue
        step = f"{answer['step_seconds']:.2f} s" if "step_seconds" in answer else ""
        image = " × ".join(map(str, answer["image"]))
        seconds = [f"{answer['proof_seconds']:.1f} s", f"{answer['remembered_seconds']:.2f} s", step]
        found.append([f"{name}, {image}: `{answer['plan']}`", *seconds, "; ".join(answer["proved"]) or "–",
                      "; ".join(answer["unproved"]) or "–"])  # fmt: skip
    return found


TITLES = ["model", "proof", "remembered", "a real step", "proved", "not proved"]


def page() -> None:
    """Put the tables into README.md."""
    for file in sorted((HERE / "results").glob("*.json")):
        results = json.loads(file.read_text())
        about = results["machine"]
        head = f"{results['device']}; {about['cpu']}, {about['cores']} cores; torch {results['torch']}; "
        head += f"{results['date'][:10]}, commit {about['commit']}. Command: `{results['command']}`."
        place(HERE / "README.md", file.stem, f"{head}\n\n{markdown(TITLES, rows(results))}")


def main() -> None:
    """Measure, print, write; or only write the page."""
    options = arguments()
    if options.page:
        page()
        return
    device = device_of(options)
    models = dict[str, Any]()
    options.output.mkdir(parents=True, exist_ok=True)
    for name in options.only:
        models[name] = attempted(name, device, options.steps or device == "cuda")
        print(*rows({"models": {name: models[name]}})[0], sep=" · ", flush=True)
        results = {
            "command": command_line("proof", sys.argv[1:]),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
            "machine": machine(),
            "torch": torch.__version__,
            "models": models,
        }
        (options.output / f"{device}.json").write_text(json.dumps(rounded(results), indent=1) + "\n")


if __name__ == "__main__":
    main()
