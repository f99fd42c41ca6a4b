"""Rounds: every algorithm as a table, and its sums against a float64 sum, in one process."""

from __future__ import annotations

from itertools import chain, pairwise, permutations
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mural.collectives.algorithms import (
    ALGORITHMS,
    all_reduction,
    broadcast,
    butterfly,
    gather_ring,
    halving_doubling,
    parameter_server,
    reduction,
    ring,
    ring_blocking,
    scatter_ring,
    tree,
    two_level,
)
from mural.collectives.ordered import ordered
from mural.collectives.program import BufferPart, RankProgram, program
from mural.collectives.rounds import (
    ChunkSend,
    Collective,
    among,
    by_pair,
    divided,
    joined,
    pipelined,
    simultaneous,
    whole,
)  # fmt: skip
from mural.collectives.simulate import simulate
from mural.errors import PlanError

ROUNDING = {torch.float32: 2.0**-24, torch.float64: 2.0**-53, torch.bfloat16: 2.0**-8}
MOST_RANKS = 9


def table(collective: Collective) -> list[str]:
    """Its rounds, a string each."""
    return [" | ".join(map(str, sends)) for sends in collective.rounds]


# What the files draw, once more ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("collective", "rounds"), [
    (tree(4), ["1→0 +0 | 3→2 +0", "2→0 +0", "0→2 =0", "0→1 =0 | 2→3 =0"]),
    (tree(5), ["1→0 +0", "2→0 +0 | 4→3 +0", "3→0 +0", "0→3 =0", "0→2 =0 | 3→4 =0", "0→1 =0"]),
    (butterfly(4), ["0→1 +0 | 1→0 +0 | 2→3 +0 | 3→2 +0", "0→2 +0 | 2→0 +0 | 1→3 +0 | 3→1 +0"]),
    (butterfly(3), ["1→0 +0", "0→2 +0 | 2→0 +0", "0→1 =0"]),
    (
        halving_doubling(4),
        [
            "0→1 +2 | 0→1 +3 | 1→0 +0 | 1→0 +1 | 2→3 +2 | 2→3 +3 | 3→2 +0 | 3→2 +1",
            "0→2 +1 | 1→3 +3 | 2→0 +0 | 3→1 +2",
            "0→2 =0 | 1→3 =2 | 2→0 =1 | 3→1 =3",
            "0→1 =0 | 0→1 =1 | 1→0 =2 | 1→0 =3 | 2→3 =0 | 2→3 =1 | 3→2 =2 | 3→2 =3",
        ],
    ),
    (halving_doubling(3), ["1→0 +0 | 1→0 +1", "0→2 +1 | 2→0 +0", "0→2 =0 | 2→0 =1", "0→1 =0 | 0→1 =1"]),
    (
        ring(3),
        [
            "0→1 +2 | 1→2 +0 | 2→0 +1",
            "0→1 +1 | 1→2 +2 | 2→0 +0",
            "0→1 =0 | 1→2 =1 | 2→0 =2",
            "0→1 =2 | 1→2 =0 | 2→0 =1",
        ],
    ),
    (ring_blocking(2), ["0→1 +1", "1→0 +0", "0→1 =0", "1→0 =1"]),
    (
        ring_blocking(3),
        [
            *("0→1 +2", "1→2 +0", "2→0 +1", "0→1 +1", "1→2 +2", "2→0 +0"),
            *("0→1 =0", "1→2 =1", "2→0 =2", "0→1 =2", "1→2 =0", "2→0 =1"),
        ],
    ),
    (
        two_level([[0, 1], [2, 3]]),
        [
            "0→1 +0 | 0→1 +1 | 1→0 +0 | 1→0 +1 | 2→3 +0 | 2→3 +1 | 3→2 +0 | 3→2 +1",
            "0→2 +1 | 2→0 +0",
            "0→2 =0 | 2→0 =1",
            "0→1 =0 | 0→1 =1 | 2→3 =0 | 2→3 =1",
        ],
    ),
    (parameter_server(4), ["1→0 +0 | 2→0 +0 | 3→0 +0", "0→1 =0 | 0→2 =0 | 0→3 =0"]),
    (broadcast(3, chunks=3, shape="chain"), ["0→1 =0", "1→2 =0 | 0→1 =1", "1→2 =1 | 0→1 =2", "1→2 =2"]),
    (broadcast(4, root=2), ["2→0 =0", "2→3 =0 | 0→1 =0"]),
    (reduction(4, chunks=2), ["1→0 +0 | 3→2 +0", "2→0 +0 | 1→0 +1 | 3→2 +1", "2→0 +1"]),
    (reduction(3, root=1, shape="chain"), ["0→2 +0", "2→1 +0"]),
    (
        ordered(ring(3)),
        [
            "0→1 +2 | 1→2 3=0 | 2→0 4=1",
            "0→1 4=1 | 0→1 7=4 | 1→2 +2 | 2→0 3=0 | 2→0 6=3 | 1→1 1+4 | 1→1 1+7 | 0→0 0+6 | 0→0 0+3",
            "0→1 =0 | 1→2 =1 | 2→0 =2",
            "0→1 =2 | 1→2 =0 | 2→0 =1",
        ],
    ),
])  # fmt: skip
def test_tables(collective: Collective, rounds: list[str]) -> None:
    assert table(collective) == rounds


