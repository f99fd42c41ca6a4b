"""A pool of rank processes per world size that lives for the whole test run."""

from __future__ import annotations

import atexit
import multiprocessing as mp
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TIMEOUT = 120.0
_pools: dict[int, Pool] = {}


class RankError(AssertionError):
    """Some rank raised; the message holds every rank's traceback."""


def _serve(rank: int, world: int, store: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timedelta(seconds=TIMEOUT)
    )
    while True:
        call = pipe.recv()
        if call is None:
            break
        function, args = call
        try:
            pipe.send((True, function(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()


class Pool:
    """Ranks that run one function after the other."""

    def __init__(self, world: int):
        context = mp.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory(prefix="mural-ranks-")
        store = str(Path(self.folder.name) / "store")
        self.pipes, self.processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world, store, theirs), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """The results of `function(*args)` on every rank, in order of ranks."""
        for pipe in self.pipes:
            pipe.send((function, args))
        answers = [pipe.recv() if pipe.poll(TIMEOUT) else (False, f"no answer in {TIMEOUT} s") for pipe in self.pipes]
        failed = {rank: text for rank, (good, text) in enumerate(answers) if not good}
        if failed:
            raise RankError("\n".join(f"--- rank {rank}\n{text}" for rank, text in failed.items()))
        return [value for _, value in answers]

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()


def run_on(world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """The results of `function(*args)` on every rank of a world, whose processes start once; anew after a failure."""
    if world not in _pools:
        _pools[world] = Pool(world)
    try:
        return _pools[world].run(function, *args)
    except BaseException:
        _pools.pop(world).close()
        raise


def restart(world: int) -> None:
    """End the ranks of a world; the next test starts new ones."""
    if world in _pools:
        _pools.pop(world).close()


def only(world: int) -> None:
    """End the ranks of all other worlds: idle ranks keep the memory of the largest case they ran."""
    for other in [w for w in _pools if w != world]:
        restart(other)


@atexit.register
def close_all() -> None:
    """End all pools."""
    for pool in _pools.values():
        pool.close()
