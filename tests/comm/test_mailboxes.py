"""Messages through mailboxes and through staging buffers: exact, in order, and free of the sender's later writes.

A GPU is imitated (late.py): copies happen later than asked, on lanes, ordered by marks alone.
"""

from __future__ import annotations

import random
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from late import LateLanes, LateMemory
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import mural
from law import Grid, compare, image
from mural.comm import Transport, host_staging, path_choice
from mural.comm.channels import Channels
from mural.comm.device_paths import Mailed, Paths, Sized, StagedIn, StagedPath
from mural.comm.messages import Transfer
from mural.comm.shared_gpu import mailbox
from mural.comm.shared_gpu.introduction import Refused, introduced
from mural.comm.shared_gpu.mailbox import Inbox, MessageHeader, Outbox
from ranks import restart, run_on

TYPES = (torch.float64, torch.bool, torch.int64, torch.bfloat16, torch.complex64, torch.uint8, torch.float16)


@contextmanager
def travelling(way: str) -> Generator[tuple[Transport, Paths]]:
    """The transport of all ranks, while CPU tensors travel as GPU tensors would."""
    mesh = mural.init(data=torch.distributed.get_world_size())
    transport, lanes = mesh.transport, LateLanes()
    others = [peer for peer in range(mesh.world) if peer != mesh.rank]
    if way in ("mailbox", "resting"):
        mail = introduced(transport.group, range(mesh.world), lanes, LateMemory(lanes))
        paths = Paths(lanes, {p: Mailed(mail.outboxes[p], mail.inboxes[p]) for p in others}, way, mail)
    else:
        arena = host_staging.Arena(lanes, host_staging.PageableMemory)
        paths = Paths(lanes, {p: StagedPath(arena) for p in others}, way)
    path_choice.use(transport, paths)
    if way == "resting":
        path_choice.rest_on_host(transport, host_staging.PageableMemory)
        paths = transport.paths["cpu"]
    try:
        yield transport, paths
    finally:
        del transport.paths["cpu"]


