"""The numbers of the tables, from the raw results: printed, and written into README.md between its two marks."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

BEGIN, END = "<!-- results: written by run.py --page -->", "<!-- end of results -->"
TIME_GOAL, MEMORY_GOAL = 1.05, 1.03
NAMES = {
    "plain": "two ranks, no exchange (plain torch)",
    "mural": "**mural**",
    "averaged": "mural, gradients averaged",
    "single": "one process, the whole image",
    "shardtensor": "PhysicsNeMo ShardTensor",
    "dtensor": "torch DTensor",
}
STEP_HEAD = ("two ranks, one thread each", "result", "step, s", "÷ plain", "peak memory, GB a rank", "÷ plain")
EXCHANGE_HEAD = ("one exchange of forward strips", "median, µs", "quartiles, µs")


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median and third quartile.

    >>> quartiles([3.0, 1.0, 2.0])
    (1.5, 2.0, 2.5)
    """
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def spread(values: Sequence[float], form: str) -> str:
    """The median, with the quartiles behind it."""
    low, middle, high = (format(v, form) for v in quartiles(values))
    return f"{middle} ({low} to {high})"


def slowest(answers: Sequence[dict[str, float]], key: str) -> float:
    """The time of a step is that of its slowest rank, as the peak is that of its largest."""
    return max(answer[key] for answer in answers)


def times(results: dict[str, Any], name: str) -> tuple[list[float], list[float]]:
    """Seconds of the steps of a variant, and their ratios to plain's in the same pair."""
    variant, key = ("mural", "averaged") if name == "averaged" else (name, "seconds")
    pairs = results["pairs"].get("mural" if variant == "plain" else variant, [])
    seconds = [slowest(pair[variant], key) for pair in pairs]
    return seconds, [s / slowest(pair["plain"], "seconds") for s, pair in zip(seconds, pairs, strict=True)]


def peaks(results: dict[str, Any], name: str) -> tuple[list[float], list[float]]:
    """Peaks of memory above the imports in bytes, and their ratios to plain's in the same repeat."""
    above = [slowest(ranks, "above") for ranks in results["memory"].get(name, [])]
    plain = [slowest(ranks, "above") for ranks in results["memory"]["plain"]]
    return above, [a / b for a, b in zip(above, plain, strict=False)]


def verdict(results: dict[str, Any], name: str) -> str:
    """What the check in float64 found."""
    if name in results["not_run"]:
        return f"not run here: {results['not_run'][name]}"
    if name == "plain":
        return "of two images, as nothing crosses the cut"
    if name == "single":
        return "the reference"
    found = results["checks"]["mural" if name == "averaged" else name]
    if all(isinstance(e, float) and e <= 1e-10 for e in found.values()):
        return f"exact (to {max(found.values()):.0e})"
    return "; ".join(f"{part} {said(error)}" for part, error in found.items())


def said(error: float | str) -> str:
    """An error in words; of what was raised, its type (the file has all of it)."""
    if isinstance(error, str):
        return f"raises {error.split(':')[0]}"
    return f"exact (to {error:.0e})" if error <= 1e-10 else f"wrong by up to {error:.0%}"


def titled(results: dict[str, Any], name: str, title: str) -> str:
    """The variant's name, with the version of the peer's package."""
    version = results["versions"].get(name, {}).get("package")
    return f"{title} {version}" if version else title


def step_rows(results: dict[str, Any]) -> list[tuple[str, ...]]:
    """The rows of the table of steps."""
    rows: list[tuple[str, ...]] = []
    for name, title in NAMES.items():
        seconds, ratios = times(results, name)
        above, shares = peaks(results, name)
        cells = [
            spread(seconds, ".3f") if seconds else "–",
            spread(ratios, ".3f") if ratios and name != "plain" else "–",
            spread([a / 1e9 for a in above], ".3f") if above else "–",
            spread(shares, ".3f") if shares and name != "plain" else "–",
        ]
        if name == "mural":
            cells[1] += f"; goal ≤ {TIME_GOAL}"
            cells[3] += f"; goal ≤ {MEMORY_GOAL}"
        rows.append((titled(results, name, title), verdict(results, name), *cells))
    return rows


def exchange_rows(results: dict[str, Any]) -> list[tuple[str, ...]]:
    """The rows of the table of exchanges: over all bursts and both ranks."""
    rows: list[tuple[str, ...]] = []
    for name, title in (("rpc", "torch RPC, asynchronous calls"), ("transport", "**mural's transport**")):
        every = [seconds * 1e6 for burst in results["exchange"][name] for rank in burst for seconds in rank]
        low, middle, high = quartiles(every)
        rows.append((title, f"{middle:.0f}", f"{low:.0f} to {high:.0f}"))
    return rows


def caption(results: dict[str, Any]) -> str:
    """Where and how the numbers came about."""
    at, settings = results["machine"], results["settings"]
    return (
        f"{settings['layers']} × (conv 16→16 3×3 + ReLU), {settings['size']}², {settings['pairs']} pairs "
        f"({settings['peer_pairs']} for one process and peers), {settings['repeats']} peaks of memory; "
        f"{at['cpu']}, {at['cores']} cores, torch {results['versions']['mural']['torch']}, Python {at['python']}, "
        f"load {at['load_at_start']:.1f} at the start, commit {at['commit']}, {results['date'][:10]}"
    )


def show(results: dict[str, Any], console: Console) -> None:
    """Print both tables."""
    tables = [(caption(results), STEP_HEAD, step_rows(results)), (None, EXCHANGE_HEAD, exchange_rows(results))]
    for title, head, rows in tables:
        table = Table(*head, title=title)
        for row in rows:
            table.add_row(*(cell.replace("**", "") for cell in row))
        console.print(table)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table for the page."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def rewrite(readme: Path, source: Path) -> None:
    """Put the numbers of that file into the page, between the marks."""
    if not source.is_file():
        raise SystemExit(f"{source} does not exist: run the benchmark first, or name its file with --output")
    results = json.loads(source.read_text())
    text = readme.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise SystemExit(f"{readme} needs the line {BEGIN!r} and then {END!r}, once each")
    before, rest = text.split(BEGIN)
    parts = [
        f"{caption(results)}. Command: `{results['command']}`. Median, with the quartiles in parentheses.",
        markdown(STEP_HEAD, step_rows(results)),
        markdown(EXCHANGE_HEAD, exchange_rows(results)),
    ]
    readme.write_text(f"{before}{BEGIN}\n\n" + "\n\n".join(parts) + f"\n\n{END}{rest.split(END)[1]}")


def rounded(value: Any) -> Any:
    """The same results with times to the microsecond, for a readable file; relative errors keep three digits."""
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return float(f"{value:.3e}" if abs(value) < 1e-6 else f"{value:.7f}") if isinstance(value, float) else value
