"""A streamed step as text: its passes with what they keep and measure, and what each sweep over the tiles takes."""

from __future__ import annotations

from collections.abc import Collection

from mural.graph.nodes import Place
from mural.memory.passes import Passes, StreamPass
from mural.memory.stream_cost import StreamCost, SweepCost

GIB = 2**30


def site_names(passes: Passes) -> dict[Place, str]:
    """The call-site that makes each value."""
    return {place: call.node.site for call in passes.graph.calls for place in call.node.makes}


def describe_step(passes: Passes, cost: StreamCost, hosted: Collection[Place] = ()) -> str:
    """One line for each pass: its tiles, what it keeps and measures, and the operations and bytes of its sweeps."""
    lines = [line_of(passes, one, cost, hosted) for one in passes.passes]
    peak = max((one.sweep.peak for one in cost.sweeps), default=0)
    total = (
        f"step: {len(cost.sweeps)} sweeps, {cost.flops / 1e12:.2f} TFLOP, halo {cost.halo:.3f}, "
        f"{cost.device_bytes / 1e9:.1f} GB on the device, {cost.link_bytes / 1e9:.1f} GB over the link, "
        f"peak {peak / GIB:.2f} GiB"
    )
    seconds = cost.seconds()
    return "\n".join([*lines, total if seconds is None else f"{total}, {seconds:.3f} s"])


def line_of(passes: Passes, one: StreamPass, cost: StreamCost, hosted: Collection[Place]) -> str:
    """The line of one pass."""
    names = site_names(passes)
    mine = [c for c in cost.sweeps if (c.sweep.number, c.sweep.whole) == (one.number, one.whole)]
    kept = ", ".join(f"{names.get(p, p[0])}{' (host)' if p in hosted else ''}" for p in one.keeps) or "nothing"
    measured = ", ".join(dict.fromkeys(passes.graph.calls[c].node.site for c, _ in one.measures)) or "nothing"
    tiles = "whole tensors" if one.whole else f"{mine[0].tiles if mine else 0} tiles"
    return f"pass {one.number}: {tiles}; keeps {kept}; measures {measured}; {'; '.join(map(sweep_text, mine))}"


def sweep_text(one: SweepCost) -> str:
    """What one sweep takes."""
    text = f"{one.sweep.kind} {one.flops / 1e12:.2f} TFLOP {(one.read + one.written) / 1e9:.1f} GB"
    link = one.inward + one.outward
    return f"{text} {link / 1e9:.1f} GB link" if link else text
