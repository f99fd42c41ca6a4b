"""The classic U-Net on one GPU: plain torch, and ranks of mural that share the GPU, each capped at 16 GiB.

mural bench peers --device cuda                     all parts, in order of importance
mural bench peers --device cuda --parts speed       one of them
mural bench peers --collect FILE.jsonl …            put the files of such runs together, as results/gpu.json
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.case import Case
from harness.options import add_options, cap_of, device_of
from harness.results import Log, collect
from harness.session import Session, guess_for
from harness.team import Pool

HERE = Path(__file__).resolve().parent
PRECISIONS = ("float32", "bfloat16")
PARTS = ("single", "memory", "speed", "limits", "compile")
STEPS, RATE = 3, 0.02


@dataclass(frozen=True)
class Sizes:
    """What is measured: sizes are those of square images."""

    single: tuple[int, ...] = (1024, 2048, 3072, 4096)
    memory: tuple[tuple[int, int], ...] = ((8, 4096), (4, 3072), (2, 2048))
    """Ranks and size: what should fit in 16 GiB a rank."""
    speed: int = 2048
    pairs: int = 15
    guesses: tuple[int, ...] = (1280, 1792)
    """For each precision, a size that fits on one rank."""
    step: int = 256
    options: tuple[tuple[str, Any], ...] = ()


TOY = Sizes((32, 48), ((2, 48),), 48, 2, (32, 32), 16, (("width", 4), ("depth", 2)))


class Parts:
    """The parts of the benchmark, each a method; all write to one log."""

    def __init__(self, session: Session, sizes: Sizes, options: argparse.Namespace) -> None:
        self.session, self.sizes = session, sizes
        self.cap = cap_of(options)
        self.ranks: tuple[int, ...] = options.ranks

    def case(self, size: int, ranks: int = 1, precision: str = "float32", **more: Any) -> Case:
        """The U-Net on a square image."""
        return Case("UNet2D", (size, size), ranks, precision, options=self.sizes.options, **more)

    def single(self) -> None:
        """Plain torch in one process with the whole GPU."""
        for precision in PRECISIONS:
            for size in self.sizes.single:
                self.session.measure(self.case(size, precision=precision, sharded=False), None, budget=4.0, quiet=True)

    def memory(self) -> None:
        """Ranks under the cap, at sizes that one device of 16 GiB cannot train; and some steps of SGD."""
        first = True
        for ranks, size in self.sizes.memory:
            for precision in PRECISIONS:
                case = self.case(size, ranks, precision)
                self.session.measure(case, self.cap, budget=4.0)
                if first:
                    self.train(case, self.cap)
                    first = False
        ranks, size = self.sizes.memory[0]
        self.train(self.case(size, sharded=False), None)

    def train(self, case: Case, cap: int | None) -> None:
        """Some steps of SGD: the losses go down, and are those of plain torch."""
        if self.session.log.find("train", case=case.encode(), cap=cap) is None:
            answers = self.session.ask("train", case, cap, steps=STEPS, rate=RATE)
            if answers is not None:
                peak = max(a["allocated"] for a in answers)
                losses = answers[0]["losses"]
                self.session.log.write("train", case=case.encode(), cap=cap, losses=losses, rate=RATE, allocated=peak)
                self.session.log.say(f"{case.title}: losses {', '.join(f'{loss:.5f}' for loss in losses)}")

    def speed(self, compiled: bool = False) -> None:
        """A mesh of one rank, and each shard of two, against plain torch on an image of the same extents."""
        for ranks in (1, 2):
            for precision in reversed(PRECISIONS):
                case = self.case(self.sizes.speed, ranks, precision, compiled=compiled)
                if self.session.log.find("pairs", case=case.encode()) is not None:
                    continue
                longest = 400.0 if compiled else 120.0
                answers = self.session.ask("pairs", case, None, quiet=True, count=self.sizes.pairs, longest=longest)
                if answers is not None:
                    self.session.log.write("pairs", case=case.encode(), cap=None, ranks=answers)
                    self.session.log.say(f"{case.title}: {', '.join(map(said, answers))} of plain torch")

    def compile(self) -> None:
        """The same with torch.compile, should mural take it; else a record of what it says."""
        self.speed(compiled=True)

    def limits(self) -> None:
        """The largest square image under the cap: plain torch, then each number of ranks."""
        for precision, guess in zip(PRECISIONS, self.sizes.guesses, strict=True):
            plain = self.case(0, precision=precision, sharded=False)
            self.session.limit(plain, self.cap, step=self.sizes.step, guess=guess)
        for ranks in self.ranks:
            for precision, guess in zip(PRECISIONS, self.sizes.guesses, strict=True):
                case = self.case(0, ranks, precision)
                known = self.session.log.find("limit", case=replace(case, ranks=1).encode(), cap=self.cap)
                single = known["largest"] if known and ranks > 1 else None
                start = guess_for(ranks, single, guess, self.sizes.step, 2)
                self.session.limit(case, self.cap, step=self.sizes.step, guess=start)


def said(answer: dict[str, Any]) -> str:
    """The ratio of the medians of one rank."""
    middle = {name: sorted(answer[name])[len(answer[name]) // 2] for name in ("mural", "plain")}
    return f"{middle['mural'] / middle['plain']:.3f}"


def main() -> None:
    """Measure the parts, or put files together."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, minutes=10)
    parser.add_argument(
        "--parts", default="single,memory,speed,limits", help=f"of {', '.join(PARTS)}, in order (all but compile)"
    )
    options = parser.parse_args()
    if options.page:
        parser.error("--page stands without --unet")
    if unknown := [name for name in options.parts.split(",") if name not in PARTS]:
        parser.error(f"no part is called {unknown[0]!r}: choose from {', '.join(PARTS)}")
    if options.collect:
        target = options.output or HERE / "results" / "gpu.json"
        print(f"{collect(options.collect, target)} records in {target.name}")
        return
    device = device_of(options)
    log = Log("peers", options.output, options.known, options.minutes)
    pool = Pool(device, spares=options.spares if device == "cuda" and not options.quick else 0)
    session = Session(log, pool)
    parts = Parts(session, TOY if options.quick else Sizes(), options)
    try:
        for name in options.parts.split(","):
            part: Callable[[], None] = getattr(parts, name)
            if log.left > 30:
                log.say(f"{name}: {(part.__doc__ or '').strip()}")
                part()
            else:
                log.write("skipped", name=name)
    finally:
        session.drop()
        pool.close()
    log.say("finished")
