"""Ranks really started: by mural, torchrun, mpirun and by hand; what they listen on, how they end, who is named."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mural
from mural.errors import PeerError, PlanError
from mural.ranks import RankError, attempt, free_port, placement, run_local
from mural.ranks.identity import Placement
from mural.ranks.join import agreed_backend
from mural.ranks.spawn import equipment
from mural.ranks.spawned import Orders, declare, excused
from mural.ranks.store import fresh, host, stay_local

BIN = Path(sys.executable).parent
LISTENING = "0A"


def listening(pid: int) -> set[str]:
    """The local addresses on which a process listens, as /proc writes them."""
    inodes = set[str]()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(entry))
    rows = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()
    ]
    return {row[1] for row in rows if row[3] == LISTENING and f"socket:[{row[9]}]" in inodes}


LOOPBACK = ("0100007F:", "0000000000000000FFFF00000100007F:", "00000000000000000000000001000000:")


def report(rank: int, folder: str) -> dict[str, Any]:
    """Dies on rank 1 at the first attempt; then tells what rank 0 sees."""
    mesh = mural.init(spatial=(2, 1))
    x = mural.shard(torch.rand(1, 3, 16, 16), mesh)
    torch.nn.Conv2d(3, 3, 3, padding=1)(x)  # a message has passed, so that all connections are made
    Path(folder, f"sockets{attempt()}.{rank}").write_text("\n".join(listening(os.getpid())))
    if rank == 1 and attempt() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    return {
        "world": mesh.world,
        "launcher": placement().launcher,
        "attempt": attempt(),
        "local": placement().local_rank,
    }


@pytest.mark.slow
def test_local_ranks_start_again_and_listen_on_loopback_alone(tmp_path: Path) -> None:
    said: list[str] = []
    found = run_local(report, 2, str(tmp_path), restarts=1, say=said.append)
    assert found == {"world": 2, "launcher": "mural", "attempt": 1, "local": 0}
    assert said[0].startswith("starting 2 local ranks over gloo: on the CPU")
    assert "rank 1 (pid " in said[1]
    assert "was ended by SIGKILL" in said[1]
    assert "starting all ranks again: 1 of 1" in said[1]
    addresses = [line for path in tmp_path.glob("sockets*") for line in path.read_text().splitlines()]
    assert len(addresses) >= 4
    assert [a for a in addresses if not a.startswith(LOOPBACK)] == []


def test_the_store_of_a_machine_listens_on_loopback_alone() -> None:
    before = listening(os.getpid())
    store = host("", 0, 0, 5.0, loopback=True)
    assert [a for a in listening(os.getpid()) - before if not a.startswith(LOOPBACK)] == []
    assert len(listening(os.getpid()) - before) == 1
    with pytest.raises(PlanError, match="set MASTER_PORT"):
        host("127.0.0.1", store.port, 1, 5.0, loopback=True)


@pytest.mark.parametrize(
    ("gpus", "backend"),
    [((b"a", b"b"), "nccl"), ((b"a", b"a"), "gloo"), ((b"a", b""), "gloo"), ((b"", b""), "gloo")],
)
def test_ranks_agree_on_a_backend_by_their_gpus(gpus: tuple[bytes, bytes], backend: str) -> None:
    store = dist.HashStore()
    store.set("mural/gpu/1", gpus[1])
    assert agreed_backend(store, Placement(0, 2), gpus[0].decode()) == backend


def test_equipment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert equipment(2, "auto") == ("nccl", 2, "each on a GPU of its own")
    assert equipment(4, "cuda") == ("gloo", 2, "sharing 2 GPUs")
    assert equipment(4, "cpu") == ("gloo", 0, "on the CPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert equipment(4, "auto")[0] == "gloo"
    with pytest.raises(PlanError, match="no GPU"):
        equipment(2, "cuda")
    with pytest.raises(PlanError, match="choose cpu, cuda or auto"):
        equipment(2, "tpu")


def test_local_ranks_are_no_part_of_a_torchrun_around_them() -> None:
    orders = Orders(4, "127.0.0.1:5", "gloo", 0, 1, 3, 10.0, 1)
    environ = {"TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "far", "MASTER_PORT": "1", "RANK": "9", "HOME": "/"}
    declare(environ, 2, orders)
    found = mural.ranks.resolve(environ)
    assert (found.rank, found.world, found.launcher, found.address) == (2, 4, "mural", None)
    assert environ["MURAL_ATTEMPT"] == "3"
    assert environ["HOME"] == "/"


def test_interfaces_that_the_user_chose_stay_outside_of_local_ranks() -> None:
    environ = {"GLOO_SOCKET_IFNAME": "eth7"}
    stay_local(environ)
    assert environ == {"GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": "lo"}
    stay_local(environ, force=True)
    assert environ["GLOO_SOCKET_IFNAME"] == "lo"


def test_consequences_are_told_from_causes() -> None:
    assert excused(PeerError("waiting for rank 1"))
    assert excused(RuntimeError("[…/pair.cc:598] Connection closed by peer [127.0.0.1]:1"))
    assert excused(KeyboardInterrupt())
    assert not excused(ValueError("no good"))


def test_arguments() -> None:
    with pytest.raises(PlanError, match="at least 1 rank"):
        run_local(report, 0)


def test_a_function_of_a_notebook_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks ended with exit code 1, and a traceback of multiprocessing."""

    def work(rank: int) -> None: ...

    monkeypatch.setattr(work, "__module__", "__main__")
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    with pytest.raises(PlanError, match=r"work is defined in a notebook .* `from work import work`"):
        run_local(partial(work), 2)


