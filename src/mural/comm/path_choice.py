"""The choice of a way for GPU tensors over gloo and MPI: CUDA IPC where it works and is faster, else staging.

gloo sends from host memory only, and so does an MPI without CUDA support. Between ranks on one GPU, mailboxes in GPU
memory avoid that detour, if the system lets processes open each other's memory. `settle` finds out: it sends a pattern
through every mailbox, and then times both ways at some sizes; messages of a size at which staging is faster are staged.
The environment variable MURAL_GPU_PATH, set to `ipc` or `pinned` on all ranks, decides instead.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from math import inf

import torch
import torch.distributed as dist

from mural.comm.copy_streams import CudaLanes, Lanes
from mural.comm.device_paths import Mailed, Paths, Sized, StagedPath, Way
from mural.comm.failure.agree import gather, together
from mural.comm.host_staging import Arena, Buffer, Pinned
from mural.comm.hosts import host
from mural.comm.messages import Transfer, Transport
from mural.comm.shared_gpu.introduction import Refused, introduced
from mural.comm.shared_gpu.ipc import CudaMemory
from mural.comm.shared_gpu.mail import Mail
from mural.errors import PlanError

VARIABLE = "MURAL_GPU_PATH"
CHOICES = ("", "ipc", "pinned")
TRIAL_BYTES, TRIALS = (2**16, 2**20, 2**24), 8
"""The sizes that are timed, each after a warm-up: a strip of a small image, one of a large image, a gathered tensor."""


def settle(transport: Transport) -> None:
    """Choose how GPU tensors travel in a group that sends from host memory, the same way on every rank. Collective."""
    group = transport.group
    if group is None or not transport.direct.backend.from_host or dist.get_world_size(group) == 1:
        return
    wanted = os.environ.get(VARIABLE, "").lower()
    facts = gather(group, (wanted, place()), VARIABLE).values()
    said, places = [choice for choice, _ in facts], [found for _, found in facts]
    if any(choice != said[0] or choice not in CHOICES for choice in said):
        raise PlanError(f"{VARIABLE} is {said} on the ranks: set it to ipc or to pinned on all, or on none")
    rank = dist.get_rank(group)
    lanes = own_lanes() if places[rank] is not None else None
    staged = staged_paths(lanes, len(places), rank) if lanes is not None else None
    use(transport, staged)
    shared = any(places.count(found) > 1 for found in places if found is not None)
    if wanted == "ipc" and not shared:
        raise PlanError(f"{VARIABLE}=ipc, but no two ranks share a GPU: unset {VARIABLE}")
    if wanted == "pinned" or not shared:
        return
    circle = [other for other, found in enumerate(places) if found is not None and found == places[rank]]
    try:
        mail = introduced(group, circle, lanes, CudaMemory(lanes) if lanes is not None else None)
    except Refused as error:
        why = str(error).splitlines()[0]
        if wanted == "ipc":
            raise PlanError(f"{VARIABLE}=ipc, but CUDA IPC does not work ({why}): unset {VARIABLE}") from error
        use(transport, described(staged, f"no CUDA IPC: {why}"))
        return
    mailed = mailed_paths(staged, mail) if staged is not None and mail is not None else None
    compare(transport, staged, mailed, forced=wanted == "ipc")


def place() -> tuple[str, str] | None:
    """The machine and the GPU of this process; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    try:
        gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    except RuntimeError:  # a GPU that cannot be used
        return None
    return host(), gpu


def own_lanes() -> CudaLanes | None:
    """The lanes of the current GPU; None if it has no room for another process."""
    try:
        return CudaLanes(torch.device("cuda", torch.cuda.current_device()))
    except RuntimeError:
        return None


def staged_paths(lanes: Lanes, world: int, rank: int) -> Paths:
    """Every peer by staging."""
    way = StagedPath(Arena(lanes))
    ways: dict[int, Way] = {peer: way for peer in range(world) if peer != rank}
    return Paths(lanes, ways, "GPU tensors staged through pinned memory")


def mailed_paths(staged: Paths, mail: Mail, limit: int = 0) -> Paths:
    """Mailboxes for the peers that share this rank's GPU; staging for the others and for messages below a limit."""
    boxes: dict[int, Way] = {peer: Mailed(mail.outboxes[peer], mail.inboxes[peer]) for peer in mail.others}
    if limit:
        boxes = {peer: Sized(staged.ways[peer], box, limit) for peer, box in boxes.items()}
    ways: dict[int, Way] = {**staged.ways, **boxes}
    some = f" to {len(boxes)} of {len(ways)} ranks, else staged through pinned memory" if len(boxes) < len(ways) else ""
    return Paths(staged.lanes, ways, f"GPU tensors through CUDA IPC{some}", mail)


