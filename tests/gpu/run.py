"""The law over NCCL: python tests/gpu/run.py, on a machine with one GPU or more; `make test-gpu` calls it.

Ranks get a GPU each where there are enough, else they share. It prints what happened by family and number of ranks,
and fails where a case is not exact, or a family has no cases.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
FOLDERS = (".", "pipeline", "shard", "engine", "comm", "collectives", "federated", "train", "domain", "memory", "gpu",
           "../benchmarks")  # fmt: skip
WORLDS = (2, 4)


@dataclass
class Row:
    """What became of a family's cases on some ranks."""

    family: str
    ranks: int
    cases: int = 0
    exact: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, outcome: float | str, tolerance: float, refused: str) -> None:
        """Count a case."""
        self.cases += 1
        if outcome == refused:
            self.refused += 1
        elif not isinstance(outcome, str) and outcome <= tolerance:
            self.exact += 1
        else:
            self.wrong.append(f"case {self.cases}: {outcome}")

    def __str__(self) -> str:
        done = f"{self.exact} of {self.cases} exact, {self.refused} refused, {self.seconds:.0f} s"
        return "\n    WRONG  ".join([f"{self.ranks} ranks  {self.family}: {done}", *self.wrong])


def run(name: str, world: int) -> Row:
    """A family's cases, one batch after the other."""
    import families
    import laws

    row, begun = Row(name, world), time.monotonic()
    try:
        for outcomes in families.FAMILIES[name](world):
            for outcome in outcomes:
                row.add(outcome, families.TOLERANCE, laws.REFUSED)
            if os.environ.get("MURAL_GPU_VERBOSE"):
                print(f"{world} ranks  {name}: {row.cases} cases, {time.monotonic() - begun:.1f} s", flush=True)
    except Exception:
        row.wrong.append(traceback.format_exc()[-3000:])
    row.seconds = time.monotonic() - begun
    print(row, flush=True)
    return row


def run_here(world: int, names: list[str], out: Path) -> None:
    """All families on so many ranks, one after the other; what is known so far is always in the file."""
    from families import FAMILIES

    rows: list[Row] = []
    for name in FAMILIES:
        if not names or name in names:
            rows.append(run(name, world))
            out.write_text(json.dumps([asdict(row) for row in rows]), encoding="utf-8")


def run_apart(names: list[str]) -> list[Row]:
    """What became of all families: each number of ranks has a process of its own, and they take turns on the GPU."""
    with tempfile.TemporaryDirectory(prefix="mural-gpu-") as folder:
        outs = {world: Path(folder, f"{world}.json") for world in WORLDS}
        children = [
            subprocess.Popen([sys.executable, __file__, "--ranks", str(world), "--out", str(out), *names])
            for world, out in outs.items()
        ]
        for child in children:
            child.wait()
        return [Row(**row) for out in outs.values() if out.exists() for row in json.loads(out.read_text())]


def table(rows: list[Row]) -> str:
    """Families by numbers of ranks, as Markdown."""
    lines = ["| family | ranks | cases | exact | refused | seconds |", "|---|---|---|---|---|---|"]
    order = list(dict.fromkeys(row.family for row in rows))
    for row in sorted(rows, key=lambda row: (order.index(row.family), row.ranks)):
        lines.append(f"| {row.family} | {row.ranks} | {row.cases} | {row.exact} | {row.refused} | {row.seconds:.0f} |")
    return "\n".join(lines)


def main() -> int:
    """The exit code: 0 where every case of every family was exact, or refused by name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", help="the families to run; all by default")
    parser.add_argument("--ranks", type=int, help="run on so many ranks, in this process")
    parser.add_argument("--out", type=Path, help="where to write what became of them; a table if it ends in .md")
    options = parser.parse_args()
    os.environ["MURAL_TEST_BACKEND"] = os.environ.get("MURAL_TEST_BACKEND", "nccl")
    sys.path[:0] = [str(HERE.parent / folder) for folder in FOLDERS]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE.parents[1] / "src"), os.environ.get("PYTHONPATH", "")])
    if options.ranks:
        run_here(options.ranks, options.families, options.out)
        return 0
    import torch

    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        print("test-gpu needs a GPU and a torch with NCCL: this machine has none", file=sys.stderr)
        return 1
    begun = time.monotonic()
    rows = run_apart(options.families)
    gpus, nccl = torch.cuda.device_count(), ".".join(map(str, torch.cuda.nccl.version()))
    about = f"{gpus} × {torch.cuda.get_device_name(0)}, torch {torch.__version__}, NCCL {nccl}"
    report = f"{table(rows)}\n\n{about}, {time.monotonic() - begun:.0f} s"
    print(report, flush=True)
    if options.out is not None:
        options.out.write_text(report + "\n", encoding="utf-8")
    return verdict(rows, options.families)


def verdict(rows: list[Row], names: list[str]) -> int:
    """1 where a family is missing on some ranks, or something was wrong."""
    from families import FAMILIES

    ran = {(row.family, row.ranks) for row in rows if row.cases}
    missing = [f"{n} on {w} ranks" for n in FAMILIES for w in WORLDS if (not names or n in names) and (n, w) not in ran]
    if missing:
        print(f"no cases: {', '.join(missing)}", file=sys.stderr)
    return 1 if missing or any(row.wrong for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
