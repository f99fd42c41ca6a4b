"""A pool of rank processes per world size that lives for the whole test run, as long as there are not too many ranks.

They meet over gloo, or over the backend that the environment's MURAL_TEST_BACKEND names: `strict` behaves like NCCL on
the CPU, and `nccl` is NCCL itself, with tensors on the GPUs, which ranks share where there are fewer than ranks.
"""

from __future__ import annotations

import atexit
import multiprocessing as mp
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TIMEOUT = float(os.environ.get("MURAL_TEST_TIMEOUT", "120"))
BACKEND = os.environ.get("MURAL_TEST_BACKEND", "gloo")
DEVICE = "cuda" if BACKEND == "nccl" else "cpu"
FORKS = mp.get_context("forkserver")
"""Starts processes as copies of one that has imported mural: a rank is there in a tenth of a second, not in three."""
FORKS.set_forkserver_preload(["mural"])
MOST_RANKS = 20
"""Idle ranks keep a quarter of a gigabyte each, more after large cases: pools that were not used for longest end."""
_pools: dict[tuple[int, str], Pool] = {}
"""By world size and backend, the one that was used last at the end."""


class RankError(AssertionError):
    """Some rank raised; the message holds every rank's traceback."""


def _serve(rank: int, world: int, backend: str, store: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if backend == "nccl":
        take_gpu(rank, world)
    if backend == "strict":
        sys.path.append(str(Path(__file__).parent / "comm"))
        import strict

        strict.register()
    dist.init_process_group(
        backend, store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timedelta(seconds=TIMEOUT)
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


def take_gpu(rank: int, world: int) -> None:
    """Give a rank its GPU; ranks that share one look like machines of their own to NCCL, which refuses them else."""
    import torch

    from mural.comm.groups import survive_errors
    from mural.ranks.store import stand_apart

    gpus = torch.cuda.device_count()
    torch.cuda.set_device(rank % gpus)
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    survive_errors()
    if gpus < world:
        stand_apart(os.environ, rank)


class Pool:
    """Ranks that run one function after the other."""

    def __init__(self, world: int, backend: str = BACKEND):
        self.folder = tempfile.TemporaryDirectory(prefix="mural-ranks-")
        store = str(Path(self.folder.name) / "store")
        self.pipes, self.processes = [], []
        for rank in range(world):
            ours, theirs = FORKS.Pipe()
            process = FORKS.Process(target=_serve, args=(rank, world, backend, store, theirs), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def answers(self, function: Callable[..., Any], *args: Any) -> list[tuple[bool, Any]]:
        """Of every rank whether `function(*args)` returned there, with its result, or why there is none."""
        for pipe in self.pipes:
            pipe.send((function, args))
        return [self._answer(pipe) for pipe in self.pipes]

    def _answer(self, pipe: Connection) -> tuple[bool, Any]:
        try:
            return pipe.recv() if pipe.poll(TIMEOUT) else (False, f"no answer in {TIMEOUT} s")
        except (EOFError, ConnectionResetError):
            return (False, "its process ended")

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """The results of `function(*args)` on every rank, in order of ranks."""
        answers = self.answers(function, *args)
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


def run_on(world: int, function: Callable[..., Any], *args: Any, backend: str = BACKEND) -> list[Any]:
    """The results of `function(*args)` on every rank of a world, whose processes start once; anew after a failure."""
    key = (world, backend)
    pool = _pools.pop(key, None)
    while pool is None and _pools and world + sum(ranks for ranks, _ in _pools) > MOST_RANKS:
        restart(*next(iter(_pools)))
    _pools[key] = pool or Pool(world, backend)
    try:
        return _pools[key].run(function, *args)
    except BaseException:
        _pools.pop(key).close()
        raise


def restart(world: int, backend: str = BACKEND) -> None:
    """End the ranks of a world; the next test starts new ones."""
    if (world, backend) in _pools:
        _pools.pop((world, backend)).close()


def only(world: int) -> None:
    """End the ranks of all other worlds: idle ranks keep the memory of the largest case they ran."""
    for other, backend in list(_pools):
        if other != world:
            restart(other, backend)


@atexit.register
def close_all() -> None:
    """End all pools."""
    for pool in _pools.values():
        pool.close()
