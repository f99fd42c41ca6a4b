"""Bad inputs, as data, and the law for all of them: a short message that names the value and the fix, and nothing left.

A case is a good folder in which one thing was made bad, a command line, and words that the message has to have.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import numpy as np
import tifffile

from mural import cli

SECONDS = 60
"""After which a case counts as hung."""
LONGEST = 420
"""Characters of a message: some four lines of a terminal."""
RUN = """
folder = "run"
[model]
factory = "mural.models:UNet"
arguments = { classes = 2, width = 4, depth = 2 }
[data]
images = "images/*.tif"
masks = "masks/*.tif"
batch = 2
[optimizer]
name = "SGD"
lr = 0.1
[train]
steps = 2
[log]
tensorboard = "off"
[launch]
device = "cpu"
hang = 60.0
"""
BEGUN = {"run/config.toml", "run/status.json", "run/metrics.jsonl", "run/starts.jsonl"}
"""What a run that has begun leaves in its folder."""

Made = Callable[[Path], object]


def as_it_is(_: Path) -> None:
    """Nothing is made bad: the command line is."""


@dataclass(frozen=True)
class Bad:
    """One bad input: what it is, the command line, words of the message, and how the folder is made bad.

    A command line of flags alone is that of `mural train run.toml`.
    """

    name: str
    command: str
    words: str | tuple[str, ...]
    made: Made = as_it_is
    code: int = 1
    begun: bool = False
    """Whether the run was under way, so that its folder has files."""
    environ: Mapping[str, str] = field(default_factory=dict[str, str])

    def __str__(self) -> str:
        return self.name


def write_good(folder: Path, side: int = 32) -> None:
    """A run that works: two images with masks, and its file."""
    draw = np.random.default_rng(0)
    for kind in ("images", "masks"):
        (folder / kind).mkdir()
    for name in "01":
        image = draw.integers(0, 255, (side, side, 3)).astype(np.uint8)
        tifffile.imwrite(folder / f"images/{name}.tif", image, photometric="rgb")
        tifffile.imwrite(folder / f"masks/{name}.tif", (image[..., 0] > 127).astype(np.uint8))
    (folder / "run.toml").write_text(RUN)


# -- the law -----------------------------------------------------------------------------------------------------------


def refused(bad: Bad, folder: Path) -> None:
    """Raise unless the command ends as it should, in the folder that it is given."""
    with contextlib.chdir(folder):
        write_good(folder)
        bad.made(folder)
        before = files_in(folder)
        with patch.dict(os.environ, bad.environ):
            said = called(f"train run.toml {bad.command}" if bad.command[:1] in ("", "-") else bad.command)
        check(bad, said)
        left = {name for name in files_in(folder) - before if not name.endswith("/.lock") and "/proofs/" not in name}
        assert left <= (BEGUN if bad.begun else set()), f"files are left: {left}"


def check(bad: Bad, said: Said) -> None:
    """Raise unless what was said obeys the law."""
    message = folded(said.err)
    assert said.code == bad.code, (said.code, message, said.out[-500:])
    assert "Traceback" not in said.out + said.err, said.err[-2000:]
    assert message.startswith(("Usage: mural", "Error") if bad.code == 2 else "mural: "), message
    assert len(message) <= LONGEST, f"{len(message)} characters: {message}"
    words = [bad.words] if isinstance(bad.words, str) else bad.words
    assert [word for word in words if word not in message] == [], message


def folded(text: str) -> str:
    """A message on one line, without the frame that the command line's own errors have."""
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", text).split())


def files_in(folder: Path) -> set[str]:
    """The files below a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@dataclass(frozen=True)
class Said:
    """What a command ended with."""

    code: object
    out: str
    err: str


def called(command: str) -> Said:
    """What the console script does with a command line, in this process."""
    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    with patch.object(sys, "argv", ["mural", *shlex.split(command)]), patch.dict(os.environ, COLUMNS="200"), in_time():
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                cli.main()
        except SystemExit as end:
            code = end.code
    return Said(code, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def in_time() -> Generator[None]:
    """A block that fails where it hangs."""

    def late(*_: object) -> None:
        raise TimeoutError(f"no answer in {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# -- what is made bad --------------------------------------------------------------------------------------------------


def content(name: str, data: bytes | str) -> Made:
    """A file with other content."""
    return lambda folder: (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)


def edited(old: str, new: str) -> Made:
    """The run's file with other words."""
    if RUN.count(old) != 1:
        raise ValueError(f"{old!r} is not once in the run's file")
    return content("run.toml", RUN.replace(old, new))


def cut_off(name: str) -> Made:
    """The first half of a file."""
    return lambda folder: (folder / name).write_bytes((data := (folder / name).read_bytes())[: len(data) // 2])


def several(*made: Made) -> Made:
    """One after the other."""
    return lambda folder: [each(folder) for each in made]
