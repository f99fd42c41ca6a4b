"""The hunt's command: time is divided, findings are printed and written, the exit code says whether there were any."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hunt import run
from hunt.findings import Finding, Tally

Report = Callable[[str], None]


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, float]]:
    """Searches that note how they were called; one finds something, one raises."""
    called: list[tuple[str, int, float]] = []

    def quiet(seed: int, seconds: float, report: Report) -> Tally:
        called.append(("quiet", seed, seconds))
        return Tally("quiet", exact=3, refused=2, missing=("fft",))

    def lucky(seed: int, seconds: float, report: Report) -> Tally:
        called.append(("lucky", seed, seconds))
        report("found")
        return Tally("lucky", 1, 0, (Finding("lucky", "incorrect", "case 5", "loss: 1", "print('the case')\n"),))

    def broken(seed: int, seconds: float, report: Report) -> Tally:
        raise RuntimeError("no ranks")

    monkeypatch.setattr(run, "SEARCHES", {"quiet": ("", 0), "lucky": ("", 0), "broken": ("", 0)})
    monkeypatch.setattr(
        run, "found_searches", lambda: {"quiet": (quiet, 0.75), "lucky": (lucky, 0.25), "broken": (broken, 0.0)}
    )
    return called


def test_time_is_divided_and_findings_are_told(
    searched: list[tuple[str, int, float]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.json"
    given = ["--minutes", "2", "--seed", "7", "--output", str(out), "--folder", str(tmp_path / "scripts")]
    assert run.main(given) == 1
    assert searched == [("quiet", 7, 90.0), ("lucky", 8, 30.0)]
    printed = capsys.readouterr().out
    assert "seed 7" in printed
    assert "[lucky] found" in printed
    assert "the search itself crashed: RuntimeError('no ranks')" in printed
    told = json.loads(out.read_text())
    assert told["seed"] == 7
    assert told["missing"] == ["quiet: fft"]
    assert [(row["search"], row["cases"], row["incorrect"], row["crashed"]) for row in told["searches"]] == [
        ("quiet", 5, 0, 0), ("lucky", 2, 1, 0), ("broken", 1, 0, 1),
    ]  # fmt: skip
    script = Path(told["findings"][0]["script"])
    assert script.read_text() == "print('the case')\n"


def test_a_quiet_hunt_ends_with_0(searched: list[tuple[str, int, float]], capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--minutes", "1", "--only", "quiet"]) == 0
    assert searched[0][2] == 60.0
    assert "hunting for 1 minutes, seed " in capsys.readouterr().out


def test_the_page_holds_what_hunts_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    docs = Path(__file__).parents[2] / "docs"
    monkeypatch.syspath_prepend(str(docs))
    import generate_hunt

    kept = generate_hunt.PAGE.read_text(encoding="utf-8")
    assert kept == generate_hunt.page(), "run python docs/generate_hunt.py"
