"""All runs of the benchmark: first a choice of the learning rate for every arm, then every arm with every seed.

Workers are processes that share the device: while one prepares its next runs, another computes. Each trains a few
runs side by side. Results are written as they come, so that a run that is cut short keeps what it has.
"""

from __future__ import annotations

import base64
import multiprocessing
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import torch
from context.bounds import best, distances
from context.cases import Run, Settings
from context.evaluation import on_tiles, on_whole, scored
from context.scene import Scene, scenes
from context.training import Engine, Training, take
from harness.results import Log, Record
from torch import Tensor

import mural

POINTS = 30
"""Points of a loss curve that are kept."""
PICTURED, PICTURES = 1, 6
"""The seed whose predictions are kept, and for how many of the test images: at half the resolution."""
POOL, VALIDATION, TEST = 1, 2, 3
"""Seeds of the three sets of images."""


@dataclass
class Bench:
    """The images of one process, and what it does with them."""

    settings: Settings
    device: torch.device

    def images(self, count: int, seed: int) -> Scene:
        """Images of the benchmark's size on its device."""
        return scenes(count, self.settings.size, seed, self.device)

    @cached_property
    def pool(self) -> Scene:
        """Images to train on."""
        return self.images(self.settings.pool, POOL)

    @cached_property
    def judged(self) -> dict[int, tuple[Scene, Tensor]]:
        """Images to choose a learning rate by, and images to report, each with its nuclei's distances."""
        sizes = {VALIDATION: self.settings.validation, TEST: self.settings.test}
        sets = {seed: self.images(count, seed) for seed, count in sizes.items()}
        return {seed: (scene, distances(scene)) for seed, scene in sets.items()}

    def engine(self, run: Run) -> Engine:
        """Whole images go through mural, here on one rank; patches are plain torch. All in the same precision."""
        cuda = self.device.type == "cuda"
        mesh = mural.init(spatial=(1, 1)) if run.patch == self.settings.size else None
        return Engine(autocast=cuda, capture=cuda, mesh=mesh)

    def train(self, runs: Sequence[Run]) -> list[Record]:
        """What comes of some runs, trained side by side."""
        trainings = [Training(self.settings, run, self.pool, self.engine(run)) for run in runs]
        seconds = take(trainings, self.settings.steps)
        records = [self.judge(training) | {"seconds": seconds / len(runs)} for training in trainings]
        del trainings
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return records

    def judge(self, training: Training) -> Record:
        """The scores of a trained model, run whole and, for a patch, in tiles; its loss curve; sometimes its picture."""
        run, model = training.run, training.model.eval()
        sets = {"test": TEST} if run.seed else {"test": TEST, "validation": VALIDATION}
        parts = training.losses.chunk(POINTS)
        found: Record = {"case": run.encode(), "losses": [float(part.mean()) for part in parts]}
        for name, seed in sets.items():
            scene, far = self.judged[seed]
            chances = {"whole": on_whole(model, scene.image)}
            if run.patch < self.settings.size:
                chances["tiles"] = on_tiles(model, scene.image, run.patch)
            found[name] = {way: scored(chance, scene, run.question, far) for way, chance in chances.items()}
            if run.seed == PICTURED and run.depth == max(self.settings.depths):
                found["pictures"] = {way: packed(chance.argmax(1)[:PICTURES]) for way, chance in chances.items()}
        return found

    def bound(self, question: Any, depth: int, patch: int) -> Record:
        """The best that anybody can do on the test images with that patch and receptive field."""
        scene, far = self.judged[TEST]
        about = {"question": question, "depth": depth, "patch": patch}
        return {"case": about} | best(scene, question, patch, depth, far)


def packed(labels: Tensor) -> str:
    """Labels (N, S, S) at half the resolution, as text."""
    return base64.b85encode(zlib.compress(labels[:, ::2, ::2].to(torch.uint8).cpu().numpy().tobytes(), 9)).decode()


