"""Waiting for a collective, and for the news that it will never end because a peer raised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from mural.comm import Transport
from mural.comm.presence import reason
from mural.comm.trace import Post
from mural.errors import PeerError

LOOK = timedelta(seconds=1)


@dataclass
class Call:
    """What the alarm is told that this rank waits for: no messages of its own, which a peer could complete."""

    serial: int
    outgoing: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    incoming: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])


def wait_for(
    work: Any, transport: Transport, name: str, needs: Sequence[tuple[int, Post]] = (), kind: str = "gradients"
) -> None:
    """Wait for a collective, or raise what kept a peer from joining it; `needs` are its `appointment`."""
    alarm = transport.alarm
    if alarm is None or transport.direct.backend != "gloo":
        with transport.blocked(kind, needs):
            work.wait()
        return
    # A peer that raised before it began as many transfers as this rank did will not come.
    with alarm.watching(Call(transport.serial + 1)), transport.blocked(kind, needs):
        while True:
            try:
                work.wait(LOOK)
                return
            except RuntimeError as error:
                if alarm.heard:
                    raise PeerError(f"waiting for {name}: {alarm.heard}") from error
                if str(error) != "Operation timed out!":
                    raise PeerError(f"waiting for {name}: {reason(error)}. A peer has ended: see its log") from error
