"""A plan proved before its first step: `mural.check` on small cases that run the program of the real one."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mural.check.fingerprint import fingerprint, proofs_folder, remember, remembered
from mural.check.no_trace import no_trace
from mural.check.sampled_batch import SampledBatch
from mural.check.small_proofs import SECONDS, SmallProofs
from mural.check.subject import Subject
from mural.comm.failure.agree import said
from mural.comm.failure.shared_fate import shared_fate
from mural.engine import Loss, Parallel
from mural.engine.proof import Proof
from mural.plans import Plan
from mural.ranks import Mesh


def is_plain(plan: Plan) -> bool:
    """Whether a plan is what one device does anyway."""
    divided = plan.devices > 1 or plan.microbatches > 1 or plan.stages > 1
    return not (divided or plan.stream is not None or plan.recompute or plan.offload)


@dataclass
class StepProver:
    """Proves a plan for the first batch that it is given."""

    plan: Plan
    loss: Loss
    remembers: bool | Path = True
    """The folder in which the proof is remembered; True for the user's cache folder."""
    command: str = "mural.check(model, plan, image, target, loss)"
    """What compares the real case."""
    seconds: float = SECONDS
    subject: Subject | None = None
    mesh: Mesh | None = None
    unseen: str = ""
    """Why there is nothing to prove with."""

    def look(self, model: nn.Module, mesh: Mesh) -> None:
        """Keep a copy of the model without its memory."""
        self.mesh = mesh
        if is_plain(self.plan):
            return
        try:
            self.subject = Subject.of(model, self.loss)
        except Exception as error:  # whatever a class of the user's says to a copy
            self.unseen = f"the model cannot be copied ({type(error).__name__}: {error})".splitlines()[0]

    def prove(self, pm: Parallel, image: Any, target: Any) -> Proof:
        """The proof for such batches; raises `ProofError` where a small case differs from one device. Collective."""
        if is_plain(self.plan) or self.mesh is None:
            return Proof()
        with shared_fate(self.mesh.transport):
            why = said(self.mesh, [self.unseen], "the copy of a proof")[0]
            if why or self.subject is None:
                return Proof(unproved=(f"the plan: {why}",))
            with no_trace(pm.plain, self.loss) as lasting:
                if lasting:
                    return Proof(unproved=tuple(f"the plan: it would leave {text} changed" for text in lasting))
                proof = self.proved(pm, self.subject, self.mesh, image, target)
            if pm.device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(pm.device)
        return proof

    def proved(self, pm: Parallel, subject: Subject, mesh: Mesh, image: Any, target: Any) -> Proof:
        """The proof that is remembered, or found now. Collective."""
        begin = time.perf_counter()
        subject.like(pm.plain)
        kind = next((p.dtype for p in subject.model.parameters() if p.is_floating_point()), torch.float32)
        batch = SampledBatch.of(image, target, kind, mesh)
        key, folder = fingerprint(subject, self.plan, batch, pm.device, mesh), proofs_folder(self.remembers)
        known = remembered(folder, key, mesh)
        if known is not None:
            return known
        small = SmallProofs(self.plan, pm, subject, mesh, batch, self.command, begin + self.seconds)
        proof = replace(small.proof(image, target), seconds=time.perf_counter() - begin)
        if not small.hurried:  # another time there may be more of it
            remember(folder, key, proof, mesh)
        return proof
