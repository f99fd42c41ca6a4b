"""The examples run as their first lines say, and agree with each other."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples"


def losses(script: Path) -> list[str]:
    """The losses that a script prints under torchrun on four ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return re.findall(r"loss ([0-9.]+)", done.stdout)


@pytest.mark.slow
def test_examples_agree() -> None:
    found = [losses(script) for script in sorted(FOLDER.glob("*.py"))]
    assert len(found) >= 2
    assert all(len(each) > 1 and each == found[0] for each in found)
