"""Agreement: one rank's failure, as each of the others hears of it, and what ranks tell each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

import mural
from mural.comm.failure.agree import any_rank, by_rank, gather, said, together
from mural.errors import DataError, PlanError
from ranks import run_on

ERRORS: dict[str, Exception] = {
    "mural's": PlanError("four ranks are too few"),
    "data": DataError("a.tif: it is damaged", "a.tif"),
    "another": OSError(28, "No space left"),
}


def failing(failures: dict[int, str], data: int) -> list[tuple[str, str]]:
    """What this rank raises where some fail, twice: afterwards the ranks can still agree."""
    world = dist.get_world_size()
    mesh = mural.init(spatial=(world // data, 1), data=data)
    met: list[tuple[str, str]] = []
    for kind in ({}, {"kind": DataError}):
        try:
            with together(mesh, "the work", **kind):
                if mesh.rank in failures:
                    raise ERRORS[failures[mesh.rank]]
            met.append(("", ""))
        except Exception as error:
            met.append((type(error).__name__, str(error)))
    return met


@pytest.mark.parametrize(("failures", "kinds", "text"), [
    ({}, ["", ""], ""),
    ({1: "mural's"}, ["PlanError"] * 2, "the work failed on rank 1: four ranks are too few"),
    ({0: "another"}, ["PeerError", "DataError"], "the work failed on rank 0: OSError: [Errno 28] No space left"),
    ({1: "data", 2: "data"}, ["DataError"] * 2, "the work failed on ranks 1, 2: a.tif: it is damaged"),
    ({0: "data", 2: "mural's"}, ["DataError"] * 2, "the work failed on rank 0: a.tif: it is damaged; on rank 2: four"),
])  # fmt: skip
def test_all_ranks_raise_what_one_met(failures: dict[int, str], kinds: list[str], text: str) -> None:
    for rank, met in enumerate(run_on(4, failing, failures, 2)):
        own = ERRORS.get(failures.get(rank, ""))
        assert [kind for kind, _ in met] == (kinds if own is None else [type(own).__name__] * 2)
        assert all(words.startswith(text) if own is None else words == str(own) for _, words in met)


def told(data: int) -> tuple[Any, ...]:
    """What ranks gather on the mesh, and on the meshes of ranks that share an image."""
    world = dist.get_world_size()
    mesh = mural.init(spatial=(world // data, 1), data=data)
    own = "x" * 1000 * mesh.rank
    texts = ["", "all", f"rank {mesh.rank}" if mesh.rank > 1 else ""]
    return (
        [len(text) for text in gather(mesh, own, "lengths").values()],
        list(gather(mesh.alone(), mesh.rank, "ranks").items()),
        gather(mesh.alone(data_only=False), "me", "alone"),
        said(mesh, texts, "texts"),
        any_rank(mesh, mesh.rank == 3, False, True),
        any_rank(mesh.alone(), mesh.rank == 3),
    )


def test_ranks_tell_each_other() -> None:
    for rank, (lengths, near, alone, texts, any_of_all, any_of_near) in enumerate(run_on(4, told, 2)):
        assert lengths == [0, 1000, 2000, 3000]
        assert near == ([(0, 0), (1, 1)] if rank < 2 else [(2, 2), (3, 3)])
        assert alone == {rank: "me"}
        assert texts == ["", "all", "rank 2"]
        assert any_of_all == (True, False, True)
        assert any_of_near == (rank >= 2,)


def test_a_process_without_a_mesh_agrees_with_itself() -> None:
    assert any_rank(None, True, False) == (True, False)
    assert gather(None, "me", "alone") == {0: "me"}
    with pytest.raises(OSError, match="mine"), together(None, "the work"):
        raise OSError("mine")


def test_failures_of_many_ranks_in_words() -> None:
    assert by_rank({0: "a", 1: "b", 3: "a"}, 4) == "on ranks 0, 3: a; on rank 1: b"
    assert by_rank({0: "a", 1: "a"}, 2) == "a"
