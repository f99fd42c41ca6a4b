"""The page on datasets of one's own: its Python runs, from top to bottom, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import mural.data

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "own-dataset.md"
TEXT = PAGE.read_text(encoding="utf-8")


@pytest.mark.skipif(not hasattr(mural.data, "Loader"), reason="mural.data does not name the loader yet")
def test_every_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert len(examples) == TEXT.count("```python") == 6
    for number, code in enumerate(examples):
        exec(compile(code, f"{PAGE.name}, example {number}", "exec"), {"__name__": "page"})
    printed = capsys.readouterr().out
    assert "Facts(samples=6, channels=3, dtype=torch.uint8, smallest=(256, 320), largest=(256, 320))" in printed
    assert "torch.Size([2, 3, 256, 320]) torch.Size([2, 256, 320])" in printed
    assert "5 samples\n1 of 6 samples were left out:" in printed
