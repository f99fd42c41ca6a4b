"""Replay: one rank's part of a step, run alone, with everything that its peers sent served from a recording.

Ranks that share a GPU slow each other down, so the time of a step on it says nothing about one rank's own work. So:
all ranks run one step together, and each records what arrived. Then one rank at a time runs the same step again;
it packs its messages, computes its interior and its borders, and waits for nobody, as every message is there.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from mural.comm import messages


@dataclass
class Tape:
    """The messages that arrived in one step, by transfer, in the order in which transfers began."""

    names: list[str] = field(default_factory=list)
    arrived: list[dict[int, Tensor]] = field(default_factory=list)
    position: int = 0

    def begin(self, name: str) -> int:
        """The number of a transfer that begins."""
        self.names.append(name)
        self.arrived.append({})
        return len(self.names) - 1

    def following(self, name: str, sizes: Mapping[int, int]) -> dict[int, Tensor]:
        """What arrived in the next transfer; an error if the step is not the one that was recorded."""
        number = self.position
        self.position += 1
        recorded = self.names[number] if number < len(self.names) else "nothing"
        if recorded != name or {p: t.numel() for p, t in self.arrived[number].items()} != dict(sizes):
            raise RuntimeError(f"transfer {number} of the replay is {name} {dict(sizes)}, but {recorded} was recorded")
        return self.arrived[number]


@contextmanager
def replaced(by: type) -> Generator[None]:
    """Let every module of mural that starts transfers use another class for them, inside the block."""
    original = messages.Transfer
    users = [m for name, m in list(sys.modules.items()) if name.partition(".")[0] == "mural" and uses(m, original)]
    for module in users:
        module.Transfer = by
    try:
        yield
    finally:
        for module in users:
            module.Transfer = original


def uses(module: Any, original: type) -> bool:
    """Whether a module holds that class under its own name."""
    return getattr(module, "Transfer", None) is original


@contextmanager
def recording(tape: Tape) -> Generator[None]:
    """Write what arrives inside the block on the tape."""

    class Recorded(messages.Transfer):
        """A transfer that keeps a copy of what it received."""

        def __init__(self, carrier: Any, name: str, *rest: Any, **more: Any) -> None:
            super().__init__(carrier, name, *rest, **more)
            self.number = tape.begin(name)

        def wait(self) -> dict[int, Tensor]:
            """The buffers that arrived, by peer."""
            arrived = super().wait()
            tape.arrived[self.number] = {peer: buffer.clone() for peer, buffer in arrived.items()}
            return arrived

    with replaced(Recorded):
        yield


@contextmanager
def replaying(tape: Tape) -> Generator[None]:
    """Serve transfers inside the block from the tape, from its beginning; nothing is sent."""
    tape.position = 0

    class Replayed:
        """A transfer whose messages are there."""

        def __init__(self, _: Any, name: str, sends: Any, sizes: Mapping[int, int], *rest: Any, **more: Any) -> None:
            self.arrived = tape.following(name, sizes)

        def __enter__(self) -> Replayed:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def wait(self) -> dict[int, Tensor]:
            """The buffers that were recorded, by peer."""
            return self.arrived

    with replaced(Replayed):
        yield
