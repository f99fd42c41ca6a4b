"""Waiting for a collective, and for the news that it will never end because a peer raised."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from mural.comm import Transport
from mural.comm.failure.alarm import Awaited
from mural.comm.failure.connections import reason
from mural.comm.trace import Post
from mural.errors import PeerError

LOOK = timedelta(seconds=1)


def wait_for(
    work: Any,
    transport: Transport,
    name: str,
    needs: Sequence[tuple[int, Post]] = (),
    kind: str = "gradients",
    on_host: bool = False,
) -> None:
    """Wait for a collective, or raise what kept a peer from joining it; `needs` are its `appointment`.

    Over NCCL the GPU is waited for, unless the tensors are `on_host`, whom gloo serves.
    """
    alarm = transport.alarm
    by_gloo = transport.serves_host_by_gloo if on_host else transport.direct.backend == "gloo"
    if alarm is None or not by_gloo:
        with transport.blocked(kind, needs):
            work.wait()
            transport.await_gpu(name)
        return
    # A peer that raised before it began as many transfers as this rank did will not come.
    with alarm.watching(Awaited(transport.serial + 1, name)), transport.blocked(kind, needs):
        while True:
            try:
                work.wait(LOOK)
                return
            except RuntimeError as error:
                if alarm.heard:
                    raise PeerError(f"waiting for {name}: {alarm.heard}") from error
                if str(error) != "Operation timed out!":
                    raise PeerError(f"waiting for {name}: {reason(error)}. A peer has ended: see its log") from error
