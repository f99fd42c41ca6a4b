"""The page on checkpoints: its Python runs, one block after the other, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
DECISIONS = ("0013-checkpoints-without-pickle.md", "0028-checkpoints-of-our-own.md")
PAGES = [DOCS / "concepts" / "checkpoints.md", *(DOCS / "decisions" / name for name in DECISIONS)]


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGES[0].read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, PAGES[0].name, "exec"), names)
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8"))
    assert targets
    assert [target for target in targets if not (page.parent / target).exists()] == []
