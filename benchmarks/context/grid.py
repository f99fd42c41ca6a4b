"""All runs of the benchmark: first a choice of the learning rate for every arm, then every arm with every seed.

Workers are processes that share the device: while one prepares its next runs, another computes. Each trains a few
runs side by side. Results are written as they come, so that a run that is cut short keeps what it has.
"""

from __future__ import annotations

import base64
import multiprocessing
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from statistics import fmean

import torch
from harness.results import Log, Record
from torch import Tensor

import mural
from context.bounds import best, distances
from context.cases import Arm, Run, Settings
from context.evaluation import on_tiles, on_whole, scored
from context.scene import Scene, scenes
from context.training import Engine, Training, take

POINTS = 30
"""Points of a loss curve that are kept."""
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
        """The scores of a model, run whole and, for a patch, in tiles; its loss curve; of one seed also pictures."""
        run, model = training.run, training.model.eval()
        sets = {"test": TEST, "validation": VALIDATION} if run.seed < self.settings.tries else {"test": TEST}
        parts = training.losses.chunk(POINTS)
        found: Record = {"case": run.encode(), "losses": [float(part.mean()) for part in parts]}
        for name, seed in sets.items():
            scene, far = self.judged[seed]
            chances = {"whole": on_whole(model, scene.image)}
            if run.patch < self.settings.size:
                chances["tiles"] = on_tiles(model, scene.image, run.patch)
            found[name] = {way: scored(chance, scene, run.question, far) for way, chance in chances.items()}
            if name == "test" and run.seed == self.settings.tries and run.depth == self.settings.deepest:
                picks = pictured(scene)
                found["pictures"] = {way: packed(chance.argmax(1)[picks]) for way, chance in chances.items()}
        return found

    def bound(self, arm: Arm) -> Record:
        """The best that anybody can do on the test images with that patch and receptive field."""
        scene, far = self.judged[TEST]
        return {"case": arm.encode()} | best(scene, arm, far)


def pictured(scene: Scene) -> list[int]:
    """Which images to show: the first of one lobule, and the first of several."""
    alone = [int((lobule.unique() >= 0).sum()) == 1 for lobule in scene.lobule]
    return [alone.index(kind) if kind in alone else 0 for kind in (True, False)]


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
    """Every arm with every learning rate, and the first seeds."""
    tries = product(settings.arms, range(settings.tries), settings.rates)
    return [Run(arm.question, arm.depth, arm.patch, rate, seed) for arm, seed, rate in tries]


def merit(record: Record) -> float:
    """How well a run did on the validation images: run whole or in tiles, whichever suits it better."""
    return max(way["accuracy"] for way in record["validation"].values())


def chosen(settings: Settings, records: Sequence[Record]) -> dict[Arm, float]:
    """For every arm that was tried, the learning rate with the best mean on the validation images."""
    found: dict[Arm, dict[float, list[float]]] = {}
    for record in records:
        run = Run(**record["case"])
        if run.seed < settings.tries:
            found.setdefault(run.arm, {}).setdefault(run.rate, []).append(merit(record))
    return {arm: max(rates, key=lambda rate: fmean(rates[rate])) for arm, rates in found.items()}


def groups_of(runs: Sequence[Run], count: int) -> list[Sequence[Run]]:
    """The runs in order, so many at a time."""
    return [runs[first : first + count] for first in range(0, len(runs), count)]


_bench: Bench | None = None


def _enter(settings: Settings, device: str) -> None:
    global _bench
    torch.set_num_threads(1)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.benchmark_limit = True, 4
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
    for arm in settings.arms:
        log.write("bound", **bench.bound(arm))
    known = [r for r in log.records if r["kind"] == "run"]

    def through(runs: Sequence[Run]) -> None:
        for group in train([run for run in runs if all(r["case"] != run.encode() for r in known)]):
            known.extend(log.write("run", **record) for record in group)
            tell(log, group)

    through(sweep(settings))
    rates = chosen(settings, known)
    later = product(range(settings.tries, settings.seeds), rates.items())
    through([Run(arm.question, arm.depth, arm.patch, rate, seed) for seed, (arm, rate) in later])


def tell(log: Log, group: Sequence[Record]) -> None:
    """Say what came of some runs."""
    for record in group:
        run, test = Run(**record["case"]), record["test"]
        ways = ", ".join(f"{way} {score['accuracy']:.3f}" for way, score in test.items())
        about = f"{run.question} depth {run.depth} patch {run.patch} rate {run.rate:g} seed {run.seed}"
        log.say(f"{about}: {ways} ({record['seconds']:.1f} s)")