@pytest.mark.parametrize("ranks", range(1, MOST_RANKS + 1))
def test_numbers_of_rounds(ranks: int) -> None:
    doublings, fold = ranks.bit_length() - 1, int(ranks & ranks - 1 > 0)
    assert len(tree(ranks).rounds) == 2 * (doublings + fold)
    assert len(butterfly(ranks).rounds) == doublings + 2 * fold
    assert len(halving_doubling(ranks).rounds) == 2 * doublings + 2 * fold
    assert len(ring(ranks).rounds) == 2 * (ranks - 1)
    assert len(broadcast(ranks, chunks=5, shape="chain").rounds) == (ranks - 1 + 4 if ranks > 1 else 0)


def test_a_blocking_ring_never_sends_and_receives_at_once() -> None:
    for ranks in range(2, MOST_RANKS + 1):
        for sends in ring_blocking(ranks).rounds:
            busy = list(chain.from_iterable((s.source, s.destination) for s in sends))
            assert len(busy) == len(set(busy))


# Sums -----------------------------------------------------------------------------------------------------------------


@st.composite
def nodes_of(draw: st.DrawFn) -> list[list[int]]:
    """One to nine ranks, in nodes."""
    ranks = draw(st.permutations(range(draw(st.integers(1, MOST_RANKS)))))
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(ranks) - 1)))))
    bounds = [0, *(c for c in cuts if c < len(ranks)), len(ranks)]
    return [ranks[a:b] for a, b in pairwise(bounds)]


@settings(max_examples=60, deadline=None)
@given(nodes_of(), st.integers(0, 40), st.sampled_from(list(ROUNDING)), st.integers(0, 2**16))
def test_every_algorithm_sums(nodes: list[list[int]], values: int, dtype: torch.dtype, seed: int) -> None:
    """Within the rounding of as many additions as there are, and the same bits on every rank."""
    ranks = sum(map(len, nodes))
    torch.manual_seed(seed)
    brought = [(torch.randn(values, dtype=torch.float64) * 10 ** torch.randn(1).item()).to(dtype) for _ in range(ranks)]
    exact = torch.stack(brought).double()
    bound = ranks * ROUNDING[dtype] * exact.abs().sum(0)
    one_order: set[bytes] = set()
    for name in ALGORITHMS:
        plain = all_reduction(name, nodes)
        for collective in (plain, ordered(plain)):
            found = simulate(collective, brought)
            assert all(torch.equal(each.view(torch.uint8), found[0].view(torch.uint8)) for each in found)
            assert ((found[0].double() - exact.sum(0)).abs() <= bound).all()
        one_order.add(found[0].view(torch.uint8).numpy().tobytes())
    assert len(one_order) == 1


