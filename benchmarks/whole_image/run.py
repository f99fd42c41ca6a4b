"""Label maps of whole images: `mural bench whole_image`.

mural bench whole_image                            on a GPU: 32,768² under 4 GiB, plans compared, sliding windows
mural bench whole_image --list                     the names of all parts
mural bench whole_image --only 'predict/*' NAME    parts by patterns or whole names, in that order (all, in theirs)
mural bench whole_image --quick --device cpu       everything at toy size, to try it out: the numbers mean nothing
mural bench whole_image --collect FILE.jsonl …     put the files of such runs together, as results/gpu.json or cpu.json
mural bench whole_image --page                     write README.md's tables from results/

Each part runs in a process of its own; each result is written at once. A part whose result is in --output or --known
files is left out.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.case import GIB
from harness.options import DEVICES, device_of, numbers
from harness.results import Log, collect, read
from harness.team import CaseFailed, Pool, Starter

from whole_image import page
from whole_image.parts import ON_CPU, QUICK, Part, Sizes, all_parts, selected

HERE = Path(__file__).resolve().parent
OVERTIME = 30.0
"""Seconds that a part may go on when the time is up."""
PREPARING = 400.0
"""Seconds for training the run and writing the images."""


def arguments() -> argparse.Namespace:
    """The options, with the sizes and the parts that they ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--only", nargs="+", metavar="PART", help="names of parts, or patterns as 'predict/*'")
    add("--list", action="store_true", help="only print the names of the parts")
    add("--device", choices=DEVICES, default="auto", help="auto: cuda where there is a GPU")
    add("--minutes", type=float, default=9, help="begin no part after this long (9)")
    add("--sides", type=numbers, help="sides of images to predict under the cap (32768; 2048,8192 on a CPU)")
    add("--cap", type=float, help="memory of the device in GiB (4); on a CPU, of growth")
    add("--width", type=int, help="width of the U-Net (64; 8 on a CPU)")
    add("--tiles", type=numbers, help="tiles of streams, of which the first that fits counts (1024,768,512)")
    add("--steps", type=int, help="steps of its training (150; 100 on a CPU)")
    add("--folder", type=Path, default=Path(tempfile.gettempdir()) / "mural_whole_image",
        help="where images, the run and label maps are written; they stay")  # fmt: skip
    add("--known", type=Path, nargs="*", default=[], help="files of results that need not come again")
    add("--output", type=Path, help="file of the results, one line for each measurement")
    add("--quick", action="store_true", help="toy sizes, to try it out: the numbers mean nothing")
    add("--collect", type=Path, nargs="+", help="only put files of results together, for the page")
    add("--page", action="store_true", help="only write README.md, from results/")
    options = parser.parse_args()
    options.device = device_of(options)
    usual = QUICK if options.quick else Sizes() if options.device == "cuda" else ON_CPU
    given = {name: getattr(options, name) for name in ("sides", "cap", "width", "tiles", "steps")}
    options.sizes = replace(usual, **{name: value for name, value in given.items() if value is not None})
    try:
        listed = all_parts(options.sizes, options.device)
        options.parts = selected(listed, options.only) if options.only else listed
    except ValueError as error:
        parser.error(str(error))
    return options


class Bench:
    """Runs parts, one after the other, and writes what came of each."""

    def __init__(self, log: Log, pool: Pool, options: argparse.Namespace) -> None:
        self.log, self.pool, self.sizes = log, pool, options.sizes
        folder = options.folder / ("quick" if options.quick else f"{options.device}-{options.sizes.width}")
        self.about: dict[str, Any] = {"folder": str(folder), "sizes": asdict(options.sizes)}

    def prepare(self, parts: list[Part]) -> bool:
        """Train the run, and write the images; whether there is something to measure with."""
        sides = sorted({part.side for part in parts})
        try:
            with self.pool.team(1, None) as team:
                self.log.versions(team.facts)
                took = team.ask("prepare", limit=PREPARING, sides=sides, **self.about)[0]
        except CaseFailed as failure:
            failure.note(self.log, "the start", name="prepare")
            return False
        self.log.write("prepared", **took)
        self.log.say(f"trained in {took['training']:.1f} s; images written in {took['writing']:.1f} s")
        return True

    def run(self, part: Part) -> None:
        """Measure a part, with smaller tiles where memory is short."""
        for tile in self.sizes.tiles:
            try:
                with self.pool.team(1, None if part.cap is None else int(part.cap * GIB)) as team:
                    limit = max(0.0, self.log.left) + OVERTIME
                    found = team.ask("measure", limit=limit, name=part.name, tile=tile, **self.about)[0]
            except CaseFailed as failure:
                failure.note(self.log, f"{part.name} in tiles of {tile}", name=part.name, tile=tile)
                if failure.kind != "memory":
                    return
                continue
            record = self.log.write("measure", name=part.name, **found)
            self.log.say(f"{part.name}: {page.short(record)}")
            return


def main() -> None:
    """Measure parts, or only list them, or put files together, or write the page."""
    options = arguments()
    if options.list:
        print("\n".join(part.name for part in options.parts))
        return
    if options.collect:
        on_gpu = any(r.get("device_memory") for file in options.collect for r in read(file))
        target = options.output or HERE / "results" / f"{'gpu' if on_gpu else 'cpu'}.json"
        print(f"{collect(options.collect, target)} records in {target.name}")
        return
    if options.page:
        page.write(HERE)
        return
    log = Log("whole_image", options.output, options.known, options.minutes)
    waiting = [part for part in options.parts if log.find("measure", name=part.name) is None]
    # On a GPU, the next process imports what it needs while this one measures; on a CPU it would disturb.
    start = Starter("whole_image.rank", all_cores=True, usual_memory=True)
    pool = Pool(options.device, spares=1 if options.device == "cuda" else 0, start=start)
    try:
        bench = Bench(log, pool, options)
        for part in waiting if waiting and bench.prepare(waiting) else ():
            if log.left > 0:
                bench.run(part)
            else:
                log.say(f"{part.name}: left out, the time is up")
    finally:
        pool.close()
    print(f"\n{page.tables(log.records)}")


if __name__ == "__main__":
    main()
