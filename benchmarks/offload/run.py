"""What offload costs, next to what was published: `mural bench offload`.

mural bench offload --list                        the names of all parts, with the seconds that each may take
mural bench offload --only 'table/vgg19/*' NAME   parts by patterns or whole names, in that order (all, in theirs)
mural bench offload --toy --device cpu            everything at toy size, to try it out: the numbers mean nothing
mural bench offload --collect FILE.jsonl …        put the files of such runs together, as results/gpu.json
mural bench offload --page                        write README.md's tables from results/

Each part runs in a process of its own, under its cap, and its result is written at once; toys share a process. A part
whose result is known, or for which the time does not suffice, is left out; `--again` measures anew.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.case import GIB
from harness.options import DEVICES, device_of
from harness.results import Log, collect
from harness.team import CaseFailed, Pool, Starter, Team

from offload import page
from offload.parts import TOY, Part, Sizes, all_parts, selected
from offload.settings import Settings

HERE = Path(__file__).resolve().parent
OVERTIME = 30.0
"""Seconds that a part may go on when the time is up."""
TOY_SETTINGS = Settings(toy=True, epochs=2, repeats=2)


def arguments() -> argparse.Namespace:
    """The options, with the parts that they ask for."""
    usual = Settings()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--only", nargs="+", metavar="PART", help="names of parts, or patterns as 'table/*/naive'")
    add("--list", action="store_true", help="only print the names of the parts")
    add("--device", choices=DEVICES, default="auto", help="auto: cuda where there is a GPU")
    add("--minutes", type=float, default=9, help="stop after about this long (9)")
    add("--epochs", type=int, default=usual.epochs, help=f"epochs of the document's training ({usual.epochs})")
    add("--repeats", type=int, default=usual.repeats, help=f"steps or copies of other parts ({usual.repeats})")
    add("--known", type=Path, nargs="*", default=[], help="files of results that need not come again")
    add("--again", action="store_true", help="measure what is known, too")
    add("--output", type=Path, help="file of the results, one line for each measurement")
    add("--toy", action="store_true", help="toy sizes, to try it out: the numbers mean nothing")
    add("--collect", type=Path, nargs="+", help="only put files of results together, for the page")
    add("--page", action="store_true", help="only write README.md, from results/")
    options = parser.parse_args()
    listed = all_parts(TOY if options.toy else Sizes())
    try:
        options.parts = selected(listed, options.only) if options.only else listed
    except ValueError as error:
        parser.error(str(error))
    options.settings = TOY_SETTINGS if options.toy else Settings(epochs=options.epochs, repeats=options.repeats)
    return options


class Bench:
    """Runs parts, one after the other, and writes what came of each."""

    def __init__(self, log: Log, pool: Pool, options: argparse.Namespace) -> None:
        self.log, self.pool, self.settings = log, pool, options.settings
        self.known = [] if options.again else [*log.records]
        self.shared = ExitStack()
        self.team: Team | None = None
        """The process that toys share."""

    def run(self, part: Part) -> None:
        """Measure a part, unless it is known or too long for the time that is left."""
        if (why := self.left_out(part)) is not None:
            self.log.say(f"{part.name}: left out, {why}")
            return
        about: dict[str, Any] = {"name": part.name, "toy": self.settings.toy}
        try:
            with self.process(part) as team:
                limit = max(0.0, self.log.left) + OVERTIME
                found = team.ask("run_part", limit=limit, name=part.name, **asdict(self.settings))[0]
        except CaseFailed as failure:
            failure.note(self.log, part.name, **about)
            return
        record = self.log.write("measure", **about, **found)
        self.log.say(f"{part.name}: {page.short(record)}")

    @contextmanager
    def process(self, part: Part) -> Generator[Team]:
        """A process for a part, under its cap; toys have none, and share one until a part fails."""
        if not self.settings.toy:
            with self.pool.team(1, None if part.cap is None else part.cap * GIB) as team:
                self.log.versions(team.facts)
                yield team
            return
        if self.team is None:
            self.team = self.shared.enter_context(self.pool.team(1, None))
            self.log.versions(self.team.facts)
        try:
            yield self.team
        except CaseFailed:
            self.close()
            raise

    def left_out(self, part: Part) -> str | None:
        """Why a part is not run, if it is not. Missing memory is a result."""
        about = [r for r in self.known if r.get("name") == part.name]
        if about and (about[-1]["kind"] == "measure" or about[-1].get("why") == "memory"):
            return "known"
        expected = 0.0 if self.settings.toy else part.expected(self.settings.epochs)
        if self.log.left < expected:
            return f"it may take {expected:.0f} s, and {max(0.0, self.log.left):.0f} are left"
        return None

    def close(self) -> None:
        """End the process that toys share."""
        self.team = None
        self.shared.close()


def main() -> None:
    """Measure parts, or only list them, or put files together, or write the page."""
    options = arguments()
    if options.list:
        seconds = {part.name: part.expected(options.epochs) for part in options.parts}
        print("\n".join(f"{expected:6.0f} s  {name}" for name, expected in seconds.items()))
        print(f"{sum(seconds.values()):6.0f} s  all together")
    elif options.collect:
        print(collect(options.collect, options.output or HERE / "results" / "gpu.json"), "records")
    elif options.page:
        page.write(HERE)
    else:
        measure(options)


def measure(options: argparse.Namespace) -> None:
    """Run the parts, and print the tables."""
    device = device_of(options)
    output = options.output or (None if options.toy else HERE / "results" / f"{device}.jsonl")
    log = Log("offload", output, options.known, options.minutes)
    # On a GPU, the next processes import what they need while one measures; on a CPU they would disturb.
    pool = Pool(device, spares=3 if device == "cuda" else 0, start=Starter("offload.rank", all_cores=True))
    bench = Bench(log, pool, options)
    try:
        for part in options.parts:
            bench.run(part)
    finally:
        bench.close()
        pool.close()
    print(f"\n{page.tables(log.records)}")


if __name__ == "__main__":
    main()
