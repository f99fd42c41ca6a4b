"""Pairing: lists of files from globs, and which mask belongs to which image."""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mural.errors import DataError

IMAGE_FOLDERS = (".zarr", ".n5")
"""Folders that are one image each, not folders of images."""
DOUBLE_ENDINGS = re.compile(r"\.(ome\.(tiff?|zarr|btf|tf[28])|nii\.gz)$", re.IGNORECASE)
LISTED = 8
Patterns = str | Path | Sequence[str | Path]
"""A glob, a folder or a file; or several of these."""


def stem(path: Path) -> str:
    """The name without its format's ending, of which some have two parts.

    >>> stem(Path("a/one.ome.tif")), stem(Path("b/v1.2.nii.gz")), stem(Path("c/one.png"))
    ('one', 'v1.2', 'one')
    """
    name, doubled = DOUBLE_ENDINGS.subn("", path.name)
    return name if doubled else path.stem


def expand(pattern: str | Path, what: str) -> tuple[Path, ...]:
    """The files of a glob, a folder or a single path, sorted; `what` names them in the error when there are none."""
    path = Path(pattern).expanduser()
    if path.is_dir() and path.suffix.lower() not in IMAGE_FOLDERS:
        found = [p for p in path.iterdir() if not p.name.startswith(".")]
    elif glob.has_magic(str(path)):
        found = [Path(p) for p in glob.glob(str(path), recursive=True)]
        check_links(found, what)
        if any(p.is_file() or p.suffix.lower() in IMAGE_FOLDERS for p in found):
            found = [p for p in found if p.is_file() or p.suffix.lower() in IMAGE_FOLDERS]
    else:
        found = [path] if path.exists() else []
    if not found:
        raise DataError(f"{what}: nothing matches {str(pattern)!r} (in {Path.cwd()}): {nearest_hint(path)}")
    return tuple(sorted(found))


def check_links(found: Sequence[Path], what: str) -> None:
    """Raise where a link leads nowhere, or to itself: it would be left out."""
    if lost := [path for path in found if path.is_symlink() and not path.exists()]:
        raise DataError(
            f"{what}: {str(lost[0])!r} is a link to {os.readlink(lost[0])!r}, which leads nowhere: mend or remove it",
            str(lost[0]),
        )


def nearest_hint(path: Path) -> str:
    """What to look at when a path or glob leads nowhere: the first part of it that does not exist."""
    fixed = [p for p in reversed(path.parents) if not glob.has_magic(str(p))]
    missing = next((p for p in fixed if not p.exists()), None)
    if missing is not None:
        return f"the folder {str(missing)!r} does not exist"
    return f"look into {str(fixed[-1] if fixed else path.parent)!r} and correct the pattern"


def is_glob(pattern: str | Path) -> bool:
    """Whether a path is a pattern with wildcards, and not a file whose name has such characters."""
    return glob.has_magic(str(pattern)) and not Path(pattern).expanduser().exists()


def base_of(pattern: str | Path) -> Path:
    """The folder of a pattern above its first wildcard."""
    path = Path(pattern).expanduser()
    if path.is_dir() and path.suffix.lower() not in IMAGE_FOLDERS:
        return path
    return next((p for p in path.parents if not glob.has_magic(str(p))), Path())


def wildcard_text(pattern: str | Path) -> Callable[[Path], str]:
    """What the wildcards of a pattern's last part stand for in a path: `a_*_x.tif` gives 7 for `a_7_x.tif`."""
    parts = re.split(r"(\*+|\?|\[[^\]]*\])", Path(pattern).name)
    expression = re.compile("".join("(.+?)" if i % 2 else re.escape(part) for i, part in enumerate(parts)) + "$")

    def text(path: Path) -> str:
        found = expression.match(path.name)
        return "|".join(found.groups()) if found else path.name

    return text


