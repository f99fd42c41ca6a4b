"""Processes: which machine a rank runs on, and whether it is still alive, as far as this machine can tell."""

from __future__ import annotations

import os
import socket
from functools import cache
from pathlib import Path

LOCAL_STORE = "MURAL_LOCAL_STORE"
"""Set in the ranks that `run_local` starts: the address of the store in which they meet."""

PROC = Path("/proc")


@cache
def host() -> str:
    """What distinguishes this machine, or its network namespace, from others."""
    boot = PROC / "sys/kernel/random/boot_id"
    parts = [socket.gethostname(), boot.read_text().strip() if boot.exists() else ""]
    return " ".join([*parts, _namespace("net")])


def identity() -> str:
    """The identity of this process: its machine and PID namespace, its PID, and when it started."""
    return "\n".join([host(), _namespace("pid"), str(os.getpid()), _begun(os.getpid())])


def has_ended(other: str) -> bool:
    """Whether the process of an identity is gone; False if it runs, or cannot be seen from here.

    >>> has_ended(identity()), has_ended("another machine\\n\\n1\\n5")
    (False, False)
    """
    place, numbers, pid, begun = other.split("\n")
    if (place, numbers) != (host(), _namespace("pid")) or not begun:
        return False
    return _begun(int(pid)) != begun


@cache
def _namespace(kind: str) -> str:
    link = PROC / "self/ns" / kind
    return os.readlink(link) if link.exists() else ""


def _begun(pid: int) -> str:
    """When a process of this machine started, in ticks since boot; empty if it is gone or waits to be reaped."""
    try:
        # The name, in parentheses, may contain anything; state and 19 more fields are between it and the time.
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
