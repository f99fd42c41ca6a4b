"""The layout of a folder: which files are images, which are their masks or classes, by the names of files and folders.

images/a.tif   masks/a.tif            folders with a word for images, and one for masks
imagesTr/a_0000.nii   labelsTr/a.nii  nnU-Net
a.tif   a_mask.tif                    names with a word for masks, next to their images
p1/image.nii   p1/label.nii           a folder for each case
train/…   val/…   test/…              any of these, in folders that say what is held out
cat/1.png   dog/1.png                 no masks, and a folder for each class
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mural.data.open import FORMATS
from mural.data.sets.pairing import DOUBLE_ENDINGS, IMAGE_FOLDERS, Matched, listed, matched, stem
from mural.errors import DataError

MASK_WORDS = frozenset((
    "mask", "masks", "label", "labels", "seg", "segs", "segmentation", "segmentations", "annotation", "annotations",
    "gt", "truth", "groundtruth", "target", "targets",
))  # fmt: skip
IMAGE_WORDS = frozenset((
    "image", "images", "img", "imgs", "scan", "scans", "slide", "slides", "raw", "input", "inputs", "photo", "photos",
))  # fmt: skip
SPLIT_WORDS = {
    "validation": frozenset(("val", "valid", "validation")),
    "test": frozenset(("test", "tests", "testing", "ts")),
}
WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+|[^\W\d_a-zA-Z]+")
FIRST_CHANNEL = "0000"
"""How nnU-Net ends the name of a case's first channel; each channel has a file of its own."""
WRITTEN = ("status.json", "predictions.json")
"""A folder with one of these was written by mural: a run, or predictions."""
SUFFIXES = tuple(suffix for form in FORMATS for suffix in form.suffixes)
Pair = tuple[Path, Path | int]
"""An image with its mask, or with the number of its class."""


@dataclass(frozen=True)
class FolderLayout:
    """Images with masks or classes, and files that have no place among them."""

    training: tuple[Pair, ...]
    validation: tuple[Pair, ...] = ()
    classes: tuple[str, ...] = ()
    """Names of the folders that stand for classes, where there are no masks."""
    images_alone: tuple[Path, ...] = ()
    masks_alone: tuple[Path, ...] = ()
    channels_alone: tuple[Path, ...] = ()
    """Further channels of paired images, in files of their own."""
    test: tuple[Path, ...] = ()
    """Files in folders that are called test."""
    others: Counter[str] = field(default_factory=Counter[str])
    """Endings of files that are no images, and how many there are of each."""


def layout_of(folder: Path) -> FolderLayout:
    """What the files in a folder, and in all folders in it, are by their names; no file is opened."""
    files, others = files_in(folder)
    if not files:
        there = f"no image among {others.total()} files ({in_words(others)})" if others else "nothing in it"
        raise DataError(f"{folder}: there is {there}. Images are {', '.join(SUFFIXES[:14])}, …")
    test = tuple(path for path in files if split_of(folder, path) == "test")
    rest = tuple(path for path in files if path not in set(test)) or files
    found, masks = paired(folder, rest)
    if not found.pairs and masks:
        raise DataError(
            f"{folder}: {len(rest) - len(masks)} images and {len(masks)} masks, but no two have names that belong "
            f"together, as {listed([str(p) for p in (*found.images_alone[:1], *masks[:1])])}. {by_hand(folder)}"
        )
    if not found.pairs:
        return class_folders(folder, rest, test if rest is not files else (), others)
    training = tuple(pair for pair in found.pairs if split_of(folder, pair[0]) != "validation")
    validation = tuple(pair for pair in found.pairs if split_of(folder, pair[0]) == "validation")
    channels = tuple(further_channels(found))
    return FolderLayout(
        training or validation,
        validation if training else (),
        images_alone=tuple(path for path in found.images_alone if path not in set(channels)),
        masks_alone=found.masks_alone,
        channels_alone=channels,
        test=test if rest is not files else (),
        others=others,
    )


def by_hand(folder: Path) -> str:
    """What was looked for, and how to name files whose names do not say what they are."""
    return (
        f"Masks are known by a word in the name of their folder or file: {', '.join(sorted(MASK_WORDS)[:6])}, …; "
        f"or there is a folder of images for each class. To name images and masks yourself: mural init {folder} "
        f"--images '{folder}/a/*.tif' --masks '{folder}/b/*.png'"
    )


# -- files -------------------------------------------------------------------------------------------------------------


def files_in(folder: Path) -> tuple[tuple[Path, ...], Counter[str]]:
    """The files in a folder that may be images, sorted, and the endings of all others."""
    if not folder.is_dir():
        raise DataError(f"{folder}: there is no such folder")
    found: list[Path] = []
    others: Counter[str] = Counter()
    for path in walked(folder):
        if path.name.lower().endswith(SUFFIXES):
            found.append(path)
        else:
            others[path.suffix or path.name] += 1
    # A compressed volume that was unpacked next to itself is there twice.
    unpacked = set(found)
    plain = [p for p in found if not (p.suffix.lower() == ".gz" and p.with_suffix("") in unpacked)]
    return tuple(sorted(plain)), others


def walked(folder: Path) -> Iterator[Path]:
    """All files below a folder, and Zarr folders, which are one image each; nothing hidden or written by mural."""
    seen: set[str] = set()
    for place, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        if real in seen or any(name in files for name in WRITTEN):
            folders.clear()
            continue
        seen.add(real)
        images = [name for name in folders if Path(name).suffix.lower() in IMAGE_FOLDERS]
        folders[:] = [n for n in folders if n not in images and not n.startswith((".", "__"))]
        yield from (Path(place) / name for name in (*images, *files) if not name.startswith("."))


