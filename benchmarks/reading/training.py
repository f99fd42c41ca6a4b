"""Training on an image that does not fit in memory: `mural bench reading --training`.

Makes a synthetic slide as sharded OME-Zarr, box by box, then trains on random windows of it with and without reading
ahead. Writes `results/training.json` and, with --page, its table.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from harness.results import command_line, machine, rounded
from harness.tables import markdown, place

import mural
from mural.data import convert, synthetic

HERE = Path(__file__).resolve().parent
PARTS = {"read ahead": {"prefetch": 2, "workers": 2}, "read when needed": {"prefetch": 0, "workers": 2}}
HEAD = ("", "step, s", "waiting for data", "megapixels per second", "largest memory of a rank, GiB")


def arguments(argv: list[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=65536, help="rows and columns of the slide")
    parser.add_argument("--window", type=int, default=1024, help="rows and columns of a step's window")
    parser.add_argument("--steps", type=int, default=16, help="updates of each run")
    parser.add_argument("--ranks", type=int, default=2, help="local ranks over which the window is cut")
    parser.add_argument("--width", type=int, default=8, help="channels of the U-Net's first level")
    parser.add_argument("--folder", type=Path, help="where the slide is made, or was made (a temporary folder)")
    parser.add_argument("--quick", action="store_true", help="small and few, and no file: to try it out")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "training.json", help="file of the results")
    parser.add_argument("--page", action="store_true", help="only write README.md, from that file")
    options = parser.parse_args(argv)
    if options.quick:
        options.size, options.window, options.steps, options.output = 1024, 128, 4, None
    return options


def make(folder: Path, size: int) -> None:
    """Write the slide and its mask; a slide that is there already is kept."""
    sample = synthetic(size, seed=0)
    for name, source in (("images", sample.image), ("masks", sample.target)):
        path = folder / name / "slide.ome.zarr"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            convert(source, path, levels=1, labels=name == "masks", progress=say(name))


def say(name: str) -> Any:
    """A line for every tenth of a file."""
    shown: list[int] = []

    def progress(done: int, total: int) -> None:
        tenth = 10 * done // max(1, total)
        if tenth not in shown:
            shown.append(tenth)
            print(f"{name}: {done / 1e9:.1f} of {total / 1e9:.1f} GB", flush=True)

    return progress


def train(folder: Path, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The readings of one run, without its first steps."""
    place = folder / f"run-{name.replace(' ', '-')}-{time.time_ns()}"
    mural.Trainer(
        {
            "folder": str(place),
            "model": {"arguments": {"classes": 3, "width": options.width, "depth": 3}},
            "data": {
                "images": [str(folder / "images" / "slide.ome.zarr")],
                "masks": [str(folder / "masks" / "slide.ome.zarr")],
                "crop": [options.window, options.window],
                "repeat": options.steps,
                **PARTS[name],
            },
            "optimizer": {"name": "SGD", "lr": 0.01},
            "checkpoint": {"every": 0},
            "log": {"every": 1, "tensorboard": "off"},
            "plan": {"spatial": [options.ranks, 1]},
        }
    ).fit()
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    kept = [line for line in lines if line["kind"] == "train"][2:]
    keys = ("step_seconds", "data_wait", "communication", "megapixels_per_second")
    return {**{key: [line[key] for line in kept] for key in keys}, "peak_memory": kept[-1]["peak_memory"]}


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The slide, and both runs on it."""
    with tempfile.TemporaryDirectory(prefix="mural-reading-", dir=options.folder) as made:
        folder = options.folder or Path(made)
        make(folder, options.size)
        files = [f for part in ("images", "masks") for f in (folder / part).rglob("*") if f.is_file()]
        return {
            "command": command_line("reading", sys.argv[1:]),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "settings": {key: getattr(options, key) for key in ("size", "window", "steps", "ranks", "width")},
            "file_bytes": sum(f.stat().st_size for f in files),
            "memory_bytes": int(Path("/proc/meminfo").read_text().split()[1]) * 1024,
            "parts": {name: train(folder, name, options) for name in PARTS},
        }


def row(name: str, found: dict[str, Any]) -> tuple[str, ...]:
    """A run's row of the table; the share of waiting is that of the time of all steps."""
    waited = sum(s * w for s, w in zip(found["step_seconds"], found["data_wait"], strict=True))
    return (
        name,
        f"{median(found['step_seconds']):.2f}",
        f"**{waited / sum(found['step_seconds']):.1%}**",
        f"{median(found['megapixels_per_second']):.2f}",
        f"{max(found['peak_memory']) / 2**30:.2f}",
    )


def write_page(results: dict[str, Any]) -> None:
    """Put the table into the page."""
    at, size = results["machine"], results["settings"]["size"]
    text = (
        f"{size}² RGB: {3 * size**2 / 1e9:.1f} GB of pixels, {12 * size**2 / 1e9:.1f} GB as the float32 that a model "
        f"takes, on a machine with {results['memory_bytes'] / 1e9:.1f} GB of memory; "
        f"{results['file_bytes'] / 1e9:.1f} GB as OME-Zarr with its mask. Windows of "
        f"{results['settings']['window']}² at random places, cut over {results['settings']['ranks']} ranks; U-Net of "
        f"width {results['settings']['width']}; medians of {results['settings']['steps'] - 2} steps. "
        f"{at['cpu']}, {at['cores']} cores; commit {at['commit']}, {results['date'][:10]}. "
        f"Command: `{results['command']}`."
    )
    rows = [row(name, found) for name, found in results["parts"].items()]
    place(HERE / "README.md", "training", f"{text}\n\n{markdown(HEAD, rows)}")


def main(argv: list[str]) -> None:
    """Measure, print, write; or only write the page."""
    options = arguments(argv)
    if options.page:
        write_page(json.loads(options.output.read_text()))
        return
    results = rounded(run(options))
    for name, found in results["parts"].items():
        print("  ".join(f"{head}: {cell}" for head, cell in zip(HEAD, row(name, found), strict=True)))
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(results, indent=1) + "\n")
        print(f"written: {options.output}")


if __name__ == "__main__":
    main(sys.argv[1:])
