"""Preflight: every file of a dataset is opened before a run, so that it does not lose work to a bad file."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import attrgetter

import torch

from mural.comm.failure.agree import greatest, said
from mural.data.formats.dtypes import TORCH
from mural.data.image_sample import BadSample, Samples, name_at, sample_at
from mural.data.loading.piece_reader import sources_of
from mural.data.loading.pixels import Pixels
from mural.data.open import open as open_image
from mural.data.source import Source, level_of
from mural.errors import DataError, UnfitData
from mural.ranks import Mesh

SHOWN = 10
"""Bad samples that an error lists."""
THREADS = 8
DTYPES = tuple(TORCH.values())


@dataclass(frozen=True)
class DatasetFacts:
    """What the images of a dataset have in common, and the smallest and largest extent of each spatial dim."""

    samples: int
    channels: int
    dtype: torch.dtype
    smallest: tuple[int, ...]
    largest: tuple[int, ...]


@dataclass(frozen=True)
class Unusable:
    """Why a sample cannot be used; `unfit` where it can be read, but does not fit the run."""

    reason: str
    unfit: bool = False


@dataclass(frozen=True)
class SampleHeader:
    """What a sample's files say of themselves."""

    name: str
    channels: int
    dtype: torch.dtype
    extents: tuple[int, ...]

    @property
    def code(self) -> list[int]:
        """What must be equal in all samples, as numbers."""
        return [self.channels, DTYPES.index(self.dtype), len(self.extents)]


def check(samples: Samples, mesh: Mesh | None = None, level: int = 0, pixels: Pixels | None = None) -> DatasetFacts:
    """The facts of a dataset, or an error on every rank that lists which samples cannot be used. Collective."""
    facts, unread, unfit = inspect(samples, mesh, level, pixels or Pixels())
    raise_problems(sorted([*unread, *unfit], key=attrgetter("index")))
    return facts


def raise_problems(problems: Sequence[BadSample]) -> None:
    """Raise one error that lists bad samples, where there are some."""
    if not problems:
        return
    alike: dict[str, list[BadSample]] = {}
    for problem in problems:
        alike.setdefault(problem.reason.replace(problem.name, ""), []).append(problem)
    several = {1: "", 2: " (and 1 more alike)"}
    groups = [(same[0].reason, len(same)) for same in alike.values()]
    lines = [f"  {reason}{several.get(n, f' (and {n - 1} more alike)')}" for reason, n in groups[:SHOWN]]
    rest = sum(n for _, n in groups[SHOWN:])
    more = [f"  and {rest} more"] if rest else []
    title = "1 sample cannot be used:" if len(problems) == 1 else f"{len(problems)} samples cannot be used:"
    raise DataError("\n".join([title, *lines, *more]), problems[0].name)


def inspect(
    samples: Samples, mesh: Mesh | None, level: int, pixels: Pixels
) -> tuple[DatasetFacts, list[BadSample], list[BadSample]]:
    """The facts of the good samples, those that cannot be read, and those that can and do not fit. Collective.

    Every rank opens its share of the files.
    """
    count, mine = len(samples), range(*((mesh.rank, len(samples), mesh.world) if mesh else (0, len(samples), 1)))
    with ThreadPoolExecutor(THREADS, thread_name_prefix="mural-preflight") as threads:
        found = dict(zip(mine, threads.map(lambda i: header(samples, i, level, pixels), mine), strict=True))
    headers = {i: h for i, h in found.items() if isinstance(h, SampleHeader)}
    texts = {i: h for i, h in found.items() if isinstance(h, Unusable)}
    texts |= {i: Unusable(reason, unfit=True) for i, reason in unlike(headers, mesh).items()}
    flags = torch.zeros(count, dtype=torch.uint8)
    flags[list(texts)] = 1
    flags[[i for i, text in texts.items() if text.unfit]] = 2
    flags = greatest(mesh, flags, "preflight")
    bad: list[int] = flags.nonzero().flatten().tolist()
    reasons = said(mesh, [texts[i].reason if i in texts else "" for i in bad], "preflight") if bad else []
    names = [name_at(samples, i) or reason.split(":")[0] for i, reason in zip(bad, reasons, strict=True)]
    problems = [BadSample(*fields) for fields in zip(bad, names, reasons, strict=True)]
    good = [h for i, h in headers.items() if i not in texts]
    unread, unfit = ([one for one in problems if flags[one.index] == kind] for kind in (1, 2))
    return facts_of(count, good, mesh), unread, unfit


def header(samples: Samples, index: int, level: int, pixels: Pixels) -> SampleHeader | Unusable:
    """What a sample's files say, or why it cannot be used."""
    taken: list[Source] = []

    def take(path: str) -> Source:
        taken.append(open_image(path, threads=1))
        return taken[-1]

    name = f"sample {index}"
    try:
        sample = sample_at(samples, index)
        name = sample.name
        image, *_ = sources_of(sample, take, level, pixels)
        return SampleHeader(name, image.shape[0], image.dtype, level_of(image, level).shape[1:])
    except DataError as error:
        return Unusable(str(error) if name in str(error) else f"{name}: {error}", isinstance(error, UnfitData))
    except Exception as error:
        return Unusable(f"{name}: {type(error).__name__}: {error}")
    finally:
        for source in taken:
            source.close()


def unlike(headers: dict[int, SampleHeader], mesh: Mesh | None) -> dict[int, str]:
    """Of this rank's samples, those whose channels, type or dims differ from the dataset's first good one."""
    first = -int(greatest(mesh, torch.tensor([-min(headers, default=2**40)]), "preflight").item())
    code = headers[first].code if first in headers else [-1, -1, -1]
    model = greatest(mesh, torch.tensor(code), "preflight").tolist()
    (name,) = said(mesh, [headers[first].name if first in headers else ""], "preflight")
    found: dict[int, str] = {}
    for index, h in headers.items():
        if h.code != model:
            found[index] = (
                f"{h.name}: has {h.channels} channels of {str(h.dtype).removeprefix('torch.')} and {len(h.extents)} "
                f"spatial dims, but {name} has {model[0]} of {str(DTYPES[model[1]]).removeprefix('torch.')} and "
                f"{model[2]}: images of one dataset must be alike; convert one of them"
            )
    return found


def facts_of(count: int, good: Sequence[SampleHeader], mesh: Mesh | None) -> DatasetFacts:
    """What all ranks' good samples have in common."""
    codes = torch.full((9,), -(2**40))
    for h in good:
        extents = torch.tensor((*h.extents, 0, 0)[:3])
        codes = torch.maximum(codes, torch.cat([torch.tensor(h.code), extents, -extents]))
    channels, dtype, ndim, *extents = greatest(mesh, codes, "preflight").tolist()
    if channels < 0:
        return DatasetFacts(count, 0, torch.uint8, (), ())
    return DatasetFacts(count, channels, DTYPES[dtype], tuple(-n for n in extents[3 : 3 + ndim]), tuple(extents[:ndim]))
