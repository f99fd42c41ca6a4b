"""What is expected of models and plans before anything runs: programs of streamed steps, predictions, chosen plans."""

from __future__ import annotations

EXPECTED: dict[str, object] = {}


def expectations(name: str) -> str:
    """The text of a pair."""
    return str(EXPECTED[name])
