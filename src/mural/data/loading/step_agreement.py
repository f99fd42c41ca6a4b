"""Agreement on a step: what all ranks make of it after each has read its part, by one exchange of a few numbers.

Texts travel only where something failed, or where a dataset names its samples no other way.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mural.comm.failure.agree import greatest, said
from mural.data.image_sample import BadSample, Samples, name_at
from mural.data.loading.piece_reader import SampleForm
from mural.data.loading.read_ahead import StepRead
from mural.errors import DataError
from mural.ranks import Mesh

GOOD, BAD, FATAL = 1, 2, 3
UNKNOWN = -(2**62)
FORM = 10
"""Numbers in the code of a form."""


@dataclass(frozen=True)
class BatchOutcome:
    """What became of a batch, the same on every rank: the names of its samples, which of them are good, their form."""

    names: tuple[str, ...]
    kept: tuple[int, ...]
    """The places in the batch whose samples are good on all ranks."""
    form: SampleForm | None
    bad: tuple[BadSample, ...]
    fatal: bool
    stored: tuple[tuple[int, ...], ...] = ()
    """Of the good ones, the extents in their files."""


def consent(step: StepRead, samples: Samples, mesh: Mesh) -> BatchOutcome:
    """What all ranks make of a step; raises on every rank if samples cannot be in one batch. Collective."""
    states, speakers, forms = exchanged(step, mesh)
    names = names_of(step, samples, mesh)
    failing = [place for place, state in enumerate(states) if state > GOOD]
    bad: list[BadSample] = []
    if failing:
        mine = [step.failures[p].reason if speakers[p] == mesh.rank else "" for p in failing]
        for place, text in zip(failing, said(mesh, mine, "data errors"), strict=True):
            index = step.batched.indices[place]
            bad.append(BadSample(index, names[place], f"rank {speakers[place]} could not read {text}"))
    good = {place: form for place, form in enumerate(forms) if form is not None}
    fatal = FATAL in states
    form = None if bad and fatal else agreed_form(good, names)
    stored = tuple(one.stored for one in good.values())
    return BatchOutcome(names, tuple(good), form, tuple(bad), fatal, stored)


def exchanged(step: StepRead, mesh: Mesh) -> tuple[list[int], list[int], list[SampleForm | None]]:
    """For each place of a batch: its worst state on any rank, the first rank that failed there, and its form.

    Every number travels with its negative, so that the greatest of both shows whether ranks disagree.
    """
    batched, row = step.batched, 2 + 2 * FORM
    table = torch.full((len(batched.indices), row), UNKNOWN, dtype=torch.int64)
    for place in batched.places:
        failure = step.failures.get(place)
        table[place, 0] = GOOD if failure is None else FATAL if failure.fatal else BAD
        table[place, 1] = -1 if failure is None else mesh.world - mesh.rank
        if place in step.pieces:
            code = torch.tensor(step.pieces[place].form.code)
            table[place, 2:] = torch.cat([code, -code])
    table = greatest(mesh, table, "samples")
    codes, negated = table[:, 2 : 2 + FORM], -table[:, 2 + FORM :]
    forms: list[SampleForm | None] = []
    for state, code, other in zip(table[:, 0].tolist(), codes, negated, strict=True):
        if state == GOOD and not torch.equal(code, other):
            seen = [SampleForm.decoded(form.tolist()) for form in (code, other)]
            raise DataError(
                f"ranks see different shapes of one image of step {batched.number} ({seen[0]} and {seen[1]}): let "
                f"every machine read the same files"
            )
        forms.append(SampleForm.decoded(code.tolist()) if state == GOOD else None)
    return table[:, 0].tolist(), [mesh.world - s for s in table[:, 1].tolist()], forms


def check_same(samples: Samples, mesh: Mesh, settings: Sequence[int]) -> None:
    """Raise on every rank if ranks have other samples or settings than this one. Collective."""
    if mesh.world == 1:
        return
    names = "\n".join(name_at(samples, index) for index in range(len(samples)))
    mine = torch.tensor([len(samples), zlib.crc32(names.encode()), zlib.crc32(repr(tuple(settings)).encode())])
    found = greatest(mesh, torch.cat([mine, -mine]), "samples")
    if not torch.equal(found[:3], -found[3:]):
        raise DataError(
            f"the ranks have different datasets or settings (rank {mesh.rank}: {len(samples)} samples; the most are "
            f"{int(found[0])}, the fewest {-int(found[3])}): every rank needs the same dataset, batch, seed and epoch; "
            f"compare what the globs find on each machine"
        )


def names_of(step: StepRead, samples: Samples, mesh: Mesh) -> tuple[str, ...]:
    """The names of all samples of a batch; exchanged where the dataset knows none without making the sample."""
    named = [name_at(samples, index) for index in step.batched.indices]
    if all(named):
        return tuple(named)
    mine = [step.pieces[place].name if place in step.pieces else "" for place in range(len(named))]
    found = said(mesh, mine, "names")
    return tuple(name or f"sample {index}" for name, index in zip(found, step.batched.indices, strict=True))


def agreed_form(forms: dict[int, SampleForm], names: Sequence[str]) -> SampleForm | None:
    """The one form of all samples of a batch, or an error that names two that differ."""
    if not forms:
        return None
    first, one = next(iter(forms.items()))
    for place, other in forms.items():
        if other == one:
            continue
        if other.extents != one.extents and other.channels == one.channels:
            size = tuple(map(min, one.extents, other.extents))
            remedy = f"take batch=1, with which sizes may change from step to step, or cut all to one size: crop={size}"
        else:
            remedy = "images of one dataset have the same number of channels and the same kind of target"
        raise DataError(
            f"{names[first]} is {one}, but {names[place]} is {other}, and both are in one batch: {remedy}",
            names[place],
        )
    return one
