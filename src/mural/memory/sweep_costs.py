"""What the sweeps of a streamed step take; and as text, with what the passes keep and measure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from mural.graph.nodes import Place
from mural.memory.joined_passes import joined_passes
from mural.memory.passes import Passes, StreamPass
from mural.memory.sweeps import Sweep

GIB = 2**30


@dataclass(frozen=True)
class SweepCost:
    """What one sweep takes. Bytes `inward` come from the host over the link, `outward` go there; `early` ones of those
    that come can do so while the sweep before goes on.
    """

    sweep: Sweep
    tiles: int
    flops: float
    plain_flops: float
    """The operations without overlap of tiles."""
    read: float
    written: float
    inward: float
    outward: float
    early: float
    pixels: int
    """Positions read of the image."""
    seconds: float | None = None
    """Computing, if the device is known: on the GPU, or queueing by the host, whatever takes longer."""
    bandwidth: float | None = None
    """Bytes a second over the link, each way."""

    @property
    def link_seconds(self) -> float | None:
        """Seconds of the link, if it is known: of the direction that takes longer."""
        return None if self.bandwidth is None else max(self.inward, self.outward) / self.bandwidth

    @property
    def halo(self) -> float:
        """How many times what tiles own is computed, weighted by work."""
        return self.flops / self.plain_flops if self.plain_flops else 1.0


@dataclass(frozen=True)
class StreamCost:
    """What all sweeps of a step take."""

    sweeps: tuple[SweepCost, ...]
    bands: int = 0
    """Bytes on the device through which those over the link pass."""
    start: float = 0.0
    """Seconds in which a step begins."""

    @property
    def flops(self) -> float:
        """Operations."""
        return sum(one.flops for one in self.sweeps)

    @property
    def halo(self) -> float:
        """How many times what tiles own is computed, weighted by work."""
        plain = sum(one.plain_flops for one in self.sweeps)
        return self.flops / plain if plain else 1.0

    @property
    def device_bytes(self) -> float:
        """Bytes read and written on the device."""
        return sum(one.read + one.written for one in self.sweeps)

    @property
    def link_bytes(self) -> float:
        """Bytes over the link to the host, both ways."""
        return sum(one.inward + one.outward for one in self.sweeps)

    @property
    def pixels(self) -> int:
        """Positions read of the image."""
        return sum(one.pixels for one in self.sweeps)

    def seconds(self, overlap: bool = True) -> float | None:
        """Seconds, computing and the link at the same time or one after the other; None on unknown hardware.

        At the same time, a sweep takes as long as its computing, or what is left for it to bring, or to send before all
        that waits has room. What the link has time for then is brought for the next one (`early` bytes at most).
        """
        total, ahead, behind = self.start, 0.0, 0.0
        for one, after in zip(self.sweeps, (*self.sweeps[1:], None), strict=True):
            if one.seconds is None or one.bandwidth is None or one.link_seconds is None:
                return None
            inward, outward = one.inward / one.bandwidth - ahead, one.outward / one.bandwidth + behind
            took = max(one.seconds, inward, outward - self.bands / one.bandwidth)
            ahead = 0.0 if after is None else min(after.early / one.bandwidth, took - inward)
            behind = max(0.0, outward - took)
            total += took if overlap else one.seconds + one.link_seconds
        return total + (behind if overlap else 0.0)


def site_names(passes: Passes) -> dict[Place, str]:
    """The call-site that makes each value."""
    return {place: call.node.site for call in passes.graph.calls for place in call.node.makes}


def describe_step(passes: Passes, cost: StreamCost, hosted: Collection[Place] = ()) -> str:
    """One line for each pass: its tiles, what it keeps and measures, and the operations and bytes of its sweeps."""
    both = {join.after.number: join.both.number for join in joined_passes(passes).found.values()}
    lines = [line_of(passes, one, cost, hosted, both) for one in passes.passes]
    peak = max((one.sweep.peak for one in cost.sweeps), default=0)
    total = (
        f"step: {len(cost.sweeps)} sweeps, {cost.flops / 1e12:.2f} TFLOP, halo {cost.halo:.3f}, "
        f"{cost.device_bytes / 1e9:.1f} GB on the device, {cost.link_bytes / 1e9:.1f} GB over the link, "
        f"peak {peak / GIB:.2f} GiB"
    )
    seconds = cost.seconds()
    return "\n".join([*lines, total if seconds is None else f"{total}, {seconds:.3f} s"])


def line_of(
    passes: Passes, one: StreamPass, cost: StreamCost, hosted: Collection[Place], both: Mapping[int, int]
) -> str:
    """The line of one pass; `both` has the number of a pass that goes back through it and the one before it."""
    names = site_names(passes)
    numbers = [(one.number, one.whole), *([(both[one.number], False)] if one.number in both and not one.whole else [])]
    mine = [c for c in cost.sweeps if (c.sweep.one.number, c.sweep.one.whole) in numbers]
    kept = ", ".join(f"{names.get(p, p[0])}{' (host)' if p in hosted else ''}" for p in one.keeps) or "nothing"
    measured = ", ".join(dict.fromkeys(passes.graph.calls[c].node.site for c, _ in one.measures)) or "nothing"
    tiles = "whole tensors" if one.whole else f"{mine[0].tiles if mine else 0} tiles"
    return f"pass {one.number}: {tiles}; keeps {kept}; measures {measured}; {'; '.join(map(sweep_text, mine))}"


def sweep_text(one: SweepCost) -> str:
    """What one sweep takes."""
    text = f"{one.sweep.kind} {one.flops / 1e12:.2f} TFLOP {(one.read + one.written) / 1e9:.1f} GB"
    link = one.inward + one.outward
    return f"{text} {link / 1e9:.1f} GB link" if link else text
