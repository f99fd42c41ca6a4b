"""The tables of the document's numbers of GPUs: growth, memory at 1024², how busy a rank keeps its GPU, and batches."""

from __future__ import annotations

import statistics

from counts import BATCHED, BATCHES, COUNTS, ONE_K, Count
from harness.case import extents_text
from harness.tables import NONE, Found, gib, markdown, ms
from published import PLANS


def counts_text(found: Found) -> str:
    """All tables; nothing where none of it was measured."""
    parts: list[str] = []
    if rows := growth_rows(found):
        head = ["model", "GiB a rank", "ranks", "the largest on one rank", "on these", "growth", "document: growth"]
        parts += ["### The largest input on the document's numbers of GPUs", markdown(head, rows)]
    if rows := memory_rows(found):
        head = ["CNN2D, 1024²", "tensors, GiB a rank", "one rank ÷ this", "device, GiB a rank", "one rank ÷ this"]
        parts += ["### Memory at 1024², where the document has a third on 10 GPUs", markdown(head, rows)]
    if rows := utilisation_rows(found):
        head = [
            "model, input",
            "ranks",
            "own part, ms",
            "its kernels, ms",
            "GPU busy: mean (least to most of the ranks)",
        ]
        head += ["all kernels ÷ step on the shared GPU"]
        parts += ["### How busy a rank keeps its GPU", markdown(head, rows)]
    if rows := batch_rows(found):
        head = [
            "model, input",
            "ranks",
            "images",
            "tensors, GiB a rank",
            "one rank ÷ this",
            "own part, ms",
            "per image",
        ]
        head += ["one rank ÷ this", "GPU busy, mean of the ranks", "step on the shared GPU, ms", "÷ one rank's"]
        parts += ["### Several images at a time", markdown(head, rows)]
    return "\n\n".join(parts)


def growth_rows(found: Found) -> list[list[str]]:
    """For each model and number of ranks: the largest inputs, and by how much their positions grew."""
    rows: list[list[str]] = []
    for count in COUNTS:
        plan = PLANS[count.model]
        limits = {n: found.one("limit", count.case(n, 0), count.bytes) for n in count.ranks}
        largest = {n: record["largest"] if record else fitting(found, count, n) for n, record in limits.items()}
        theirs = {n: (size / plan.published[1]) ** plan.dims for n, size in plan.published.items() if n > 1}
        for n in (n for n in count.ranks if n > 1 and limits[1] and largest[1] and largest[n]):
            sizes = [extents_text((largest[k],) * plan.dims) for k in (1, n)]
            grown = f"{(largest[n] / largest[1]) ** plan.dims:.1f}"
            if limits[n] is None:  # the search was not finished
                sizes[1], grown = f"at least {sizes[1]}", f"at least {grown}"
            told = f"{theirs[n]:.1f}" if n in theirs else NONE
            rows.append([f"**{count.model}**", str(count.cap), str(n), *sizes, grown, told])
    return rows


def fitting(found: Found, count: Count, ranks: int) -> int:
    """The largest extent that fitted on some ranks, other than those of utilisation and memory; else 0."""
    sizes = [
        case.extents[0]
        for case, record in found.of("measure", model=count.model, ranks=ranks)
        if record.get("cap") == count.bytes and case == count.case(ranks, case.extents[0])
    ]
    return max((size for size in sizes if size not in (ONE_K, count.extent)), default=0)


def memory_rows(found: Found) -> list[list[str]]:
    """The peaks of one rank of CNN2D at 1024², on each number of ranks."""
    count = next(count for count in COUNTS if count.model == "CNN2D")
    peaks = {n: found.one("measure", count.case(n, ONE_K), count.bytes) for n in count.ranks}
    one = peaks[1]
    if one is None:
        return []
    rows: list[list[str]] = []
    for n, record in peaks.items():
        if record is not None:
            cells = [[gib(record[key]), f"{one[key] / record[key]:.1f}"] for key in ("allocated", "device")]
            rows.append([f"{n} rank{'s' if n > 1 else ''}", *cells[0], *cells[1]])
    return rows


def utilisation_rows(found: Found) -> list[list[str]]:
    """Kernels' time over the time of a rank's own part, alone; and of all ranks over the step that they share."""
    rows: list[list[str]] = []
    for count in COUNTS:
        rows += [row for n in count.ranks if (row := utilisation_row(found, count, n)) is not None]
    return rows


def utilisation_row(found: Found, count: Count, ranks: int) -> list[str] | None:
    """One model on one number of ranks."""
    case = count.case(ranks, count.extent)
    record, together = (found.one(kind, case, count.bytes) for kind in ("utilisation", "measure"))
    if record is None:
        return None
    shares = [kernels / wall for kernels, wall in zip(record["kernels"], record["wall"], strict=True)]
    busy = f"{100 * statistics.mean(shares):.0f}% ({100 * min(shares):.0f}% to {100 * max(shares):.0f}%)"
    whole = together["seconds"] if together else []
    shared = f"{100 * sum(record['kernels']) / statistics.median(whole):.0f}%" if whole else NONE
    title = f"**{count.model}** {extents_text(case.extents)}"
    return [title, str(ranks), ms([max(record["wall"])]), ms([max(record["kernels"])]), busy, shared]


def batch_rows(found: Found) -> list[list[str]]:
    """For each model, number of ranks and batch: memory and time, and what one rank needs for the same batch."""
    rows: list[list[str]] = []
    for count in BATCHED:
        rows += [row for n in count.ranks for images in BATCHES if (row := batch_row(found, count, n, images))]
    return rows


def batch_row(found: Found, count: Count, ranks: int, images: int) -> list[str] | None:
    """One model on one number of ranks with one batch."""
    case, one = (count.case(n, count.extent, images) for n in (ranks, 1))
    step, first = (found.one("measure", each, count.bytes) for each in (case, one))
    part, whole = (found.one("utilisation", each, count.bytes) for each in (case, one))
    if step is None or part is None or first is None or whole is None:
        return None
    own, alone = max(part["wall"]), max(whole["wall"])
    shares = [kernels / wall for kernels, wall in zip(part["kernels"], part["wall"], strict=True)]
    together, apart = (statistics.median(record["seconds"]) for record in (step, first))
    return [
        f"**{count.model}** {extents_text(case.extents)}",
        str(ranks),
        str(images),
        gib(step["allocated"]),
        f"{first['allocated'] / step['allocated']:.1f}",
        ms([own]),
        ms([own / images]),
        f"{alone / own:.2f}",
        f"{100 * statistics.mean(shares):.0f}%",
        ms([together]),
        f"{together / apart:.2f}",
    ]
