"""Tiles as CUDA graphs: all operations of a tape, queued by one call.

The host takes 40 µs and more to queue an operation, so small tiles take as long as their 300 operations take to queue.
A graph is queued at once, but it reads and writes the same memory each time:

    windows         copied to where the graph reads them, for each tile
    parameters      stay where they are; if they have moved, the tape is captured again
    casts, totals   copied once in a sweep (`LastingValues`)
    gradients       added up by the graph, in memory that lasts from step to step
    other results   copied for each tile: they are small

Passes that hand on large tensors to each other run from tapes. The memory inside of graphs is one pool, which
serves one tile at a time and nothing else. So graphs begin when many tiles in a row could have been one, and all of
them go when a tile has to run otherwise, and needs the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from mural.memory.steady_steps import LastingValues
from mural.memory.tape import FRESH, Replay, Step

IN_A_ROW = 24
"""How many tiles in a row have to run from tapes that can be graphs before graphs begin."""
SPARE = 0.05
"""The part of the device's memory that graphs leave to others, next to twice the gradients: optimizers take some."""

MOST_MOVED = 1000
"""How often graphs may be captured again as what they read has moved, until they are no longer worth it."""

Run = Callable[[], Sequence[Tensor]]


class Captured(Protocol):
    """Work that runs again, on the memory that it was captured with."""

    results: Sequence[Tensor]

    def replay(self) -> None:
        """Queue all of it."""
        ...


class CapturedGraph:
    """A CUDA graph of what a function queues; it does not run while it is captured."""

    def __init__(self, run: Run, pool: Any):
        self.graph = torch.cuda.CUDAGraph()
        # Threads that read images go on with their copies meanwhile.
        with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
            self.results = run()

    def replay(self) -> None:
        """Queue the graph on the current stream."""
        self.graph.replay()


@dataclass(frozen=True)
class GraphedTile:
    """A captured tile: where it reads its windows, and the addresses of all else that it was captured with."""

    kind: object
    captured: Captured
    windows: Sequence[Tensor]
    fixed: Sequence[int]

    def __call__(self, windows: Sequence[Tensor]) -> list[Tensor]:
        """What the tile gives for its windows."""
        for place, window in zip(self.windows, windows, strict=True):
            place.copy_(window)
        self.captured.replay()
        return [tensor.clone() for tensor in self.captured.results]


class TileGraphs:
    """The graphs of a model's tiles, of all its programs, on a device of which so many bytes may be reserved."""

    def __init__(self, device: torch.device, limit: int):
        self.device, self.limit = device, limit
        self.tiles: dict[int, GraphedTile] = {}
        self.steady: dict[int, LastingValues] = {}
        """What programs carry over from tile to tile, by program."""
        self.sums: dict[str, Tensor] = {}
        """Where graphs add up gradients, by parameter."""
        self.windows: dict[int, Tensor] = {}
        """Memory for windows, by their number among those of a tile."""
        self.pool: Any = None
        self.in_a_row = 0
        self.moved = 0
        """How often a graph was captured again, as what it reads was elsewhere."""
        self.refused = False
        """Whether there is no room for graphs, or they cannot be captured, or not for long."""

    def ready(self) -> bool:
        """Whether a tile that could be a graph is to run as one; it counts the tile."""
        self.in_a_row += 1
        return self.in_a_row > IN_A_ROW and not self.refused

    def holds(self, kind: object) -> bool:
        """Whether there is a graph for a kind of tiles."""
        return id(kind) in self.tiles

    def release(self) -> None:
        """Give all memory back: a tile runs otherwise."""
        self.in_a_row = 0
        if not self.tiles:
            return
        for held in (self.tiles, self.steady, self.sums, self.windows):
            held.clear()
        self.pool = None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    def lasting(self, program: object) -> LastingValues:
        """What a program carries over from tile to tile."""
        return self.steady.setdefault(id(program), LastingValues())

    def run(
        self, kind: object, replay: Replay, windows: Sequence[Tensor], others: Sequence[Tensor],
        sums: Mapping[str, Tensor],
    ) -> list[Tensor] | None:  # fmt: skip
        """What a tape gives for windows, and for other tensors that stay where they are; None if it cannot be a graph.

        `sums` are those of the other tensors to which it adds gradients.
        """
        fixed = [tensor.data_ptr() for tensor in others]
        found = self.tiles.get(id(kind))
        if found is None or found.fixed != fixed:
            self.moved += found is not None
            try:
                found = self._captured(kind, replay, windows, others, fixed)
            except RuntimeError:  # no memory, or an operation that no graph can hold
                found = None
            if found is None or not self._has_room(sums.values()) or self.moved > MOST_MOVED:
                self.refused = True
                del found
                self.release()
                return None
            self.tiles[id(kind)] = found
            self.sums.update(sums)
        return found(windows)

    def _captured(
        self, kind: object, replay: Replay, windows: Sequence[Tensor], others: Sequence[Tensor], fixed: Sequence[int]
    ) -> GraphedTile:
        """A tile as a graph."""
        self.tiles.pop(id(kind), None)
        places = [self._place(number, window) for number, window in enumerate(windows)]
        captured = self.capture(lambda: replay(*places, *others))
        return GraphedTile(kind, captured, places, fixed)

    def capture(self, run: Run) -> Captured:
        """Work as a graph, in the pool."""
        if not self.tiles:
            self.pool = torch.cuda.graph_pool_handle()
        return CapturedGraph(run, self.pool)

    def _place(self, number: int, window: Tensor) -> Tensor:
        """Where a graph reads a window: in memory that all kinds of tiles share, as far as it suffices."""
        reach = sum((n - 1) * stride for n, stride in zip(window.shape, window.stride(), strict=True))
        size = (1 + reach) * window.element_size()
        held = self.windows.get(number)
        if held is None or held.numel() < size:
            held = self.windows[number] = torch.zeros(size, dtype=torch.uint8, device=window.device)
        return held[:size].view(window.dtype).as_strided(window.shape, window.stride())

    def _has_room(self, sums: Iterable[Tensor]) -> bool:
        """Whether what graphs reserve leaves enough to others."""
        if self.device.type != "cuda":
            return True
        others = 2 * sum(t.numel() * t.element_size() for t in sums) + SPARE * self.limit
        return torch.cuda.memory_reserved(self.device) + others <= self.limit


def can_be_graph(steps: Sequence[Step], parts: Iterable[str], given: Iterable[Tensor], device: torch.device) -> bool:
    """Whether a tape can be a graph: no gradient of the image comes out, and all numbers are on the device.

    What is read on the host, as a tensor with one number may be, would be as it was when the graph was captured.
    """
    made = [kwargs.get("device") for _, _, kwargs, _ in steps]
    here = all(place.type == device.type for place in (*(t.device for t in given), *filter(None, made)))
    return here and "of_windows" not in parts and all(step[0] is not FRESH for step in steps)
