"""A new user's first hour works as its page has it: the model learns, and its label maps open elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import tifffile

import first_hour


def test_the_page_has_all_steps() -> None:
    typed = first_hour.commands(first_hour.PAGE.read_text(encoding="utf-8"))
    assert [line.split()[:2] for line in typed if line.startswith("mural")] == [
        ["mural", "init"], ["mural", "train"], ["mural", "predict"], ["mural", "report"]
    ]  # fmt: skip
    assert "monai" in " ".join(typed)


@pytest.mark.slow
def test_the_first_hour(tmp_path: Path) -> None:
    done = first_hour.hour(tmp_path, Path(sys.executable).parent)
    assert sum(one.seconds for one in done) < 3600
    assert "run.toml" in done[1].printed
    assert "(1500, 1200) uint8" in done[-2].printed
    assert (tmp_path / "runs" / "tissue" / "report.html").is_file()
    for image in sorted((tmp_path / "tissue" / "masks").iterdir()):
        right = tifffile.imread(image) == tifffile.imread(tmp_path / "predictions" / image.name)
        assert right.mean() > 0.85, "most pixels; background alone is 80%"
