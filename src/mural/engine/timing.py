"""When the stages of a model worked, and when they should have: measured and predicted timelines of a step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mural import cost
from mural.comm.failure.agree import gather
from mural.engine.inputs import Image, shape_of
from mural.engine.microbatches import rows_of
from mural.engine.parallel import Parallel
from mural.engine.stage_programs import StagePrograms
from mural.errors import ConfigError, PlanError
from mural.pipeline.timeline import ActionSpan, StageCosts, Timeline, simulate
from mural.report import gantt
from mural.text_files import save_text


def measured_spans(pm: Parallel) -> tuple[ActionSpan, ...]:
    """When each seat's first rank worked in the last step, in seconds from the start of the first action. Collective.

    Ranks of one machine have one clock; between machines the clocks differ.
    """
    own = pm.stage_ranks.own
    mine = [(own, action, begin, end) for action, begin, end in pm.way.spans]
    first = pm.world_mesh.rank == pm.stage_ranks.ranks(own)[0]
    told = gather(pm.world_mesh, mine if first else [], "spans")
    found = [span for spans in told.values() for span in spans]
    start = min((begin for _, _, begin, _ in found), default=0.0)
    return tuple(ActionSpan(seat, action, begin - start, end - start) for seat, action, begin, end in found)


def predicted_timeline(
    pm: Parallel,
    image: Image,
    hardware: str | cost.Hardware = "cpu",
    seconds: Sequence[cost.Seconds] | None = None,
) -> Timeline:
    """The timeline of a step on such a batch: seconds and bytes of the stages as predicted for some hardware.

    `seconds` are those of each node of a micro-batch's graph, where they were measured.
    """
    machine = hardware if isinstance(hardware, cost.Hardware) else cost.Hardware.named(hardware)
    rows = rows_of(shape_of(image)[0], pm.plan.microbatches)
    stage_programs = StagePrograms(pm.plain, pm.division)
    route = stage_programs.route_of(image, rows[0].count)
    ranks = [mesh.world // mesh.size("data") for mesh in pm.stage_ranks.meshes]
    schedule = pm.stage_ranks.schedule(len(rows))
    share = [ranks[schedule.seat_of[0, stage]] for stage in range(schedule.stages)]
    seconds = cost.seconds(route.graph, machine) if seconds is None else seconds
    if len(seconds) != len(route.graph):
        raise PlanError(f"{len(seconds)} seconds were given for {len(route.graph)} nodes: give one for each, in order")
    known = cost.estimate(route.graph, machine)
    held = [known.walk(s.start, s.stop).peak(accumulates=True) for s in route.stretches]
    spans = [seconds[s.start : s.stop] for s in route.stretches]
    costs = StageCosts(
        forward=tuple(sum(n.forward for n in span) / part for span, part in zip(spans, share, strict=True)),
        backward=tuple(sum(n.backward for n in span) / part for span, part in zip(spans, share, strict=True)),
        kept=tuple(found.kept // part for found, part in zip(held, share, strict=True)),
        fixed=tuple(found.state for found in held),
        recompute=(pm.plan.recompute == "stages",) * schedule.stages,
        sizes=tuple(part.count / rows[0].count for part in rows),
        latency=machine.link.latency,
        bandwidth=machine.link.bandwidth,
    )
    program = stage_programs.program(route.edges, len(rows), training=True, prefetch=1)
    return simulate(program, costs)


def draw_gantt(pm: Parallel, image: Image, path: str | Path, hardware: str | cost.Hardware = "cpu") -> None:
    """Write a page, .html, with the chart of the last step: predicted above, measured below.

    Collective; the first rank writes.
    """
    if Path(path).suffix != ".html":
        raise ConfigError(f"{path} would hold a Gantt chart, which is a page: let its name end in .html")
    measured = measured_spans(pm)
    if pm.world_mesh.rank == 0:
        predicted = predicted_timeline(pm, image, hardware)
        panels = {"predicted": predicted.spans, "measured": measured}
        drawn = gantt.html(panels, title=str(pm.plan).replace("\n", ", "))
        save_text(path, drawn)
