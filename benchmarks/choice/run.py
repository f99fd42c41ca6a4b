"""Whether `mural.plan` takes the best of many mixes: `mural bench choice`.

mural bench choice --predict results/predicted.jsonl   only predict, on any machine: it takes some minutes
mural bench choice --list                              names of all parts, with the seconds that each may take
mural bench choice --only 'unet/*/8/*' NAME            parts by patterns or whole names, in that order (all, in theirs)
mural bench choice --toy --device cpu                  everything at toy size, to try it out: the numbers mean nothing
mural bench choice --collect FILE.jsonl …              put the files of such runs together, as results/gpu.json
mural bench choice --page                              write README.md's tables from results/

The parts of a setting share a process, under its cap, until one fails; each result is written at once. What is in
results/predicted.jsonl, --output or --known files is not predicted or measured again; `--again` measures anew.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.case import GIB
from harness.options import DEVICES, device_of
from harness.results import Log, Record, collect, read
from harness.team import CaseFailed, Pool, Starter, Team

from choice import page
from choice.parts import TOY, Part, Sizes, all_parts, expected, not_run, selected

HERE = Path(__file__).resolve().parent
PREDICTED = HERE / "results" / "predicted.jsonl"
OVERTIME, PREDICTING = 30.0, 300.0
"""Seconds that a part may go on when the time is up, and that a prediction may take."""


def arguments() -> argparse.Namespace:
    """The options, with the parts that they ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--only", nargs="+", metavar="PART", help="names of parts, or patterns as 'unet/*/8/*'")
    add("--list", action="store_true", help="only print the names of the parts")
    add("--predict", type=Path, metavar="FILE", help="only predict, into this file")
    add("--device", choices=DEVICES, default="auto", help="auto: cuda where there is a GPU")
    add("--minutes", type=float, default=9, help="stop after about this long (9)")
    add("--repeats", type=int, default=4, help="steps that count (4)")
    add("--budget", type=float, default=10.0, help="seconds for the steps that count (10)")
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
    if options.toy:
        options.repeats, options.budget = 1, 0.0
    if PREDICTED.is_file() and not options.toy and options.predict is None:
        options.known.insert(0, PREDICTED)
    return options


class Bench:
    """Predicts settings and runs parts, one after the other, and writes what came of each."""

    def __init__(self, log: Log, pool: Pool, options: argparse.Namespace) -> None:
        self.log, self.pool, self.options = log, pool, options
        self.known = [] if options.again else [*log.records]
        self.unpredicted: set[str] = set()
        """Settings whose prediction failed in this run."""
        self.shared = ExitStack()
        self.team: Team | None = None
        self.setting = ""
        """The process at hand, and the setting that it measures; none if it predicts, or takes toys."""

    def predicted(self, part: Part) -> Record | None:
        """The prediction of a part's setting, known or made now; None, and a record of why, if that failed."""
        known = self.log.find("predicted", name=part.setting, toy=self.options.toy)
        if known is not None or part.setting in self.unpredicted:
            return known
        try:
            with self.process() as team:
                found = team.ask("predict", limit=PREDICTING, name=part.name, toy=self.options.toy)[0]
        except CaseFailed as failure:
            self.unpredicted.add(part.setting)
            failure.note(self.log, part.setting, name=part.setting, toy=self.options.toy)
            return None
        record = self.log.write("predicted", name=part.setting, toy=self.options.toy, **found)
        chosen = record["mixes"]["chosen"]
        self.log.say(f"{part.setting}: {chosen.get('words') or chosen['impossible']}, in {record['took']:.0f} s")
        return record

    def run(self, part: Part) -> None:
        """Measure a part, unless it is known, need not run, or is too long for the time that is left."""
        predicted = self.predicted(part)
        if predicted is None:
            return
        if (why := self.left_out(part, predicted)) is not None:
            self.log.say(f"{part.name}: left out, {why}")
            return
        given = {"name": part.name, "toy": self.options.toy}
        more = {"plan": predicted["mixes"][part.mix]["plan"], "repeats": self.options.repeats}
        limit = max(0.0, self.log.left) + OVERTIME
        try:
            with self.process(part) as team:
                found = team.ask("run_part", limit=limit, **given, **more, budget=self.options.budget)[0]
        except CaseFailed as failure:
            failure.note(self.log, part.name, **given)
            return
        record = self.log.write("measure", **given, **found)
        self.log.say(f"{part.name}: {page.short(record)}")

    @contextmanager
    def process(self, part: Part | None = None) -> Generator[Team]:
        """The process of a part's setting, under its cap, until something fails in it. Without a part: one to predict.

        Toys have no cap, and share a process with predictions.
        """
        measured = None if self.options.toy else part
        setting = "" if measured is None else measured.setting
        if self.team is None or setting != self.setting:
            self.close()
            self.team = self.shared.enter_context(self.pool.team(1, None if measured is None else measured.cap * GIB))
            self.setting = setting
            if part is not None:
                self.log.versions(self.team.facts)
        try:
            yield self.team
        except CaseFailed:
            self.close()
            raise

    def left_out(self, part: Part, predicted: Record) -> str | None:
        """Why a part is not run, if it is not. Missing memory is a result."""
        about = [r for r in self.known if r.get("name") == part.name and r["kind"] in ("measure", "failure")]
        if about and (about[-1]["kind"] == "measure" or about[-1]["why"] == "memory"):
            return "known"
        if (why := not_run(part, predicted)) is not None:
            return why
        seconds = 0.0 if self.options.toy else expected(part, predicted)
        if self.log.left < seconds:
            return f"it may take {seconds:.0f} s, and {max(0.0, self.log.left):.0f} are left"
        return None

    def close(self) -> None:
        """End the process at hand."""
        self.team = None
        self.shared.close()


def main() -> None:
    """Measure parts, or only list them, predict, put files together, or write the page."""
    options = arguments()
    if options.list:
        known = {r["name"]: r for path in options.known for r in read(path) if r["kind"] == "predicted"}
        seconds = {part.name: expected(part, known.get(part.setting)) for part in options.parts}
        print("\n".join(f"{each:6.0f} s  {name}" for name, each in seconds.items()))
        print(f"{sum(seconds.values()):6.0f} s  all together; 0 s: it need not run")
    elif options.collect:
        print(collect(options.collect, options.output or HERE / "results" / "gpu.json"), "records")
    elif options.page:
        page.write(HERE)
    else:
        measure(options)


def measure(options: argparse.Namespace) -> None:
    """Predict, or run the parts and print the tables."""
    device = "cpu" if options.predict else device_of(options)
    output = options.predict or options.output or (None if options.toy else HERE / "results" / f"{device}.jsonl")
    log = Log("choice", output, options.known, options.minutes)
    # On a GPU, the next processes import what they need while one measures; on a CPU they would disturb.
    pool = Pool(device, spares=3 if device == "cuda" else 0, start=Starter("choice.rank", all_cores=True))
    bench = Bench(log, pool, options)
    try:
        for part in options.parts:
            bench.predicted(part) if options.predict else bench.run(part)
    finally:
        bench.close()
        pool.close()
    if not options.predict:
        print(f"\n{page.tables(log.records)}")


if __name__ == "__main__":
    main()