@pytest.mark.parametrize("ranks", range(1, MOST_RANKS + 1))
@pytest.mark.parametrize("name", ALGORITHMS)
def test_each_number_counts_once(name: str, ranks: int) -> None:
    nodes = [list(range(n, min(n + 3, ranks))) for n in range(0, ranks, 3)]
    bits = [[1 << 4 * rank] * 7 for rank in range(ranks)]
    for collective in (all_reduction(name, nodes), ordered(all_reduction(name, nodes))):
        assert simulate(collective, bits) == [[sum(1 << 4 * rank for rank in range(ranks))] * 7] * ranks


def test_order_of_summation() -> None:
    """What each file says, with letters for numbers."""
    for ranks, bracketing in ((4, "((0+1)+(2+3))"), (5, "(((0+1)+2)+(3+4))"), (6, "(((0+1)+(2+3))+(4+5))")):
        for make in (tree, butterfly, halving_doubling):
            assert spelled(make(ranks)) == {bracketing}
            assert ordered(make(ranks)) == make(ranks)
        for make in (ring, ring_blocking, parameter_server):
            assert spelled(ordered(make(ranks))) == {bracketing}
    assert spelled(parameter_server(4)) == {"(((0+1)+2)+3)"}
    assert spelled(ring(3)) == {"(0+(1+2))", "((0+2)+1)", "((0+1)+2)"}
    assert spelled(reduction(3, shape="chain"), 0) == {"(0+(1+2))"}


class Spelled(str):
    """A sum written out; the sum of two is the same in either order, and the one with more brackets comes first."""

    def __add__(self, other: str) -> Spelled:
        def weight(text: str) -> tuple[int, str]:
            return -text.count("("), text.strip("(")

        first, second = sorted((self, other), key=weight) if self.strip("(") > other.strip("(") else (self, other)
        return Spelled(f"({first}+{second})")


def spelled(collective: Collective, rank: int | None = None) -> set[str]:
    """All sums that a collective forms of the ranks' numbers."""
    numbers = [[Spelled(rank)] * collective.chunks for rank in range(collective.ranks)]
    found = simulate(collective, numbers)
    return set(chain.from_iterable(found if rank is None else [found[rank]]))


# Parts ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", range(1, MOST_RANKS + 1))
def test_parts_of_an_all_reduce(ranks: int) -> None:
    numbers = [[rank * 100 + place for place in range(ranks + 2)] for rank in range(ranks)]
    sums = [sum(column) for column in zip(*numbers, strict=True)]
    scattered, bounds = simulate(scatter_ring(ranks), numbers), scatter_ring(ranks).bounds(ranks + 2)
    gathered = simulate(gather_ring(ranks), numbers)
    for rank, (a, b) in enumerate(bounds):
        assert scattered[rank][a:b] == sums[a:b]
        assert all(each[a:b] == numbers[rank][a:b] for each in gathered)
    for root in range(ranks):
        for shape in ("tree", "chain"):
            for chunks in (1, 3):
                assert simulate(broadcast(ranks, root, chunks, shape), numbers) == [numbers[root]] * ranks
                assert simulate(reduction(ranks, root, chunks, shape), numbers)[root] == sums


