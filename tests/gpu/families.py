"""The families of cases that `make test-gpu` runs over NCCL on 2 and on 4 ranks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import domain_cases
import failures
import laws
import stage_cases
import test_all_reduce_plans
import test_attention
import test_channel
import test_cuda
import test_domain_law
import test_expressions
import test_folds
import test_fused
import test_offloaded_steps
import test_parallelize
import test_recompute
import test_streamed_ranks
import torch
from runs import run_config, write_images
from stage_cases import Case

import mural
from law import Grid, image
from mural.ranks import run_local
from mural.train.loop import fit_rank
from ranks import run_on

Outcome = float | str
"""The largest difference from one device, `laws.REFUSED`, or what went wrong."""
Family = Callable[[int], Iterator[Sequence[Outcome]]]
Plan = mural.Plan

TOLERANCE = 1e-10
GRIDS = {
    2: (Grid((2, 1)), Grid((1, 2)), Grid((1,), data=2)),
    4: (Grid((2, 2)), Grid((2, 1), data=2), Grid((4, 1))),
}


def on_ranks(world: int, function: Callable[..., Sequence[Outcome]], *args: Any) -> list[Outcome]:
    """Each case's worst outcome over the ranks."""
    every = run_on(world, function, *args)
    return [worst(outcomes) for outcomes in zip(*every, strict=True)]


def worst(outcomes: Sequence[Outcome]) -> Outcome:
    """What stands for all ranks: something wrong before anything else."""
    words = [each for each in outcomes if isinstance(each, str) and each != laws.REFUSED]
    if words:
        return words[0]
    numbers = [each for each in outcomes if not isinstance(each, str)]
    if len(numbers) < len(outcomes):
        return laws.REFUSED if not numbers else "refused on some ranks alone"
    return max(numbers)


def windowed(world: int) -> Iterator[Sequence[Outcome]]:
    """Convolutions, pools, interpolation, norms and small networks."""
    for grid in GRIDS[world]:
        cases = []
        for build in test_cuda.MODULES.values():
            torch.manual_seed(3)
            cases.append((build().double(), [image(2, 4, 33, 29)]))
        yield on_ranks(world, laws.modules, cases, grid)


def expressions(world: int) -> Iterator[Sequence[Outcome]]:
    """Pointwise operations, shapes, reductions, losses."""
    for grid in GRIDS[world][:2]:
        yield on_ranks(world, laws.expressions, test_expressions.POINTWISE, grid, (2, 4, 13, 11), True)
        yield on_ranks(world, laws.expressions, test_expressions.SHAPES, grid, (2, 4, 13, 11), True)
        yield on_ranks(world, laws.expressions, test_expressions.REDUCTIONS, grid, (2, 4, 13, 11), False)
        losses = [test_expressions.Loss(code, grid) for code in test_expressions.LOSSES]
        pair = [image(2, 4, 13, 11), image(2, 4, 13, 11, seed=1)]
        yield on_ranks(world, laws.modules, [(loss, pair) for loss in losses], grid)


def attention(world: int) -> Iterator[Sequence[Outcome]]:
    """Attention, products, merged dims."""
    grid = GRIDS[world][0]
    codes = test_attention.ATTENTION + test_attention.PRODUCTS
    yield on_ranks(world, laws.expressions, codes, grid, (2, 4, 5, 7), False)
    yield on_ranks(world, laws.expressions, test_folds.CASES, grid, (2, 3, 8, 12), False)


def fused_halos(world: int) -> Iterator[Sequence[Outcome]]:
    """Layers that share an exchange, and what a mesh measured for another mesh's use."""
    for name in islice(test_fused.CHAINS, 5):
        yield on_ranks(world, fused_chain, name, GRIDS[world][0])
    if world == 4:
        yield on_ranks(world, laws.meshes_in_turn)


def fused_chain(name: str, grid: Grid) -> list[Outcome]:
    """A chain of layers, on ranks; functions without a name do not travel to them, so it goes by its name."""
    return [laws.fused(test_fused.CHAINS[name], grid)]


MODELS: dict[str, dict[str, Any]] = {
    "unet": {"sizes": ((35, 28),) * 3},
    "unet-instance": {"sizes": ((16, 12), (20, 16), (16, 12))},
    "resnet-v2": {"sizes": ((12, 12),) * 3, "labels": "class"},
    "tied": {"sizes": ((9, 8),) * 3},
    "fan": {"sizes": ((9, 8),) * 3, "images": 5},
}


def of_plans(*plans: Plan) -> Family:
    """Models under the plans with a world's number of ranks, over three steps of an optimizer."""

    def family(world: int) -> Iterator[Sequence[Outcome]]:
        for plan in plans:
            if plan.devices == world:
                cases = [Case(model, plan, **more) for model, more in MODELS.items()]
                yield on_ranks(world, laws.stages, cases, stage_cases.law)

    return family


