"""The proofs of a plan on its small cases: which there is time for, what each shows, and what none does."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Any

import torch

from mural.check.compared_case import Case
from mural.check.comparison import Comparison
from mural.check.first_difference import first_different_module
from mural.check.plain_look import PlainLook, first_look
from mural.check.same_program import unlike_calls, unlike_passes
from mural.check.sampled_batch import SampledBatch
from mural.check.side_by_side import compared, full_float32
from mural.check.small_case import Sizes, SmallCase, has_tile_inside, provable, small_cases
from mural.check.subject import Subject
from mural.comm.failure.agree import gather
from mural.comm.failure.shared_fate import given_up
from mural.engine import Parallel, share_from_first
from mural.engine.inputs import inputs_of
from mural.engine.loss_terms import LossTerms
from mural.engine.materialize import unwrapped
from mural.engine.memory_room import free_for_each
from mural.engine.proof import Proof
from mural.engine.stream_program import StreamProgram
from mural.engine.streamed import Streamed
from mural.errors import PeerError, ProofError
from mural.plans import Plan
from mural.ranks import Mesh
from mural.shard.generators import generators_kept

SECONDS = 30.0
"""How long a proof may take, about."""
COPIES = 8
"""How many times the memory of the parameters a proof takes."""
RUNS = 7
"""How many runs on one device a comparison makes for each of its steps."""
EXPLAINED = {torch.float64: 1e-6, torch.float32: 2e-1}
"""What rounding may explain of a value, relative to the largest entry of its kind, so that it counts as proved."""


class Unproved(Exception):
    """Why a part of a plan cannot be proved."""


class TooLong(Unproved):
    """Why there is no time to prove it."""


@dataclass
class SmallProofs:
    """The proofs of one plan on its small cases."""

    plan: Plan
    pm: Parallel
    subject: Subject
    mesh: Mesh
    batch: SampledBatch
    command: str
    until: float
    """The time at which they should be done, of `time.perf_counter`."""
    unproved: list[str] = field(default_factory=list[str])
    proved: list[str] = field(default_factory=list[str])
    difference: float = 0.0
    hurried: bool = False
    """Whether there was no time for some of it."""

    def proof(self, image: Any, target: Any) -> Proof:
        """All of them, and what they do not show. Collective."""
        self.unproved += [*self.left_out()]
        if any(getattr(part, "requires_grad", False) for part in inputs_of(image)):
            self.unproved.append("the gradient of the image, which is not compared")
        try:
            self.check_room()
            options, real = self.options(image, target)
            for number, cases in enumerate(options):
                try:
                    for case in cases:
                        self.compare(case, real)
                    break
                except TooLong:
                    if number == len(options) - 1:
                        self.hurried = True
                        raise
        except Unproved as reason:
            self.unproved.append(str(reason))
        return Proof(tuple(self.proved), tuple(dict.fromkeys(self.unproved)), self.difference)

    def left_out(self) -> Iterator[str]:
        """What no small case shows."""
        plan, cuda = self.plan, self.pm.device.type == "cuda"
        yield from self.subject.omitted
        if plan.precision != "float32":
            yield "autocast: the small case runs without it"
        if self.pm.module is not unwrapped(self.pm.module):
            yield "torch.compile: the small case runs the model as it is written"
        if plan.average:
            yield f"average = {plan.average}: data ranks train alone between averages"
        if plan.batchnorm in ("rank", "micro-rank"):
            yield f'batchnorm = "{plan.batchnorm}": its statistics are not those of one device'
        if plan.stream is not None and cuda:
            yield "CUDA graphs of tiles, which begin in later steps"
        if plan.offload:
            yield "which values leave for the host: in the small case all do that may"

    def check_room(self) -> None:
        """Raise if this rank has no memory for copies of the whole model. Collective."""
        free = free_for_each(self.mesh, torch.device("cpu"))
        if self.pm.device.type == "cuda":
            free = min(free, torch.cuda.mem_get_info(self.pm.device)[0])
        needed = COPIES * self.subject.bytes()
        if any(gather(self.mesh, needed > free, "the memory of a proof").values()):
            raise Unproved(
                f"the plan: whole copies of the model take {needed / 2**30:.1f} GiB, more than one rank has free "
                f"({free / 2**30:.1f} GiB)"
            )

    # -- which cases --------------------------------------------------------------------------------------------------

    def options(self, image: Any, target: Any) -> tuple[list[tuple[SmallCase, ...]], StreamProgram | None]:
        """Sets of small cases, the most thorough first, with the real program where images are streamed. Collective."""
        self.sizes = Sizes(self.subject, self.batch)
        if isinstance(self.pm.way, Streamed):
            with self.pm.way.prepared(image, target) as real:
                self.sizes.graphs[self.sizes.image] = real.program.graph
                options, program = [*small_cases(self.small_plan(), self.sizes, real)], real.program
        else:
            options, program = [*small_cases(self.small_plan(), self.sizes, None)], None
        options = [cases for cases in options if cases]
        if not options:
            raise Unproved(f"the plan: the model takes no image that is small enough ({self.sizes.refused})")
        return options, program

    def check_time(self, small: SmallCase, seconds: float) -> None:
        """Raise if a case takes more time than is left on rank 0. Collective."""
        needed, left = gather(self.mesh, (seconds, self.until - time.perf_counter()), "the time of a proof")[0]
        if needed > left:
            raise TooLong(
                f"the plan: its small case ({small}) would take {needed:.1f} s or more, and {max(left, 0.0):.1f} s are "
                f"left of {SECONDS:.0f}"
            )

    def small_plan(self) -> Plan:
        """The plan, with the cuts that its stages have."""
        plan, sites = provable(self.plan), self.pm.division.sites
        return replace(plan, cuts=sites[1:]) if plan.stages > 1 and plan.domain == 1 else plan

    # -- one case -----------------------------------------------------------------------------------------------------

    def compare(self, small: SmallCase, real: StreamProgram | None) -> None:
        """Compare a case with one device; raises where it differs, or takes too long. Collective."""
        self.check_time(small, 2 * small.work / pace(self.pm.device))
        case, look, double = self.realized(small, 3 if small.plan.offload else 1)
        if look.why:
            raise Unproved(f"the plan: {look.why}{self.of_targets(look)}")
        self.check_time(small, look.seconds * (RUNS * case.steps + 2 * 3 ** len(small.tiled)))
        made = list[Parallel]()
        case = replace(case, settle=partial(self.settle, real, made))
        with full_float32(self.pm.device):
            try:
                found = compared(case)
            except PeerError:
                raise
            except Exception as error:
                if given_up(self.mesh.transport):
                    raise
                how = f"{type(error).__name__}: {error}"
                raise Unproved(f"the plan: its small case ({small}) ended with {how}") from None
            if not found.exact:
                raise self.differs(found, case, small)
        self.note(found, small, look, double)
        self.unproved += [*self.unlike(small, real, made)]

    def realized(self, small: SmallCase, steps: int) -> tuple[Case, PlainLook, bool]:
        """A case in double precision, or in the model's own where it takes no other, with a first look. Collective."""
        device, errors = self.pm.device, dict[bool, str]()
        for double in (True, False):
            model, loss = self.subject.realized(device, double)
            image, target = self.batch.drawn(small.shapes, device, double)
            with generators_kept(device):
                share_from_first(model, self.mesh)
                LossTerms.of(loss, model).settle(device, self.mesh)
            case = Case(model, small.plan, image, target, loss, self.mesh, steps)
            dtype = torch.float64 if double else next((p.dtype for p in model.parameters()), torch.float32)
            look = None
            try:
                with full_float32(device):
                    look = first_look(case, dtype, device)
            except Exception as error:  # the model's own, for a type that it does not take
                errors[double] = f"{type(error).__name__}: {error}".splitlines()[0]
            if all(gather(self.mesh, look is not None, "the run on one device").values()) and look is not None:
                return case, look, double
        raise Unproved(f"the plan: the small case ({small}) does not run on one device ({errors.get(False, '')})")

    def of_targets(self, look: PlainLook) -> str:
        """What may be the reason for a loss that is not a number."""
        values = self.batch.constant_targets()
        return f": all its targets are {values[0]:g}" if "loss" in look.why and values else ""

    def settle(self, real: StreamProgram | None, made: list[Parallel], pm: Parallel) -> None:
        """Have the small case make the choices of the real one."""
        made.append(pm)
        if isinstance(pm.way, Streamed):
            pm.way.like = real
        if pm.offloading is not None:
            pm.offloading.everything, pm.offloading.least = True, 1

    def note(self, found: Comparison, small: SmallCase, look: PlainLook, double: bool) -> None:
        """Note what a comparison proved, and what it left open."""
        dtype = torch.float64 if double else torch.float32
        vague = [
            row for row in found.rows if row.difference and row.limit * row.share / row.difference > EXPLAINED[dtype]
        ]
        if vague:
            self.unproved.append(
                f"{vague[0].title()}{f' and {len(vague) - 1} more' if len(vague) > 1 else ''}: rounding explains "
                f"{vague[0].limit:.0e} of it"
            )
        if look.still:
            self.unproved.append(
                f"gradients that are zero in the small case: {', '.join(look.still[:3])} ({len(look.still)})"
            )
        self.unproved += [f"random numbers next to plain torch: {n}" for n in found.notes if "mode, too" in n]
        plan = "; ".join(line for line in str(self.plan).splitlines())
        self.proved.append(
            f"{plan}: {small} in {'float64' if double else 'the type of the model'}, {len(found.rows)} values"
        )
        self.difference = max([self.difference, *(value for value in found.values() if value < inf)])

    def unlike(self, small: SmallCase, real: StreamProgram | None, made: Sequence[Parallel]) -> Iterator[str]:
        """Where the program of the small case is not that of the real one."""
        there, here, at = self.sizes.image, small.shapes[0], "the real size"
        extents = " × ".join(map(str, there[2:]))
        for pm in made:
            program = [*pm.way.programs.values()][-1] if isinstance(pm.way, Streamed) else None
            if program is not None and real is not None:
                if how := unlike_calls(real.graph, program.graph) or unlike_passes(real, program):
                    yield f"{at} ({extents}): {how}"
                elif small.tiled and not has_tile_inside(program, small.tiled):
                    yield f"a tile that touches no border: there is none in {small}"
            if pm.division.sites != self.pm.division.sites:
                yield f"the stages of {at}: they begin at {list(self.pm.division.sites[1:])}"
        if real is not None:
            return
        one, other = self.sizes.graph(there), self.sizes.graph(here)
        if one is None or other is None:
            yield f"that {at} makes the calls of the small one: the model cannot be captured ({self.sizes.refused})"
        elif how := unlike_calls(one, other):
            yield f"{at} ({extents}): {how}"
        elif not self.sizes.with_loss:
            yield f"that the loss makes the same calls at {at}: it cannot be captured ({self.sizes.refused})"

    def differs(self, found: Comparison, case: Case, small: SmallCase) -> ProofError:
        """The error for a case that is not what one device does."""
        where = first_different_module(case, found)
        return ProofError(
            f"the plan ({', '.join(str(self.plan).splitlines())}) does not give the result of one device: on a "
            f"small case ({small}), {found.verdict}. {where}. Nothing was trained: compare the real case by "
            f"`{self.command}`, and report this; a run without `prove` would train on it"
        )


def pace(device: torch.device) -> float:
    """About how many operations a device does in a second: half as many as in a product of moderate matrices."""
    x = torch.rand(384, 384, dtype=torch.float64, device=device)
    float((x @ x).sum())
    begin = time.perf_counter()
    float((x @ x).sum())
    seconds = time.perf_counter() - begin
    return 0.5 * 2 * 384**3 / seconds
