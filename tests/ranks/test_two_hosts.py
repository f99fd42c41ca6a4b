"""Training between two hosts: two network namespaces with a cable between them, and a launcher in each."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import pytest
from test_mpi import mpirun, needs_mpi

HERE = Path(__file__).parent
SCRIPT = HERE / "two_hosts_training.py"
TIMEOUT = 240.0
PORT = 29471


@dataclass(frozen=True)
class Host:
    """A network namespace with one end of a cable."""

    name: str
    cable: str
    address: str

    def command(self, *words: str) -> list[str]:
        """A command that runs on the host."""
        return ["ip", "netns", "exec", self.name, *words]


def ip(*words: str) -> None:
    """Run `ip`; raise with its words if it refuses."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False, timeout=20)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@pytest.fixture
def hosts() -> Generator[tuple[Host, Host]]:
    """Two hosts that reach each other and nothing else; they go whatever happens."""
    if shutil.which("ip") is None:
        pytest.skip("two hosts need network namespaces, and there is no `ip` here")
    own, net = os.getpid(), os.getpid() % 250
    found = tuple(Host(f"mural-{own}-{i}", f"mu{own % 10**9}-{i}", f"10.213.{net}.{i + 1}") for i in range(2))
    try:
        try:
            for host in found:
                ip("netns", "add", host.name)
            ip("link", "add", found[0].cable, "netns", found[0].name, "type", "veth", "peer", "name", found[1].cable)
            ip("link", "set", found[1].cable, "netns", found[1].name)
            for host in found:
                ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.cable)
                ip("-n", host.name, "link", "set", host.cable, "up")
                ip("-n", host.name, "link", "set", "lo", "up")
        except OSError as error:
            pytest.skip(f"two hosts need network namespaces, and this user may not make them: {error}")
        yield found[0], found[1]
    finally:
        for host in found:
            end_all(host)
            with contextlib.suppress(OSError):
                ip("link", "delete", host.cable)  # where it did not get as far as its host
            with contextlib.suppress(OSError):
                ip("netns", "delete", host.name)


def end_all(host: Host) -> None:
    """End what still runs on a host: launchers start their ranks in sessions of their own."""
    listed = subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, text=True, check=False, timeout=20)
    for number in listed.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(number), signal.SIGKILL)


def environment(host: Host) -> dict[str, str]:
    """The variables of a launcher on a host."""
    root = HERE.parents[1]
    paths = os.pathsep.join([str(root / "src"), str(root / "tests")])
    return os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": host.cable}


def together(commands: list[tuple[Host, list[str]]]) -> list[str]:
    """What commands said that run at the same time; all are ended if one fails or takes too long."""
    running = [
        subprocess.Popen(
            host.command(*words),
            env=environment(host),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for host, words in commands
    ]
    said: list[str] = []
    try:
        said += [process.communicate(timeout=TIMEOUT)[0] for process in running]
    finally:
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(20)
    assert [process.returncode for process in running] == [0] * len(running), "\n".join(said)
    return said


def check(file: Path, hosts: tuple[Host, Host]) -> None:
    """The training ran on both hosts, and gave what one process gives."""
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["interfaces"] == [[host.cable] for host in hosts for _ in range(2)]
    assert found["apart"] < 1e-9
    assert found["losses"] == pytest.approx(found["expected"], rel=1e-10)
    assert found["losses"][-1] != found["losses"][0]


@needs_mpi
@pytest.mark.slow
def test_mpirun_between_two_hosts(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    file, agent = tmp_path / "found.json", tmp_path / "agent"
    # What mpirun takes for ssh: it is given a host and a command.
    cases = " ".join(f"{host.address}) name={host.name};;" for host in hosts)
    agent.write_text(f'#!/bin/sh\ncase "$1" in {cases} esac\nshift\nexec ip netns exec "$name" /bin/sh -c "$*"\n')
    agent.chmod(0o700)
    net = hosts[0].address.rpartition(".")[0] + ".0/24"
    words = [mpirun() or "mpirun", "-n", "4", "--host", ",".join(f"{host.address}:2" for host in hosts)]
    words += ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--prtemca", "plm_ssh_agent", str(agent)]
    words += ["--prtemca", "oob_tcp_if_include", net, "--mca", "btl_tcp_if_include", net]
    words += ["--mca", "btl", "tcp,self"]  # the hosts share /dev/shm, where their ranks would meet by mistake
    together([(hosts[0], [*words, sys.executable, str(SCRIPT), str(file), "mpi"])])
    check(file, hosts)


@pytest.mark.slow
@pytest.mark.parametrize("rendezvous", ["c10d", "static"])
def test_torchrun_between_two_hosts(rendezvous: str, hosts: tuple[Host, Host], tmp_path: Path) -> None:
    file, commands = tmp_path / "found.json", list[tuple[Host, list[str]]]()
    for index, host in enumerate(hosts):
        words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
        words += ["--local-addr", host.address, "--rdzv-backend", rendezvous, "--rdzv-id", "mural"]
        words += ["--rdzv-endpoint", f"{hosts[0].address}:{PORT}", "--node-rank", str(index)]
        if rendezvous == "c10d":
            words += ["--rdzv-conf", f"is_host={1 - index}"]  # the hosts have one name, so it cannot tell them apart
        commands.append((host, [*words, str(SCRIPT), str(file)]))
    together(commands)
    check(file, hosts)
