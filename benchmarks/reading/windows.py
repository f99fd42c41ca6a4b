"""Windows against whole files, in every format: `mural bench reading`.

Every reader reads the same windows, in turn, from files in the page cache. Writes `results/windows.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import page
from files import FILES, TILE, image
from harness.results import command_line, machine, rounded
from readers import Read, Window, cut, others, ours

HERE = Path(__file__).resolve().parent
PACKAGES = (
    "tensorstore",
    "tifffile",
    "imagecodecs",
    "zarr",
    "rasterio",
    "openslide-python",
    "nibabel",
    "pillow",
    "numpy",
)
NUMBERS = {
    "size": (8192, 1024, "rows and columns of the image"),
    "window": (1500, 300, "rows and columns of a window"),
    "windows": (15, 3, "windows that each reader reads"),
    "wholes": (3, 1, "times that each file is read whole"),
}


def arguments(argv: list[str]) -> argparse.Namespace:
    """The options; --quick is for trying the benchmark out, and writes a file only where --output names one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, (full, quick, what) in NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, help=f"{what} ({full}; with --quick {quick})")
    parser.add_argument("--formats", nargs="*", choices=list(FILES), default=list(FILES), help="only these")
    parser.add_argument("--folder", type=Path, help="where the files are made for the time (a temporary folder)")
    parser.add_argument("--quick", action="store_true", help="small, few, and no file: to try it out")
    parser.add_argument("--output", type=Path, help="file of the results (results/windows.json)")
    parser.add_argument("--page", action="store_true", help="only write README.md and the figure, from that file")
    options = parser.parse_args(argv)
    for name, (full, quick, _) in NUMBERS.items():
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else full)
    if options.output is None and not options.quick:
        options.output = HERE / "results" / "windows.json"
    return options


def unaligned(size: int, window: int, count: int) -> list[Window]:
    """Windows at places that no tile begins at, the same in every run."""
    draw = random.Random(0)
    places = [(draw.randrange(size - window), draw.randrange(size - window)) for _ in range(count)]
    return [((top | 1, (top | 1) + window), (left | 1, (left | 1) + window)) for top, left in places]


def timed(read: Read, window: Window, expected: np.ndarray | None) -> float:
    """Seconds of one read; where the format keeps pixels exactly, they are checked."""
    begin = time.perf_counter()
    found = read(window)
    seconds = time.perf_counter() - begin
    if expected is not None and not np.array_equal(found, expected[:, slice(*window[0]), slice(*window[1])]):
        raise SystemExit(f"{read}: wrong pixels at {window}, so nothing is measured")
    return seconds


def measure(path: Path, windows: list[Window], wholes: int, expected: np.ndarray | None) -> dict[str, Any]:
    """The times of all readers of a file, in turn, and what mural's decoded."""
    with ExitStack() as stack:
        read, source = ours(path)
        alone, other = ours(path, threads=1)
        stack.callback(source.close)
        stack.callback(other.close)
        readers = {"mural": read, "mural, one thread": alone}
        readers |= {name: make(path, stack) for name, make in others(path).items()}
        for reader in readers.values():  # what is opened late, or decoded once for all windows, is not counted
            timed(reader, windows[0], expected)
        first = source.counter.bytes_decoded
        source.counter.reset()
        seconds: dict[str, list[float]] = {name: [] for name in readers}
        for window in windows:
            for name, reader in readers.items():
                seconds[name].append(timed(reader, window, expected))
        whole = [timed(cut(path), windows[n % len(windows)], expected) for n in range(wholes)]
        windowed = not path.name.endswith((".png", ".jpg", ".gz"))
        per_window = source.counter.bytes_decoded / len(windows) if windowed else first
    return {"seconds": seconds, "whole": whole, "decoded": per_window, "windowed": windowed}


def run(options: argparse.Namespace) -> dict[str, Any]:
    """All formats, one after the other; a file is removed before the next is made."""
    pixels = image(options.size)
    windows = unaligned(options.size, options.window, options.windows)
    results: dict[str, Any] = {
        "command": command_line("reading", sys.argv[1:]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine() | {"load_at_start": os.getloadavg()[0]},
        "settings": {name: getattr(options, name) for name in NUMBERS} | {"tile": TILE},
        "versions": {name: version(name) for name in PACKAGES},
        "box_bytes": 3 * options.window**2,
        "image_bytes": prod(pixels.shape),
        "formats": {},
    }
    for title in options.formats:
        name, write = FILES[title]
        with tempfile.TemporaryDirectory(prefix="mural-reading-", dir=options.folder) as folder:
            path = Path(folder) / name
            write(path, pixels)
            exact = None if "JPEG" in title else pixels
            found = measure(path, windows, options.wholes, exact)
            found["file_bytes"] = sum(f.stat().st_size for f in (path, *path.rglob("*")) if f.is_file())
        results["formats"][title] = found
        print(page.line(title, found, results), flush=True)
    return results


def main(argv: list[str]) -> None:
    """Measure, print, write; or only write the page."""
    options = arguments(argv)
    if options.page:
        page.write(HERE, options.output or HERE / "results" / "windows.json")
        return
    results = rounded(run(options))
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(results, indent=1) + "\n")
        print(f"written: {options.output}")
