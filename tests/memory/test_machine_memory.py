"""How much memory is free: on a machine, and in a container."""

from pathlib import Path

import pytest

from mural.memory.machine_memory import UNKNOWN, MachineMemory, machine_memory

MEMINFO = "MemTotal: 2000 kB\nMemFree: 100 kB\nMemAvailable: 1000 kB\nHugePages_Total: 0\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, MachineMemory(UNKNOWN, UNKNOWN)),
        ({"meminfo": MEMINFO}, MachineMemory(2048000, 1024000)),
        ({"meminfo": MEMINFO, "memory.max": "max\n", "memory.current": "5\n"}, MachineMemory(2048000, 1024000)),
        ({"meminfo": MEMINFO, "memory.max": "900\n", "memory.current": "500\n"}, MachineMemory(2048000, 400, 900)),
        (
            {
                "meminfo": MEMINFO, "memory.max": "900\n", "memory.current": "500\n",
                "memory.stat": "anon 300\ninactive_file 150\n",
            },
            MachineMemory(2048000, 550, 900),
        ),
        (
            {
                "meminfo": MEMINFO, "memory/memory.limit_in_bytes": "800", "memory/memory.usage_in_bytes": "900",
                "memory/memory.stat": "total_inactive_file 50",
            },
            MachineMemory(2048000, 0, 800),
        ),
        (
            {
                "meminfo": MEMINFO, "memory/memory.limit_in_bytes": "9223372036854771712",
                "memory/memory.usage_in_bytes": "9",
            },
            MachineMemory(2048000, 1024000),
        ),
    ],
)  # fmt: skip
def test_free_memory(tmp_path: Path, files: dict[str, str], expected: MachineMemory) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert machine_memory(tmp_path, tmp_path) == expected


def test_this_machine() -> None:
    found = machine_memory()
    assert 0 < found.free <= found.total
