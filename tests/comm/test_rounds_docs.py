"""The page on collectives: its Python prints what it says, its links lead somewhere."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "collectives.md"
TEXT = PAGE.read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("code", "printed"), EXAMPLES)
def test_examples_print_what_the_page_says(code: str, printed: str) -> None:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, PAGE.name, "exec"), {})
    assert output.getvalue() == printed


def test_every_example_is_run() -> None:
    assert len(EXAMPLES) == TEXT.count("```python") == 4


def test_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#]+)", TEXT)
    assert [t for t in targets if not (PAGE.parent / t).exists()] == []
