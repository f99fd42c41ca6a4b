"""The peak memory of a process: its own, not that of the process that started it."""

from __future__ import annotations

import subprocess
import sys

import numpy as np

from mural.memory.machine_memory import peak_resident

CHILD = """
import resource
from mural.memory.machine_memory import peak_resident
print(peak_resident(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def test_a_process_does_not_inherit_the_peak_of_its_parent() -> None:
    """`ru_maxrss` did: a run that a large process started reported that one's size as its own."""
    held = np.ones(2**30 // 8)
    assert peak_resident() > held.nbytes
    found = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
    mine, inherited = map(int, found.stdout.split())
    assert mine < held.nbytes <= max(inherited, held.nbytes)
