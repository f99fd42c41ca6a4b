"""The document's numbers of GPUs, 5 to 28, as ranks of one GPU under smaller caps; and how busy a rank keeps its GPU.

A cap of 16 GiB for each of 28 ranks would need 448 GiB. Growth over one rank does not depend on the cap as long as
one rank has the same, so each model is searched on one rank and on the document's numbers under a cap that all of
them have room for together. A name is WHAT/MODEL/RANKS, and for `batch` WHAT/MODEL/RANKS/IMAGES:

    limit          the largest input that fits
    memory         the peak at 1024², where the document found a third of one GPU's memory on 10
    utilisation    the share of a rank's own part of the step in which the GPU runs its kernels, the other ranks idle
    batch          memory, time and utilisation at an input that one rank holds, with several images at a time: the
                   document had one, and expects more of the same from larger batches
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.case import GIB, Case
from harness.results import Record
from harness.search import floor_to
from harness.session import Session, guess_for
from published import PLANS

FULL = 16
"""The cap in GiB for which `PLANS` has its guesses."""
ONE_K = 1024


@dataclass(frozen=True)
class Count:
    """A model on one rank and on the document's numbers of GPUs, under a cap, and the extent for utilisation."""

    model: str
    cap: int
    """GiB of each rank."""
    ranks: tuple[int, ...]
    extent: int
    step: int
    """Extents are tried in multiples of this; for a signal, of as much on each rank."""

    @property
    def bytes(self) -> int:
        """The cap in bytes."""
        return self.cap * GIB

    def case(self, ranks: int, extent: int, batch: int = 1) -> Case:
        """The model on so many ranks and an input of that extent."""
        return Case(self.model, (extent,) * PLANS[self.model].dims, ranks, batch=batch)

    def steps(self, ranks: int) -> int:
        """The step of the search on so many ranks."""
        return self.step * ranks if PLANS[self.model].dims == 1 else self.step

    @property
    def guess(self) -> int:
        """An extent that should fit on one rank under the cap."""
        plan = PLANS[self.model]
        return floor_to(plan.guess * (self.cap / FULL) ** (1 / plan.dims), self.step)


COUNTS = (
    Count("CNN2D", 8, (1, 5, 10), 2048, 128),
    Count("FCN2D", 8, (1, 10), 1024, 64),
    Count("CNN1D", 8, (1, 6, 12), 2**22, 2**18),
    Count("CNN3D", 4, (1, 9, 28), 144, 8),
)
TOYS = (Count("CNN2D", 1, (1, 3), 64, 32),)
BATCHED = (Count("CNN2D", FULL, (1, 4, 8), 2048, 128), Count("FCN2D", FULL, (1, 4, 8), 1024, 64))
"""The models whose batch grows, at an extent of which one rank holds the largest."""
TOY_BATCHED = (Count("CNN2D", 1, (1, 2), 64, 32),)
BATCHES = (1, 2, 4)
SUMMING = {"CNN2D": 0.2, "FCN2D": 0.5}
"""Seconds for each rank of a step, its gradients and its replay, roughly; FCN2D has half a GiB of parameters."""


@dataclass(frozen=True)
class Task:
    """One thing to find out of a model on some ranks."""

    what: str
    count: Count
    ranks: int
    batch: int = 1

    @property
    def name(self) -> str:
        """The name.

        >>> Task("limit", COUNTS[0], 10).name, Task("batch", BATCHED[0], 8, 4).name
        ('limit/CNN2D/10', 'batch/CNN2D/8/4')
        """
        images = f"/{self.batch}" if self.what == "batch" else ""
        return f"{self.what}/{self.count.model}/{self.ranks}{images}"

    @property
    def expected(self) -> float:
        """Seconds that it takes, roughly; after a failure, ranks start anew."""
        start = 4 + 0.5 * self.ranks
        if self.what == "batch":
            return start / len(BATCHES) / len(BATCHED) + 1 + SUMMING[self.count.model] * self.ranks
        return start + 2.5 * self.ranks + 6 if self.what == "limit" else start / 2 + 1 + 0.3 * self.ranks


def tasks(quick: bool) -> list[Task]:
    """All of them; those of as many ranks under one cap follow each other, the search, which ends ranks, last."""
    counts = TOYS if quick else COUNTS
    order = dict.fromkeys((ranks, count.cap) for ranks in (1, 10, 5, 6, 9, 12, 28, 3) for count in counts)
    found: list[Task] = []
    for ranks, cap in order:
        mine = [count for count in counts if count.cap == cap and ranks in count.ranks]
        found += [Task("memory", count, ranks) for count in mine if count.model == "CNN2D"]
        found += [Task("utilisation", count, ranks) for count in mine]
        found += [Task("limit", count, ranks) for count in mine]
    return [*found, *batch_tasks(quick)]


def batch_tasks(quick: bool) -> list[Task]:
    """Every batch of every model, all of as many ranks one after the other."""
    counts = TOY_BATCHED if quick else BATCHED
    numbers = sorted({ranks for count in counts for ranks in count.ranks})
    return [Task("batch", count, ranks, batch) for ranks in numbers for count in counts for batch in BATCHES]


def carry_out(session: Session, task: Task, quick: bool) -> None:
    """Find one thing out, unless it is known."""
    count, cap = task.count, None if quick else task.count.bytes
    if task.what == "memory":
        session.measure(count.case(task.ranks, count.extent if quick else ONE_K), cap)
    elif task.what in ("utilisation", "batch"):
        case = count.case(task.ranks, count.extent, task.batch)
        session.measure(case, cap)
        utilisation(session, case, cap)
    elif not quick:
        search(session, count, task.ranks)


def search(session: Session, count: Count, ranks: int) -> None:
    """The largest input on some ranks; on several, from what one rank reached."""
    plan, cap = PLANS[count.model], count.bytes
    alone = session.log.find("limit", case=count.case(1, 0).encode(), cap=cap)
    single = alone["largest"] if alone and ranks > 1 else None
    step = count.steps(ranks)
    guess = guess_for(ranks, single, count.guess, step, plan.dims)
    session.limit(count.case(ranks, 0), cap, step=step, guess=guess)


def utilisation(session: Session, case: Case, cap: int | None) -> Record | None:
    """For each rank, alone on the device: seconds of its part of the step, and of its kernels."""
    known = session.log.find("utilisation", case=case.encode(), cap=cap)
    if known is not None:
        return known
    answers = session.ask("utilisation", case, cap)
    if answers is None:
        return None
    found = {key: [answer[key] for answer in answers] for key in ("wall", "kernels")}
    record = session.log.write("utilisation", case=case.encode(), cap=cap, **found)
    shares = [kernels / wall for kernels, wall in zip(record["kernels"], record["wall"], strict=True)]
    session.log.say(
        f"{case.title}: its kernels run {100 * sum(shares) / len(shares):.0f}% of a rank's part of the step"
    )
    return record