def ending(path: Path) -> str:
    """What a file's name ends with, as its format has it.

    >>> ending(Path("a/one.ome.tif")), ending(Path("one.PNG"))
    ('.ome.tif', '.PNG')
    """
    double = DOUBLE_ENDINGS.search(path.name)
    return double.group() if double else path.suffix


def in_words(endings: Counter[str]) -> str:
    """How many files there are of each ending, the most frequent first.

    >>> in_words(Counter({".txt": 2, ".xml": 9})), in_words(Counter({".tif": 8}))
    ('.xml 9, .txt 2', '.tif')
    """
    if len(endings) == 1:
        return next(iter(endings))
    return ", ".join(f"{name} {count}" for name, count in endings.most_common(4))


# -- what names say ----------------------------------------------------------------------------------------------------


def words_of(name: str) -> list[str]:
    """The words and numbers of a name.

    >>> words_of("labelsTr"), words_of("JPEGImages"), words_of("case-07_mask2")
    (['labels', 'Tr'], ['JPEG', 'Images'], ['case', '07', 'mask', '2'])
    """
    return WORD.findall(name)


def has_word(name: str, words: frozenset[str]) -> bool:
    """Whether one of the words is in a name."""
    return any(word.lower() in words for word in words_of(name))


def in_mask_folder(folder: Path, path: Path) -> bool:
    """Whether a file is in a folder for masks: the innermost folder with a word for masks or images decides."""
    for name in reversed(path.relative_to(folder).parts[:-1]):
        if has_word(name, MASK_WORDS):
            return True
        if has_word(name, IMAGE_WORDS):
            return False
    return False


def named_mask(folder: Path, path: Path) -> bool:
    """Whether a file's own name, or its folder, says that it is a mask."""
    return has_word(stem(path), MASK_WORDS) or in_mask_folder(folder, path)


def split_of(folder: Path, path: Path) -> str:
    """What the folders of a file say that it is for: "validation", "test", or nothing."""
    names = path.relative_to(folder).parts[:-1]
    return next((split for split, words in SPLIT_WORDS.items() if any(has_word(n, words) for n in names)), "")


def plain_text(name: str) -> str:
    """A name without words for images and masks.

    >>> plain_text("case_0000_mask")
    'case-0000'
    """
    return "-".join(word for word in words_of(name) if word.lower() not in MASK_WORDS | IMAGE_WORDS)


def texts_of(folder: Path, path: Path, is_mask: bool) -> tuple[str, str, str, str]:
    """Texts that an image and its mask may share: the stem; path or stem without words for images and masks; a case.

    An image's case has no number of a channel; a mask has no channels, so that a number belongs to its case.
    """
    own = plain_text(stem(path))
    *folders, _ = path.relative_to(folder).parts
    place = "/".join(filter(None, (*map(plain_text, folders), own)))
    # A file that has nothing but such words is known by its folder alone.
    return stem(path), place, own or place, own if is_mask else own.removesuffix(f"-{FIRST_CHANNEL}")


# -- pairs -------------------------------------------------------------------------------------------------------------


def paired(folder: Path, files: Sequence[Path]) -> tuple[Matched, tuple[Path, ...]]:
    """The pairs of files, and all masks: known by their folders or by their own names, whichever pairs more."""
    roles: tuple[Callable[[Path, Path], bool], ...] = (in_mask_folder, named_mask)
    found: list[tuple[Matched, tuple[Path, ...]]] = []
    for is_mask in roles:
        masks = tuple(path for path in files if is_mask(folder, path))
        images = [path for path in files if path not in set(masks)]
        texts = [{p: texts_of(folder, p, some is masks) for p in some} for some in (images, masks)]
        found.append((matched(*texts), masks))
    return max(found, key=lambda each: (len(each[0].pairs), len(each[1])))


def further_channels(found: Matched) -> Iterator[Path]:
    """Images without a mask that are named like one with a mask, but for the number of its channel."""
    by_case = [i for i, mask in found.pairs if plain_text(stem(i)) == f"{plain_text(stem(mask))}-{FIRST_CHANNEL}"]
    first = {stem(image).removesuffix(FIRST_CHANNEL) for image in by_case}
    yield from (path for path in found.images_alone if re.sub(r"\d{4}$", "", stem(path)) in first)


def class_folders(folder: Path, files: Sequence[Path], test: tuple[Path, ...], others: Counter[str]) -> FolderLayout:
    """The layout of images that are in one folder for each class."""
    names = sorted({path.parent.name for path in files})
    no_class = IMAGE_WORDS.union(*SPLIT_WORDS.values(), ("train", "training"))
    if len(names) < 2 or any(path.parent == folder for path in files) or any(has_word(n, no_class) for n in names):
        raise DataError(f"{folder}: {len(files)} images, but no masks (first: {files[0]}). {by_hand(folder)}")
    pairs = [(path, names.index(path.parent.name)) for path in files]
    validation = tuple(pair for pair in pairs if split_of(folder, pair[0]) == "validation")
    training = tuple(pair for pair in pairs if pair not in set(validation))
    kept = (training, validation) if training else (validation, ())
    return FolderLayout(*kept, classes=tuple(names), test=test, others=others)
