"""Ranks that end between the start of the process group and their first call, between two calls, or in one.

All others raise in words at once, though none of them ends before all have raised: closed connections tell them.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import sys
import time
from datetime import timedelta
from typing import Any

import pytest

import mural
from mural.ranks import free_port
from ranks import FORKS

SOON, TIMEOUT = 40.0, 120.0
"""Seconds: what an error may take, and the timeout of the process group."""

PLANS: dict[str, dict[str, Any]] = {
    "data": {"data": 3},
    "spatial": {"spatial": (3, 1)},
    "channel": {"channel": 3, "channel_layers": "all"},
    "average": {"data": 3, "average": 2},
    "micro-batches": {"data": 3, "schedule": "gpipe", "microbatches": 2},
    "1f1b": {"stage": 3, "schedule": "1f1b", "microbatches": 3, "cuts": ("2", "4")},
    "gpipe": {"stage": 3, "schedule": "gpipe", "microbatches": 3, "cuts": ("2", "4")},
    "gems": {"stage": 3, "schedule": "gems", "microbatches": 4, "cuts": ("2", "4")},
}


def serve(rank: int, port: int, options: dict[str, Any], end: tuple[str, str, int], told: Any, over: Any) -> None:
    """A rank of three, one of which ends before some call; the others tell what it was that they raised, and when."""
    import torch
    import torch.distributed as dist
    from torch import nn

    torch.set_num_threads(1)
    os.environ.update(GLOO_SOCKET_IFNAME="lo", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=3, timeout=timedelta(seconds=TIMEOUT))
    plan, begun = mural.Plan(**options), 0.0

    def reach(call: str) -> float:
        when, how, who = end
        if (call, rank) == (when, who):
            if how == "raise":
                raise RuntimeError("no file descriptor is left")
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            sys.exit(0)
        time.sleep(0.3)
        return time.monotonic()

    create, number = dist.new_group, itertools.count(1)

    def new_group(*args: Any, **options: Any) -> Any:
        reach(f"group {next(number)}")
        return create(*args, **options)

    if end[0].startswith("group"):
        dist.new_group = new_group

    try:
        begun = reach("init")
        grid = {"spatial": plan.spatial or None, "data": plan.data, "stage": plan.stage, "channel": plan.channel}
        mesh = mural.init(**grid, timeout=TIMEOUT)  # type: ignore[arg-type]
        begun = reach("parallelize")
        layers = nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1)
        pm = mural.parallelize(nn.Sequential(*layers), plan, mesh=mesh, image=(3, 16, 16))
        for call in ("step", "second step"):
            begun = reach(call)
            pm.step(torch.rand(6, 3, 16, 16, generator=torch.Generator().manual_seed(0)), torch.zeros(6, 16, 16).long())
        told.put((rank, "nothing", 0.0))
    except Exception as error:
        told.put((rank, f"{type(error).__name__}: {error}", time.monotonic() - begun))
    over.wait(TIMEOUT)
    told.close()
    told.join_thread()
    os._exit(0)


def survivors(options: dict[str, Any], when: str, how: str, who: int) -> dict[int, tuple[str, float]]:
    """What the other two raised, and after how many seconds."""
    told, over, port = FORKS.Queue(), FORKS.Event(), free_port()
    ranks = [
        FORKS.Process(target=serve, args=(r, port, options, (when, how, who), told, over), daemon=True)
        for r in range(3)
    ]
    try:
        for process in ranks:
            process.start()
        found = [told.get(timeout=TIMEOUT) for _ in range(3 if how == "raise" else 2)]
    finally:
        over.set()
        for process in ranks:
            process.join(5.0)
            process.kill()
    return {rank: (text, seconds) for rank, text, seconds in found}


CASES = [
    ("data", "init", "exit", 2),
    ("data", "init", "kill", 0),
    ("1f1b", "parallelize", "exit", 1),
    ("spatial", "parallelize", "kill", 0),
    *((name, "step", "kill" if i % 2 else "exit", i % 3) for i, name in enumerate(PLANS)),
    *((name, "second step", "exit" if i % 2 else "kill", (i + 1) % 3) for i, name in enumerate(PLANS)),
]

QUICK = [CASES[0], CASES[2], *(case for case in CASES if case[:2] == ("1f1b", "step"))]


@pytest.mark.parametrize(
    ("name", "when", "how", "who"),
    [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_a_rank_that_ends_before_a_call_ends_the_calls_of_all(name: str, when: str, how: str, who: int) -> None:
    found = survivors(PLANS[name], when, how, who)
    assert sorted(found) == [rank for rank in range(3) if rank != who]
    for text, seconds in found.values():
        assert text.startswith("PeerError: "), found
        assert "ended" in text or "heard" in text, found
        assert seconds < SOON, found
        if when in ("init", "parallelize"):
            assert f"rank {who} ended" in text, found


@pytest.mark.parametrize(
    ("group", "how", "who"), [(1, "kill", 2), (1, "raise", 0), (2, "exit", 1), (2, "kill", 0), (3, "raise", 2)]
)
def test_a_rank_that_ends_while_a_group_is_made_ends_the_wait_of_all(group: int, how: str, who: int) -> None:
    """The others waited for it until the timeout, or raised what the store said, which had ended with rank 0."""
    found = survivors(PLANS["1f1b"], f"group {group}", how, who)
    assert sorted(found) == [rank for rank in range(3) if rank != who or how == "raise"]
    for rank, (text, seconds) in found.items():
        assert text.startswith("PeerError: "), found
        assert "no file descriptor is left" in text if rank == who else re.search(rf"\b{who}\b.* ended", text), found
        assert seconds < SOON, found
