"""The same bytes in few large tensors or in many small ones, copied to the host and back."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from offload.parts import Part
from offload.settings import Settings

TOTAL, TOY_TOTAL = 512 * 2**20, 2**20
Pieces = list[Tensor]


def fresh(there: Pieces, here: Pieces, device: torch.device) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """As `model.to` copies: each time into new memory, on both sides."""
    left: Pieces = []

    def out() -> None:
        left[:] = [piece.to("cpu", copy=True) for piece in there]

    def back() -> None:
        there[:] = [piece.to(device, copy=True) for piece in left]

    return out, back


def into(blocking: bool) -> Callable[[Pieces, Pieces, torch.device], tuple[Callable[[], Any], Callable[[], Any]]]:
    """Copies between memory that is taken once."""

    def made(there: Pieces, here: Pieces, _: torch.device) -> tuple[Callable[[], Any], Callable[[], Any]]:
        def copy(targets: Pieces, sources: Pieces) -> None:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=not blocking)

        return lambda: copy(here, there), lambda: copy(there, here)

    return made


WAYS = {
    "fresh": (fresh, False),
    "pageable": (into(blocking=True), False),
    "pinned": (into(blocking=True), True),
    "nonblocking": (into(blocking=False), True),
}
"""How each way copies, and whether the host's memory is pinned."""


def measured(part: Part, device: torch.device, settings: Settings) -> dict[str, Any]:
    """Seconds of both directions in every way, after one round trip that does not count."""
    count = int(part.subject)
    length = (TOY_TOTAL if settings.toy else TOTAL) // 4 // count
    found: dict[str, Any] = {"bytes": 4 * length * count, "each": 4 * length}
    for name, (way, pinned) in WAYS.items():
        whole = torch.arange(length * count, dtype=torch.float32, device=device)
        # One block for all pieces: pinning each by itself takes longer than all copies.
        host = torch.zeros(length * count, pin_memory=pinned and device.type == "cuda")
        there, here = list(whole.split(length)), list(host.split(length))
        out, back = way(there, here, device)
        times = [(seconds(out, device), seconds(back, device)) for _ in range(settings.repeats + 1)][1:]
        if not torch.equal(torch.cat(there), torch.arange(length * count, dtype=torch.float32, device=device)):
            raise RuntimeError(f"{name} copies changed the values of {count} tensors: they should be as before")
        found[name] = {"out": [first for first, _ in times], "back": [second for _, second in times]}
    return found


def seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds until the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin
