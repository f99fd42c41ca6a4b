"""A case is tried on the ranks of its plan: each imports its script and compares."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path

import ranks
from hunt.findings import Kind

NUMBERS = itertools.count()


@dataclass(frozen=True)
class Trial:
    """What became of a case: exact, refused, incorrect, crashed, hung, or skipped for what is no case."""

    word: str
    detail: str = ""

    @property
    def failed(self) -> bool:
        """Whether it broke the promise."""
        return self.word in ("incorrect", "crashed", "hung")

    @property
    def kind(self) -> Kind:
        """The kind of a finding that it is."""
        return "hung" if self.word == "hung" else "crashed" if self.word == "crashed" else "incorrect"

    @property
    def cause(self) -> str:
        """Of a crash the last line of the error without its numbers, else the word."""
        if self.word != "crashed":
            return self.word
        last = self.detail.strip().splitlines()[-1] if self.detail.strip() else ""
        return "".join(c for c in last if not c.isdigit())[:60]


def on_rank(path: str, number: int) -> tuple[str, str]:
    """What a case's script finds on this rank."""
    name = f"hunted_case_{number}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        return module.outcome(module.CASE)
    finally:
        del sys.modules[name]


def tried(path: Path, world: int) -> Trial:
    """Try a case on ranks that earlier ones left; they end after a failure."""
    try:
        found = ranks.run_on(world, on_rank, str(path), next(NUMBERS))
    except ranks.RankError as error:
        text = str(error)
        return Trial("hung" if "no answer in" in text else "crashed", text[-3000:])
    trial = joint(found)
    if trial.failed:
        ranks.restart(world)
    return trial


def joint(found: list[tuple[str, str]]) -> Trial:
    """The outcome of a case from those of all ranks."""
    by_word = dict(reversed(found))
    for word in ("crashed", "incorrect", "skipped"):
        if word in by_word:
            return Trial(word, by_word[word])
    if "peer" in by_word and "refused" not in by_word:
        return Trial("crashed", "a rank failed because of another one, and none says why\n" + by_word["peer"])
    if "refused" in by_word:
        alone = "" if "exact" not in by_word else "refused on some ranks alone: "
        return Trial("crashed" if alone else "refused", alone + by_word["refused"])
    return Trial("exact")
