"""One device, any image: `mural bench one_gpu`.

mural bench one_gpu --list                       the names of all parts, with the seconds that each may take
mural bench one_gpu --only 'unet/plain/*' NAME   parts by patterns or whole names, in that order (all, in theirs)
mural bench one_gpu --toy --device cpu           everything at toy size, to try it out: the numbers mean nothing
mural bench one_gpu --collect FILE.jsonl …       put the files of such runs together, as results/gpu.json
mural bench one_gpu --page                       write README.md's tables from results/

Each part runs in a process of its own, under its cap; each result is written at once. A part whose result is known, or
for which the time does not suffice, is left out; `--again` measures anew.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.case import GIB
from harness.options import DEVICES, device_of
from harness.results import Log, collect
from harness.team import CaseFailed, Pool, Starter

from one_gpu import page
from one_gpu.parts import TOY, Part, Sizes, all_parts, selected

HERE = Path(__file__).resolve().parent
OVERTIME = 20.0
"""Seconds that a part may go on when the time is up."""
WRITING = 400.0
"""Seconds for writing the files."""


def arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="PART", help="names of parts, or patterns as 'unet/stream16/*'")
    parser.add_argument("--tile", type=int, default=0, help="tile of the streamed parts (chosen by the cap)")
    parser.add_argument("--device", choices=DEVICES, default="auto", help="auto: cuda where there is a GPU")
    parser.add_argument("--minutes", type=float, default=9, help="stop after about this long (9)")
    parser.add_argument("--repeats", type=int, default=6, help="steps of a part, where the budget allows (6)")
    parser.add_argument("--budget", type=float, default=15, help="seconds for the steps of a part after the first (15)")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "mural_one_gpu",
                        help="where the files are written that are read; they stay")  # fmt: skip
    parser.add_argument("--known", type=Path, nargs="*", default=[], help="files of results that need not come again")
    parser.add_argument("--again", action="store_true", help="measure what is known, too")
    parser.add_argument("--output", type=Path, help="file of the results, one line for each measurement")
    parser.add_argument("--toy", action="store_true", help="toy sizes, to try it out: the numbers mean nothing")
    parser.add_argument("--list", action="store_true", help="only print the names of the parts")
    parser.add_argument("--collect", type=Path, nargs="+", help="only put files of results together, for the page")
    parser.add_argument("--page", action="store_true", help="only write README.md, from results/")
    options = parser.parse_args()
    try:
        options.parts = chosen(options.only, options.toy, options.tile)
    except ValueError as error:
        parser.error(str(error))
    return options


def chosen(only: list[str] | None, toy: bool, tile: int) -> list[Part]:
    """The parts that are asked for; at toy size with small tiles, so that there are several."""
    listed = all_parts(TOY if toy else Sizes())
    parts = selected(listed, only) if only else listed
    return [part.tiled(tile or (32 if toy else 0)) for part in parts]


class Bench:
    """Runs parts, one after the other, and writes what came of each."""

    def __init__(self, log: Log, pool: Pool, options: argparse.Namespace) -> None:
        self.log, self.pool, self.options = log, pool, options
        self.before = len(log.records) if options.again else 0
        """Records that do not count as known."""

    def run(self, part: Part) -> None:
        """Measure a part, unless it is known, hopeless or too long for the time that is left."""
        if (why := self.left_out(part)) is not None:
            self.log.say(f"{part.name}: left out, {why}")
            return
        about: dict[str, Any] = {"name": part.name, "toy": self.options.toy}
        cap = None if part.cap is None else part.cap * GIB
        folder = str(self.options.folder)
        try:
            with self.pool.team(1, cap) as team:
                self.log.versions(team.facts)
                wrote = team.ask("prepare", limit=WRITING, name=part.name, folder=folder) if part.way == "file" else [0]
                limit = max(0.0, self.log.left) + OVERTIME
                settings = {"repeats": self.options.repeats, "budget": self.options.budget, "toy": self.options.toy}
                found = team.ask("steps", limit=limit, name=part.name, folder=folder, **settings)[0]
        except CaseFailed as failure:
            failure.note(self.log, part.name, **about)
            return
        record = self.log.write("measure", **about, wrote=wrote[0], **found)
        self.log.say(f"{part.name}: {page.short(record)}")

    def left_out(self, part: Part) -> str | None:
        """Why a part is not run, if it is not."""
        last = {r["name"]: r for r in self.log.records[self.before :] if r["kind"] in ("measure", "failure")}
        if last.get(part.name, {}).get("kind") == "measure":
            return "known"
        if part.way == "lightstream" and importlib.util.find_spec("lightstream") is None:
            return "lightstream cannot be imported: README.md says how to bring it"
        if self.log.left < (0 if self.options.toy else part.expected):
            return f"it may take {part.expected:.0f} s, and {max(0.0, self.log.left):.0f} are left"
        short = [Part.parse(name) for name, record in last.items() if record.get("why") == "memory"]
        smaller = [other.size for other in short if other.series == part.series and other.size < part.size]
        return f"memory was short at {min(smaller)}" if smaller else None


def main() -> None:
    """Measure parts, or only list them, or put files together, or write the page."""
    options = arguments()
    if options.list:
        print("\n".join(f"{part.expected:6.0f} s  {part.name}" for part in options.parts))
        print(f"{sum(part.expected for part in options.parts):6.0f} s  all together")
        return
    if options.collect:
        print(collect(options.collect, options.output or HERE / "results" / "gpu.json"), "records")
        return
    if options.page:
        page.write(HERE)
        return
    device = device_of(options)
    output = options.output or (None if options.toy else HERE / "results" / f"{device}.jsonl")
    log = Log("one_gpu", output, options.known, options.minutes)
    # On a GPU, the next process imports what it needs while this one measures; on a CPU it would disturb.
    pool = Pool(device, spares=1 if device == "cuda" else 0, start=Starter("one_gpu.rank", all_cores=True))
    bench = Bench(log, pool, options)
    try:
        for part in options.parts:
            bench.run(part)
    finally:
        pool.close()
    print(f"\n{page.table(log.records)}")


if __name__ == "__main__":
    main()