# ------------------------------------------------------------------------------------------------ slow, each in seconds


def fail(rank: int, how: str) -> None:
    """Rank 1 fails in some way, while rank 0 waits for it."""
    mural.init(spatial=(2, 1))
    if rank == 0:
        dist.barrier()
    elif how == "raise":
        raise ValueError("no good")
    elif how == "exit":
        os._exit(7)
    elif how == "abort":
        os.abort()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise", "rank 1 .* raised:\n\n(.|\n)*ValueError: no good"),
        ("exit", "exit code 7"),
        ("abort", "ended by SIGABRT"),
    ],
)
def test_a_rank_that_fails_is_named(how: str, words: str) -> None:
    with pytest.raises(RankError, match=words) as error:
        run_local(fail, 2, how)
    assert (error.value.rank, error.value.raised) == (1, how == "raise")


SCRIPT = """
    import os, signal, sys, time
    import torch, torch.distributed as dist
    import mural
    from mural.ranks import run_local

    def patient(rank, folder):
        left = []
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, lambda n, _: left.append(n))
        open(f"{folder}/pid{rank}.part", "w").write(str(os.getpid()))
        os.rename(f"{folder}/pid{rank}.part", f"{folder}/pid{rank}")
        while not left:
            time.sleep(0.05)
        open(f"{folder}/saved{rank}", "w").write(str(left[0]))
        return left[0]

    def stubborn(rank, folder):
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        open(f"{folder}/pid{rank}.part", "w").write(str(os.getpid()))
        os.rename(f"{folder}/pid{rank}.part", f"{folder}/pid{rank}")
        time.sleep(600)

    def waiting(rank, folder):
        mural.init(spatial=(2, 1))
        dist.barrier()
        open(f"{folder}/pid{rank}.part", "w").write(str(os.getpid()))
        os.rename(f"{folder}/pid{rank}.part", f"{folder}/pid{rank}")
        if rank == 0:
            dist.barrier()
        time.sleep(600)

    if __name__ == "__main__":
        function = globals()[sys.argv[1]]
        print(run_local(function, 2, sys.argv[2], grace=float(sys.argv[3])), flush=True)
"""