def pair(images: Patterns, masks: Patterns) -> list[tuple[Path, Path]]:
    """The images of some patterns, each with the mask of the other patterns that has the same stem, in order.

    Where stems repeat or differ, the path below the pattern's folder decides, then what the wildcards stand for
    (`scan_*.tif` with `mask_*.tif`); the first of these that matches all files, one to one, is taken.
    """
    found, targets = keyed(images, "images"), keyed(masks, "masks")
    best = matched(found, targets)
    if best.images_alone or best.masks_alone:
        why = difference([*found], [*targets])
        raise DataError(f"images {words(images)} and masks {words(masks)} do not match: {why}")
    return list(best.pairs)


@dataclass(frozen=True)
class Matched:
    """Images, each with its mask, and those of both that have no partner, or more than one."""

    pairs: tuple[tuple[Path, Path], ...]
    images_alone: tuple[Path, ...] = ()
    masks_alone: tuple[Path, ...] = ()


def matched(images: Mapping[Path, Sequence[str]], masks: Mapping[Path, Sequence[str]]) -> Matched:
    """The pairs of files that share a text no other file has; of several texts, by the first that pairs most files.

    >>> found = matched({Path("a.tif"): ["a"], Path("b.tif"): ["b"]}, {Path("a.png"): ["a"]})
    >>> len(found.pairs), str(*found.images_alone)
    (1, 'b.tif')
    """
    found: list[tuple[tuple[Path, Path], ...]] = [()]
    for texts, targets in zip(zip(*images.values(), strict=True), zip(*masks.values(), strict=True), strict=False):
        once, by_text = Counter(texts), Counter(targets)
        masks_of = dict(zip(targets, masks, strict=True))
        both = (text for text in texts if once[text] == by_text[text] == 1)
        images_of = dict(zip(texts, images, strict=True))
        found.append(tuple((images_of[text], masks_of[text]) for text in both))
    pairs = max(found, key=len)
    paired = {path for each in pairs for path in each}
    return Matched(pairs, tuple(p for p in images if p not in paired), tuple(p for p in masks if p not in paired))


def keyed(patterns: Patterns, what: str) -> dict[Path, tuple[str, str, str]]:
    """The files of some patterns, each with the texts that may tell which other file belongs to it."""
    several = [patterns] if isinstance(patterns, (str, Path)) else patterns
    ways = {pattern: (stem, below(base_of(pattern)), wildcard_text(pattern)) for pattern in several}
    return {
        path: (by_stem(path), by_place(path), by_wildcards(path))
        for pattern, (by_stem, by_place, by_wildcards) in ways.items()
        for path in expand(pattern, what)
    }


def words(patterns: Patterns) -> str:
    """Patterns as a message names them."""
    return repr(str(patterns)) if isinstance(patterns, (str, Path)) else listed([str(p) for p in patterns])


def below(base: Path) -> Callable[[Path], str]:
    """The path of a file below a folder, without its ending."""
    return lambda path: str(path.relative_to(base).with_name(stem(path)))


def difference(images: Sequence[Path], masks: Sequence[Path]) -> str:
    """Why two lists of files do not match one to one, by their stems."""
    sides = {"image": [stem(p) for p in images], "mask": [stem(p) for p in masks]}
    complaints: list[str] = []
    for side, stems in sides.items():
        if repeated := sorted(s for s, n in Counter(stems).items() if n > 1):
            files = [str(p) for p in (images if side == "image" else masks) if stem(p) == repeated[0]]
            complaints.append(f"several {side}s are called {listed(repeated)} (as {listed(files)})")
    for side, other in (("image", "mask"), ("mask", "image")):
        if alone := sorted(set(sides[side]) - set(sides[other])):
            complaints.append(f"no {other} for the {side}s {listed(alone)}")
    return "; ".join(complaints) + ". Give each image one mask of the same name, or pass two lists in one order"


def listed(names: Sequence[str]) -> str:
    """The first few names, and how many more there are.

    >>> listed(["a", "b"])
    "'a', 'b'"
    """
    shown = ", ".join(repr(name) for name in names[:LISTED])
    return shown if len(names) <= LISTED else f"{shown} and {len(names) - LISTED} more"
