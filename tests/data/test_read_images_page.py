"""The page on reading images: its Python prints what it says, and its table names every format."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import numpy as np
import pytest
import tifffile

from mural.data.open import FORMATS

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "read-images.md"
TEXT = PAGE.read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def test_examples_print_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = np.zeros((600, 800, 3), np.uint8)
    with tifffile.TiffWriter("slide.tif") as file:
        for level in range(4):
            part = data[:: 2**level, :: 2**level]
            file.write(
                part, tile=(128, 128), photometric="rgb", subfiletype=int(level > 0), compression="zlib", metadata=None
            )
    assert len(EXAMPLES) == TEXT.count("```python")
    for code, printed in EXAMPLES:
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(code, PAGE.name, "exec"), {})
        assert output.getvalue() == printed


def test_the_table_names_every_format() -> None:
    table = TEXT[TEXT.index("| format |") : TEXT.index("A file's name and its first bytes")]
    for form in FORMATS:
        assert form.suffixes[0] in table
        assert form.needs is None or f"mural-train[{form.needs[1]}]" in table