def channels(world: int) -> Iterator[Sequence[Outcome]]:
    """Layers split by channels, and with data and spatial ranks (hybrids)."""
    cases = [(plan, name, images) for name, plan, images in test_channel.PLANS if plan.devices == world]
    for case in cases:
        yield on_ranks(world, laws.calls, test_channel.trained, [case])


def rings(world: int) -> Iterator[Sequence[Outcome]]:
    """Gradients by rounds of ours."""
    names = ("ring", "tree", "halving-doubling", "auto") if world == 2 else ("ring", "butterfly")
    cases = [({"data": world, "all_reduce": name},) for name in names]
    cases += [({"data": 2, "stage": 2, "all_reduce": "ring"},)] if world == 4 else []
    for case in cases:
        yield on_ranks(world, laws.calls, test_all_reduce_plans.trained, [case])


def collectives(world: int) -> Iterator[Sequence[Outcome]]:
    """`mural.comm`: every algorithm, type and call."""
    yield on_ranks(world, laws.collectives, world)


def averaging(world: int) -> Iterator[Sequence[Outcome]]:
    """Local SGD, and a federated mean."""
    plan = Plan(data=2, average=2) if world == 2 else Plan(data=2, spatial=(2, 1), average=3)
    yield on_ranks(world, laws.calls, test_parallelize.alone, [(plan, plan.average)])
    yield on_ranks(world, laws.averaged_by_clinics)


def domains(world: int) -> Iterator[Sequence[Outcome]]:
    """Separation networks: a rank for each domain, and with other axes."""
    for case in (*test_domain_law.QUICK, *test_domain_law.SLOW):
        if case.placed().devices == world:
            yield [max(found.values()) for found in run_on(world, domain_cases.law, case)]


def offload(world: int) -> Iterator[Sequence[Outcome]]:
    """Memory that leaves for the host: the same bits as without, and something left."""
    for ranks, plan in test_offloaded_steps.PLANS.values():
        if ranks == world:
            norm = "group" if plan.piped else "batch"
            found = run_on(world, test_offloaded_steps.on_rank, plan, norm, 4)
            yield [0.0 if same and left else f"same bits: {same}, {left} bytes left" for same, left in found]


def computed_again(world: int) -> Iterator[Sequence[Outcome]]:
    """Blocks that are computed again, whatever they do to what they are given: as without."""
    again = partial(Plan, recompute="all")
    plans = {
        2: (again(spatial=(2, 1)), again(data=2, offload=("activations",))),
        4: (again(data=2, spatial=(2, 1), offload=("activations",)),),
    }
    for plan in plans[world]:
        yield on_ranks(world, laws.calls, test_recompute.on_ranks, [(name, plan) for name in test_recompute.ON_RANKS])


def streamed(world: int) -> Iterator[Sequence[Outcome]]:
    """Ranks that go through their pieces in tiles."""
    for case in (*test_streamed_ranks.CASES, *test_streamed_ranks.SLOW):
        if case.world == world:
            yield [max(found.values()) for found in run_on(world, test_streamed_ranks.compared, case)]


def delays(world: int) -> Iterator[Sequence[Outcome]]:
    """Exchanges while streams and processes sleep at random."""
    plans = {
        2: (Plan(spatial=(2, 1)), Plan(stage=2, microbatches=4, schedule="1f1b", batchnorm="micro")),
        4: (Plan(spatial=(2, 2)), Plan(data=2, spatial=(2, 1)), Plan(stage=2, spatial=(2, 1), microbatches=2)),
    }
    for plan in plans[world]:
        model = "unet-instance" if plan.microbatches > 1 and plan.batchnorm != "micro" else "unet"
        for seed in range(3):
            yield on_ranks(world, laws.shaken, [Case(model, plan, sizes=((32, 28),) * 3)], seed)


def training(world: int) -> Iterator[Sequence[Outcome]]:
    """`mural train` with checkpoints: the curve of one rank, also where a run stops and resumes under another plan."""
    plans = {2: ({"spatial": [2, 1]}, {"data": 2}), 4: ({"data": 2, "spatial": [1, 2]}, {"stage": 2, "data": 2})}
    with tempfile.TemporaryDirectory(prefix="mural-gpu-") as folder:
        place = Path(folder)
        write_images(place)
        more = {"model__dtype": "float64", "data__batch": 4, "launch__device": "cuda", "launch__backend": "nccl"}
        one = run_config(place, "one", **more | {"launch__backend": "auto"})
        run_local(fit_rank, 1, one, device="cuda")
        for plan, steps in zip(plans[world], (3, 6), strict=True):
            mural.Trainer(run_config(place, "resumed", **more, plan=plan, train__steps=steps)).fit()
            ours, theirs = losses(place / "resumed"), losses(place / "one")[:steps]
            yield [max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))]


