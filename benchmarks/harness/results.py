"""Results: one line of JSON for each measurement, written as soon as it is there; many files become one.

A file begins with a `header` (machine, versions, command). Nothing in it names a folder of the machine.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
Record = dict[str, Any]


def said(command: list[str]) -> str:
    """What a program printed; nothing if it is not there, or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def machine() -> dict[str, Any]:
    """What this runs on, as far as it can be seen without torch."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    used = said(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]).split()
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        "driver": said(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]),
        "device_used_before": int(used[0]) * 2**20 if used and used[0].isdigit() else 0,
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", os.environ.get("PYTORCH_ALLOC_CONF", "default")),
        "commit": said(["git", "-C", str(HERE), "describe", "--always", "--dirty"]),
    }


def command_line(name: str, arguments: list[str]) -> str:
    """The command as a reader would type it, without folders of this machine."""
    return scrubbed(shlex.join(["mural", "bench", name, *arguments]))


def scrubbed(text: str) -> str:
    """A text without folders of this machine; names with slashes stay.

    >>> scrubbed("File /home/me/torch/nn/conv.py broke, --output=/tmp/x.json --only unet/plain/bf16")
    'File conv.py broke, --output=x.json --only unet/plain/bf16'
    """
    return re.sub(r"(?<![\w.*+~-])(?:/[\w.+~-]+)+/([\w.+~-]+)", r"\1", text)


class Log:
    """A file of results that grows by one line at a time, and what was known before; prints what it writes."""

    def __init__(
        self, benchmark: str, path: Path | None, known: Iterable[Path], minutes: float, command: str = ""
    ) -> None:
        """The command is that of `mural bench`, unless it is given."""
        self.path, self.begin, self.minutes = path, time.monotonic(), minutes
        self.records = [record for file in known for record in read(file)]
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.records += read(path) if path.is_file() else []
        self.machine = machine()
        self.facts: Record = {}
        date = datetime.now(UTC).isoformat(timespec="seconds")
        command = command or command_line(benchmark, sys.argv[1:])
        self.write("header", command=command, date=date, machine=self.machine)

    def write(self, kind: str, **values: Any) -> Record:
        """Append one record."""
        record = {"kind": kind, **rounded(values), "at": round(time.monotonic() - self.begin, 1)}
        self.records.append(record)
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(record) + "\n")
        return record

    def versions(self, facts: Record) -> None:
        """Write what the processes of this run run with, once."""
        if facts != self.facts:
            self.facts = facts
            self.write("versions", **facts)

    def find(self, kind: str, **values: Any) -> Record | None:
        """The last record of that kind with these values."""
        return next((r for r in reversed(self.records) if matches(r, {"kind": kind, **values})), None)

    @property
    def left(self) -> float:
        """Seconds that are left of the time that was given."""
        return 60 * self.minutes - (time.monotonic() - self.begin)

    def say(self, text: str) -> None:
        """Print a line with the time."""
        print(f"{time.monotonic() - self.begin:6.0f} s  {text}", flush=True)


def matches(record: Record, values: Record) -> bool:
    """Whether a record has these values."""
    return all(record.get(key) == value for key, value in values.items())


def read(path: Path) -> list[Record]:
    """The records of a file: one a line, or one JSON document with a list of them; a broken last line is left out."""
    text = path.read_text()
    if path.suffix == ".json":
        return json.loads(text)["records"]
    return list(lines_of(text))


def lines_of(text: str) -> Iterator[Record]:
    """The records of the lines that are whole.

    >>> list(lines_of('{"kind": "limit"}\\n{"kind": "meas'))
    [{'kind': 'limit'}]
    """
    for line in text.splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def identity(record: Record) -> str:
    """What a record is about: a later record of the same replaces it."""
    about = {k: record[k] for k in ("kind", "case", "net", "way", "side", "cap", "name", "date") if k in record}
    return json.dumps(about, sort_keys=True)


def collect(sources: Iterable[Path], target: Path) -> int:
    """The number of records in the published file, made of all sources; the later of two about the same counts."""
    found: dict[str, Record] = {}
    for source in sources:
        for record in read(source):
            if record["kind"] != "skipped":
                found.pop(identity(record), None)
                found[identity(record)] = record
    target.parent.mkdir(parents=True, exist_ok=True)
    rows = ",\n  ".join(json.dumps(record) for record in found.values())
    target.write_text(f'{{\n "records": [\n  {rows}\n ]\n}}\n')
    return len(found)


def rounded(value: Any) -> Any:
    """The same values with six significant digits."""
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(v) for v in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
