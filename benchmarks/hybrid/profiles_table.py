"""Tables of the profiles: computing, communication and idle time of every rank, and how evenly bytes leave."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from harness.results import Record
from harness.tables import markdown

TITLES = {"lenet5": "LeNet-5, 32²", "alexnet": "AlexNet, 224²"}


def profile_text(records: Sequence[Record]) -> str:
    """A row for each network and way."""
    rows = [
        [
            f"{TITLES[r['net']]}, {r['images']} images",
            r["way"],
            str(r["ranks"]),
            f"{1e3 * statistics.mean(s['seconds'] for s in r['shares']):.1f}",
            *(f"{100 * part:.0f}%" for part in mean_shares(r["shares"])),
            idle_of(r["shares"]),
            f"{sum(r['messages']):.0f}",
            f"{sum(r['bytes']) / 2**20:.2f}",
            *evenness(r["parts"]),
        ]
        for r in records
    ]
    head = ["network", "way", "ranks", "step, ms", "compute", "communication", "idle", "idle of each rank"]
    head += ["messages", "MiB", "peak ÷ mean", "parts with traffic", "largest part, MiB"]
    return markdown(head, rows)


def mean_shares(shares: Sequence[Record]) -> list[float]:
    """Computing, communication and idle time of all ranks, as parts of their steps."""
    total = sum(s["seconds"] for s in shares)
    return [sum(s[key] for s in shares) / total for key in ("compute", "communicating", "idle")]


def idle_of(shares: Sequence[Record]) -> str:
    """The idle share of every rank."""
    return ", ".join(f"{100 * s['idle'] / s['seconds']:.0f}%" for s in shares)


def evenness(steps: Sequence[Sequence[int]]) -> list[str]:
    """The part of a step in which most is sent over the mean of all parts, how many have any, and its MiB.

    >>> evenness([[2**20, 0, 2**20, 2**21], [2**20, 0, 2**20, 2**21]])
    ['2.0', '75%', '2.00']
    """
    ratios = [max(parts) * len(parts) / sum(parts) for parts in steps if sum(parts)]
    if not ratios:
        return ["–", "0%", "0.00"]
    some = statistics.mean(sum(part > 0 for part in parts) / len(parts) for parts in steps)
    most = statistics.median(max(parts) for parts in steps)
    return [f"{statistics.median(ratios):.1f}", f"{100 * some:.0f}%", f"{most / 2**20:.2f}"]
