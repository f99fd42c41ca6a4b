"""Ranks that raise, end, are killed or hang over NCCL: the others end within seconds, in words, with weights intact."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import mural
from mural.comm.watchdog import HUNG, Watchdog
from mural.errors import PeerError
from mural.models import UNet
from ranks import DEVICE, Pool

SECONDS = 20.0
"""How long the others may take to end; torch's own limit in these groups is two minutes."""
LIMIT = 4.0
"""How long a rank may make no progress before the watchdog says that it hangs."""


class Trouble:
    """A loss like any other, until one rank meets its fate in it, or in the backward that begins there."""

    def __init__(self, how: str, where: str):
        self.how, self.where, self.armed = how, where, False

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if self.armed and self.where == "forward":
            self.strike()
        if self.armed and self.where == "backward":
            output.register_hook(lambda _: self.strike())
        return F.cross_entropy(output, target)

    def strike(self) -> None:
        """Raise, end this process, or never come back."""
        if self.how == "raises":
            raise ValueError("a loss went wrong")
        if self.how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "exits":
            os._exit(3)
        time.sleep(600)


def suffered(plan: mural.Plan, how: str, where: str, victim: int) -> dict[str, Any]:
    """A good step, then one in which a rank fails: what this rank saw, how long it took, and whether weights moved."""
    if os.environ.get("MURAL_GPU_VERBOSE"):
        faulthandler.dump_traceback_later(25)
    torch.manual_seed(0)
    trouble = Trouble(how, where)
    pm = mural.parallelize(UNet(width=8, depth=2).double().to(DEVICE), plan, trouble)
    optimizer = torch.optim.SGD(list(pm.parameters()), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(4, 3, 64, 48, dtype=torch.float64, generator=generator).to(DEVICE)
    masks = torch.randint(2, (4, 64, 48), generator=generator).to(DEVICE)
    pm.step(images, masks)
    optimizer.step()
    pm.zero_grad()
    finish()
    before = [p.detach().clone() for p in pm.parameters()]
    trouble.armed = dist.get_rank() == victim
    begun, said = time.monotonic(), ""
    with Watchdog(pm.world_mesh, LIMIT) if how == "hangs" else nullcontext():
        try:
            for _ in range(3):
                pm.step(images, masks)
                optimizer.step()
        except (PeerError, ValueError) as error:
            said = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - begun
    again = ""
    try:
        pm.step(images, masks)
    except Exception as error:
        again = f"{type(error).__name__}: {error}"
    finish()
    kept = all(torch.equal(a, b) for a, b in zip(before, pm.parameters(), strict=True))
    faulthandler.cancel_dump_traceback_later()
    return {"said": said, "again": again, "seconds": seconds, "kept": kept}


def finish() -> None:
    """Wait for the GPU, if there is one."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def fails_well(world: int, plan: mural.Plan, how: str, where: str) -> str:
    """Empty where the ranks ended as they should; else what was wrong."""
    victim = world - 1
    pool = Pool(world)
    try:
        answers = pool.answers(suffered, plan, how, where, victim)
        codes = []
        for process in pool.processes:
            process.join(timeout=10 if how == "hangs" else 0.1)
            codes.append(process.exitcode)
        return verdict(answers, codes, how, victim)
    finally:
        pool.close()


def verdict(answers: list[tuple[bool, Any]], codes: list[int | None], how: str, victim: int) -> str:
    """What is wrong with how ranks ended."""
    if how == "hangs":
        others = [code for rank, code in enumerate(codes) if rank != victim]
        return "" if others == [HUNG] * len(others) else f"the watchdog ended processes with codes {codes}"
    for rank, (good, found) in enumerate(answers):
        if rank == victim and how != "raises":
            continue
        if not good:
            return f"rank {rank}: {found}"
        kind = "ValueError: a loss" if rank == victim else "PeerError: "
        if not found["said"].startswith(kind):
            return f"rank {rank} saw {found['said']!r}, not {kind!r}"
        if not found["kept"]:
            return f"rank {rank}: weights moved after {found['said']}"
        if found["seconds"] > SECONDS:
            return f"rank {rank} took {found['seconds']:.0f} s to say {found['said']}"
    return ""