def losses(folder: Path) -> list[float]:
    """The losses of a run's updates."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["kind"] == "train"]


def profiles(world: int) -> Iterator[Sequence[Outcome]]:
    """`mural profile`: a profile in which each rank waited and worked."""
    from mural.profile.profiled_steps import profile

    with tempfile.TemporaryDirectory(prefix="mural-gpu-") as folder:
        write_images(Path(folder))
        plan = {"spatial": [world, 1]}
        more = {"launch__device": "cuda", "launch__backend": "nccl", "plan": plan}
        found = profile(run_config(Path(folder), "profiled", **more), steps=3, warmup=1)
        waits = [len(notes.trace.waits) for notes in found.notes] if found is not None else []
        yield [0.0 if len(waits) == world and all(waits) else f"waits of the ranks: {waits}"]


def failing(world: int) -> Iterator[Sequence[Outcome]]:
    """A rank that raises, exits, is killed or hangs, in forward or in backward."""
    rows, replicas, line = Plan(spatial=(world, 1)), Plan(data=world), Plan(stage=world)
    for plan, how, where in (
        (rows, "raises", "forward"),
        (rows, "raises", "backward"),
        (replicas, "raises", "backward"),
        (line, "raises", "forward"),
        (rows, "is killed", "backward"),
        (replicas, "is killed", "backward"),
        (line, "is killed", "forward"),
        (rows, "exits", "forward"),
        (rows, "hangs", "forward"),
    ):
        wrong = failures.fails_well(world, plan, how, where)
        yield [f"{' '.join(str(plan).split())}, {how} in {where}: {wrong}" if wrong else 0.0]


def example(world: int) -> Iterator[Sequence[Outcome]]:
    """The example that trains on one image over NCCL, by torchrun."""
    script = Path(__file__).parents[2] / "examples" / "09_gpu_to_gpu.py"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    done = subprocess.run(
        [sys.executable, *launcher, str(script)], capture_output=True, text=True, timeout=120, check=False
    )
    found = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", done.stdout)]
    good = done.returncode == 0 and "over nccl" in done.stdout and len(found) == 5 and found[-1] < found[0]
    yield [0.0 if good else f"{done.stdout[-300:]} {done.stderr[-1000:]}"]


MICRO = partial(Plan, batchnorm="micro")
FAMILIES: dict[str, Family] = {
    "windowed operations": windowed,
    "pointwise, shapes, reductions, losses": expressions,
    "attention, products, merged dims": attention,
    "fused halos": fused_halos,
    "data": of_plans(Plan(data=2), Plan(data=4)),
    "spatial": of_plans(Plan(spatial=(2, 1)), Plan(spatial=(1, 2)), Plan(spatial=(2, 2)), Plan(spatial=(4, 1))),
    "data × spatial": of_plans(
        Plan(data=2, spatial=(1, 1)), Plan(data=2, spatial=(2, 1)), Plan(data=2, spatial=(1, 2))
    ),
    "channel, hybrid": channels,
    "stages, sequential": of_plans(Plan(stage=2), Plan(stage=4), Plan(stage=2, recompute="stages")),
    "stages, GPipe": of_plans(*(MICRO(stage=n, microbatches=2, schedule="gpipe") for n in (2, 4))),
    "stages, 1F1B": of_plans(*(MICRO(stage=n, microbatches=4, schedule="1f1b") for n in (2, 4))),
    "stages, interleaved": of_plans(*(MICRO(stage=n, microbatches=4, schedule="interleaved") for n in (2, 4))),
    "GEMS": of_plans(
        *(MICRO(stage=n, microbatches=4, schedule="gems", gems=how) for n in (2, 4) for how in ("lean", "interleaved"))
    ),
    "stages × data, spatial": of_plans(
        MICRO(stage=2, microbatches=2, schedule="1f1b"),
        MICRO(stage=2, spatial=(2, 1), microbatches=2, schedule="1f1b"),
        MICRO(stage=2, data=2, microbatches=2, schedule="gpipe"),
        MICRO(stage=2, grids=((3, 1), (1, 1)), microbatches=2, schedule="gpipe"),
        MICRO(stage=2, spatial=(2, 1), microbatches=2, schedule="gems"),
    ),
    "domains": domains,
    "offload": offload,
    "blocks computed again": computed_again,
    "streamed": streamed,
    "gradients by rounds": rings,
    "collectives": collectives,
    "averaging, federated mean": averaging,
    "random delays": delays,
    "training, resume": training,
    "profile": profiles,
    "failures": failing,
    "example": example,
}