def test_what_is_refused() -> None:
    with pytest.raises(PlanError, match="'rings' is unknown: choose tree, butterfly"):
        all_reduction("rings", [[0]])
    with pytest.raises(PlanError, match="name each rank from 0 on once"):
        two_level([[0, 1], [1, 2]])
    with pytest.raises(PlanError, match="root=4 is not one of 4 ranks"):
        broadcast(4, root=4)
    with pytest.raises(PlanError, match="shape='star' is unknown: choose tree or chain"):
        reduction(4, shape="star")
    with pytest.raises(PlanError, match="names a rank or chunk that is not there"):
        Collective("wrong", 2, 1, ((ChunkSend(0, 2, 0, True),),))
    with pytest.raises(PlanError, match="to another's place"):
        Collective("wrong", 2, 2, ((ChunkSend(0, 1, 0, True, 3),),))
    with pytest.raises(PlanError, match="each is at least 1"):
        tree(2, chunks=0)
    with pytest.raises(PlanError, match="differ in ranks or chunks"):
        joined("both", tree(2), tree(3))
    with pytest.raises(PlanError, match="has 3 ranks, but"):
        among(tree(3), (0, 1), 4)
    for change in (whole, pipelined):
        with pytest.raises(PlanError, match="has 3 chunks already"):
            change(ring(3), 2)
    with pytest.raises(PlanError, match="bring as many on every rank"):
        simulate(ring(2), [[1, 2], [1]])
    with pytest.raises(PlanError, match="would add the numbers of rank 0 twice"):
        ordered(Collective("twice", 2, 1, ((ChunkSend(0, 1, 0, True),), (ChunkSend(0, 1, 0, True),))))
    with pytest.raises(PlanError, match="order a collective once"):
        ordered(ordered(ring(3)))


@pytest.mark.parametrize("send", [
    ChunkSend(-1, 0, 0, True), ChunkSend(2, 0, 0, True), ChunkSend(0, -1, 0, True), ChunkSend(0, 2, 0, True),
    ChunkSend(0, 1, -1, True), ChunkSend(-2, 1, 0, False), ChunkSend(1, 1, -2, False),
])  # fmt: skip
def test_every_rank_and_chunk_of_a_send_is_there(send: ChunkSend) -> None:
    with pytest.raises(PlanError, match="names a rank or chunk that is not there"):
        Collective("wrong", 2, 1, ((ChunkSend(0, 1, 0, True),), (send,)))


@pytest.mark.parametrize(("ranks", "chunks"), [(0, 1), (1, 0), (-1, 1), (1, -1), (0, 0)])
def test_ranks_and_chunks_are_at_least_one(ranks: int, chunks: int) -> None:
    with pytest.raises(PlanError, match="each is at least 1"):
        Collective("none", ranks, chunks, ())
    assert Collective("one", 1, 1, ()).spares == 0


def test_spare_copies_are_counted_where_they_come_from_and_go_to() -> None:
    def spares(*sends: ChunkSend) -> int:
        return Collective("some", 2, 2, (sends,)).spares

    assert spares(ChunkSend(0, 1, 0, True), ChunkSend(0, 1, 1, False)) == 0
    assert spares(ChunkSend(0, 1, 1, False, 5)) == 2
    assert spares(ChunkSend(1, 1, 5, True, 1), ChunkSend(1, 1, 2, False, 0)) == 2
    assert spares(ChunkSend(1, 1, 3, True, 1)) == 1
    assert str(ChunkSend(1, 0, 3, True, 1)) == "1→0 1+3"
    assert str(ChunkSend(1, 0, 3, False, 0)) == "1→0 0=3"
    assert ChunkSend(1, 0, 3, False, 0).place == 0


def test_values_are_divided_as_equally_as_possible() -> None:
    assert divided(10, 4) == ((0, 3), (3, 6), (6, 8), (8, 10))
    assert divided(0, 3) == ((0, 0), (0, 0), (0, 0))
    assert divided(2, 4) == ((0, 1), (1, 2), (2, 2), (2, 2))
    assert [divided(n, 3)[-1][1] for n in range(9)] == list(range(9))


def test_messages_of_a_round_by_pair() -> None:
    sends = (ChunkSend(0, 1, 0, True), ChunkSend(1, 0, 1, True), ChunkSend(1, 1, 0, True, 0), ChunkSend(0, 1, 1, False))
    assert by_pair(sends) == {(0, 1): [sends[0], sends[3]], (1, 0): [sends[1]]}
    assert [send.local for send in sends] == [False, False, True, False]


def test_collectives_at_the_same_time_may_end_at_different_times() -> None:
    long, short = among(tree(3), (0, 1, 2), 5), among(tree(2), (3, 4), 5)
    assert table(simultaneous("both", (long, short))) == ["1→0 +0 | 4→3 +0", "2→0 +0 | 3→4 =0", "0→2 =0", "0→1 =0"]
    assert str(simultaneous("both", (long, short))).splitlines()[0] == "both: 5 ranks, 1 chunk"