def parent_of(function: str, folder: Path, grace: float = 60.0) -> tuple[subprocess.Popen[str], list[int]]:
    """A process that started two local ranks, and their pids."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    parent = subprocess.Popen(
        [sys.executable, str(script), function, str(folder), str(grace)], stdout=subprocess.PIPE, text=True
    )
    paths = [folder / f"pid{rank}" for rank in range(2)]
    wait_until(lambda: all(path.exists() for path in paths), 120)
    return parent, [int(path.read_text()) for path in paths]


def wait_until(true: Any, seconds: float) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, f"not in {seconds} s"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_signals_reach_the_ranks_which_save_and_leave(number: signal.Signals, tmp_path: Path) -> None:
    parent, pids = parent_of("patient", tmp_path)
    parent.send_signal(number)
    out, _ = parent.communicate(timeout=60)
    assert (parent.returncode, out.strip()) == (0, str(int(number)))
    assert [(tmp_path / f"saved{rank}").read_text() for rank in range(2)] == [str(int(number))] * 2
    assert not any(alive(pid) for pid in pids)


@pytest.mark.slow
def test_ranks_that_do_not_leave_in_time_are_ended(tmp_path: Path) -> None:
    parent, pids = parent_of("stubborn", tmp_path, grace=1.0)
    parent.send_signal(signal.SIGTERM)
    parent.communicate(timeout=30)
    assert parent.returncode == 128 + signal.SIGTERM
    assert not any(alive(pid) for pid in pids)


@pytest.mark.slow
def test_a_second_interrupt_does_not_wait(tmp_path: Path) -> None:
    parent, pids = parent_of("stubborn", tmp_path, grace=600.0)
    parent.send_signal(signal.SIGINT)
    time.sleep(1.0)
    assert parent.poll() is None
    parent.send_signal(signal.SIGINT)
    parent.communicate(timeout=30)
    assert parent.returncode not in (0, None)
    assert not any(alive(pid) for pid in pids)


@pytest.mark.slow
def test_an_interrupt_ends_a_wait_for_a_message(tmp_path: Path) -> None:
    parent, pids = parent_of("waiting", tmp_path, grace=600.0)
    parent.send_signal(signal.SIGINT)
    parent.communicate(timeout=30)  # rank 0 waits inside gloo, where Python does not see the signal
    assert parent.returncode not in (0, None)
    assert not any(alive(pid) for pid in pids)


@pytest.mark.slow
def test_ranks_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    parent, pids = parent_of("stubborn", tmp_path)
    parent.kill()
    parent.communicate(timeout=30)
    wait_until(lambda: not any(alive(pid) for pid in pids), 10)


JOINING = """
    import os, sys
    import torch, torch.distributed as dist
    import mural
    from test_launch import LOOPBACK, listening

    mesh = mural.init(spatial=(2, 1))
    x = mural.shard(torch.arange(32.0).view(1, 1, 8, 4), mesh)
    total = x.sum().item()
    place = mural.ranks.placement()
    sockets = [a for a in listening(os.getpid()) if not a.startswith(LOOPBACK)]
    words = f"{place.launcher.split()[0]} {total} {dist.get_backend()} far={sockets}"
    os.write(1, f"rank {mesh.rank} of {mesh.world} {words}\\n".encode())  # in one piece
"""


def joined(command: list[str], folder: Path, **environ: str) -> list[str]:
    """What the ranks print that a command starts."""
    script = folder / "joining.py"
    script.write_text(textwrap.dedent(JOINING))
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("GLOO_", "NCCL_", "MASTER_"))}
    run = subprocess.Popen(
        [*command, str(script)],
        env=clean | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, messages = run.communicate(timeout=120)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
    assert run.returncode == 0, messages
    return sorted(line for line in out.splitlines() if line.startswith("rank"))


def expected(launcher: str) -> list[str]:
    return [f"rank {rank} of 2 {launcher} 496.0 gloo far=[]" for rank in range(2)]


MPIRUN = [str(BIN / "mpirun"), "--allow-run-as-root", "--oversubscribe", "-n", "2"]


@pytest.mark.slow
def test_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert joined(command, tmp_path) == expected("torchrun")


@pytest.mark.slow
@pytest.mark.skipif(not (BIN / "mpirun").exists(), reason="needs mpirun, of mural-train[mpi]")
def test_mpirun_needs_no_address_on_one_machine(tmp_path: Path) -> None:
    assert joined([*MPIRUN, sys.executable], tmp_path) == expected("mpirun")


@pytest.mark.slow
@pytest.mark.skipif(not (BIN / "mpirun").exists(), reason="needs mpirun, of mural-train[mpi]")
def test_mpi_tells_the_address_of_rank_0_to_several_machines(tmp_path: Path) -> None:
    # The ranks are told that they are alone on their machines.
    alone = "OMPI_COMM_WORLD_LOCAL_SIZE=1 OMPI_COMM_WORLD_LOCAL_RANK=0 exec"
    found = joined([*MPIRUN, "sh", "-c", f'{alone} {sys.executable} "$0"'], tmp_path, GLOO_SOCKET_IFNAME="lo")
    assert [line.split(" far=")[0] for line in found] == [line.split(" far=")[0] for line in expected("mpirun")]


@pytest.mark.slow
def test_srun(tmp_path: Path) -> None:
    """Srun's variables, on processes that a shell starts."""
    port = str(free_port())
    slurm = {"SLURM_JOB_ID": "8", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "0"}
    slurm |= {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "n[1]", "MASTER_PORT": port}
    shell = f'for r in 0 1; do SLURM_PROCID=$r SLURM_LOCALID=$r {sys.executable} "$0" & done; wait'
    assert joined(["sh", "-c", shell], tmp_path, **slurm) == expected("srun")


