"""All-reduce between processes: a run equals the simulation to the bit, and failures end in errors."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mural
from mural.collectives import program
from mural.collectives.algorithms import ALGORITHMS
from mural.collectives.choose import rounds_of
from mural.collectives.simulate import simulate
from mural.comm.groups import leave
from mural.errors import PeerError, PlanError, UnsupportedOp
from ranks import BACKEND, Pool, restart, run_on


def brought(values: int, dtype: torch.dtype, world: int) -> list[torch.Tensor]:
    """What each rank brings, the same list on every rank."""
    made = (torch.Generator().manual_seed(rank) for rank in range(world))
    return [torch.randn(values, dtype=torch.float64, generator=each).to(dtype) for each in made]


def compared(sizes: tuple[int, ...], segment: int) -> list[tuple[Any, ...]]:
    """Cases in which a run differs from the simulation."""
    whole, program.SEGMENT_BYTES = program.SEGMENT_BYTES, segment
    world, rank = dist.get_world_size(), dist.get_rank()
    nodes = ((0,), tuple(range(1, world)))
    different: list[tuple[Any, ...]] = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for values in sizes:
            inputs = brought(values, dtype, world)
            for name in ALGORITHMS:
                for deterministic in (False, True):
                    mine = inputs[rank].clone()
                    found = mural.comm.all_reduce(mine, name, deterministic=deterministic, nodes=nodes)
                    expected = simulate(rounds_of(name, nodes, deterministic), inputs)[rank]
                    if found is not mine or not torch.equal(mine.view(torch.uint8), expected.view(torch.uint8)):
                        different.append((dtype, values, name, deterministic))
    program.SEGMENT_BYTES = whole
    return different


@pytest.mark.parametrize(
    ("world", "sizes"), [(2, (0, 1, 5, 3001)), (3, (2, 1003)), pytest.param(4, (3, 1001), marks=pytest.mark.slow)]
)
def test_a_run_equals_the_simulation(world: int, sizes: tuple[int, ...]) -> None:
    assert run_on(world, compared, sizes, 1024) == [[]] * world


@pytest.mark.slow
@pytest.mark.parametrize("world", [5, 6, 7, 8, 9])
def test_a_run_equals_the_simulation_on_many_ranks(world: int) -> None:
    try:
        assert run_on(world, compared, (1, 10_007), 4096) == [[]] * world
    finally:
        restart(world)


def kinds_of_tensors() -> list[bool]:
    """Tensors that are not a row of floats in memory."""
    world, rank = dist.get_world_size(), dist.get_rank()
    total = sum(range(1, world + 1))
    base = torch.arange(24.0).view(4, 6)
    turned = (base * (rank + 1)).t()
    view = torch.zeros(4, 12)[:, ::2]
    view += base * (rank + 1)
    image = (torch.ones(2, 3, 4, 5) * (rank + 1)).contiguous(memory_format=torch.channels_last)
    number = torch.tensor(rank + 1)
    weight = torch.nn.Parameter(torch.full((3,), float(rank + 1)))
    turning = torch.full((5,), rank + 1j)
    for tensor in (turned, view, image, number, weight, turning.conj()):
        mural.comm.all_reduce(tensor, "ring")
    mean = mural.comm.all_reduce(torch.full((2, 2), rank + 1.0), "butterfly", average=True)
    return [
        torch.equal(turned, (base * total).t()),
        torch.equal(view, base * total),
        bool((image == total).all()) and image.is_contiguous(memory_format=torch.channels_last),
        int(number) == total and number.ndim == 0,
        bool((weight == total).all()) and weight.requires_grad and weight.is_leaf,
        bool((turning == total - world + world * 1j).all()),
        bool((mean == total / world).all()),
    ]


def test_tensors_of_every_kind() -> None:
    for found in run_on(3, kinds_of_tensors):
        assert found == [True] * len(found)


def the_others() -> list[Any]:
    """Parts of an all-reduce, and groups of some ranks."""
    world, rank = dist.get_world_size(), dist.get_rank()
    numbers = torch.arange(float(world * 2)).view(world * 2, 1) + 100 * rank
    gathered = mural.comm.all_gather(torch.tensor([rank, -rank]))
    scattered = mural.comm.reduce_scatter(numbers)
    sent = mural.comm.broadcast(torch.full((5,), float(rank)), root=2, chunks=3, shape="chain")
    summed = mural.comm.reduce(torch.full((5,), float(rank)), root=1, chunks=2)
    groups = [dist.new_group([0, 1]), dist.new_group([2, 1])]
    part = [mural.comm.all_reduce(torch.tensor([10.0**rank]), "ring", group=groups[place]).item()
            for place, ranks in enumerate(([0, 1], [1, 2])) if rank in ranks]  # fmt: skip
    return [gathered.tolist(), scattered.flatten().tolist(), sent.tolist(), summed.tolist(), part]


def test_parts_and_groups() -> None:
    found = run_on(3, the_others)
    for rank, (gathered, scattered, sent, _, _) in enumerate(found):
        assert gathered == [[0, 0], [1, -1], [2, -2]]
        assert scattered == [3 * (2 * rank + n) + 300 for n in range(2)]
        assert sent == [2.0] * 5
    assert found[1][3] == [3.0] * 5
    assert [part for *_, part in found] == [[11.0], [11.0, 110.0], [110.0]]


def unusual() -> list[bool]:
    """Parts of no values, types that are sent but not added, memory that is read alone, and nodes from a generator."""
    world, rank, comm = dist.get_world_size(), dist.get_rank(), mural.comm
    flags = torch.tensor([rank == 0, rank == 1, False])
    eighth, wide = torch.full((3,), 0.5 + rank).to(torch.float8_e5m2), torch.tensor([2**16 - 1 - rank])
    halves: Any = (node for node in ([world - 1], range(world - 1)))
    gathered = [comm.all_gather(each) for each in (flags, eighth, wide.to(torch.uint16), torch.ones(1).expand(5))]
    return [
        comm.reduce_scatter(torch.zeros(2 * world, 0)).shape == (2, 0),
        comm.reduce_scatter(torch.zeros(0, 2, dtype=torch.complex64)).shape == (0, 2),
        gathered[0].tolist() == [[one == 0, one == 1, False] for one in range(world)],
        gathered[1].float()[:, 0].tolist() == [0.5 + one for one in range(world)],
        gathered[2].tolist() == [[2**16 - 1 - one] for one in range(world)],
        gathered[3].shape == (world, 5),
        comm.broadcast(flags, root=1) is flags and flags.tolist() == [False, True, False],
        comm.broadcast(torch.tensor([[True, rank == 0]]).t(), root=0).flatten().tolist() == [True, True],
        comm.all_reduce(torch.ones(3), "two-level", nodes=halves).tolist() == [world] * 3,
    ]


def test_unusual_tensors_and_nodes() -> None:
    for found in run_on(2, unusual):
        assert found == [True] * len(found)


def short_lived() -> list[tuple[int, int]]:
    """The threads that watch and the open files after each group that is used once and destroyed."""
    found: list[tuple[int, int]] = []
    for _ in range(6):
        group = dist.new_group()
        mural.comm.all_reduce(torch.ones(2), "ring", group)
        dist.destroy_process_group(group)
        del group
        threads = sum(thread.name == "mural-alarm" for thread in threading.enumerate())
        found.append((threads, len(os.listdir("/proc/self/fd"))))
    return found


def test_groups_that_are_gone_keep_neither_threads_nor_sockets() -> None:
    for found in run_on(2, short_lived):
        assert {threads for threads, _ in found} == {1}, found  # one for all alarms
        assert found[-1][1] <= found[1][1] + 2, found


def wrong(given: Any) -> Any:
    """A value that the annotations would not let pass."""
    return given


def refused() -> list[tuple[str, str]]:
    """What this rank raises for calls that cannot be, alike on all ranks; then the ranks still agree."""
    calls = [
        lambda: mural.comm.all_reduce(torch.ones(3), "rings"),
        lambda: mural.comm.all_reduce(torch.ones(3, dtype=torch.bool)),
        lambda: mural.comm.all_reduce(torch.ones(3, dtype=torch.int64), average=True),
        lambda: mural.comm.all_reduce(torch.eye(3).to_sparse()),
        lambda: mural.comm.all_reduce(torch.ones(3), "two-level", nodes=[[0], [1, 2]]),
        lambda: mural.comm.reduce_scatter(torch.ones(3)),
        lambda: mural.comm.broadcast(torch.ones(3), root=7),
        lambda: mural.comm.broadcast(torch.ones(3), root=wrong(1.0)),
        lambda: mural.comm.broadcast(torch.ones(3), chunks=wrong(2.0)),
        lambda: mural.comm.all_reduce(torch.ones(3), nodes=[[0, 0]]),
        lambda: mural.comm.all_reduce(torch.ones(3), nodes=wrong([0, 1])),
        lambda: mural.comm.all_reduce(torch.ones(3, dtype=torch.uint16)),
        lambda: mural.comm.reduce(torch.ones(3, dtype=torch.float8_e5m2)),
        lambda: mural.comm.all_reduce(torch.ones(1).expand(5)),
        lambda: mural.comm.broadcast(torch.ones(9).as_strided((4, 3), (2, 1))),
        lambda: mural.comm.all_reduce(torch.ones(3, device="meta")),
    ]
    met: list[tuple[str, str]] = []
    for call in calls:
        with pytest.raises((PlanError, UnsupportedOp)) as caught:
            call()
        met.append((caught.type.__name__, str(caught.value)))
    assert mural.comm.all_reduce(torch.ones(1)).item() == dist.get_world_size()
    return met


def test_what_is_refused_on_all_ranks() -> None:
    for met in run_on(2, refused):
        assert [kind for kind, _ in met] == [
            "PlanError",
            *["UnsupportedOp"] * 3,
            *["PlanError"] * 7,
            *["UnsupportedOp"] * 5,
        ]
        assert met[0][1].startswith("algorithm='rings' is unknown: choose tree, butterfly")


def calls(case: str, odd: bool) -> Any:
    """The sum of ten values; or what is another call on the odd rank, in a way that the case names."""
    ten, comm = torch.ones(10), mural.comm
    match case:
        case "raises":
            return comm.all_reduce(ten.bool() if odd else ten)
        case "size":
            return comm.all_reduce(torch.ones(11) if odd else ten)
        case "empty":
            return comm.all_reduce(ten[:0] if odd else ten)
        case "algorithm":
            return comm.all_reduce(ten, "tree" if odd else "ring")
        case "average" | "deterministic":
            return comm.all_reduce(ten, **{case: odd})
        case "nodes":
            return comm.all_reduce(ten, "two-level", nodes=[[0, 1], [2]] if odd else [[0], [1, 2]])
        case "auto" | "backend":
            return comm.all_reduce(ten, "ring" if odd else case)
        case "auto size":
            return comm.all_reduce(torch.ones(500) if odd else ten, "auto")
        case "root":
            return comm.reduce(ten, root=int(odd))
        case "root of a broadcast":
            return comm.broadcast(ten, root=int(odd))
        case _:
            return comm.broadcast(ten, chunks=1 + odd)


def failing(case: str) -> list[str]:
    """What this rank raises where rank 1 does something else, and in the call after that."""
    mural.comm.all_reduce(torch.ones(10), "auto" if case == "auto size" else "ring")
    said: list[str] = []
    for _ in range(2):
        try:
            calls(case, dist.get_rank() == 1)
            said.append("")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
        if case.startswith(("root", "chunks")):  # a rank that missed nothing is done: it finds out in the next call
            case = "the same"
    if case in ("auto", "backend"):
        with pytest.raises(PeerError, match="auto: an earlier call of these ranks failed"):
            mural.comm.explain(torch.ones(10))
    leave(mural.init(data=dist.get_world_size()).transport.group)  # the next test's calls have a group of their own
    return said


needs_tags = pytest.mark.skipif(BACKEND != "gloo", reason="messages of NCCL have no tags")


@needs_tags
@pytest.mark.parametrize(("case", "mine", "theirs"), [
    ("raises", "UnsupportedOp: a sum over ranks in torch.bool", "rank 1 raised UnsupportedOp: a sum"),
    ("size", "PeerError: ring of 11 values", "rank 1 called ring of 11 values of float32, rounds"),
    ("algorithm", "PeerError: tree of 10 values", "rank 1 called tree of 10 values of float32, rounds"),
    ("empty", "", "rank 1 called ring of 0 values of float32, rounds"),
    ("average", "PeerError: ring of 10 values", ", average, but this rank ring of 10 values"),
    ("deterministic", "PeerError: ring of 10 values", ", deterministic, but this rank ring of 10 values"),
])  # fmt: skip
def test_a_rank_that_differs_is_an_error_on_the_others(case: str, mine: str, theirs: str) -> None:
    found = run_on(3, failing, case)
    assert found[1][0].startswith(mine)
    for first, second in (found[0], found[2]):
        assert first.startswith("PeerError: ring of 10 values of float32")
        assert theirs in first
        assert second.startswith("PeerError")
        assert "start the run again" in second


@needs_tags
@pytest.mark.parametrize(("case", "words"), [
    ("auto", "auto for up to 16 values of float32"),
    ("backend", "backend of 10 values of float32"),
    ("auto size", "auto for up to 512 values of float32"),
])  # fmt: skip
def test_calls_of_the_backend_are_compared_too(case: str, words: str) -> None:
    for first, second in run_on(2, failing, case):
        assert first.startswith("PeerError")
        assert words in first
        assert "make the same call on all" in first
        assert "start the run again" in second


@needs_tags
@pytest.mark.parametrize(("case", "theirs", "mine"), [
    ("nodes", "two-level of 10 values of float32, rounds", "two-level of 10 values of float32, rounds"),
    ("root", "reduce by tree of 10 values of float32, rounds", ", root=1, chunks=1"),
    ("root of a broadcast", "broadcast by tree of 10 values of float32, rounds", ", root=1, chunks=1"),
    ("chunks", "broadcast by tree of 10 values of float32, rounds", ", root=0, chunks=2"),
])  # fmt: skip
def test_other_rounds_are_found_by_those_who_wait(case: str, theirs: str, mine: str) -> None:
    """A rank that missed nothing is done before it can know, and hears in its next call."""
    found = run_on(3, failing, case)
    for rank, said in enumerate(found):
        assert any(each.startswith("PeerError") for each in said), said
        assert rank != 1 or "make the same call on all" in said[0]
    assert theirs in found[1][0]
    assert mine in found[1][0]


def dying(folder: str, groups: dict[str, Any]) -> None:
    """Rank 1 ends in the middle; the others write down what they raise, by each algorithm in a group of its own."""
    rank = dist.get_rank()
    for name in ("halving-doubling", "auto", "backend"):
        groups[name] = dist.new_group()
        mural.comm.all_reduce(torch.ones(10), "ring", groups[name])
    if rank == 1:
        os._exit(3)
    for name, group in groups.items():
        try:
            for _ in range(3):
                mural.comm.all_reduce(torch.ones(2**20), name, group)
        except PeerError as error:
            Path(folder, f"{name} {rank}").write_text(str(error), encoding="utf-8")


@needs_tags
def test_a_rank_that_dies_is_an_error_on_the_others(tmp_path: Path) -> None:
    pool = Pool(3)
    try:
        for pipe in pool.pipes:
            pipe.send((dying, (str(tmp_path), {})))
        for rank in (0, 2):
            assert pool.pipes[rank].poll(60), "a rank waits for one that is gone"
    finally:
        pool.close()
    for rank in (0, 2):
        for name, words in (("halving-doubling", "of"), ("auto", "for up to"), ("backend", "of")):
            said = (tmp_path / f"{name} {rank}").read_text(encoding="utf-8")
            assert said.startswith(f"{name} {words} 1048576 values of float32")


@pytest.mark.slow
def test_every_algorithm_over_mpi(tmp_path: Path) -> None:
    from test_mpi import launch, missing

    if missing():
        pytest.skip(missing())
    run = launch(3, "mpi_rounds.py", str(tmp_path))
    for rank in range(3):
        file = tmp_path / f"{rank}.json"
        assert file.exists(), run.stdout + run.stderr
        different, said = json.loads(file.read_text(encoding="utf-8"))
        assert different == []
        assert "ring of 11 values of float32" in said
        assert "ring of 10 values of float32" in said
