"""Introductions: mailboxes between ranks that share a GPU, created together and tested before use."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist

from mural.comm.copy_streams import Lanes
from mural.comm.failure import agree
from mural.comm.shared_gpu.mail import Card, Mail
from mural.comm.shared_gpu.mailbox import SharedMemory
from mural.errors import MuralError

PATIENCE_SECONDS = 5.0
GREETING, PATTERN_BYTES = 1, 1000


class Refused(MuralError):
    """Some rank could not do its part; raised on every rank."""


def introduced(
    group: dist.ProcessGroup, circle: Sequence[int], lanes: Lanes | None, memory: SharedMemory | None
) -> Mail | None:
    """This rank's mailboxes, each tested with a pattern in both directions; None for a rank alone. Collective.

    `circle` holds the ranks that share this rank's GPU, itself included. Between the steps all ranks agree that the
    last one worked, so that none waits for a rank that failed.
    """
    mail: Mail | None = None
    card: Card | None = None
    sent: dict[int, list[int]] = {}
    together = partial(agree.together, group, kind=Refused, same=True)
    try:
        with together():
            if lanes is not None and memory is not None and len(circle) > 1:
                mail = Mail(dist.get_rank(group), circle, lanes, memory, dist.distributed_c10d._get_default_store())
                card = mail.card()
        cards = agree.gather(group, card, "mailboxes")
        with together():
            if mail is not None:
                mail.meet({other: card for other, card in cards.items() if card is not None})
        with together():
            if mail is not None:
                sent = dict(greetings(mail))
        wires = agree.gather(group, sent, "mailboxes")
        with together():
            if mail is not None:
                check_greetings(mail, wires)
        with together():
            for other, box in mail.outboxes.items() if mail is not None else ():
                wait_until(box.all_read, f"rank {other} read a message, but its board did not say so")
    except Refused:
        if mail is not None:
            mail.discard()
        raise
    return mail


def pattern(source: int, destination: int, device: torch.device) -> torch.Tensor:
    """Bytes that identify their sender and receiver."""
    return ((torch.arange(PATTERN_BYTES, device="cpu") * (source + 3) + destination * 7) % 251).to(device, torch.uint8)


def greetings(mail: Mail) -> list[tuple[int, list[int]]]:
    """The headers of a pattern sent to every other rank of the circle."""
    mail.board.unlink()  # all have opened it, so it goes away with the last of them
    sent: list[tuple[int, list[int]]] = []
    for other, box in mail.outboxes.items():
        data = pattern(mail.rank, other, mail.lanes.device)
        wire, done = box.put(data, GREETING, mail.lanes.now())
        mail.lanes.join(done, data)
        sent.append((other, wire.tolist()))
    return sent


def check_greetings(mail: Mail, wires: Mapping[int, Mapping[int, list[int]]]) -> None:
    """Raise unless the patterns of all others arrive within a few seconds."""
    for other, box in mail.inboxes.items():
        found = torch.zeros(PATTERN_BYTES, dtype=torch.uint8, device=mail.lanes.device)
        wire = torch.tensor(wires[other][mail.rank], dtype=torch.int64, device="cpu")
        done = box.take(wire, GREETING, found, mail.lanes.now())
        wait_until(lambda done=done: mail.lanes.over(done), f"a message from rank {other} did not arrive")
        mail.lanes.join(done, found)
        if not torch.equal(found, pattern(other, mail.rank, mail.lanes.device)):
            raise RuntimeError(f"a message from rank {other} arrived with wrong values")


def wait_until(true: Callable[[], bool], trouble: str) -> None:
    """Wait for a condition, or raise after a few seconds."""
    until = time.monotonic() + PATIENCE_SECONDS
    while not true():
        if time.monotonic() > until:
            raise TimeoutError(f"{trouble} in {PATIENCE_SECONDS:.0f} s")
        time.sleep(1e-4)