def unpacked(text: str, size: int) -> Tensor:
    """What was packed, of images of that size.

    >>> bool((unpacked(packed(torch.ones(1, 4, 4)), 4) == torch.ones(1, 2, 2)).all())
    True
    """
    half = -(-size // 2)
    return torch.frombuffer(bytearray(zlib.decompress(base64.b85decode(text))), dtype=torch.uint8).view(-1, half, half)


def sweep(settings: Settings) -> list[Run]:
    """Every arm with every learning rate, one seed."""
    arms = product(settings.questions, settings.depths, settings.patches, settings.rates)
    return [Run(*arm, seed=0) for arm in arms]


def chosen(records: Iterable[Record]) -> list[Run]:
    """Every arm with the learning rate that did best on the validation images, run whole or in tiles."""
    best_of: dict[tuple[Any, ...], tuple[float, Run]] = {}
    for record in records:
        run = Run(**record["case"])
        accuracy = max(way["accuracy"] for way in record["validation"].values())
        arm = (run.question, run.depth, run.patch)
        best_of[arm] = max(best_of.get(arm, (-1.0, run)), (accuracy, run), key=lambda pair: pair[0])
    return [run for _, run in best_of.values()]


def groups_of(runs: Sequence[Run], count: int) -> list[Sequence[Run]]:
    """The runs in order, so many at a time."""
    return [runs[first : first + count] for first in range(0, len(runs), count)]


_bench: Bench | None = None


def _enter(settings: Settings, device: str) -> None:
    global _bench
    torch.set_num_threads(1)
    torch.backends.cudnn.benchmark = True
    _bench = Bench(settings, torch.device(device))


def _train(runs: Sequence[Run]) -> list[Record]:
    if _bench is None:
        raise RuntimeError("a worker trains after it has entered")
    return _bench.train(runs)


def spread(bench: Bench, log: Log) -> Callable[[Sequence[Run]], Iterator[list[Record]]]:
    """A call that trains runs in groups, on workers or here, and yields results as they come, while there is time."""
    settings = bench.settings
    if not settings.workers:
        return lambda runs: (bench.train(group) for group in groups_of(runs, settings.together))
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(settings.workers, context, _enter, (settings, bench.device.type))

    def train(runs: Sequence[Run]) -> Iterator[list[Record]]:
        groups = iter(groups_of(runs, settings.together))
        pending: set[Future[list[Record]]] = set()
        while True:
            while len(pending) <= settings.workers and log.left > 0 and (group := next(groups, None)):
                pending.add(pool.submit(_train, group))
            if not pending:
                return
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()

    return train


def measure(settings: Settings, device: str, log: Log) -> None:
    """Run everything: bounds, the sweep, and then seed after seed, so that what is cut off is whole seeds."""
    bench = Bench(settings, torch.device(device))
    train = spread(bench, log)
    for about in product(settings.questions, settings.depths, settings.patches):
        log.write("bound", **bench.bound(*about))
    known = [r for r in log.records if r["kind"] == "run"]
    wanted = [run for run in sweep(settings) if all(r["case"] != run.encode() for r in known)]
    for group in train(wanted):
        known += [log.write("run", **record) for record in group]
        tell(log, group)
    arms = chosen(known)
    later = [replace(run, seed=seed) for seed in range(1, settings.seeds) for run in arms]
    for group in train([run for run in later if all(r["case"] != run.encode() for r in known)]):
        for record in group:
            log.write("run", **record)
        tell(log, group)


def tell(log: Log, group: Sequence[Record]) -> None:
    """Say what came of some runs."""
    for record in group:
        run, test = Run(**record["case"]), record["test"]
        ways = ", ".join(f"{way} {score['accuracy']:.3f}" for way, score in test.items())
        about = f"{run.question} depth {run.depth} patch {run.patch} rate {run.rate:g} seed {run.seed}"
        log.say(f"{about}: {ways} ({record['seconds']:.1f} s)")
