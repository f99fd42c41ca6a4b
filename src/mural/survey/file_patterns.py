"""Patterns that name the files of a run as a person would: by globs, where training pairs them as they are meant."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from itertools import chain, product
from pathlib import Path

from mural.data.sets.pairing import pair, stem
from mural.errors import DataError
from mural.survey.folder_layout import Pair, ending

LAST_PART = re.compile(r"[_\-. ]+([a-zA-Z]+|\d{4})$")
FIRST_PART = re.compile(r"[a-zA-Z]+[_\-. ]*(?=.)")
Patterns = tuple[str, ...]


def patterns_of(
    pairs: Sequence[Pair], given: Patterns = (), masks_given: Patterns = ()
) -> tuple[Patterns, Patterns] | None:
    """Globs of images and masks of which training makes these very pairs, the given ones first; None if none do."""
    images, masks = [image for image, _ in pairs], [mask for _, mask in pairs if isinstance(mask, Path)]
    if len(images) != len(masks):
        return None
    ways = product(globs_of(images), globs_of(masks))
    for some, others in chain([(given, masks_given)] if given else [], ways):
        try:
            found = pair(some, others)
        except DataError:
            continue
        if set(found) == set(pairs):
            return some, others
    return None


def globs_of(files: Sequence[Path]) -> Iterator[Patterns]:
    """Ways to name some files, one glob for each of their endings, the simplest first."""
    parents = {str(file.parent) for file in files}
    base, deep = Path(os.path.commonpath(parents)), len(parents) > 1
    stems, endings = [stem(file) for file in files], sorted({ending(file) for file in files})
    where = f"{glob.escape(base.as_posix())}/" if base != Path() else ""
    for before, after in (("", ""), ("", shared(stems, LAST_PART)), (shared(stems, FIRST_PART), "")):
        name = f"{glob.escape(before)}*{glob.escape(after)}"
        yield tuple(f"{where}{'**/' * deep}{name}{glob.escape(each)}" for each in endings)


def shared(stems: Sequence[str], part: re.Pattern[str]) -> str:
    """What all stems have where a pattern finds it, or nothing.

    >>> (
    ...     shared(["a_mask", "b_mask"], LAST_PART),
    ...     shared(["scan7", "scan8"], FIRST_PART),
    ...     shared(["a_x", "a_y"], LAST_PART),
    ... )
    ('_mask', 'scan', '')
    """
    found = {match.group() if (match := part.search(text)) and match.group() != text else "" for text in stems}
    return found.pop() if len(found) == 1 else ""
