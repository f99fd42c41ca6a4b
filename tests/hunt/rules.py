"""The rule validator: every operation, in every form, on pieces of every kind, next to plain torch."""

from __future__ import annotations

import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import ranks
from hunt.findings import Finding, Tally
from hunt.rules_case import VALUES, Case, Job, Outcome, Place, job_of
from hunt.rules_forms import FORMS
from hunt.rules_ranks import merged, of_ranks
from hunt.rules_samples import IMAGE, dtypes_of, names
from ranks import run_on

SEARCH = "rules"
OPERATIONS, CASES = 6, 8
"""How many operations a batch has, and how many cases of each are tried."""
GRIDS: tuple[tuple[tuple[int, ...], int], ...] = (
    ((2,), 1), ((2,), 1), ((3,), 1), ((), 2), ((2,), 2), ((2, 2), 1), ((1, 2), 2), ((4,), 1),
)  # fmt: skip
"""Spatial ranks and data ranks."""


CRASHING = ("grid_sample", "fractional_max_pool", "linalg.")
"""What ends the process in torch itself, or does not end, where a position is not a number."""


def draw_place(drawn: random.Random) -> Place:
    """Where the tensors of some cases are."""
    kind = drawn.choices(("ranks", "microbatches", "tiles"), (6, 1, 1))[0]
    if kind != "ranks":
        return Place(kind, 0)  # type: ignore[arg-type]
    spatial, data = drawn.choice(GRIDS)
    return Place("ranks", 0, spatial, data)


def draw_batches(seed: int, without: set[str], only: Sequence[str] = ()) -> Iterator[list[Job]]:
    """Cases without end, in batches with the same number of ranks; those of operations without a rule once."""
    drawn = random.Random(seed)
    every = [n for n in names() if not only or n in only]
    while True:
        drawn.shuffle(every)
        for start in range(0, len(every), OPERATIONS):
            place = draw_place(drawn)
            chosen = [n for n in every[start : start + OPERATIONS] if n.rstrip("!") not in without]
            cases = [draw_case(name, place, drawn) for name in chosen for _ in range(CASES)]
            yield [job for job in map(job_of, cases) if job is not None]


def fixed(seed: int, place: Place, count: int) -> list[Job]:
    """So many cases in one kind of place, the same for the same seed: half of them on images of our own."""
    drawn, found = random.Random(seed), list[Job]()
    every = [name for name in names() if not name.startswith(IMAGE)]
    images = [name for name in names() if name.startswith(IMAGE)]
    while len(found) < count:
        job = job_of(draw_case(drawn.choice(images if len(found) % 2 else every), place, drawn))
        found += [job] if job is not None else []
    return found


def draw_case(name: str, place: Place, drawn: random.Random) -> Case:
    """A case of an operation."""
    types = dtypes_of(name)
    kind = types[0] if drawn.random() < 0.8 or "grid_sampl" in name else drawn.choice(types)
    values = "given" if drawn.random() < 0.5 or any(word in name for word in CRASHING) else drawn.choice(VALUES)
    form = drawn.choice(FORMS)
    place = Place(place.kind, drawn.getrandbits(24), place.spatial, place.data)
    return Case(name, drawn.getrandbits(16), place, form, values, str(kind).removeprefix("torch."))


def outcomes_of(jobs: Sequence[Job]) -> list[Outcome]:
    """What cases of one number of ranks come to; one that hangs or ends a process is found by the file of progress."""
    found: list[Outcome] = []
    world = jobs[0].case.place.world
    with tempfile.TemporaryDirectory() as folder:
        progress = Path(folder) / "case"
        while len(found) < len(jobs):
            rest = jobs[len(found) :]
            progress.write_text("0")
            try:
                by_rank = run_on(world, of_ranks, rest, str(progress))
            except ranks.RankError as error:
                done = int(progress.read_text())
                if done:  # those before it again, without it
                    found += outcomes_of(rest[:done])
                found.append(Outcome("hung", str(error)[-600:]))
                continue
            found += [merged(list(each)) for each in zip(*by_rank, strict=True)]
    return found


def search(seed: int, seconds: float, report: Callable[[str], None], only: Sequence[str] = ()) -> Tally:
    """Draw cases until the seconds are over."""
    until = time.monotonic() + seconds
    counts: Counter[str] = Counter()
    by_place: Counter[tuple[str, str]] = Counter()
    findings: dict[str, Finding] = {}
    missing, without = set[str](), set[str]()
    for jobs in draw_batches(seed, without, only):
        if time.monotonic() >= until:
            break
        for job, outcome in zip(jobs, outcomes_of(jobs) if jobs else [], strict=True):
            case = job.case
            counts[outcome.kind] += 1
            by_place[case.place.name, outcome.kind] += 1
            if outcome.kind == "missing":
                missing.add(outcome.detail)
                if case.form == "given" and not case.op.startswith(IMAGE):
                    without.add(case.op.rstrip("!"))
            elif outcome.kind in ("incorrect", "crashed", "hung"):
                finding = Finding(SEARCH, outcome.kind, case.line, outcome.detail, case.script)
                findings[case.line] = finding
                report(f"{outcome.kind}: {case.line}: {outcome.detail.splitlines()[0] if outcome.detail else ''}")
    for (place, kind), count in sorted(by_place.items()):
        report(f"{place}: {count} {kind}")
    return Tally(SEARCH, counts["exact"], counts["refused"], tuple(findings.values()), tuple(sorted(missing)))


def show(case: Case) -> None:
    """Print what a case comes to."""
    job = job_of(case)
    outcome = Outcome("skipped") if job is None else outcomes_of([job])[0]
    print(f"{case.line}\n{outcome.kind}: {outcome.detail}")
