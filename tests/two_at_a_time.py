"""The tests in two processes at the same time, as `make test` and `make test-all` run them.

python tests/two_at_a_time.py PYTEST-ARGUMENTS. Ranks of one half compute while those of the other wait. What the second
half prints comes when the first is done; the exit code is 0 where both passed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FIRST = ("shard", "pipeline", "graph", "geometry", "models", "cost", "check", "checkpoint", "replicate", "federated")
"""The folders of the first half; the second has all others, and what lies in no folder."""


def halves() -> tuple[list[str], list[str]]:
    """The paths of both."""
    found = sorted(p for p in (ROOT / "tests").iterdir() if p.name.startswith("test_") or any(p.glob("test_*.py")))
    first = [ROOT / "tests" / name for name in FIRST]
    return ["src", *(str(p.relative_to(ROOT)) for p in first)], [
        str(p.relative_to(ROOT)) for p in found if p not in first and not p.name.startswith("__")
    ]


def main() -> int:
    """The exit code."""
    command = [sys.executable, "-m", "pytest", "--doctest-modules", "-p", "no:cacheprovider", *sys.argv[1:]]
    first, second = halves()
    with tempfile.TemporaryFile() as said:
        other = subprocess.Popen([*command, *second], cwd=ROOT, stdout=said, stderr=subprocess.STDOUT)
        try:
            code = subprocess.run([*command, *first], cwd=ROOT, check=False).returncode
        finally:
            other.wait()
            said.seek(0)
            sys.stdout.write(said.read().decode(errors="replace"))
    return code or other.returncode


if __name__ == "__main__":
    sys.exit(main())
