"""One case of a comparison: a model, a batch and a plan, the same steps with and without the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import Any

from torch import nn

from mural.check.comparison import Row
from mural.check.copies import copied
from mural.check.plain_run import PlainModel
from mural.check.rounding import PROBES, At, Reference, gaps, left_behind, move
from mural.check.updates import Stepping, steps
from mural.comm.failure.agree import gather, together
from mural.engine import Loss, Parallel
from mural.engine.applied_plan import apply_plan
from mural.engine.inputs import shape_of
from mural.plans import DEFAULT, Plan
from mural.ranks import Mesh


@dataclass(frozen=True)
class Case:
    """What is compared, and how: `random` takes a mesh of one rank for one device, which draws as the plan does."""

    model: nn.Module
    plan: Plan
    image: Any
    target: Any
    loss: Loss
    mesh: Mesh
    steps: int
    rate: float = 0.0
    eps: float = 0.0
    random: bool = False
    settle: Callable[[Parallel], None] | None = None
    """Is given the model under the plan before its first step."""

    def rows(self) -> list[Row]:
        """Every value in its worst step, as the rank on which it is worst has it; the same on all ranks. Collective."""
        reference = self.reference()
        model, loss = copied(self.model, self.loss)
        divided = apply_plan(model, self.plan, loss, mesh=self.mesh, image=self.extents)
        if self.settle is not None:
            self.settle(divided)
        names, observed = {name for _, name in reference.values}, self.observed(reference)
        walked = steps(divided, self.image, self.target, self.steps, self.rate, names, observed)
        mine = (reference.row(at, found) for at, found in gaps(walked, reference.values).items())
        told = gather(self.mesh, list(worst(mine)), "check").values()
        rows = {(row.kind, row.name): row for row in worst(row for rows in told for row in rows)}
        for step, (kind, name) in reference.values:
            # A streamed step shows no result that comes from whole tensors.
            if (kind, name) not in rows and (kind != "output" or self.plan.stream is None):
                rows[kind, name] = Row(kind, name, step, inf, 0.0, "is missing", inf)
        return list(rows.values())

    def reference(self) -> Reference:
        """What one device does, and how far rounding moves that: each rank tries other movements. Collective."""
        plain = PlainModel(self.model, self.plan, self.loss)
        before = {("parameter", name): p.detach() for name, p in plain.named_parameters()}
        before |= {("buffer", name): buffer for name, buffer in plain.named_buffers()}
        noise: dict[At, float] = {}
        with together(self.mesh, "the run on one device"):
            values = left_behind(self.alone(*copied(self.model, self.loss), self.image))
            for probe in range(self.mesh.rank, max(PROBES, self.mesh.world), self.mesh.world):
                model, loss = copied(self.model, self.loss)
                trained = [p for _, p in PlainModel(model, self.plan, loss).named_parameters()]
                walked = self.alone(model, loss, move(trained, self.image, self.eps, probe))
                for at, found in gaps(walked, values).items():
                    noise[at] = max(noise.get(at, 0.0), found.size if isfinite(found.size) else 0.0)
        for told in gather(self.mesh, noise, "rounding").values():
            noise |= {at: max(size, noise.get(at, 0.0)) for at, size in told.items()}
        return Reference(values, before, self.eps, noise)

    def observed(self, reference: Reference) -> bool:
        """Whether the model's results are compared: a streamed step shows them tile by tile if they are one tensor."""
        return self.plan.stream is None or {name for _, (kind, name) in reference.values if kind == "output"} == {""}

    def alone(self, model: nn.Module, loss: Loss, image: Any) -> Iterable[Any]:
        """The steps of a model on one device."""
        one: Stepping = self.one_rank(model, loss) if self.random else PlainModel(model, self.plan, loss)
        return steps(one, image, self.target, self.steps, self.rate)

    def one_rank(self, model: nn.Module, loss: Loss) -> Stepping:
        """The model on a mesh of this rank alone."""
        apart = {"microbatches": self.plan.microbatches, "batchnorm": "micro"} if self.plan.norms_apart else {}
        plan = replace(DEFAULT, precision=self.plan.precision, **apart)
        return apply_plan(model, plan, loss, mesh=self.mesh.alone(data_only=False), image=self.extents)

    @property
    def extents(self) -> tuple[int, ...]:
        """The shape of one image."""
        return shape_of(self.image)[1:]


def worst(rows: Iterable[Row]) -> Iterable[Row]:
    """Of each value the worst row, with the largest share of all of its rows."""
    found: dict[tuple[str, str], Row] = {}
    for row in rows:
        other = found.setdefault((row.kind, row.name), row)
        further = max(row, other, key=lambda row: row.rank)
        found[row.kind, row.name] = replace(further, share=max(row.share, other.share))
    return found.values()
