"""The backend over MPI under real mpirun: every call, the law, training, and the end of a run in which a rank fails."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from mpi_checks import CHECKS, PLANS, SLOW

from mural.comm import mpi
from mural.comm.mpi import backend, buffers, installation
from mural.errors import PlanError

HERE = Path(__file__).parent
RANKS = 2


def mpirun() -> str | None:
    """The mpirun beside this Python, or the system's."""
    beside = Path(sys.executable).parent / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun")


def missing() -> str:
    return mpi.available() or ("" if mpirun() else "there is no mpirun")


needs_mpi = pytest.mark.skipif(bool(missing()), reason=f"MPI: {missing()}")


def launch(ranks: int, script: str, *args: str, timeout: float = 150) -> subprocess.CompletedProcess[str]:
    """Run a script of this folder on some ranks of this machine; all are ended after the timeout."""
    root = HERE.parents[1]
    folders = ("src", "tests", "benchmarks")
    paths = [*(str(root / name) for name in folders), str(HERE), str(HERE.parent / "collectives")]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(installation.LAUNCHER_PREFIXES)
    }
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    many = ["--oversubscribe", "--bind-to", "none"]
    root_too = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    command = [mpirun() or "mpirun", "-n", str(ranks), *root_too, *many, sys.executable, str(HERE / script), *args]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 15)  # mpirun ends its ranks
        out, err = process.communicate(timeout=20)
        pytest.fail(f"{script} {args} did not end in {timeout} s\n{out}\n{err}")
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def checked(folder: Path, ranks: int, which: str) -> list[dict[str, str]]:
    """What every check raised on each rank of one run."""
    run = launch(ranks, "mpi_checks.py", str(folder), which)
    files = [folder / f"{rank}.json" for rank in range(ranks)]
    assert all(file.exists() for file in files), run.stdout + run.stderr
    assert run.returncode == 0, run.stdout + run.stderr
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """The results of one run, for all checks."""
    return checked(tmp_path_factory.mktemp("mpi"), RANKS, "fast")


@needs_mpi
@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_on_ranks(name: str, found: list[dict[str, str]]) -> None:
    for rank, results in enumerate(found):
        assert not results.get(name, "not run"), f"rank {rank}: {results.get(name, 'not run')}"


@needs_mpi
@pytest.mark.slow
def test_on_four_ranks(tmp_path: Path) -> None:
    for results in checked(tmp_path, 4, "fast"):
        assert results == {check.__name__: "" for check in CHECKS}


@needs_mpi
@pytest.mark.slow
def test_data_parallel_training_by_torch(tmp_path: Path) -> None:
    for results in checked(tmp_path, 2, "slow"):
        assert results == {check.__name__: "" for check in SLOW}


@needs_mpi
@pytest.mark.slow
def test_plans_on_two_ranks(tmp_path: Path) -> None:
    for results in checked(tmp_path, 2, "plans"):
        assert results == {check.__name__: "" for check in PLANS}


@needs_mpi
@pytest.mark.parametrize(
    ("how", "said", "met"),
    [
        pytest.param("raise", "no such file: image.tif", True, marks=pytest.mark.slow),
        pytest.param("exit", "rank 1, which has left the run", True, marks=pytest.mark.slow),
        pytest.param("leave", "rank 1, which has left the run", True, marks=pytest.mark.slow),
        pytest.param("kill", "signal 9", True, marks=pytest.mark.slow),
        pytest.param("early", "before the ranks have met", False, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_fails_alone_ends_all(how: str, said: str, met: bool) -> None:
    begun = time.monotonic()
    run = launch(2, "mpi_failures.py", how)
    assert run.returncode != 0
    assert ("rank 0 met 2 ranks" in run.stdout) is met
    assert "got an answer" not in run.stdout
    assert said in " ".join((run.stdout + run.stderr).split())
    assert time.monotonic() - begun < 60


def test_importing_mural_does_not_load_mpi() -> None:
    code = "import sys, mural; sys.exit('mpi4py' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@needs_mpi
@pytest.mark.slow
def test_asking_does_not_start_mpi() -> None:
    code = "from mural.comm import mpi; print(mpi.available(), mpi.describe(), mpi.loaded()[0].Is_initialized())"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert answer.startswith("None ")
    assert "threads" in answer
    assert "CUDA pointers" in answer
    assert answer.strip().endswith("False")


def test_without_mpi4py_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    assert 'pip install "mural-train[mpi]"' in (mpi.available() or "")
    assert mpi.describe() == "no MPI: mpi4py is not installed"
    installation.library.cache_clear()
    with pytest.raises(PlanError, match=r"pip install \"mural-train\[mpi\]\""):
        mpi.register()


@needs_mpi
@pytest.mark.slow
def test_torchrun_starts_no_mpi() -> None:
    code = (
        "import os, torch.distributed as dist; from mural.comm import mpi; mpi.register();"
        "dist.init_process_group(mpi.NAME, store=dist.HashStore(), rank=0, world_size=2)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert "torchrun starts no MPI" in run.stderr


def test_the_loaded_library_is_found_by_its_file(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text(
        "7f0 r-xp 0 08:01 12   /usr/lib/libmpi.so.40\n7f1 r-xp 0 08:01 13   /usr/lib/libc.so.6\n7f2 rw-p 0 00:00 0\n"
    )
    assert installation.loaded_libraries(maps) == ["/usr/lib/libmpi.so.40"]
    assert installation.loaded_libraries(tmp_path / "none") == []


def test_memory_that_mpi_takes() -> None:
    x = torch.arange(6.0).view(2, 3)
    assert buffers.outgoing(x, direct=False).data_ptr() == x.data_ptr()
    assert buffers.incoming(x, direct=False).data_ptr() == x.data_ptr()
    assert buffers.outgoing(x.t(), direct=False).is_contiguous()
    assert buffers.incoming(x.t(), direct=False).data_ptr() != x.data_ptr()
    assert buffers.summand(x.bfloat16()).dtype == torch.float32
    assert buffers.summand(x).data_ptr() == x.data_ptr()
    assert buffers.summand(x.t()).data_ptr() != x.data_ptr()
    with pytest.raises(buffers.UnsupportedOp, match="dense"):
        buffers.outgoing(torch.eye(3).to_sparse(), direct=False)
    with pytest.raises(buffers.UnsupportedOp, match="float8"):
        buffers.summand(x.to(torch.float8_e4m3fn))


def test_addresses_of_this_host() -> None:
    assert backend.addresses(local=True) == ["127.0.0.1"]
    assert not [address for address in backend.interfaces() if address.startswith("127.")]
    assert set(backend.interfaces()) <= set(backend.addresses(local=False))


def test_only_rank_0s_own_store_will_do() -> None:
    second = timedelta(seconds=1)
    store = dist.TCPStore("127.0.0.1", 0, None, True, second, wait_for_workers=False)
    store.set("mpi/token", "right")
    names = ["no.such.host.invalid", "127.0.0.1"]
    assert backend.reached(names, store.port, "right", second).get("mpi/token") == b"right"
    with pytest.raises(PlanError, match="MASTER_ADDR"):
        backend.reached(names, store.port, "wrong", second)