def rest_on_host(transport: Transport, make: Callable[[int], Buffer] = Pinned) -> None:
    """Have messages that nobody has read yet rest in the host's memory, on all ranks alike: GPU memory is short.

    Nothing goes through mailboxes from now on; they stay as they are, since peers have opened them.
    """
    for kind, paths in transport.paths.items():
        way = StagedPath(Arena(paths.lanes, make, most_idle=inf), late=True)
        ways: dict[int, Way] = dict.fromkeys(paths.ways, way)
        words = "GPU tensors staged through pinned memory, where they rest until they are needed"
        transport.paths[kind] = Paths(paths.lanes, ways, words, paths.mail)


def described(paths: Paths | None, more: str) -> Paths | None:
    """The same paths with a longer description."""
    return None if paths is None else Paths(paths.lanes, paths.ways, f"{paths.words} ({more})", paths.mail)


def use(transport: Transport, paths: Paths | None) -> None:
    """Let tensors on the device of the paths use them."""
    if paths is not None:
        transport.paths[paths.lanes.device.type] = paths


def compare(transport: Transport, staged: Paths | None, mailed: Paths | None, forced: bool) -> None:
    """Time both ways, take the faster at each size on all ranks, and say so. Collective.

    The time of a way is that of its slowest rank, so that all ranks see the same numbers and choose alike.
    """
    found = [[timed(transport, paths, size) for size in TRIAL_BYTES] for paths in (mailed or staged, staged)]
    best = torch.tensor(found, dtype=torch.float64, device="cpu")
    dist.all_reduce(best, op=dist.ReduceOp.MAX, group=transport.group)
    mail = mailed.mail if mailed is not None else None
    limit = 0 if forced else limit_of(best[0].tolist(), best[1].tolist())
    words = said(best[0].tolist(), best[1].tolist())
    if limit is None:
        # The mailboxes are dropped. First all ranks close what they opened, so that none frees memory that another has
        # open.
        with together(transport.group, "closing mailboxes"):
            for box in mail.inboxes.values() if mail is not None else ():
                box.close()
        use(transport, described(staged, words))
    elif staged is not None and mail is not None:
        how = f"as {VARIABLE} says; {words}" if forced else f"from {sized(limit)} on; {words}" if limit else words
        use(transport, described(mailed_paths(staged, mail, limit), how))
    else:
        use(transport, staged)


def limit_of(ipc: Sequence[float], pinned: Sequence[float]) -> int | None:
    """The size in bytes from which IPC was faster: 0 if always, None if not even at the largest size.

    >>> limit_of((5e-4, 5e-4, 7e-4), (3e-4, 8e-4, 7e-3)), limit_of((1, 1, 1), (2, 2, 2)), limit_of((2, 2, 2), (1, 1, 1))
    (1048576, 0, None)
    """
    slower = [i for i, (a, b) in enumerate(zip(ipc, pinned, strict=True)) if a > b]
    first = slower[-1] + 1 if slower else 0
    return None if first == len(TRIAL_BYTES) else TRIAL_BYTES[first] if first else 0


def sized(count: int) -> str:
    """A number of bytes as text.

    >>> sized(2**16), sized(2**24)
    ('64 KiB', '16 MiB')
    """
    return f"{count >> 20} MiB" if count >= 2**20 else f"{count >> 10} KiB"


def said(ipc: Sequence[float], pinned: Sequence[float]) -> str:
    """The measured times as text."""
    pairs = zip(TRIAL_BYTES, ipc, pinned, strict=True)
    return "; ".join(f"{sized(n)} in {a * 1e6:.0f} µs by IPC, {b * 1e6:.0f} pinned" for n, a, b in pairs)


def timed(transport: Transport, paths: Paths | None, size: int) -> float:
    """The least seconds for a message to the next rank and one from the previous rank, after a warm-up. Collective."""
    use(transport, paths)
    world, rank = dist.get_world_size(transport.group), dist.get_rank(transport.group)
    seconds: list[float] = []
    try:
        device = paths.lanes.device if paths is not None else torch.device("cpu")
        data = torch.ones(size, dtype=torch.uint8, device=device)
        sends, sizes = {(rank + 1) % world: data}, {(rank - 1) % world: data.numel()}
        for _ in range(1 + TRIALS):
            begun = time.perf_counter()
            (found,) = Transfer(transport, "trial", sends, sizes, data).wait().values()
            _ = found[-1:].cpu()
            seconds.append(time.perf_counter() - begun)
    except Exception as error:
        transport.raised(error)
        raise
    return min(seconds[1:])