def message(source: int, destination: int, number: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """The values of one message, the same wherever they are asked for."""
    generator = torch.Generator().manual_seed(1000 * number + 10 * source + destination)
    return torch.randint(0, 2 if dtype == torch.bool else 100, (size,), generator=generator).to(dtype)


def sizes_of(seed: int, world: int, count: int, largest: int) -> list[dict[tuple[int, int], int]]:
    """For each transfer, how many values go from whom to whom; some are empty."""
    draw = random.Random(seed)
    pairs = [(a, b) for a in range(world) for b in range(world) if a != b]
    return [{pair: draw.choice((0, 1, draw.randrange(largest))) for pair in pairs} for _ in range(count)]


def many(way: str, order: str, count: int, largest: int) -> tuple[int, int, int]:
    """Messages that differ from what was sent, and how many slots and slots given up are left."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    wrong = 0
    plan = sizes_of(len(order), world, count, largest)
    with travelling(way) as (transport, paths):
        transfers = []
        for number, sizes in enumerate(plan):
            dtype = TYPES[number % len(TYPES)]
            sends = {b: message(a, b, number, n, dtype) for (a, b), n in sizes.items() if a == rank}
            counts = {a: n for (a, b), n in sizes.items() if b == rank}
            transfers.append((number, sends, Transfer(transport, "many", sends, counts, torch.empty(0, dtype=dtype))))
            if order == "at once":
                wrong += finish(*transfers.pop(), plan, rank)
        if order == "backwards":
            transfers.reverse()
        for transfer in transfers:
            wrong += finish(*transfer, plan, rank)
        torch.distributed.barrier(transport.group)
        boxes = list(paths.mail.outboxes.values()) if paths.mail else []
        for box in boxes:
            box.collect()
        return wrong, max([len(b.slots) for b in boxes], default=0), sum(len(b.given_up) for b in boxes)


def finish(number: int, sends: dict, transfer: Transfer, plan: list, rank: int) -> int:
    """How many buffers of a transfer came out wrong; the senders overwrite theirs as soon as they may."""
    arrived = transfer.wait()
    for buffer in sends.values():
        buffer.zero_()
    dtype = TYPES[number % len(TYPES)]
    return sum(
        not torch.equal(arrived[a], message(a, b, number, n, dtype)) or arrived[a].dtype != dtype
        for (a, b), n in plan[number].items()
        if b == rank
    )


@pytest.mark.parametrize("way", ["mailbox", "staging"])
@pytest.mark.parametrize("order", ["forwards", "backwards", "at once"])
def test_many_messages_before_any_is_read(way: str, order: str) -> None:
    for world in (2, 3):
        for wrong, _, left in run_on(world, many, way, order, 30, 3000):
            assert wrong == 0
            assert left == 0


def test_a_rank_that_keeps_pace_needs_few_slots() -> None:
    for wrong, slots, left in run_on(2, many, "mailbox", "at once", 60, 3000):
        assert (wrong, left) == (0, 0)
        assert slots <= 8


def growing(limit: int) -> tuple[int, int, int]:
    """Messages that grow, some beyond the largest slot that is kept."""
    before, mailbox.LARGEST = mailbox.LARGEST, limit
    try:
        wrong, slots, left = many("mailbox", "at once", 25, 200_000)
        return wrong, slots, left
    finally:
        mailbox.LARGEST = before


def test_slots_grow_and_huge_ones_are_given_up() -> None:
    for world in (2, 3):
        for wrong, slots, left in run_on(world, growing, 2**18):
            assert (wrong, left) == (0, 0)
            assert slots <= 8


def lawful(way: str, spatial: tuple[int, int]) -> tuple[float, int, int]:
    """A small net's largest difference from plain torch, and what its messages count."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(3, 2, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 5))
    with travelling(way) as (transport, _), transport.record() as record:
        found = compare(net.double(), [image(2, 3, 21, 17)], Grid(spatial))
    return max(found.values()), record.messages, record.bytes


def test_the_law_holds_forward_and_backward() -> None:
    for world, spatial in ((2, (2, 1)), (3, (1, 3))):
        counts = []
        for way in ("mailbox", "staging", "resting"):
            found = run_on(world, lawful, way, spatial)
            assert max(gap for gap, _, _ in found) < 1e-10
            counts.append([rest for _, *rest in found])
        assert counts[0] == counts[1]


def mixed() -> list[bool]:
    """A message that waits for its copy in host memory, and one behind it that could be sent at once."""
    rank, data = torch.distributed.get_rank(), torch.arange(100)
    with travelling("staging") as (transport, paths):
        staged = Transfer(transport, "staged", {1 - rank: data}, {1 - rank: 100}, data)
        del transport.paths["cpu"]
        direct = Transfer(transport, "direct", {1 - rank: -data}, {1 - rank: 100}, data)
        second, first = direct.wait()[1 - rank], staged.wait()[1 - rank]
        path_choice.use(transport, paths)
    return [torch.equal(first, data), torch.equal(second, -data)]


def test_no_message_overtakes_another() -> None:
    assert run_on(2, mixed) == [[True, True]] * 2


def queues(way: str) -> tuple[int, int, bool]:
    """Messages to every peer, some left until their copy is complete, all sent before any is awaited."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    others, wrong = [p for p in range(world) if p != rank], 0
    with travelling(way) as (transport, _), transport.record() as record:
        channels = Channels(transport)
        for step in range(2):
            channels.begin()
            posted = []
            for number in range(step, step + 12):
                size, dtype = 1 + 500 * number, TYPES[number % len(TYPES)]
                for peer in others:
                    channels.send(f"message {number}", peer, message(rank, peer, number, size, dtype))
                    like = torch.empty(0, dtype=dtype)
                    posted.append((peer, number, channels.post(f"message {number}", peer, size, like)))
            for peer, number, transfer in reversed(posted):
                expected = message(peer, rank, number, 1 + 500 * number, TYPES[number % len(TYPES)])
                wrong += not torch.equal(channels.wait(transfer), expected)
            channels.finish()
    sizes = [message(0, 1, n, 1 + 500 * n, TYPES[n % len(TYPES)]).nbytes for s in range(2) for n in range(s, s + 12)]
    counted = (record.messages, record.bytes) == (len(others) * len(sizes), len(others) * sum(sizes))
    return wrong, len(channels.leaving), counted


@pytest.mark.parametrize("way", ["mailbox", "staging", "resting"])
def test_queues_between_pairs_of_ranks(way: str) -> None:
    for world in (2, 3):
        assert run_on(world, queues, way) == [(0, 0, True)] * world


def resting() -> tuple[bool, bool, bool]:
    """Whether a source is released before its message is read, whether memory is taken ahead, and the values."""
    rank = torch.distributed.get_rank()
    with travelling("resting") as (transport, _):
        channels = Channels(transport)
        channels.begin()
        data = message(rank, 1 - rank, 0, 1000, torch.float32)
        storage = StorageWeakRef(data.untyped_storage())
        channels.send("a message", 1 - rank, data)
        del data
        end = time.monotonic() + 30
        while not storage.expired() and time.monotonic() < end:  # the copy to the host may be late
            channels.collect()
        released = storage.expired()
        posted = channels.post("a message", 1 - rank, 1000, torch.empty(0))
        (incoming,) = posted.awaited.values()
        assert isinstance(incoming, StagedIn)
        ahead = incoming.target is not None
        equal = torch.equal(channels.wait(posted), message(1 - rank, rank, 0, 1000, torch.float32))
        channels.finish()
    return released, ahead, equal


def test_messages_that_rest_on_the_host_take_no_memory_of_the_device() -> None:
    assert run_on(2, resting) == [(True, False, True)] * 2


def caught() -> tuple[int, int, int]:
    """Work beside a transfer raises on all ranks, who go on: nobody reads its messages, and their slots go free."""
    rank = torch.distributed.get_rank()
    with travelling("mailbox") as (transport, paths):
        for number in range(12):
            data = message(rank, 1 - rank, number, 500, torch.float64)
            with (
                pytest.raises(ZeroDivisionError),
                Transfer(transport, "caught", {1 - rank: data}, {1 - rank: 500}, data),
            ):
                raise ZeroDivisionError
        data = message(rank, 1 - rank, 99, 500, torch.float64)
        arrived = Transfer(transport, "after", {1 - rank: data}, {1 - rank: 500}, data).wait()[1 - rank]
        torch.distributed.barrier(transport.group)
        box = paths.mail.outboxes[1 - rank]
        return int((arrived != message(1 - rank, rank, 99, 500, torch.float64)).sum()), len(box.slots), box.messages


def test_unwanted_messages_free_their_slots() -> None:
    for wrong, slots, messages in run_on(2, caught):
        assert wrong == 0
        assert messages == 14  # the greeting too
        assert slots <= 3


def out_of_memory() -> int:
    """All ranks run out of memory in a transfer, catch that, and go on; a message of it was put, and none was sent."""
    rank, wrong = torch.distributed.get_rank(), 0
    others = [p for p in range(3) if p != rank]
    with travelling("mailbox") as (transport, paths):
        for number in range(6):
            size = 10_000 * 2**number  # more than any slot so far holds
            sends = {p: message(rank, p, number, size, torch.float64) for p in others}
            counts, like = dict.fromkeys(others, size), sends[others[0]]
            if number % 2:
                last = paths.ways[others[1]].outbox
                memory, last.memory = last.memory, None
                with pytest.raises(AttributeError):
                    Transfer(transport, "too large", sends, counts, like)
                last.memory = memory
            arrived = Transfer(transport, "after", sends, counts, like).wait()
            wrong += sum(not torch.equal(arrived[p], message(p, rank, number, size, torch.float64)) for p in others)
    return wrong


def test_ranks_that_run_out_of_memory_together_may_go_on() -> None:
    assert run_on(3, out_of_memory) == [0, 0, 0]


class Stubborn(LateMemory):
    """Memory that one rank cannot open."""

    def open(self, handle: bytes, brief: bool) -> torch.Tensor:
        if torch.distributed.get_rank() == 1:
            raise OSError("no IPC here")
        return super().open(handle, brief)


def refused() -> str:
    group, lanes = mural.init(data=3).transport.group, LateLanes()
    try:
        introduced(group, range(3), lanes, Stubborn(lanes))
    except Refused as error:
        return str(error)
    return "worked"


def test_mailboxes_that_fail_on_one_rank_are_refused_on_all() -> None:
    assert run_on(3, refused) == ["on rank 1: OSError: no IPC here"] * 3


def partial_circle() -> tuple[str, int]:
    """Ranks 0 and 2 share memory, rank 1 does not."""
    mesh, lanes = mural.init(data=3), LateLanes()
    circle = [1] if mesh.rank == 1 else [0, 2]
    mail = introduced(mesh.transport.group, circle, lanes, LateMemory(lanes))
    staged = Paths(
        lanes,
        {p: StagedPath(host_staging.Arena(lanes, host_staging.PageableMemory)) for p in range(3) if p != mesh.rank},
        "staged",
    )
    mailed = path_choice.mailed_paths(staged, mail) if mail else None
    path_choice.compare(mesh.transport, staged, mailed, forced=True)
    try:
        data = torch.arange(50_000) + mesh.rank
        others = [p for p in range(3) if p != mesh.rank]
        found = Transfer(
            mesh.transport, "mixed", dict.fromkeys(others, data), dict.fromkeys(others, 50_000), data
        ).wait()
        words = str(mesh)
    finally:
        del mesh.transport.paths["cpu"]
    return words, sum(int((found[p] - data != p - mesh.rank).sum()) for p in others)


def test_pairs_that_share_no_memory_are_staged() -> None:
    (first, a), (second, b), (third, c) = run_on(3, partial_circle)
    assert (a, b, c) == (0, 0, 0)
    assert (
        "through CUDA IPC to 1 of 2 ranks, else staged through pinned memory (as MURAL_GPU_PATH says; 64 KiB in"
        in first
    )
    assert "as MURAL_GPU_PATH says" in third
    assert "; staged)" in second or ", staged)" in second


def wrong_variable() -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MURAL_GPU_PATH", "pigeon" if torch.distributed.get_rank() else "ipc")
        try:
            path_choice.settle(mural.init(data=2).transport)
        except mural.PlanError as error:
            return str(error)
    return ""


def test_the_variable_is_the_same_everywhere() -> None:
    for text in run_on(2, wrong_variable):
        assert "MURAL_GPU_PATH is ['ipc', 'pigeon'] on the ranks" in text


def pair(places: int = 8) -> tuple[Outbox, Inbox]:
    """An outbox and the inbox at its other end, in one process."""
    lanes = LateLanes(0.0)
    memory, handles = LateMemory(lanes), dict[int, bytes]()
    reads = memoryview(bytearray(8 * places)).cast("q")
    written, read = memory.marks(mailbox.MARKS), memory.marks(mailbox.MARKS)
    outbox = Outbox(lanes, memory, reads, written, read, handles.__setitem__, places=list(range(places)))
    return outbox, Inbox(0, lanes, memory, reads, written, read, handles.__getitem__)


def test_a_header_of_zeros_is_no_message() -> None:
    _, inbox = pair()
    with pytest.raises(mural.PeerError, match="no longer run the same"):
        inbox.take(MessageHeader.wire(), 1, torch.empty(0, dtype=torch.uint8), None)


def test_a_message_of_another_size_is_refused() -> None:
    outbox, inbox = pair()
    wire, _ = outbox.put(torch.ones(10, dtype=torch.uint8), 1, None)
    with pytest.raises(mural.PeerError, match="no longer run the same"):
        inbox.take(wire, 1, torch.empty(11, dtype=torch.uint8), None)


def test_places_run_out_with_a_clear_error_and_come_back() -> None:
    outbox, inbox = pair(places=5)
    data = torch.ones(mailbox.SMALLEST, dtype=torch.uint8)
    wires = [outbox.put(data, 1, None)[0] for _ in range(5)]
    with pytest.raises(mural.PeerError, match="unread"):
        outbox.put(data, 1, None)
    for wire in wires:
        inbox.lanes.finish(inbox.take(wire, 1, torch.empty_like(data), None))
    # Larger messages take the place of the smaller slots, one by one.
    for size in range(1, 9):
        larger = torch.full((size * 2 * mailbox.SMALLEST,), size, dtype=torch.uint8)
        into = torch.empty_like(larger)
        wire, _ = outbox.put(larger, 1, None)
        inbox.lanes.finish(inbox.take(wire, 1, into, None))
        assert torch.equal(into, larger)
    assert len(outbox.slots) == 5
    assert len(outbox.given_up) == 1  # until the next message
    assert len(inbox.opened) == len(outbox.slots)


def test_buffers_are_used_again_after_their_copy() -> None:
    lanes = LateLanes(0.0)
    arena = host_staging.Arena(lanes, host_staging.PageableMemory)
    first = arena.take(10_000)
    moment = lanes.copy(torch.empty(10), torch.empty(10), True, ())
    arena.give(first, moment)
    lanes.finish(moment)
    assert arena.take(9_000) is first
    assert arena.take(9_000) is not first
    assert first.memory.nbytes == 16_384  # 12,500 in whole pages, where torch's own would be rounded to a power of two


def lone_error(way: str) -> str:
    """Rank 1 raises while rank 0 waits for a message that never comes."""
    with travelling(way):
        x = Grid((torch.distributed.get_world_size(), 1)).shard(image(1, 3, 9, 8))
        begun = time.perf_counter()
        try:
            if x.mesh.rank == 1:
                torch.fft.fft2(x)
            for _ in range(3):
                nn.functional.conv2d(x, image(3, 3, 3, 3), padding=1)
        except mural.MuralError as error:
            return f"{type(error).__name__} after {time.perf_counter() - begun:.0f} s: {error}"
        return "no error"


@pytest.mark.parametrize(("world", "way"), [(2, "mailbox"), (3, "staging")])
def test_a_rank_that_raises_alone_ends_the_wait(world: int, way: str) -> None:
    first, second, *_ = run_on(world, lone_error, way)
    restart(world)
    assert second.startswith("UnsupportedOp")
    assert first.startswith("PeerError")
    assert "rank 1 raised UnsupportedOp" in first


def test_messages_choose_their_way_by_their_bytes_on_both_sides() -> None:
    class Noting:
        def __init__(self, name: str):
            self.name = name

        def send(self, buffer: torch.Tensor, turn: Any) -> Any:
            return self.name, buffer.nbytes

        def receive(self, count: int, like: torch.Tensor) -> Any:
            return self.name, count * like.element_size()

    way = Sized(Noting("small"), Noting("large"), 64)  # type: ignore[arg-type]
    for count, dtype in ((15, torch.float32), (16, torch.float32), (7, torch.float64), (63, torch.uint8)):
        buffer = torch.zeros(count, dtype=dtype)
        sent, received = way.send(buffer, None), way.receive(count, buffer)  # type: ignore[arg-type]
        assert sent == received == ("large" if buffer.nbytes >= 64 else "small", buffer.nbytes)
