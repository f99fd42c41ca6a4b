"""Two CPU ranks of mural beside two ranks without any exchange, one process, and peers: `mural bench peers`.

Writes `results/cpu.json` with every raw time and prints its table; `--page` writes the same numbers into README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import page
from processes import Ranks, WorkerError, running
from rich.console import Console

HERE = Path(__file__).resolve().parent
PEER_PYTHON = HERE / ".venv" / "bin" / "python"
EXACT = 1e-10
RANKS = {"single": 1}
NUMBERS = {
    "pairs": (15, 3, "alternating pairs of steps, plain and mural"),
    "peer-pairs": (5, 2, "pairs of steps, plain and each of the others"),
    "repeats": (5, 1, "fresh processes for each peak of memory"),
    "size": (1024, 128, "rows and columns of the image"),
    "layers": (8, 3, "times (convolution + ReLU)"),
    "warmup": (2, 1, "steps of each variant before the first that counts"),
}
console = Console(width=None if sys.stdout.isatty() else 160)


def arguments() -> argparse.Namespace:
    """The options; --quick is for trying the benchmark out, and writes a file only where --output names one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, (full, quick, what) in NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, help=f"{what} ({full}; with --quick {quick})")
    parser.add_argument("--shardtensor", type=Path, default=PEER_PYTHON, help="python that has nvidia-physicsnemo")
    parser.add_argument("--quick", action="store_true", help="small, few, and no file: to try it out")
    parser.add_argument("--output", type=Path, help="file of the results (results/cpu.json)")
    parser.add_argument("--page", action="store_true", help="only rewrite README.md's tables from that file")
    options = parser.parse_args()
    for name, (full, quick, _) in NUMBERS.items():
        key = name.replace("-", "_")
        if getattr(options, key) is None:
            setattr(options, key, quick if options.quick else full)
        if getattr(options, key) < 1:
            parser.error(f"--{name} must be at least 1, but is {getattr(options, key)}")
    if options.output is None and not options.quick:
        options.output = HERE / "results" / "cpu.json"
    return options


def machine() -> dict[str, Any]:
    """What this runs on."""
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    git = subprocess.run(["git", "-C", str(HERE), "describe", "--always", "--dirty"], capture_output=True, text=True)
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_at_start": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        "commit": git.stdout.strip(),
    }


class Benchmark:
    """The measurements, in order; every answer is kept raw in `results`."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.absent = {} if options.shardtensor.is_file() else {"shardtensor": f"no {options.shardtensor}"}
        self.results: dict[str, Any] = {
            "command": shlex.join(
                ["mural", "bench", "peers", *(a.name if a.is_absolute() else str(a) for a in map(Path, sys.argv[1:]))]
            ),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            # Names alone: a folder of this machine says nothing to a reader.
            "settings": {k: v.name if isinstance(v, Path) else v for k, v in vars(options).items()},
            "versions": {},
            "checks": {},
            "pairs": {},
            "exchange": {},
            "memory": {},
            "not_run": self.absent,
        }

    def ranks(self, variant: str) -> Any:
        """The processes of a variant, for the length of a block."""
        python = str(self.options.shardtensor) if variant == "shardtensor" else sys.executable
        return running(variant, RANKS.get(variant, 2), self.options.size, self.options.layers, python)

    def check(self) -> None:
        """Compare every variant that exchanges with one device; mural must be exact, a peer may be left out."""
        for variant in ("mural", "shardtensor", "dtensor"):
            if variant in self.absent:
                continue
            try:
                with self.ranks(variant) as team:
                    self.results["versions"][variant] = team.ask("hello")[0]["versions"]
                    self.results["checks"][variant] = merged(team.ask("check"))
            except WorkerError as error:
                self.absent[variant] = str(error)
        errors = self.results["checks"].get("mural", self.absent.get("mural"))
        if not is_exact(errors):
            raise SystemExit(f"mural's result is not the single device's, so nothing is measured: {errors}")

    def runnable(self) -> list[str]:
        """The peers whose forward and backward run, right or wrong."""
        checks = self.results["checks"]
        return [v for v in ("shardtensor", "dtensor") if v in checks and not raised(checks[v])]

    def pairs(self, plain: Ranks, variant: str, count: int) -> None:
        """Alternate one step of plain and one of the variant; who goes first alternates too."""
        rows: list[dict[str, Any]] = []
        with self.ranks(variant) as other:
            for _ in range(self.options.warmup):
                plain.ask("time")
                other.ask("time")
            for index in range(count):
                order = [("plain", plain), (variant, other)]
                rows.append({name: team.ask("time") for name, team in order[:: 1 if index % 2 == 0 else -1]})
        self.results["pairs"][variant] = rows

    def time(self) -> None:
        """The times of steps: every variant against plain, which lives through all of it."""
        with self.ranks("plain") as plain:
            if any(hello["mural"] for hello in plain.ask("hello")):
                raise SystemExit("the plain ranks imported mural: they must not")
            for variant in ("mural", "single", *self.runnable()):
                console.log(f"time: plain and {variant}")
                self.pairs(plain, variant, self.options.pairs if variant == "mural" else self.options.peer_pairs)

    def exchange(self) -> None:
        """The times of halo exchanges: bursts of torch RPC and of mural's transport, alternating."""
        console.log("exchange: torch RPC and mural's transport")
        names = ("rpc", "transport")
        with self.ranks("rpc") as by_rpc, self.ranks("transport") as by_transport:
            for team in (by_rpc, by_transport):
                team.ask("time")
            bursts = [(by_rpc.ask("time"), by_transport.ask("time")) for _ in range(self.options.pairs)]
        for index, name in enumerate(names):
            self.results["exchange"][name] = [[rank["seconds"] for rank in burst[index]] for burst in bursts]

    def memory(self) -> None:
        """Peaks of memory above the imports, each in fresh processes, variants alternating."""
        variants = ("plain", "mural", "single", *self.runnable())
        for repeat in range(self.options.repeats):
            console.log(f"memory: repeat {repeat + 1} of {self.options.repeats}")
            for variant in variants:
                with self.ranks(variant) as team:
                    for _ in range(2):
                        team.ask("time")
                    self.results["memory"].setdefault(variant, []).append(team.ask("memory"))


def merged(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """The worst of the ranks' errors; what a rank raised is worse than any number."""
    return {
        part: next((a[part] for a in answers if isinstance(a[part], str)), None) or max(a[part] for a in answers)
        for part in answers[0]
    }


def raised(errors: dict[str, Any]) -> bool:
    """Whether a part of the check raised."""
    return any(isinstance(e, str) for e in errors.values())


def is_exact(errors: Any) -> bool:
    """Whether forward and backward equal one device's."""
    return isinstance(errors, dict) and not raised(errors) and max(errors.values()) <= EXACT


def main() -> None:
    """Measure, print, write; or only write the page."""
    options = arguments()
    if options.page:
        page.rewrite(HERE / "README.md", options.output or HERE / "results" / "cpu.json")
        return
    benchmark = Benchmark(options)
    for measure in (benchmark.check, benchmark.time, benchmark.exchange, benchmark.memory):
        measure()
    page.show(benchmark.results, console)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(page.rounded(benchmark.results), indent=1) + "\n")
        console.print(f"written: {options.output}")


if __name__ == "__main__":
    main()
