"""The search for models: random ones under random plans, next to plain autograd in float64."""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import mural
from hunt.drawn_cases import recipe_of
from hunt.findings import Finding, Tally
from hunt.recipe import Recipe, script
from hunt.shrunk import shrunk
from hunt.trials import Trial, tried

NAME = "models"
SHRINKING = float(os.environ.get("MURAL_HUNT_SHRINKING", "90"))
"""Seconds in which a case is made smaller, at most."""


@dataclass
class Hunt:
    """Cases that are tried, and those that failed: each class is shrunk once."""

    folder: Path
    report: Callable[[str], None]
    counts: Counter[str] = field(default_factory=Counter[str])
    refusals: Counter[str] = field(default_factory=Counter[str])
    findings: list[Finding] = field(default_factory=list[Finding])
    known: list[tuple[str, frozenset[str], str]] = field(default_factory=list[tuple[str, frozenset[str], str]])

    def case(self, seed: str) -> None:
        """Draw and try a case."""
        recipe = recipe_of(Random(seed))
        if not runnable(recipe):
            self.counts["skipped"] += 1
            return
        trial = self.run(recipe)
        self.counts[trial.word] += 1
        if trial.word == "refused":
            self.refusals[trial.detail[:60]] += 1
        if trial.failed:
            self.found(seed, recipe, trial)

    def run(self, recipe: Recipe) -> Trial:
        """Try a case."""
        path = self.folder / "case.py"
        path.write_text(script(recipe))
        return tried(path, mural.Plan(**recipe.plan).devices)

    def found(self, seed: str, recipe: Recipe, trial: Trial) -> None:
        """Keep a case that failed, as small as it gets, unless it is made of what another one failed for."""
        again = self.run(recipe)
        if not again.failed and trial.word == "hung":
            self.report(f"{seed}: took longer than it may, and was {again.word} when it ran again")
            self.counts["hung"] -= 1
            self.counts[again.word] += 1
            return
        parts = recipe.ingredients()
        like = next((name for cause, some, name in self.known if cause == trial.cause and some <= parts), "")
        small = recipe
        if again.word == trial.word and not like and trial.word != "hung":
            small = shrunk(recipe, lambda other: runnable(other) and self.same(other, trial), SHRINKING)
        detail = (trial if small is recipe else self.run(small)).detail
        about = f"Found by the hunt, case {seed}: {trial.word}.\n\n{detail[-1500:]}\n"
        path = self.folder / f"{trial.word}_{len(self.findings)}.py"
        path.write_text(script(small, about))
        if not like:
            self.known.append((trial.cause, small.ingredients(), path.name))
        alone = "" if again.failed else "only after other cases: "
        note = f"as {like}: " if like else ""
        case = f"{seed}: {small.title()}"
        self.findings.append(Finding(NAME, trial.kind, case, alone + note + detail, str(path)))
        self.report(f"{trial.word}: {alone}{note}{case}\n    {detail.strip().splitlines()[-1][:200]}\n    {path}")

    def same(self, recipe: Recipe, trial: Trial) -> bool:
        """Whether a case fails in the same way."""
        found = self.run(recipe)
        return found.word == trial.word and found.cause == trial.cause


def runnable(recipe: Recipe) -> bool:
    """Whether the plan is one that `Plan` accepts: what it refuses needs no ranks."""
    try:
        mural.Plan(**recipe.plan).check_runnable()
    except mural.PlanError:
        return False
    return True


def search(seed: int, seconds: float, report: Callable[[str], None], folder: Path | None = None) -> Tally:
    """Try random cases until the time is over."""
    hunt = Hunt(folder or Path(tempfile.mkdtemp(prefix="mural-hunt-")), report)
    until, number = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        hunt.case(f"{seed}.{number}")
        number += 1
        if number % 100 == 0:
            report(f"{number} models: {dict(hunt.counts)}")
    report(f"{number} models: {dict(hunt.counts)}; refused most often: {hunt.refusals.most_common(8)}")
    return Tally(NAME, hunt.counts["exact"], hunt.counts["refused"], tuple(hunt.findings))
