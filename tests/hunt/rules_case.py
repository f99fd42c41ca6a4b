"""One case of the rule validator: a call, its form, its values, and where its tensors are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from hunt.rules_draw import Draw
from hunt.rules_forms import Form, Run, form_of
from hunt.rules_samples import sample_of
from mural.shard.table import KINDS

Values = Literal["given", "ties", "alternating", "nan", "inf"]
VALUES: tuple[Values, ...] = get_args(Values)
Kind = Literal["exact", "refused", "missing", "incorrect", "crashed", "hung", "skipped"]
"""What a case comes to; skipped: torch does not offer the form, or the tensors cannot be placed so."""

UNORDERED = ("topk", "kthvalue", "median", "nanmedian", "mode")
"""What finds positions of which torch does not say which it takes of equal values."""


@dataclass(frozen=True)
class Place:
    """Where tensors are: on ranks, in micro-batches, or in tiles; the seed decides which dims are cut, and where."""

    kind: Literal["ranks", "microbatches", "tiles"]
    seed: int
    spatial: tuple[int, ...] = ()
    data: int = 1

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.data * int(torch.tensor(self.spatial).prod()) if self.kind == "ranks" else 1

    def fits(self, tensor: Tensor) -> bool:
        """Whether the tensor has the dims that are cut."""
        if self.kind == "microbatches":
            return tensor.ndim > 0 and tensor.shape[0] > 1
        if self.kind == "tiles":
            return tensor.ndim in (3, 4, 5) and tensor.dtype == torch.float64 and min(tensor.shape) > 0
        return tensor.numel() > 0 and tensor.ndim >= max(1, len(self.spatial) + (1 if self.data > 1 else 0))

    @property
    def name(self) -> str:
        """What reports count by."""
        grid = "×".join(map(str, self.spatial))
        return f"{grid or 'no'} spatial ranks, {self.data} data" if self.kind == "ranks" else self.kind


@dataclass(frozen=True)
class Case:
    """A call that sharded tensors and plain ones are to agree on."""

    op: str
    number: int
    place: Place
    form: Form = "given"
    values: Values = "given"
    dtype: str = "float64"

    @property
    def line(self) -> str:
        """The case in one line."""
        more = "".join(f", {word}" for word in (self.form, self.values, self.dtype) if word not in ("given", "float64"))
        return f"{self.op} #{self.number}{more}, {self.place.name} (seed {self.place.seed})"

    @property
    def script(self) -> str:
        """A program that shows the case: run it with src and tests on the path."""
        return f"from hunt.rules import show\nfrom hunt.rules_case import Case, Place\n\nshow({self!r})\n"


@dataclass(frozen=True)
class Outcome:
    """What a case came to, and why."""

    kind: Kind
    detail: str = ""


def valued(tensors: Sequence[Tensor], values: Values, seed: int) -> list[Tensor]:
    """Tensors with values that luck cannot pass."""
    return [one_valued(t, values, Draw(f"values {seed} {i}")) for i, t in enumerate(tensors)]


def one_valued(tensor: Tensor, values: Values, draw: Draw) -> Tensor:
    """A tensor with some of its values replaced."""
    made = tensor.detach().clone()
    if not made.is_floating_point() or not made.numel() or values == "given":
        return made
    flat = made.reshape(-1)
    if values == "ties":
        return (made * 2).round() / 2
    if values == "alternating":
        signs = torch.ones_like(flat)
        signs[1::2] = -1
        return (flat.abs() * signs).reshape(made.shape)
    special: Any = torch.tensor([float("nan")] if values == "nan" else [float("inf"), -float("inf")])
    for _ in range(draw.int(1, 3)):
        flat[draw.int(0, flat.numel() - 1)] = draw.of(*special.tolist())
    return flat.reshape(made.shape)


@dataclass(frozen=True)
class Job:
    """A case as ranks get it."""

    case: Case
    run: Run
    tensors: tuple[Tensor, ...]
    drawn: bool
    """Whether it draws random numbers: then a mesh of one is what others are equal to."""


def job_of(case: Case) -> Job | None:
    """A case with its call and tensors; None if torch does not offer it so, or no tensor can be cut so."""
    sample = sample_of(case.op, getattr(torch, case.dtype), case.number)
    run = None if sample is None else form_of(case.op, case.number, sample, case.form)
    if sample is None or run is None or not any(case.place.fits(t) for t in sample.tensors()):
        return None
    tied = case.values == "ties" or case.dtype not in ("float64", "float32")
    if tied and getattr(sample.function, "__name__", "") in UNORDERED:
        return None
    words = {*case.op.rstrip("!").split("."), getattr(sample.function, "__name__", "")}
    drawn = any("random" in (KINDS.get(word), KINDS.get(f"{word}_")) for word in words)
    drawn = drawn or any(word in case.op for word in ("attention", "lowrank"))
    return Job(case, run, tuple(valued(sample.tensors(), case.values, case.place.seed)), drawn)