def test_partial_sums_that_are_copied_stay_apart() -> None:
    """Numbers of ranks 0 and 2 are not added before those of 1: they travel side by side, also a second time."""
    copied = Collective("copied", 3, 1, tuple((ChunkSend(a, b, 0, a == 2),) for a, b in ((2, 0), (0, 1), (1, 2))))
    assert table(ordered(copied)) == ["2→0 1=0", "0→1 =0 | 0→1 =1", "1→2 =0 | 1→2 =1"]


@pytest.mark.parametrize("into", [0, 1])
def test_a_send_that_keeps_numbers_apart_is_not_ordered_again(into: int) -> None:
    with pytest.raises(PlanError, match="order a collective once"):
        ordered(Collective("apart", 2, 1, ((ChunkSend(0, 1, 0, True, into),),)))


def test_one_collective_is_joined_to_none() -> None:
    for alone in (joined("one", ring(3)), simultaneous("one", [ring(3)])):
        assert alone == Collective("one", 3, 3, ring(3).rounds)
    assert simultaneous("both", iter([among(ring(2), (1, 0), 4), among(ring(2), (2, 3), 4)])).chunks == 2


def test_members_are_named_once_each() -> None:
    for members in ((0, 0, 1), (0, 1), (0, 1, 2, 3)):
        with pytest.raises(PlanError, match="has 3 ranks, but"):
            among(tree(3), members, 5)
    chunked = among(whole(tree(2), 2), (3, 1), 4)
    assert table(chunked) == ["1→3 +0 | 1→3 +1", "3→1 =0 | 3→1 =1"]


def test_pipelines_of_nothing_and_of_one_round() -> None:
    assert pipelined(Collective("nothing", 2, 1, ()), 3).rounds == ()
    assert table(pipelined(tree(2), 3)) == ["1→0 +0", "0→1 =0 | 1→0 +1", "0→1 =1 | 1→0 +2", "0→1 =2"]
    assert pipelined(tree(2), 1).rounds == tree(2).rounds
    for ranks, root in ((3, 3), (3, -1), (1, 1)):
        with pytest.raises(PlanError, match=f"choose one from 0 to {ranks - 1}"):
            broadcast(ranks, root)
    assert broadcast(1, 0).rounds == ()


# Programs -------------------------------------------------------------------------------------------------------------


def test_a_program_merges_adjacent_chunks() -> None:
    (first, *_) = program(halving_doubling(4), 0, 8).steps
    assert [(m.peer, m.part.start, m.part.stop) for m in first.sends] == [(1, 4, 8)]
    assert [(m.peer, m.part.start, m.part.stop, m.slot) for m in first.receives] == [(1, 0, 4, 0)]


@settings(max_examples=60, deadline=None)
@given(nodes_of(), st.sampled_from(list(ALGORITHMS)), st.booleans(), st.integers(0, 50), st.integers(1, 4))
def test_what_ranks_send_is_what_they_await(
    nodes: list[list[int]], name: str, in_order: bool, values: int, segments: int
) -> None:
    """Between two ranks the messages of one's program are, in order, those of the other's; slots do not overlap."""
    collective = all_reduction(name, nodes)
    collective = ordered(collective) if in_order else collective
    programs = [program(collective, rank, values, segments) for rank in range(collective.ranks)]
    sent: dict[tuple[int, int], list[int]] = {}
    awaited: dict[tuple[int, int], list[int]] = {}
    for rank, found in enumerate(programs):
        for index, step in enumerate(found.steps):
            assert step.ready <= index
            for m in step.sends:
                sent.setdefault((rank, m.peer), []).append(m.part.stop - m.part.start)
            for m in step.receives:
                awaited.setdefault((m.peer, rank), []).append(m.part.stop - m.part.start)
                assert m.slot + m.part.stop - m.part.start <= found.scratch or m.slot < 0
            ahead = found.steps[index : index + found.ahead + 1]
            slots = [(m.slot, m.slot + m.part.stop - m.part.start) for s in ahead for m in s.receives if m.slot >= 0]
            assert all(b <= c for (_, b), (c, _) in pairwise(sorted(slots)))
    assert sent == awaited


