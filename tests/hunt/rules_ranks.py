"""Cases on ranks: the call on tensors that are cut over a mesh, next to plain torch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import mural
from hunt.rules_case import Case, Job, Outcome, Place
from hunt.rules_draw import Draw
from law import Grid
from mural.comm.failure.shared_fate import shared_fate
from mural.errors import MuralError, PeerError
from mural.ranks import Mesh

TOLERANCE = {
    torch.float64: 1e-10, torch.complex128: 1e-10, torch.float32: 2e-4, torch.complex64: 2e-4, torch.bfloat16: 6e-2,
    torch.float16: 1e-2,
}  # fmt: skip
LEARNS_NOT = ("a leaf Variable that requires grad", "is not differentiable with respect to argument")
"""What torch's errors say where only our asking for gradients is wrong."""
NO_OUT = "'out'"
"""What they say where there is no such argument."""
UNSET = ("empty_like", "new_empty", "empty_strided")
"""Operations whose values mean nothing."""


class Wrong(Exception):
    """A difference from plain torch."""


def of_ranks(jobs: Sequence[Job], progress: str = "") -> list[Outcome]:
    """What each case comes to on this rank; the number of the case that runs is in the file `progress`."""
    found: list[Outcome] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, job in enumerate(jobs):
            if progress and (not dist.is_initialized() or dist.get_rank() == 0):
                Path(progress).write_text(str(number))
            found.append(outcome_of(job))
    return found


def outcome_of(job: Job) -> Outcome:
    """What a case comes to on this rank."""
    from hunt.rules_time import in_microbatches, in_tiles

    try:
        expected = plain(job)
    except Skipped as reason:
        return Outcome("skipped", str(reason))
    if any(words in str(expected) for words in LEARNS_NOT) or (job.run.form == "out" and NO_OUT in str(expected)):
        return Outcome("skipped", "torch has no gradient for it")
    sharded = {"ranks": on_mesh, "microbatches": in_microbatches, "tiles": in_tiles}[job.case.place.kind]
    try:
        problem = sharded(job, expected)
    except Skipped as reason:
        return Outcome("skipped", str(reason))
    except Wrong as difference:
        return Outcome("incorrect", str(difference))
    except MuralError as error:
        if isinstance(expected, Exception):
            return Outcome("exact", "raises, as torch does")
        if "has no rule for sharded tensors" in str(error):
            return Outcome("missing", str(error).split(" has no rule")[0])
        return Outcome("refused", f"{type(error).__name__}: {error}")
    except Exception as error:
        if isinstance(expected, Exception):
            return Outcome("exact", "raises, as torch does")
        return Outcome("crashed", f"{type(error).__name__}: {error}")
    if isinstance(expected, Exception):
        return Outcome("incorrect", f"torch raises {type(expected).__name__}: {expected}; this returned {problem}")
    return Outcome("exact")


class Skipped(Exception):
    """A case that says nothing."""


def plain(job: Job) -> Any:
    """What plain torch gives: the results, and the gradients of the tensors; or its error."""
    inputs, run = [leaf(t) for t in job.tensors], job.run
    torch.manual_seed(job.case.place.seed)
    try:
        if job.drawn:
            mesh = Mesh.of_one()
            given = [mural.shard(t, mesh, dims=()) if t.ndim else t for t in inputs]
            result = pytree.tree_map(whole, run(given))
        else:
            result = run(inputs)
    except MuralError as error:
        raise Skipped("the reference refuses it") from error
    except Exception as error:
        return error
    return result, gradients(result, inputs)


def leaf(tensor: Tensor) -> Tensor:
    """A copy that learns, if its numbers can."""
    return tensor.detach().clone().requires_grad_(tensor.is_floating_point())


def whole(value: Any) -> Any:
    """A whole tensor, gathered if it is sharded."""
    return value.full() if isinstance(value, mural.ShardedTensor) else value


def projected(result: Any) -> Tensor | None:
    """A random projection of all results that have gradients: so every gradient matters."""
    total: Tensor | None = None
    for number, tensor in enumerate(leaves_of(result)):
        if not isinstance(tensor, Tensor) or not tensor.requires_grad or not tensor.is_floating_point():
            continue
        weights = Draw(f"weights {number}").normal(*tensor.shape).to(tensor.dtype)
        term = (tensor * weights).sum()
        total = term if total is None else total + term
    return total


def leaves_of(result: Any) -> list[Any]:
    """The tensors and other values in a result, in order."""
    return pytree.tree_leaves(result)


def gradients(result: Any, inputs: Sequence[Tensor]) -> list[Tensor | None] | None:
    """The gradients of the inputs; None if torch gives none."""
    loss = projected(result)
    if loss is None:
        return None
    try:
        found = torch.autograd.grad(loss, [t for t in inputs if t.requires_grad], allow_unused=True)
    except (RuntimeError, NotImplementedError):
        return None
    given = iter(found)
    return [next(given) if t.requires_grad else None for t in inputs]


