"""One exchange of forward halo strips between two ranks, by torch RPC and by mural's transport.

Both pack the border row of the rank's piece, (1, 16, 1, size) floats, and end when the neighbour's row is here. An
RPC is answered whether or not the neighbour has come as far; mural's messages wait for it. This favours RPC.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from job import CHANNELS, Job
from torch import Tensor
from torch.distributed import rpc

BURST = 100
_held: dict[str, Tensor] = {}


def border() -> Tensor:
    """The row beside the cut, packed; runs on the neighbour when called by RPC."""
    return _held["row"].contiguous()


def hold(job: Job) -> None:
    """Keep this rank's piece, and its view of the row beside the cut."""
    start, stop = job.rows
    piece = torch.randn(1, CHANNELS, stop - start, job.size)
    _held["row"] = piece[:, :, -1:] if job.rank == 0 else piece[:, :, :1]


class Burst:
    """Many exchanges one after the other, each timed."""

    def __init__(self, once: Callable[[], Tensor]) -> None:
        self.once = once

    def __call__(self) -> dict[str, list[float]]:
        """Seconds of each exchange."""
        dist.barrier()
        times: list[float] = []
        for _ in range(BURST):
            begin = time.perf_counter()
            self.once()
            times.append(time.perf_counter() - begin)
        dist.barrier()
        return {"seconds": times}


def load_transport() -> Callable[[Job], Burst]:
    """The transport of mural: one message each way."""
    import mural  # noqa: PLC0415
    from mural.comm.messages import Transfer  # noqa: PLC0415

    def opened(job: Job) -> Burst:
        transport, peer = mural.init(spatial=(job.ranks, 1)).transport, 1 - job.rank
        hold(job)

        def once() -> Tensor:
            row = border()
            return Transfer(transport, "exchange", {peer: row.view(-1)}, {peer: row.numel()}, row).wait()[peer]

        return Burst(once)

    return opened


def load_rpc() -> Callable[[Job], Burst]:
    """Torch RPC: one asynchronous call each way, whose answer is the neighbour's row."""

    def opened(job: Job) -> Burst:
        hold(job)
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{job.store}.rpc", num_worker_threads=2)
        rpc.init_rpc(f"rank{job.rank}", rank=job.rank, world_size=job.ranks, rpc_backend_options=options)
        return Burst(lambda: rpc.rpc_async(f"rank{1 - job.rank}", border).wait())

    return opened


LOADERS = {"transport": load_transport, "rpc": load_rpc}
