"""Speeds, each measured in about a second: memory, the way to a GPU, the link between ranks, the disk."""

from __future__ import annotations

import contextlib
import os
import secrets
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from mural.doctor.findings import Finding, found
from mural.ranks import init, run_local
from mural.report.words import bytes_in_words
from mural.shard import shard

BUFFER = 2**28
MESSAGE, TRIPS, TRIES = 2**26, 200, 5
CHUNK, SPARE = 2**23, 4
SECONDS = 120.0


def speeds(folder: Path, link: Callable[[], tuple[Finding, ...]]) -> tuple[Finding, ...]:
    """All speeds; `link` measures between ranks."""
    return (
        *found("memory copy", memory_copy),
        *found("host and GPU", host_and_gpu),
        *found("link", link),
        *found("disk", lambda: disk(folder)),
    )


def rate(name: str, seconds: float, count: int, words: str = "") -> Finding:
    """An item in GB/s."""
    value = count / seconds / 1e9
    return Finding(
        name, f"{value:.1f} GB/s{words}" if value >= 1 else f"{value:.2f} GB/s{words}", "found", value, "GB/s"
    )


def best(action: Callable[[], object], tries: int = TRIES) -> float:
    """The fewest seconds of some tries, after one that is not counted."""
    action()
    times: list[float] = []
    for _ in range(tries):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)


def memory_copy() -> Finding:
    """How fast bytes are copied inside host memory."""
    source, target = torch.ones(BUFFER, dtype=torch.uint8), torch.empty(BUFFER, dtype=torch.uint8)
    return rate("memory copy", best(lambda: target.copy_(source)), BUFFER, f" ({torch.get_num_threads()} threads)")


def host_and_gpu() -> Iterator[Finding]:
    """How fast bytes go to the current GPU and back, from pinned and from ordinary memory."""
    if not torch.cuda.is_available():
        return
    device = torch.empty(BUFFER, dtype=torch.uint8, device="cuda")
    for kind in ("pinned", "pageable"):
        host = torch.ones(BUFFER, dtype=torch.uint8, pin_memory=kind == "pinned")
        for words, target, source in (("host to GPU", device, host), ("GPU to host", host, device)):

            def copy(target: torch.Tensor = target, source: torch.Tensor = source) -> None:
                target.copy_(source, non_blocking=True)
                torch.cuda.synchronize()

            yield rate(f"{words}, {kind}", best(copy), BUFFER)


def local_link() -> tuple[Finding, ...]:
    """Latency and speed between two ranks of this machine, started for it; and whether NCCL works, where a GPU is."""
    latency, seconds = run_local(_local_trips, 2, threads=1, timeout=SECONDS)
    return *link_items("two local ranks over gloo", latency, seconds), *found("NCCL, tried now", nccl_trial)


def nccl_trial() -> tuple[Finding, ...]:
    """Whether two ranks of this machine exchange over NCCL, started for it; nothing where there is no GPU."""
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        return ()
    good = run_local(_local_exchange, 2, threads=1, device="cuda", backend="nccl", timeout=SECONDS)
    own = torch.cuda.device_count() > 1
    where = "each with a GPU of its own" if own else "sharing the GPU, through sockets: right, but slow"
    return (Finding("NCCL, tried now", f"two ranks, {where}" if good else "two ranks received wrong values"),)


def _local_exchange(rank: int) -> bool:
    """A message in both directions and a sum, as spatial and data ranks use them."""
    mesh = init(spatial=(2,))
    row = torch.arange(6.0, device="cuda").view(1, 1, 6)
    same = torch.equal(shard(row, mesh).full(), row)
    total = torch.full((3,), float(rank + 1), device="cuda")
    dist.all_reduce(total, group=mesh.transport.group)
    return same and total.tolist() == [3.0] * 3


def _local_trips(rank: int) -> tuple[float, float]:
    return trips(0, 1, torch.device("cpu"))


def trips(first: int, second: int, device: torch.device) -> tuple[float, float]:
    """Seconds of a small message and of a large one between two ranks, one way. Both call it."""
    peer = second if dist.get_rank() == first else first
    begins = dist.get_rank() == first

    def round_trip(buffer: torch.Tensor) -> float:
        start = time.perf_counter()
        for sends in (begins, not begins):
            (dist.send if sends else dist.recv)(buffer, peer)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    small, large = (torch.ones(count, dtype=torch.uint8, device=device) for count in (8, MESSAGE))
    latency = statistics.median([round_trip(small) for _ in range(TRIPS)]) / 2
    return latency, min(round_trip(large) for _ in range(TRIES)) / 2


def link_items(words: str, latency: float, seconds: float) -> tuple[Finding, ...]:
    """What two ranks measured."""
    return (
        Finding(f"latency, {words}", f"{latency * 1e6:.0f} µs", "found", latency * 1e6, "µs"),
        rate(f"link, {words}", seconds, MESSAGE),
    )


def disk(folder: Path) -> tuple[Finding, ...]:
    """How fast a file is written to a folder until it is safe there, and read again, not from memory."""
    space = os.statvfs(folder)
    count = min(BUFFER, space.f_bavail * space.f_frsize // SPARE) // CHUNK * CHUNK
    if count == 0:
        return (Finding("disk", f"{folder} has no room for a trial of {bytes_in_words(CHUNK)}", "failed"),)
    path = folder / f".mural-doctor-{secrets.token_hex(4)}"
    try:
        written, read = _write(path, count), _read(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
    words = f" ({bytes_in_words(count)} in {folder})"
    return rate("disk, write", written, count, words), rate("disk, read", read, count, words)


def _write(path: Path, count: int) -> float:
    chunk = os.urandom(CHUNK)  # a file system that compresses would be too fast otherwise
    start = time.perf_counter()
    with path.open("xb", buffering=0) as file:
        for _ in range(count // CHUNK):
            file.write(chunk)
        os.fsync(file.fileno())
    return time.perf_counter() - start


def _read(path: Path) -> float:
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        buffer = bytearray(CHUNK)
        while file.readinto(buffer):
            pass
        return time.perf_counter() - start
