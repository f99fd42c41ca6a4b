"""Introductions: mailboxes between ranks that share a GPU, made together and tried before anybody relies on them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from mural.comm.copy_streams import Lanes
from mural.comm.shared_gpu.mail import Card, Mail
from mural.comm.shared_gpu.mailbox import Memory

PATIENCE_SECONDS = 5.0
GREETING, PATTERN_BYTES = 1, 1000

T = TypeVar("T")


class Refused(Exception):
    """Some rank could not do its part; raised on every rank."""


def gathered(group: Any, value: T) -> list[T]:
    """The values of all ranks, in order of ranks. Collective."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def everywhere(group: Any, action: Callable[[], T]) -> list[T]:
    """What an action gave on each rank; if it failed on some rank, all raise `Refused`. Collective."""
    value, trouble = None, ""
    try:
        value = action()
    except Exception as error:
        trouble = f"{type(error).__name__}: {error}".split("\n")[0]
    answers: Any = gathered(group, (value, trouble))
    for rank, (_, text) in enumerate(answers):
        if text:
            raise Refused(f"rank {rank}: {text}")
    return [found for found, _ in answers]


def introduced(group: Any, circle: Sequence[int], lanes: Lanes | None, memory: Memory | None) -> Mail | None:
    """This rank's mailboxes, each tried with a pattern in both directions; None for a rank alone. Collective.

    `circle` holds the ranks that share this rank's memory, itself included. Between the steps all ranks agree that the
    last one worked, so that nobody waits for a rank that failed.
    """
    rank, made = dist.get_rank(group), list[Mail]()
    store = dist.distributed_c10d._get_default_store()

    def make() -> Card | None:
        if lanes is None or memory is None or len(circle) < 2:
            return None
        made.append(Mail(rank, circle, lanes, memory, store))
        return made[0].card()

    def meet() -> None:
        for mail in made:
            mail.meet({other: card for other, card in enumerate(cards) if card is not None})

    def greet() -> dict[int, list[int]]:
        return {other: wire for mail in made for other, wire in greetings(mail)}

    def listen() -> None:
        for mail in made:
            check_greetings(mail, wires)

    def look() -> None:
        for mail in made:
            check_answers(mail)

    try:
        cards = everywhere(group, make)
        everywhere(group, meet)
        wires = everywhere(group, greet)
        everywhere(group, listen)
        everywhere(group, look)
    except Refused:
        for mail in made:
            mail.discard()
        raise
    return made[0] if made else None


def pattern(source: int, destination: int, device: torch.device) -> torch.Tensor:
    """Bytes that tell who sent them to whom."""
    return ((torch.arange(PATTERN_BYTES, device="cpu") * (source + 3) + destination * 7) % 251).to(device, torch.uint8)


def greetings(mail: Mail) -> list[tuple[int, list[int]]]:
    """The headers of a pattern sent to every other rank of the circle."""
    mail.board.unlink()  # all have opened it, and now it goes with the last of them
    sent: list[tuple[int, list[int]]] = []
    for other, box in mail.outboxes.items():
        data = pattern(mail.rank, other, mail.lanes.device)
        wire, done = box.put(data, GREETING, mail.lanes.now())
        mail.lanes.join(done, data)
        sent.append((other, wire.tolist()))
    return sent


def check_greetings(mail: Mail, wires: Sequence[Mapping[int, list[int]]]) -> None:
    """Raise unless the patterns of all others arrive within some seconds."""
    for other, box in mail.inboxes.items():
        found = torch.zeros(PATTERN_BYTES, dtype=torch.uint8, device=mail.lanes.device)
        wire = torch.tensor(wires[other][mail.rank], dtype=torch.int64, device="cpu")
        done = box.take(wire, GREETING, found, mail.lanes.now())
        wait_until(lambda done=done: mail.lanes.over(done), f"a message from rank {other} did not arrive")
        mail.lanes.join(done, found)
        if not torch.equal(found, pattern(other, mail.rank, mail.lanes.device)):
            raise RuntimeError(f"a message from rank {other} arrived with wrong values")


def check_answers(mail: Mail) -> None:
    """Raise unless all others say that they read this rank's messages."""
    for other, box in mail.outboxes.items():
        wait_until(box.all_read, f"rank {other} read a message, but its board did not say so")


def wait_until(true: Callable[[], bool], trouble: str) -> None:
    """Wait for a condition, or raise after some seconds."""
    until = time.monotonic() + PATIENCE_SECONDS
    while not true():
        if time.monotonic() > until:
            raise TimeoutError(f"{trouble} in {PATIENCE_SECONDS:.0f} s")
        time.sleep(1e-4)
