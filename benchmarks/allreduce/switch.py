"""A network of hosts: network namespaces around a switch whose links have a set delay and bandwidth.

    host 0 ─┐        ┌─ host 2        each link carries so many bytes a second in each direction, one packet after the
            ├─ switch ┤               other, and a packet is under way for the delay between two hosts; nothing is lost
    host 1 ─┘        └─ host 3

The switch is a loop of Python between TUN devices, one in each namespace: kernels without netem can delay no packets
by themselves. Making namespaces and devices takes the rights of root.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import select
import struct
import subprocess
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass

SET_INTERFACE, TUN_WITHOUT_HEADER = 0x400454CA, 0x0001 | 0x1000
MTU = 60_000


@dataclass(frozen=True)
class Host:
    """A network namespace and its device."""

    name: str
    device: str
    address: str

    def command(self, *words: str) -> list[str]:
        """A command that runs on the host."""
        return ["ip", "netns", "exec", self.name, *words]


def ip(*words: str) -> None:
    """Run `ip`; raise with its words if it refuses."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False, timeout=20)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


class Switch(threading.Thread):
    """Forwards packets between devices, after as long as the links take."""

    def __init__(self, files: list[int], delay: float, bandwidth: float):
        super().__init__(daemon=True, name="switch")
        self.files, self.delay, self.bandwidth = files, delay, bandwidth
        self.over = threading.Event()

    def run(self) -> None:
        """Until told to end: take what comes, and pass on what is due."""
        leaves, enters = [0.0] * len(self.files), [0.0] * len(self.files)
        queue: list[tuple[float, int, int, bytes]] = []
        number = 0
        while not self.over.is_set():
            wait = min(max(queue[0][0] - time.monotonic(), 0.0), 0.05) if queue else 0.05
            for file in select.select(self.files, [], [], wait)[0]:
                packet = os.read(file, MTU + 100)
                target = packet[19] - 1 if packet[0] >> 4 == 4 else -1  # the last byte of an IPv4 destination
                if 0 <= target < len(self.files):
                    took, source = len(packet) / self.bandwidth, self.files.index(file)
                    leaves[source] = max(leaves[source], time.monotonic()) + took
                    enters[target] = max(enters[target] + took, leaves[source] + self.delay)
                    number += 1
                    heapq.heappush(queue, (enters[target], number, target, packet))
            while queue and queue[0][0] <= time.monotonic():
                _, _, target, packet = heapq.heappop(queue)
                with contextlib.suppress(BlockingIOError):
                    os.write(self.files[target], packet)


@contextlib.contextmanager
def network(count: int, delay: float, bandwidth: float) -> Generator[list[Host]]:
    """Hosts that reach each other over links of so many bytes a second, and nothing else; they go whatever happens."""
    own, net = os.getpid(), os.getpid() % 250
    hosts = [Host(f"mural-{own}-{n}", f"mt{own % 10**8}-{n}", f"10.214.{net}.{n + 1}") for n in range(count)]
    files: list[int] = []
    switch: Switch | None = None
    try:
        for host in hosts:
            ip("netns", "add", host.name)
            file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            files.append(file)
            fcntl.ioctl(file, SET_INTERFACE, struct.pack("16sH14x", host.device.encode(), TUN_WITHOUT_HEADER))
            ip("link", "set", host.device, "netns", host.name)
            ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.device)
            ip("-n", host.name, "link", "set", host.device, "up", "mtu", str(MTU))
            ip("-n", host.name, "link", "set", "lo", "up")
            # A pause between two calls is no reason to begin slowly again.
            subprocess.run(
                host.command("sh", "-c", "echo 0 > /proc/sys/net/ipv4/tcp_slow_start_after_idle"), check=False
            )
        switch = Switch(files, delay, bandwidth)
        switch.start()
        yield hosts
    finally:
        if switch is not None:
            switch.over.set()
            switch.join(timeout=2.0)
        for file in files:
            os.close(file)
        for host in hosts:
            with contextlib.suppress(OSError):
                ip("netns", "delete", host.name)
