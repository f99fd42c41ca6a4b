"""Accepts what replayed pairs do now, and prints how that differs: `python tests/replay/accept.py [NAME…]`.

Expectations alone, of all pairs or of those named (a name may be the beginning of several). `--invariants` accepts
these instead: a refactor changes none of them, so say in the commit why they had to change.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "benchmarks")]

from replay.compare import difference, kept  # noqa: E402
from replay.expectations import EXPECTED, expectations  # noqa: E402
from replay.pairs import PAIRS  # noqa: E402
from replay.steps import invariants  # noqa: E402


def accept(kind: str, name: str, found: str) -> bool:
    """Keep a text, and print how it differs from the one before; whether it does."""
    path = kept(kind, name)
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    shown = difference(before, found, f"{kind}/{name}")
    path.parent.mkdir(exist_ok=True)
    if shown:
        path.write_text(found, encoding="utf-8")
        print(shown if before else f"{kind}/{name}: new, {len(found.splitlines())} lines")
    return bool(shown)


def main() -> None:
    """Run the pairs and keep their texts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="pairs, or the beginnings of their names; all unless given")
    parser.add_argument("--invariants", action="store_true", help="accept invariants instead of expectations")
    asked = parser.parse_args()
    kind, known = ("invariants", PAIRS) if asked.invariants else ("expectations", EXPECTED)
    chosen = [n for n in known if not asked.names or any(n.startswith(name) for name in asked.names)]
    if not chosen:
        parser.error(f"no pair of the {kind} is called so; there are: {', '.join(known)}")
    changed = [n for n in chosen if accept(kind, n, (invariants if asked.invariants else expectations)(n))]
    gone = [p for p in sorted((HERE / kind).glob("*.txt")) if p.stem not in known and not asked.names]
    for path in gone:
        path.unlink()
        print(f"{kind}/{path.stem}: gone")
    print(f"{len(chosen)} replayed, {len(changed) + len(gone)} changed")


if __name__ == "__main__":
    main()