# --- placing --------------------------------------------------------------------------------------------------------


def bounds(draw: Draw, extent: int, parts: int) -> tuple[int, ...]:
    """Where a dim is cut: 60/40, evenly, anywhere, or with an empty piece."""
    if parts == 1:
        return 0, extent
    kind = draw.of("60/40", "even", "anywhere", "empty first", "empty last")
    if kind == "60/40":
        inner = [math.ceil(extent * 0.6 + extent * 0.4 * i / max(1, parts - 1)) for i in range(parts - 1)]
    elif kind == "even":
        inner = [extent * (i + 1) // parts for i in range(parts - 1)]
    else:
        inner = sorted(draw.int(0, extent) for _ in range(parts - 1))
        if kind != "anywhere":
            inner = [0, *inner[1:]] if kind == "empty first" else [*inner[:-1], extent]
    return (0, *(min(extent, b) for b in inner), extent)


class Placed:
    """The tensors of a call on a mesh, some cut and some plain."""

    def __init__(self, place: Place, tensors: Sequence[Tensor], mesh: Mesh):
        self.place, self.mesh, self.draw = place, mesh, Draw(f"place {place.seed}")
        sizes = [t.numel() if place.fits(t) else -1 for t in tensors]
        lead = max(range(len(tensors)), key=lambda i: (sizes[i], -i))
        if sizes[lead] <= 0:
            raise Skipped("no tensor has the dims that the grid cuts")
        self.lead = tensors[lead]
        first = 1 if place.data > 1 else 0
        self.dims = tuple(self.draw.random.sample(range(first, self.lead.ndim), len(place.spatial)))
        pairs = zip((*self.dims, 0) if place.data > 1 else self.dims, (*place.spatial, place.data), strict=False)
        self.cuts = {d: bounds(self.draw, self.lead.shape[d], parts) for d, parts in pairs}
        self.tensors = [self._place(t, lead == i) for i, t in enumerate(tensors)]

    def _place(self, tensor: Tensor, lead: bool) -> Tensor:
        """A tensor cut as the first one is, or otherwise, or plain."""
        learns = tensor.is_floating_point()
        how = "same" if lead else self.draw.of("same", "same", "same", "plain", "plain", "other", "replicated")
        dims, cuts = self.dims, self.cuts
        if not lead and tensor.ndim != self.lead.ndim:
            shift = self.lead.ndim - tensor.ndim
            dims, cuts = tuple(d - shift for d in dims), {d - shift: c for d, c in cuts.items()}
        known = all(0 <= d < tensor.ndim and tensor.shape[d] == c[-1] for d, c in cuts.items())
        if not self.place.fits(tensor) or how == "plain" or (how == "same" and not known):
            return nn.Parameter(tensor.clone()) if learns else tensor.clone()
        if how == "same":
            made = mural.shard(tensor, self.mesh, dims=dims, cuts=cuts)
        elif how == "replicated" and self.place.data == 1:
            made = mural.shard(tensor, self.mesh, dims=())
        else:
            first = 1 if self.place.data > 1 else 0
            made = mural.shard(
                tensor, self.mesh, dims=self.draw.random.sample(range(first, tensor.ndim), len(self.place.spatial))
            )
        return made.requires_grad_() if learns else made


def on_mesh(job: Job, expected: Any) -> Any:
    """The call on ranks, compared with plain torch's results and gradients; its result as text."""
    case = job.case
    grid = Grid(case.place.spatial, case.place.data)
    mesh = grid.mesh()
    placed = Placed(case.place, job.tensors, mesh)
    with shared_fate(mesh.transport):
        torch.manual_seed(case.place.seed)
        result = job.run(placed.tensors)
        loss = projected(result)
        complete = pytree.tree_map(whole, result)
        if isinstance(expected, Exception):
            return describe(complete)
        if expected[1] is not None and loss is not None:
            check_loss(loss)
            loss.backward()
            plains = [t for t in placed.tensors if isinstance(t, nn.Parameter)]
            mural.reduce_gradients(plains, mesh)
        found = [None if t.grad is None else whole(t.grad) for t in placed.tensors]
    check_values(case, complete, expected[0])
    if expected[1] is not None:
        check_gradients(job, found, expected[1], expected[0])
    return None


def check_loss(loss: Tensor) -> None:
    """A sum of everything is a plain number."""
    if type(loss) is not Tensor:
        raise Wrong(f"a sum of all results is a {type(loss).__name__}")


# --- comparing ------------------------------------------------------------------------------------------------------


def is_unset(case: Case) -> bool:
    """Whether the values of its results mean nothing."""
    return any(name in case.op for name in UNSET)


def tolerance_of(case: Case, *results: Any) -> float:
    """The tolerance of the lowest precision in a case."""
    kinds = {getattr(torch, case.dtype), *(t.dtype for t in leaves_of(results) if isinstance(t, Tensor))}
    return max(TOLERANCE.get(kind, 0.0) for kind in kinds)


def check_values(case: Case, found: Any, expected: Any) -> None:
    """Raise if results are not those of plain torch."""
    got, want = leaves_of(found), leaves_of(expected)
    if len(got) != len(want):
        raise Wrong(f"{len(got)} results instead of {len(want)}")
    tolerance = tolerance_of(case, expected)
    for number, (a, b) in enumerate(zip(got, want, strict=True)):
        if isinstance(b, Tensor):
            if case.values == "inf" and isinstance(a, Tensor) and a.shape == b.shape and a.dtype == b.dtype:
                # Statistics of infinite values: torch's are NaN or infinite by the order of its additions.
                a, b = (torch.where(t.isfinite(), t, float("nan")) if t.is_floating_point() else t for t in (a, b))
            integral = not b.is_floating_point() and not b.is_complex()
            check_tensor(a, b, f"result {number}", is_unset(case), 0.0 if integral else tolerance)
        elif not (a == b or (isinstance(b, float) and math.isclose(a, b, rel_tol=1e-10, abs_tol=1e-12)) or a != a != b):
            raise Wrong(f"result {number} is {a!r}, not {b!r}")


def check_gradients(
    job: Job, found: Sequence[Tensor | None], expected: Sequence[Tensor | None], results: Any = ()
) -> None:
    """Raise if gradients are not those of plain torch; none is as good as one of zeros.

    Where values are not numbers, rules agree on results; torch's own kernels differ in gradients that nobody uses.
    """
    tolerance = tolerance_of(job.case, expected, results, job.tensors) * 10
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        if a is None or b is None:
            given = b if a is None else a
            if given is not None and given.numel() and bool(given.nan_to_num(nan=1.0).any()):
                raise Wrong(f"gradient {number} is {describe(a)}, not {describe(b)}")
            continue
        if job.case.values in ("nan", "inf") and a.shape == b.shape == job.tensors[number].shape:
            usual = a.isfinite() & b.isfinite() & job.tensors[number].isfinite()
            a, b = a.where(usual, 0.0), b.where(usual, 0.0)
        check_tensor(a, b, f"gradient {number}", False, tolerance)


def check_tensor(a: Any, b: Tensor, what: str, unset: bool, tolerance: float) -> None:
    """Raise if a tensor is not the expected one."""
    if not isinstance(a, Tensor) or a.shape != b.shape or a.dtype != b.dtype:
        raise Wrong(f"{what} is {describe(a)}, not {describe(b)}")
    if unset or not b.numel():
        return
    a, b = (numbers(t) for t in (a, b))
    same = (a == b) | (a.isnan() & b.isnan())
    gaps = torch.where(same, torch.zeros_like(a), (a - b).abs()).nan_to_num(nan=float("inf"))
    scale = b[b.isfinite()].abs().max() if bool(b.isfinite().any()) else torch.ones(())
    off = float(gaps.max() / scale.clamp(min=1e-3 if tolerance < 1e-8 else 1.0))
    if not off <= tolerance:
        where = tuple(int(i) for i in torch.unravel_index(gaps.argmax(), gaps.shape))
        first = f"at {where} it is {a[where]:.6g}, not {b[where]:.6g}"
        raise Wrong(f"{what} of shape {tuple(b.shape)} is wrong by {off:.3g}: {first}")


def numbers(tensor: Tensor) -> Tensor:
    """The values of a tensor as float64."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()


def describe(value: Any) -> str:
    """A result in a few words."""
    if isinstance(value, Tensor):
        return f"{type(value).__name__} {tuple(value.shape)} {value.dtype}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__} of {', '.join(map(describe, value))}"[:200]
    return repr(value)[:80]


def merged(outcomes: Sequence[Outcome]) -> Outcome:
    """What a case came to, from what it came to on each rank."""
    kinds = {o.kind for o in outcomes}
    for kind in ("incorrect", "crashed", "missing"):
        if kind in kinds:
            own = [o for o in outcomes if o.kind == kind and not o.detail.startswith(PeerError.__name__)]
            return own[0]
    refused = [o for o in outcomes if o.kind == "refused"]
    if refused and "exact" in kinds:
        return Outcome("crashed", f"refused on {len(refused)} of {len(outcomes)} ranks alone: {refused[0].detail}")
    own = [o for o in refused if not o.detail.startswith(PeerError.__name__)]
    return (own or refused or list(outcomes))[0]
