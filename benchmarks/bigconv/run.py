"""Figures 2 to 5 of BigConv with mural: memory and time against input size, on one and several ranks.

mural bench bigconv                            on a GPU: ranks that share it, each capped at 16 GiB
mural bench bigconv --many                     on the CPU: 9 to 28 ranks, small images, against one process
mural bench bigconv --counts                   on a GPU: the document's 5 to 28 ranks, each with a smaller cap
mural bench bigconv --counts --list            the names of these, with the seconds that each takes
mural bench bigconv --counts --only 'batch/*'  one input, 1, 2 and 4 images at a time
mural bench bigconv --batch 4                  the figures with 4 images at a time; the page shows those with one
mural bench bigconv --collect FILE.jsonl …     put the files of such runs together, as results/gpu.json
mural bench bigconv --page                     write README.md's tables and the figures from results/
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import counts
from harness.case import Case
from harness.options import add_options, cap_of, device_of
from harness.results import Log, collect
from harness.search import floor_to
from harness.selection import add_selection, listing, matching
from harness.session import Session, guess_for
from harness.team import Pool
from many import measure_many
from published import PLANS, Plan, common_size

HERE = Path(__file__).resolve().parent
TOY_CAP = 2**20


def arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, minutes=10)
    parser.add_argument("--models", default=",".join(PLANS), help=f"of {', '.join(PLANS)}, in order")
    parser.add_argument("--precision", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--batch", type=int, default=1, help="images at a time, where names do not say it (1)")
    parser.add_argument("--many", action="store_true", help="the part on the CPU, with 9 to 28 ranks")
    parser.add_argument("--counts", action="store_true", help="the document's numbers of GPUs, with smaller caps")
    add_selection(parser)
    options = parser.parse_args()
    options.models = options.models.split(",")
    if (options.list or options.only) and not options.counts:
        parser.error("--list and --only are for --counts: choose others by --models and --ranks")
    if options.batch < 1 or (options.batch > 1 and (options.counts or options.many)):
        parser.error(f"--batch {options.batch}: one or more, and without --counts and --many, which have their own")
    if unknown := [name for name in options.models if name not in PLANS]:
        parser.error(f"no model is called {unknown[0]!r}: choose from {', '.join(PLANS)}")
    return options


def measure(session: Session, name: str, ranks: int, options: argparse.Namespace) -> None:
    """One model on some ranks: at a small input, at one that a single rank holds, and up to its own largest."""
    plan, cap, dims = PLANS[name], cap_of(options), PLANS[name].dims
    if options.quick:
        toys(session, name, plan, ranks, options)
        return
    case, ones = (Case(name, (0,) * dims, n, options.precision, batch=options.batch) for n in (ranks, 1))
    alone = session.log.find("limit", case=ones.encode(), cap=cap)
    single = alone["largest"] if alone else None
    held = [
        (record["case"]["extents"][0], record)
        for record in session.log.records
        if record["kind"] == "measure" and record["cap"] == cap and Case.decode(record["case"]).sized(0) == ones
    ]
    common = common_size(held, cap) if ranks > 1 else None
    small = floor_to(plan.guess / 2, plan.steps(8))
    for size in (small, *([common] if common else [])):
        if session.log.left > 60 and session.measure(case.sized(size), cap) is not None:
            session.busy(case.sized(size), cap)
    step = plan.steps(ranks)
    guess = guess_for(ranks, single if ranks > 1 else None, plan.guess, step, dims)
    session.limit(case, cap, step=step, guess=guess, repeats=3, busy=True)


def toys(session: Session, name: str, plan: Plan, ranks: int, options: argparse.Namespace) -> None:
    """Everything once at a toy size, a failure for want of memory included."""
    width = (("width", 4),) if "CNN" in name else ()
    case = Case(name, (plan.toy,) * plan.dims, ranks, options.precision, options=width, batch=options.batch)
    session.measure(case, None)
    session.busy(case, None)
    session.measure(case, TOY_CAP if session.pool.device == "cuda" else 1)


def tasks_of(options: argparse.Namespace) -> list[counts.Task]:
    """What --counts asks for, in its own order: ranks under one cap stay."""
    every = [task for task in counts.tasks(options.quick) if task.count.model in options.models]
    names = set(matching([task.name for task in every], options.only))
    return [task for task in every if task.name in names]


def main() -> None:
    """Measure, put together, or write the page."""
    options = arguments()
    if options.page:
        import page  # noqa: PLC0415 (needs matplotlib)

        page.write(HERE)
        return
    if options.collect:
        target = options.output or HERE / "results" / ("cpu.json" if options.many else "gpu.json")
        print(f"{collect(options.collect, target)} records in {target.name}")
        return
    if options.list:
        print(listing({task.name: task.expected for task in tasks_of(options)}))
        return
    device = "cpu" if options.many else device_of(options)
    log = Log("bigconv", options.output, options.known, options.minutes)
    pool = Pool(device, spares=options.spares if device == "cuda" and not options.quick else 0)
    session = Session(log, pool)
    try:
        if options.many:
            measure_many(session, options.quick)
        elif options.counts:
            for task in tasks_of(options):
                if options.quick or log.left > task.expected:
                    counts.carry_out(session, task, options.quick)
                else:
                    log.write("skipped", name=task.name)
        else:
            for ranks in options.ranks:
                for name in options.models:
                    if log.left > 30:
                        measure(session, name, ranks, options)
                    else:
                        log.write("skipped", name=name, ranks=ranks)
    finally:
        session.drop()
        pool.close()
    log.say(f"finished; {sum(r['kind'] == 'skipped' for r in log.records)} left out for want of time")


if __name__ == "__main__":
    main()
