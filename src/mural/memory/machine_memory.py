"""The memory of this machine: what it has, what is free, what a container allows, and what this process took."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from pathlib import Path

UNKNOWN = 2**32
"""What is taken to be free where the system does not say."""
GROUPS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
"""Where a container's limit and use are, in both versions of control groups."""
NO_LIMIT = 2**60


@dataclass(frozen=True)
class MachineMemory:
    """Bytes of memory; `allowed` is what a container may use of them, None without a limit."""

    total: int
    free: int
    allowed: int | None = None


def machine_memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> MachineMemory:
    """The memory of this machine, or of the container that this process is in."""
    try:
        lines = (line.split() for line in (proc / "meminfo").read_text(encoding="ascii").splitlines())
        facts = {name.rstrip(":"): int(kib) * 1024 for name, kib, *_ in lines}
        total, free = facts["MemTotal"], facts["MemAvailable"]
    except (OSError, KeyError, ValueError):
        total = free = UNKNOWN
    for limit, use in GROUPS:
        allowed, used = number_in(groups / limit), number_in(groups / use)
        if allowed is not None and used is not None and allowed < NO_LIMIT:
            return MachineMemory(total, max(0, min(free, allowed - used + cached(groups / use))), allowed)
    return MachineMemory(total, free)


def peak_resident(status: Path = Path("/proc/self/status")) -> int:
    """The largest resident size of this process so far, in bytes.

    >>> peak_resident() > 2**20
    True
    """
    # Not getrusage first: on Linux, a process that another one started begins there with the size of that other.
    lines = status.read_text(encoding="utf-8").splitlines() if status.is_file() else []
    if found := [line.split()[1] for line in lines if line.startswith("VmHWM:")]:
        return int(found[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def number_in(path: Path) -> int | None:
    """The number that a file holds; None if there is none."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def cached(use: Path) -> int:
    """Bytes of a container's use that the system gives back when it needs them: files that were not read lately."""
    try:
        lines = (line.split() for line in (use.parent / "memory.stat").read_text(encoding="ascii").splitlines())
        facts = {name: int(number) for name, number in lines}
    except (OSError, ValueError):
        return 0
    return facts.get("total_inactive_file", facts.get("inactive_file", 0))
