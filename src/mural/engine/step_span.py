"""Which ranks a step spans: those that share its loss, its gradients, and its weights."""

from __future__ import annotations

from dataclasses import dataclass

from mural.gradients.replicas import REPLICAS
from mural.plans import Plan
from mural.ranks import SPATIAL, Mesh


@dataclass(frozen=True)
class StepSpan:
    """The ranks of a step, made once from the plan: all of a stage, or those of one data coordinate that trains alone.

    `mesh` has the ranks that share a loss, `axes` are those that gradients are averaged over, and weights are averaged
    after `every` update with that number (0: never). `part` of `parts` says whose images this rank's are.
    """

    mesh: Mesh
    axes: tuple[str, ...] = REPLICAS
    every: int = 0
    part: int = 0
    parts: int = 1

    @classmethod
    def of(cls, plan: Plan, mesh: Mesh) -> StepSpan:
        """The span of a plan's steps on the mesh of this rank's stages."""
        if not plan.average:
            return cls(mesh)
        # Where each data rank trains alone, nothing of a step travels along the data axis.
        return cls(mesh.alone(), SPATIAL, plan.average, mesh.coordinates["data"], plan.data)
