"""Where a ring overtakes a tree: all algorithms between hosts whose links have a set delay and bandwidth.

python network.py RANK FILE: one rank on one of the hosts; the launcher's variables say where the others are.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import switch
import torch
import torch.distributed as dist
from measured import timed

from mural.collectives import all_reduce
from mural.collectives.algorithms import ALGORITHMS
from mural.collectives.choose import BACKEND, rounds_of
from mural.collectives.link_costs import gauge, slowest
from mural.collectives.price import Wire, cost
from mural.collectives.team import Team, team_of

PORT, LIMIT = 29_533, 900.0
GAUGED = (2**10, 2**14, 2**17, 2**19)


def measure(ranks: int, hosts: int, delay: float, bandwidth: float, sizes: list[int], repeats: int) -> dict[str, Any]:
    """What the ranks on so many hosts find, each host with its share of them."""
    with switch.network(hosts, delay, bandwidth) as found:
        settings = json.dumps({"delay": delay, "bandwidth": bandwidth, "sizes": sizes, "repeats": repeats})
        running: list[subprocess.Popen[str]] = []
        try:
            for rank in range(ranks):
                host = found[rank * hosts // ranks]
                variables = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": found[0].address}
                variables |= {"MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": host.device, "OMP_NUM_THREADS": "1"}
                words = host.command(sys.executable, str(Path(__file__).resolve()), settings)
                running.append(subprocess.Popen(words, env=os.environ | variables, stdout=subprocess.PIPE, text=True))
            said = [process.communicate(timeout=LIMIT)[0] for process in running]
        finally:
            for process in running:
                process.kill()
                process.wait(20)
    if any(process.returncode for process in running):
        raise SystemExit(f"ranks ended with {[process.returncode for process in running]}")
    return {"ranks": ranks, "hosts": hosts, **json.loads(said[0].splitlines()[-1])}


def on_rank(delay: float, bandwidth: float, sizes: list[int], repeats: int) -> dict[str, Any]:
    """What one rank finds: all algorithms in turn, predicted from the set constants and from measured rounds."""
    team = team_of(None)
    known = gauge(team, GAUGED, 3)
    hosted = len(team.nodes) < team.size
    latency = known.latency + known.outside if not hosted else 0.0
    inside = Wire(max(latency - delay, 0.0), 0.0, delay, 1 / bandwidth, start=known.start)
    records: list[dict[str, Any]] = []
    for size in sizes:
        taken = in_turn(team, size, repeats)
        for name, seconds in taken.items():
            record: dict[str, Any] = {"bytes": size, "algorithm": name, "seconds": slowest(team, seconds[1:])}
            if name != BACKEND:
                rounds = rounds_of(name, team.nodes, False)
                record["by_constants"] = cost(rounds, size, inside, team.nodes)
                record["by_gauge"] = cost(rounds, size, known, team.nodes)
            records.append(record)
    return {"delay": delay, "bandwidth": bandwidth, "overhead": inside.latency, "records": records}


def in_turn(team: Team, size: int, repeats: int) -> dict[str, list[float]]:
    """The seconds of every algorithm on this rank, the first of which does not count."""
    data = torch.ones(size // 4)
    calls: dict[str, Callable[[], object]] = {name: lambda name=name: all_reduce(data, name) for name in ALGORITHMS}
    calls[BACKEND] = lambda: dist.all_reduce(data, group=team.group)
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(1 + repeats):
        for name in list(calls) if number % 2 else reversed(calls):
            taken[name].append(timed(team, calls[name], data))
    return taken


def crossing(found: dict[str, Any], key: str = "seconds") -> list[tuple[int, str]]:
    """From which size on which of ring and tree is faster, as often as it changes."""
    value = {
        (r["bytes"], r["algorithm"]): median(r[key]) if key == "seconds" else r[key]
        for r in found["records"]
        if r["algorithm"] in ("ring", "tree")
    }
    changes: list[tuple[int, str]] = []
    for size in sorted({size for size, _ in value}):
        faster = "ring" if value[size, "ring"] < value[size, "tree"] else "tree"
        if not changes or changes[-1][1] != faster:
            changes.append((size, faster))
    return changes


if __name__ == "__main__":
    torch.set_num_threads(1)
    answer = on_rank(**json.loads(sys.argv[1]))
    if dist.get_rank() == 0:
        print(json.dumps(answer))