@settings(max_examples=60, deadline=None)
@given(nodes_of(), st.sampled_from(list(ALGORITHMS)), st.booleans(), st.integers(1, 40), st.integers(1, 4))
@example([[0, 2, 1, 3]], "two-level", True, 3, 1)
def test_programs_run_ahead_as_far_as_they_may(
    nodes: list[list[int]], name: str, in_order: bool, values: int, segments: int
) -> None:
    """Sends that leave as early as allowed read what they would at their step.

    Receives that are posted as early as allowed, and spoil what is there until they arrive, spoil nothing needed.
    """
    collective = all_reduction(name, nodes)
    interpreted(ordered(collective) if in_order else collective, values, segments)


@pytest.mark.parametrize("cut", [1, 2, 4])
def test_programs_keep_spare_copies_apart(cut: int) -> None:
    """In nodes of any order partial sums travel side by side, and the spare copy of a chunk is no next chunk."""
    for order in permutations(range(4)):
        nodes = [order[:cut], order[cut:]] if cut < 4 else [order]
        interpreted(ordered(two_level(nodes)), 3, 1)


def interpreted(collective: Collective, values: int, segments: int) -> None:
    """Run the programs of all ranks in this process, and compare with the simulation."""
    mine: list[Any] = [torch.randint(0, 1000, (values,)) for _ in range(collective.ranks)]
    interpreters = [Interpreter(program(collective, r, values, segments), m) for r, m in enumerate(mine)]
    post: dict[tuple[int, int], list[torch.Tensor]] = {}
    while any(each.now < len(each.program.steps) for each in interpreters):
        advanced = [each.advance(rank, post) for rank, each in enumerate(interpreters)]
        assert any(advanced), "all wait for each other"
    assert not any(post.values())
    for each, right in zip(interpreters, simulate(collective, mine), strict=True):
        assert torch.equal(each.memory[0], right)


class Interpreter:
    """A rank that runs its program as early as it may, with the others in one process."""

    def __init__(self, found: RankProgram, flat: torch.Tensor):
        self.program, self.now, self.left, self.posted = found, 0, 0, 0
        self.memory = [flat.clone(), *torch.full((found.spares // len(flat), len(flat)), -1)]
        self.sent: dict[tuple[int, int], torch.Tensor] = {}

    def at(self, part: BufferPart) -> torch.Tensor:
        return self.memory[part.spare][part.start : part.stop]

    def advance(self, rank: int, post: dict[tuple[int, int], list[torch.Tensor]]) -> bool:
        """Take the next step if all that it awaits is there."""
        steps = self.program.steps
        if self.now == len(steps):
            return False
        while self.left < len(steps) and steps[self.left].leave <= self.now:
            for number, message in enumerate(steps[self.left].sends):
                self.sent[self.left, number] = self.at(message.part).clone()
                post.setdefault((rank, message.peer), []).append(self.sent[self.left, number])
            self.left += 1
        step = steps[self.now]
        for number, message in enumerate(step.sends):
            assert torch.equal(self.sent[self.now, number], self.at(message.part))
        while self.posted < len(steps) and steps[self.posted].ready <= self.now >= self.posted - self.program.ahead:
            for message in steps[self.posted].receives:
                if message.slot < 0:
                    self.at(message.part).fill_(-(10**6))
            self.posted += 1
        if any(not post.get((message.peer, rank)) for message in step.receives):
            return False
        for message in step.receives:
            (self.at(message.part).add_ if message.reduce else self.at(message.part).copy_)(
                post[message.peer, rank].pop(0)
            )
        for local in step.locals:
            (self.at(local.target).add_ if local.reduce else self.at(local.target).copy_)(self.at(local.source))
        self.now += 1
        return True