@pytest.fixture
def two_hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces that reach each other, as two machines do; the first is 10.213.0.1."""
    names = (f"mural-a{os.getpid()}", f"mural-b{os.getpid()}")
    commands = [["netns", "add", name] for name in names]
    commands += [["link", "add", "va", "netns", names[0], "type", "veth", "peer", "name", "vb", "netns", names[1]]]
    for name, device, address in zip(names, ("va", "vb"), ("10.213.0.1/24", "10.213.0.2/24"), strict=True):
        commands += [["-n", name, "addr", "add", address, "dev", device]]
        commands += [["-n", name, "link", "set", interface, "up"] for interface in (device, "lo")]
    try:
        for command in commands:
            if shutil.which("ip") is None or subprocess.run(["ip", *command], capture_output=True).returncode:
                pytest.skip("needs the right to make network namespaces")
        yield names
    finally:
        for name in names:
            if shutil.which("ip") is not None:
                subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.mark.slow
def test_torchrun_on_two_hosts(two_hosts: tuple[str, str], tmp_path: Path) -> None:
    """The name of this host may be a loopback address: gloo would then listen where the other host cannot connect."""
    options = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "10.213.0.1", "--master-port", "29400"]

    def on(number: int) -> list[str]:
        torchrun = [sys.executable, "-m", "torch.distributed.run", *options, "--node-rank", str(number)]
        return joined(["ip", "netns", "exec", two_hosts[number], *torchrun], tmp_path / str(number))

    for number in range(2):
        (tmp_path / str(number)).mkdir()
    with ThreadPoolExecutor(2) as pool:
        found = [line.split(" far=")[0] for lines in pool.map(on, range(2)) for line in lines]
    assert found == [line.split(" far=")[0] for line in expected("torchrun")]


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_an_error_with_the_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(PeerError, match=r"rank 1 of 2 did not meet(.|\n)*set MASTER_ADDR(.|\n)*RANK=1, WORLD_SIZE=2"):
        mural.init(spatial=(2, 1), timeout=2.0)
    assert not dist.is_initialized()


@pytest.mark.slow
def test_a_process_group_that_exists_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")  # half set: not looked at, since a group exists
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=20))
    try:
        assert mural.init().world == 1
        assert placement().launcher == "process group"
        with pytest.raises(PlanError, match="drop backend"):
            mural.init(backend="nccl")
    finally:
        dist.destroy_process_group()


def test_ranks_agree_on_a_part_of_the_store_that_earlier_attempts_did_not_use() -> None:
    """Torchrun's store outlives a restart: gloo once found the addresses of ranks that were gone."""
    store, names = dist.HashStore(), list[str]()
    for _ in range(3):
        with ThreadPoolExecutor(3) as pool:
            parts: list[Any] = list(pool.map(lambda rank: fresh(store, rank, 3, 20.0), range(3)))
        assert not parts[0].check(["key"])
        parts[0].set("key", "value")
        assert [part.get("key") for part in parts] == [b"value"] * 3
        names.append(store.get("mural/name").decode().split()[0])
    assert len(set(names)) == 3
    with pytest.raises(PeerError, match=r"rank 0 of 3 waited 0 s for ranks \[1, 2\]"):
        fresh(store, 0, 3, 0.2)
