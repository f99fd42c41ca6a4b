"""The search for models on a fixed selection, and its parts: scripts run alone, a planted fault is found and shrunk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

import mural
from hunt.drawn_cases import recipe_of
from hunt.models import Hunt, runnable
from hunt.recipe import Extra, Layer, Recipe, script
from hunt.shrunk import shrunk
from hunt.trials import Trial, joint, on_rank

CASES = range(60)
"""Of these seeds those on one rank; `make hunt` draws others, on up to four."""
WRONG = Layer("wrong", ("self.w# = nn.Parameter(torch.ones(4, 1, 1))",), ("x = x * self.w# * (1 + TAMPERED[0])",))


def tampered(text: str, fault: bool = True) -> str:
    """The script of a case in which the plan, but not plain torch, doubles what a layer of the kind `wrong` gives."""
    text = text.replace("class Model", "TAMPERED = [False]\n\n\nclass Model", 1)
    call = "        found = values(pm, case)"
    assert call in text
    return text.replace(call, f"        TAMPERED[0] = {fault}\n{call}\n        TAMPERED[0] = False")


@pytest.mark.parametrize("chosen", range(3))
def test_a_fixed_selection_is_exact_or_refused(tmp_path: Path, chosen: int) -> None:
    """Random models on one rank, in this process."""
    words: list[str] = []
    for number in CASES[chosen::3]:
        recipe = recipe_of(Random(f"fixed.{number}"))
        if runnable(recipe) and mural.Plan(**recipe.plan).devices == 1:
            path = tmp_path / f"case_{number}.py"
            path.write_text(script(recipe))
            word, detail = on_rank(str(path), number)
            assert word in ("exact", "refused", "skipped"), f"case {number}: {word}: {detail}\n{recipe.title()}"
            words.append(word)
    assert words.count("exact") >= len(words) / 8


def test_recipes_are_the_same_for_a_seed() -> None:
    assert script(recipe_of(Random("1.2"))) == script(recipe_of(Random("1.2")))
    assert script(recipe_of(Random("1.2"))) != script(recipe_of(Random("1.3")))


@pytest.mark.parametrize("number", range(40))
def test_scripts_are_python(number: int) -> None:
    """Without running them, that every recipe prints as a module."""
    compile(script(recipe_of(Random(f"text.{number}"))), f"case {number}", "exec")


def planted() -> Recipe:
    """A case with many parts, of which one is at fault."""
    convs = tuple(Layer("conv", ("self.conv# = nn.Conv2d(4, 4, 3, padding=1)",), ("x = self.conv#(x)",)) for _ in "ab")
    inner = Layer("block", (), ("x = self.block#(x)",), (convs[0], WRONG), block=True)
    extra = Extra("gate", "x.mean((2, 3))", terms=("0.1 * e.mean()",))
    options = {"steps": 2, "clip": True}
    loss = ("F.cross_entropy(y, t)", "0.1 * y.mean()")
    return Recipe((convs[1], inner), {"recompute": "all"}, loss, extras=(extra,), options=options)


@pytest.mark.slow
def test_a_planted_fault_is_shrunk_to_its_layer(tmp_path: Path) -> None:
    """And the script of what is left shows it by its exit code; without the fault it ends with 0."""

    def fails(recipe: Recipe) -> bool:
        path = tmp_path / "case.py"
        path.write_text(tampered(script(recipe)))
        return on_rank(str(path), 0)[0] == "incorrect"

    found = planted()
    assert fails(found)
    small = shrunk(found, fails, 60.0)
    assert [layer.kind for layer in small.layers] == ["wrong"]
    assert not small.extras
    assert small.plan == {}
    assert small.images == 1
    assert small.options == {"steps": 1, "inference": False}
    path = tmp_path / "small.py"
    for text, code in ((tampered(script(small)), 1), (tampered(script(small), fault=False), 0)):
        path.write_text(text)
        run = subprocess.run([sys.executable, "-W", "ignore", str(path)], capture_output=True, text=True, timeout=120)
        assert run.returncode == code, run.stdout + run.stderr


def test_a_class_is_shrunk_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second case with the same ingredients is counted, and told to be like the first."""
    told: list[str] = []
    hunt = Hunt(tmp_path, told.append)
    monkeypatch.setattr(Hunt, "run", lambda self, recipe: Trial("incorrect", "loss 0.0: 1.0e+00"))
    monkeypatch.setattr("hunt.models.recipe_of", lambda d: Recipe((WRONG,), {}))
    hunt.case("0.0")
    hunt.case("0.1")
    assert len(hunt.findings) == 2
    assert "as incorrect_0.py" not in told[0]
    assert "as incorrect_0.py" in told[1]


@pytest.mark.parametrize(
    ("words", "joined"),
    [
        (("exact", "exact"), "exact"),
        (("refused", "peer"), "refused"),
        (("peer", "crashed"), "crashed"),
        (("peer", "peer"), "crashed"),
        (("exact", "incorrect"), "incorrect"),
        (("exact", "refused"), "crashed"),
    ],
)
def test_ranks_agree_on_an_outcome(words: tuple[str, ...], joined: str) -> None:
    assert joint([(word, "") for word in words]).word == joined
