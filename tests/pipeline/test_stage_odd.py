"""What models and users do beside the straight way, in stages: it works as on one device, or raises a clear error."""

from __future__ import annotations

import gc
import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from stage_cases import TOLERANCE, Case, batch, compared, gap, holds, law, loss_for, model_of, parallel_of, random_law
from stage_models import Counted, Held, Report, made
from torch import Tensor, nn
from torch.nn import functional as F

import mural
from law import difference
from mural.engine.alignment import without_hooks
from mural.errors import MuralError, PeerError, PlanError
from mural.graph import capture
from mural.graph.cut_points import cut_names
from mural.graph.liveness import refused
from mural.models import UNet
from ranks import restart, run_on

PIPED = {"schedule": "1f1b", "microbatches": 2, "batchnorm": "micro"}


def worst(found: list[dict[str, float]]) -> dict[str, float]:
    """All differences above the tolerance, of all ranks."""
    return {f"rank {r}: {k}": v for r, of_rank in enumerate(found) for k, v in of_rank.items() if not v <= TOLERANCE}


# ------------------------------------------------------------------------------------------------------- every cut


def at_every_cut(name: str, options: dict[str, Any], part: tuple[int, int]) -> dict[str, float]:
    """The law for each place at which a model can be cut in two; the others raise."""
    graph = graph_of(name)
    barred, found = refused(graph), dict[str, float]()
    names = {node: site for site, node in cut_names(graph).items()}
    for cut in range(1 + part[0], len(graph), part[1]):
        case = Case(name, mural.Plan(stage=2, cuts=(names[cut],), **options), sizes=((8, 6),) * 2)
        if cut in barred:
            with pytest.raises(PlanError, match="in place"):
                parallel_of(case)
            continue
        found |= {f"{names[cut]}: {key}": value for key, value in law(case).items()}
    return found


def graph_of(name: str) -> Any:
    model = made(name)
    with without_hooks(model):
        return capture(model, [(2, 3, 8, 8), (2, 8, 8)] if name == "several" else (2, 3, 8, 8))


@pytest.mark.parametrize("name", ["in-place", "views", "stopped"])
def test_a_model_is_cut_anywhere(name: str) -> None:
    found = run_on(2, at_every_cut, name, PIPED, (0, 2))
    assert not worst(found)
    assert len(found[0]) > 30


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [(), "stages"])
@pytest.mark.parametrize("schedule", ["gpipe", "gems"])
@pytest.mark.parametrize("name", ["in-place", "views", "stopped", "several", "unused", "tied", "fan", "counted"])
def test_a_model_is_cut_at_each_place(name: str, schedule: str, recompute: Any) -> None:
    options = PIPED | {"schedule": schedule, "recompute": recompute}
    if name == "unused":  # it counts its calls
        options |= {"schedule": "1f1b", "microbatches": 1}
    assert not worst(run_on(2, at_every_cut, name, options, (0, 1)))


def test_a_buffer_that_replicas_of_gems_would_each_write_is_refused() -> None:
    found = run_on(2, refused_by_gems)
    assert all("writes to seen" in text for text in found), found


def one_norm(cut: str, training: bool, later: bool) -> tuple[str, dict[str, float]]:
    """The law for a norm that is called twice; `later` turns training on when the model is divided already."""
    plan = mural.Plan(stage=2, cuts=(cut,), schedule="gems", microbatches=2, batchnorm="micro")
    case = Case("one-norm", plan, sizes=((8, 8),) * 2, training=training)
    try:
        pm = parallel_of(case)
        return "", compared(case, model_of(case), pm.train() if later else pm)
    except PlanError as error:
        return str(error), {}


def test_a_norm_is_not_divided_between_stages_that_move_it() -> None:
    for text, _ in run_on(2, one_norm, "b", True, False):
        assert "'norm@2' reads it afterwards" in text
    for text, _ in run_on(2, one_norm, "b", False, True):
        assert "norm.running_mean, which stages [0, 1] use" in text
    for cut, training in (("b", False), ("head", True)):
        found = run_on(2, one_norm, cut, training, False)
        assert [text for text, _ in found] == ["", ""]
        assert not worst([differences for _, differences in found])


def refused_by_gems() -> str:
    case = Case("unused", mural.Plan(stage=2, schedule="gems", microbatches=2), sizes=((8, 8),))
    try:
        parallel_of(case).step(*batch(case, 0))
    except PlanError as error:
        return str(error)
    return ""


# ------------------------------------------------------------------------------------------------- batches and steps


@pytest.mark.parametrize(
    ("case"),
    [
        Case("fan", mural.Plan(stage=2, schedule="1f1b", microbatches=4), images=1, sizes=((8, 8),) * 3),
        Case("unet", mural.Plan(stage=2, **PIPED), images=5, sizes=((16, 16), (20, 12), (16, 16))),
        Case("tied", mural.Plan(stage=2, **PIPED | {"microbatches": 3}), images=5, sizes=((9, 8),) * 3, accumulate=2),
        Case(
            "tied",
            mural.Plan(stage=2, **PIPED | {"schedule": "gems", "microbatches": 3}),
            images=5,
            sizes=((9, 8),) * 3,
            accumulate=3,
        ),
        Case("unet", mural.Plan(stage=2, schedule="1f1b", microbatches=2), sizes=((16, 12),) * 3, training=False),
        Case("several", mural.Plan(stage=2, schedule="gems", microbatches=3), images=5, sizes=((8, 8),) * 2),
        Case("unused", mural.Plan(stage=2, recompute="stages"), sizes=((8, 8),) * 2),
        Case("stopped", mural.Plan(stage=2, recompute=("b", "teacher")), sizes=((8, 8),) * 2),
        Case("counted", mural.Plan(stage=2, **PIPED), sizes=((8, 8),) * 2),
    ],
    ids=str,
)
def test_batches_and_steps(case: Case) -> None:
    holds(case)


def added_up(plan: mural.Plan) -> dict[str, float]:
    """Several steps without `zero_grad`, each with its sums over ranks, then one that leaves them to `clip`."""
    case = Case("tied", plan, sizes=((9, 8),))
    plain, pm = model_of(case), parallel_of(case)
    for step in range(3):
        image, target = batch(case, step)
        for part, wanted in zip(image.chunk(plan.microbatches), target.chunk(plan.microbatches), strict=True):
            (F.cross_entropy(plain(part), wanted) * len(part) / len(image)).backward()
        pm.step(image, target, reduce=step < 2)
    norms = nn.utils.clip_grad_norm_(plain.parameters(), 0.5), pm.clip_grad_norm_(0.5)
    gradients = dict(plain.named_parameters())
    found = {name: difference(p.grad, gradients[name].grad) for name, p in pm.named_parameters()}
    found["norm"] = difference(norms[1], norms[0])
    found["infinite"] = float(pm.found_inf())
    with torch.no_grad():
        for _, p in (list(pm.named_parameters()) if pm.world_mesh.rank == 1 else [])[-1:]:
            p.grad.fill_(float("inf"))
    found["not infinite"] = 1.0 - float(pm.found_inf())
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "gems"])
def test_gradients_add_up_over_steps(schedule: str) -> None:
    assert not worst(run_on(2, added_up, mural.Plan(stage=2, **PIPED | {"schedule": schedule})))


# ------------------------------------------------------------------------------------------------------------- state


def round_trip(plan: mural.Plan) -> dict[str, Any]:
    case = Case("tied", plan, sizes=((9, 8),))
    pm = parallel_of(case)
    pm.step(*batch(case, 0))
    state = pm.state_dict()
    lone = pm.state_dict(rank0=True)
    assert (not lone) == (pm.world_mesh.rank != 0)
    unsplit = model_of(case)
    unsplit.load_state_dict(state)
    other = parallel_of(case)
    for p in other.parameters():
        p.data.fill_(7.0)
    other.load_state_dict(lone, rank0=True)
    same = all(torch.equal(a, b) for a, b in zip(other.state_dict().values(), state.values(), strict=True))
    third = parallel_of(case)
    third.load_state_dict(unsplit.state_dict())
    same &= all(torch.equal(a, b) for a, b in zip(third.state_dict().values(), state.values(), strict=True))
    errors: list[str] = []
    for bad in ({}, state | {"head.bias": torch.zeros(9)}):
        try:
            third.load_state_dict(bad)
        except (RuntimeError, MuralError) as error:
            errors.append(str(error))
    return {"same": same, "names": list(state), "errors": errors}


def test_the_state_is_that_of_the_unsplit_model() -> None:
    for found in run_on(2, round_trip, mural.Plan(stage=2, schedule="gems", microbatches=2, batchnorm="micro")):
        assert found["same"]
        assert found["names"] == list(made("tied").state_dict())
        assert "Missing key" in found["errors"][0]
        assert "size mismatch for head.bias" in found["errors"][1]


def from_meta() -> list[tuple[str, float]]:
    with torch.device("meta"):
        model = made("fan")
    pm = mural.parallelize(model, mural.Plan(stage=2))
    assert not any(p.is_meta for p in pm.parameters())
    image, target = batch(Case("fan", mural.Plan(), sizes=((9, 8),)), 0)
    assert torch.isfinite(pm.step(image, target))
    return [(name, float(value.double().sum())) for name, value in pm.state_dict().items()]


def test_a_model_on_meta_gets_memory_where_it_is_needed() -> None:
    first, second = run_on(2, from_meta)
    assert first == second
    assert first


# ----------------------------------------------------------------------------------------------------------- results


def results(plan: mural.Plan) -> dict[str, float]:
    case = Case("several", plan, images=5, sizes=((8, 8),))
    plain, pm = model_of(case).eval(), parallel_of(case).eval()
    image, target = batch(case, 0)
    out = pm(image)
    with torch.no_grad():
        expected = plain(*image)
        loss = loss_for(case)(expected, target)
    assert isinstance(out["deep"], tuple)
    assert out["out"].shape == (5, 3, 8, 8)
    assert out["out"].size(1) == 3
    assert out["best"].dtype == torch.int64
    assert out["out"].local.numel() in (0, out["out"].shape.numel() // plan.data)
    assert len(out["out"].box) == 4
    value = pm.evaluate(image, target)[2]
    return {
        "out": difference(out["out"].full(), expected["out"]),
        "early": difference(out["deep"][0].full(), expected["deep"][0]),
        "best": difference(out["best"].full(), expected["best"]),
        "loss": gap(float(value), float(loss)),
    }


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "gems"])
def test_results_are_known_everywhere(schedule: str) -> None:
    assert not worst(run_on(2, results, mural.Plan(stage=2, schedule=schedule, microbatches=2)))


# ------------------------------------------------------------------------------------------------------- random layers


@pytest.mark.parametrize(
    "case",
    [
        Case("random", mural.Plan(stage=2, schedule="gpipe", microbatches=3), images=5, sizes=((12, 8),) * 2),
        Case("random", mural.Plan(stage=2, schedule="gems", microbatches=4, recompute="stages"), sizes=((12, 8),) * 2),
        Case("random-plain", mural.Plan(stage=2, schedule="1f1b", microbatches=4), sizes=((12, 8),) * 2),
        Case(
            "random-plain",
            mural.Plan(stage=2, schedule="interleaved", microbatches=2, recompute=("c", "path", "head")),
            images=5,
            sizes=((12, 8),) * 2,
        ),
        Case("random-plain", mural.Plan(stage=2, grids=((2, 1), (1, 1)), recompute="stages"), sizes=((12, 8),) * 2),
        Case("stochastic", mural.Plan(stage=2, schedule="1f1b", microbatches=2), sizes=((12, 8),) * 2),
    ],
    ids=str,
)
def test_random_layers_draw_as_on_one_rank(case: Case) -> None:
    holds(case, function=random_law)


class Shuffled(nn.Module):
    """Draws that no micro-batch can take its part of."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.conv = how, nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "permutation":
            return self.conv(x) * torch.randperm(len(x)).view(-1, 1, 1, 1)
        return self.conv(F.dropout(x.permute(2, 0, 1, 3), 0.5).permute(1, 2, 0, 3))


def step_of(model: nn.Module, plan: mural.Plan, loss: Any = F.cross_entropy, images: int = 4) -> str:
    """What a step of a model says, if it raises."""
    try:
        pm = mural.parallelize(model, plan, loss, image=(3, 8, 8))
        pm.step(torch.rand(images, 3, 8, 8), torch.zeros(images, 8, 8).long())
    except MuralError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("how", ["permutation", "order"])
def test_draws_of_the_whole_batch_are_the_same_in_parts(how: str) -> None:
    losses: list[float] = []
    for plan in (mural.Plan(), mural.Plan(schedule="gpipe", microbatches=2), mural.Plan(recompute="stages")):
        torch.manual_seed(0)
        pm = mural.parallelize(Shuffled(how).double(), plan)
        image = torch.rand(4, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        losses.append(float(pm.step(image, torch.zeros(4, 8, 8).long())))
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-12)


# ------------------------------------------------------------------------------------------------------------- losses


def weighted(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out, target, torch.tensor([0.2, 1.0, 3.0], dtype=out.dtype), ignore_index=2)


def smooth(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out, target, label_smoothing=0.1, reduction="sum")


def probabilities(out: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy(out.sigmoid()[:, 0], (target > 0).to(out.dtype))


def bare_probabilities(out: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy(out[:, 0], (target > 0).to(out.dtype))


def logits(out: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(out[:, 0], (target > 0).to(out.dtype), reduction="sum")


def squares(out: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(out[:, 0], target.to(out.dtype)) + 0.1 * out.abs().mean()


def hinge(out: Tensor, target: Tensor) -> Tensor:
    return (1.0 - out[:, 0] * (2.0 * (target > 0).to(out.dtype) - 1.0)).clamp(min=0.0).mean()


def dice(out: Tensor, target: Tensor) -> Tensor:
    p, t = out.softmax(1)[:, 1], (target == 1).to(out.dtype)
    return 1.0 - 2.0 * (p * t).sum() / (p.sum() + t.sum() + 1.0)


LOSSES = {f.__name__: f for f in (weighted, smooth, probabilities, logits, squares, hinge, dice)}


def with_loss(name: str, plan: mural.Plan, ignored: bool) -> dict[str, float]:
    """The law for a loss; the second half of the batch can be all ignored."""
    case = Case("fan", plan, sizes=((6, 6),))
    plain, pm = model_of(case), mural.parallelize(model_of(case), plan, LOSSES[name])
    image, target = batch(case, 0)
    if ignored:
        target[2:] = 2
    expected = LOSSES[name](plain(image), target)
    expected.backward()
    found = {"loss": gap(float(pm.step(image, target)), float(expected.detach()))}
    gradients = dict(plain.named_parameters())
    return found | {name: difference(p.grad, gradients[name].grad) for name, p in pm.named_parameters()}


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "dice"])
def test_losses_of_micro_batches_add_up(name: str) -> None:
    for schedule in ("1f1b", "gems"):
        plan = mural.Plan(stage=2, schedule=schedule, microbatches=4)
        assert not worst(run_on(2, with_loss, name, plan, False))


def test_a_micro_batch_without_a_part_in_the_loss() -> None:
    for plan in (mural.Plan(stage=2, schedule="gems", microbatches=2), mural.Plan(stage=2, schedule="gpipe")):
        assert not worst(run_on(2, with_loss, "weighted", plan, True))


def test_dice_over_the_batch_needs_all_results_at_once() -> None:
    assert not worst(run_on(2, with_loss, "dice", mural.Plan(stage=2, schedule="gpipe", microbatches=2), False))
    message = step_of(made("fan").float(), mural.Plan(schedule="1f1b", microbatches=2), dice)
    assert "not a weighted sum" in message
    assert "gpipe" in message


class Bent(nn.Module):
    """A loss whose part of a micro-batch is nothing for trial results, but something for its own."""

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        return (-out).clamp(min=0.0).mean()


def test_a_loss_without_gradient_for_trials_is_no_silent_zero() -> None:
    message = step_of(nn.Conv2d(3, 3, 1), mural.Plan(schedule="1f1b", microbatches=2), Bent())
    assert "adds nothing to it for trial results" in message


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"microbatches": 2, "schedule": "gpipe"}, 'set batchnorm = "micro"'),
        ({"stage": 400}, "400 stages need 399 cuts"),
        ({"stage": 2, "cuts": ("dwon.0",)}, "write 'down.0'"),
        ({"stage": 3, "cuts": ("up.0", "down.0")}, "not in the order"),
        ({"stage": 3, "cuts": ("up.0",)}, "name the block at which each stage but the first begins"),
        ({"stage": 2, "cuts": ("stem",)}, "the first stage does"),
        ({"stage": 2, "cuts": "weight"}, "balance by"),
        ({"recompute": ("nothing",)}, "not a module of the model"),
    ],
)
def test_what_a_plan_gets_wrong_is_said(options: dict[str, Any], said: str) -> None:
    plan = mural.Plan(**options)
    assert said in run_on(1, planned, plan)[0]


def planned(plan: mural.Plan) -> str:
    """What parallelize or the first step says of a plan, on one rank that stands for the first of all."""
    try:
        graph_rules(plan)
        pm = mural.parallelize(made("unet"), plan)
        pm.step(*batch(Case("unet", plan, sizes=((16, 16),)), 0))
    except MuralError as error:
        return str(error)
    return ""


def graph_rules(plan: mural.Plan) -> None:
    """What is checked before ranks are asked for."""
    from mural.engine.stage_starts import stage_starts

    if plan.stage > 1:
        stage_starts(graph_of("unet"), plan)


def test_a_schedule_that_there_is_not() -> None:
    with pytest.raises(PlanError, match="schedule"):
        mural.Plan(stage=2, schedule="gpie")  # type: ignore[arg-type]


class Broken(nn.Module):
    """Raises on one rank, in the forward or the backward of some call."""

    def __init__(self, rank: int, backward: bool, call: int = 1) -> None:
        super().__init__()
        self.rank, self.backward, self.call, self.calls = rank, backward, call, 0
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        if not x.is_meta and dist.get_rank() == self.rank:
            self.calls += 1
            if self.calls == self.call and not self.backward:
                raise ValueError("a bad layer")
            if self.calls == self.call:
                (y.local if isinstance(y, mural.ShardedTensor) else y).register_hook(self.refuse)
        return y

    def refuse(self, grad: Tensor) -> None:
        raise ValueError("a bad gradient")


def broken(plan: mural.Plan, rank: int, backward: bool) -> tuple[str, str, float]:
    layers = [Broken(rank, backward) for _ in range(plan.stage)]
    model = nn.Sequential(nn.Conv2d(3, 4, 1), *(nn.Sequential(nn.Tanh(), layer) for layer in layers))
    cuts = tuple(f"{i}" for i in range(2, plan.stage + 1))
    pm = mural.parallelize(model, mural.Plan(**{**vars(plan), "cuts": cuts}))
    image, target = torch.rand(6, 3, 8, 8), torch.zeros(6, 8, 8).long()
    begun, texts = time.monotonic(), list[str]()
    for _ in range(2):
        try:
            pm.step(image, target)
            texts.append("")
        except (ValueError, PeerError) as error:
            texts.append(f"{type(error).__name__}: {error}")
    return texts[0], texts[1], time.monotonic() - begun


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(
    ("options", "rank"),
    [({"stage": 3, "schedule": "1f1b"}, 0), ({"stage": 3, "schedule": "gems"}, 2), ({"stage": 2, "data": 2}, 3)],
)
def test_a_rank_that_raises_ends_the_others(options: dict[str, Any], rank: int, backward: bool) -> None:
    plan = mural.Plan(microbatches=4 if options.get("schedule") else 1, **options)
    if "data" in options:
        plan = mural.Plan(schedule="1f1b", microbatches=3, **options)
    found = run_on(plan.devices, broken, plan, rank, backward)
    for at, (first, second, seconds) in enumerate(found):
        kind = "ValueError" if at == rank else "PeerError"
        assert first.startswith(kind), found
        assert f"rank {rank} raised ValueError" in first or f"on rank {rank}: ValueError" in first or at == rank, found
        assert re.match("PeerError: an earlier step failed", second), found
        assert seconds < 60


def after_a_failure(plan: mural.Plan, slow: int) -> dict[str, float]:
    """A model made parallel after another one's step had failed, with a rank that keeps the others waiting."""
    broken(plan, 0, False)
    case = Case("fan", plan, sizes=((8, 8),) * 2)
    if dist.get_rank() == slow:
        time.sleep(1.0)
    return law(case)


def test_another_model_runs_after_a_failure() -> None:
    assert not worst(run_on(2, after_a_failure, mural.Plan(stage=2, schedule="1f1b", microbatches=3), 1))


# --------------------------------------------------------------------------------------------------------------- hooks


def hooked() -> dict[str, Any]:
    case = Case("counted", mural.Plan(stage=2, cuts=("b",), **PIPED), sizes=((8, 8),) * 2)
    plain, pm = model_of(case), parallel_of(case)
    seen: list[str] = []
    for name, module in pm.module.named_modules():
        if name and not any(True for _ in module.children()):
            module.register_forward_hook(lambda _m, _a, _o, name=name: seen.append(name))
    for model in (plain, pm.module):
        model.get_submodule("c").register_forward_hook(lambda _m, _a, out: out * 1.5)
    found = {"wrong": {k: v for k, v in compared(case, plain, pm).items() if not v <= TOLERANCE}, "seen": set(seen)}
    pm.module.register_forward_hook(lambda _m, _a, out: out)
    try:
        pm.step(*batch(case, 0))
    except PlanError as error:
        found["said"] = str(error)
    return found


def test_hooks_of_modules_run_or_are_refused() -> None:
    first, second = run_on(2, hooked)
    assert not first["wrong"]
    assert not second["wrong"]
    assert first["seen"] == {"a"}
    assert second["seen"] >= {"look", "b", "c", "norm", "head", "pass_on"}
    for found in (first, second):
        assert "has a forward hook, but is not called as a whole" in found["said"]


def test_a_hook_may_replace_what_a_module_hands_on() -> None:
    losses: list[float] = []
    for plan in (mural.Plan(), mural.Plan(schedule="gpipe", microbatches=2)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Identity(), nn.Conv2d(3, 3, 1))
        model[1].register_forward_hook(lambda _m, _a, out: out * 2.0)
        pm = mural.parallelize(model, plan)
        losses.append(float(pm.step(torch.ones(4, 3, 8, 8), torch.zeros(4, 8, 8).long())))
    assert losses[0] == pytest.approx(losses[1])


def test_a_result_that_nobody_can_look_into_is_refused() -> None:
    message = step_of(Held(), mural.Plan(recompute="stages"), lambda out, _: out.value.mean())
    assert "Report" in message
    assert isinstance(Held()(torch.zeros(1, 3, 8, 8)), Report)


def test_one_number_for_the_batch_is_refused_in_parts() -> None:
    assert "mean of shapes" in step_of(Counted(mean=True), mural.Plan(**PIPED | {"schedule": "gpipe"}), total)
    assert not step_of(Counted(mean=True), mural.Plan(recompute="stages"), total)


def total(out: Tensor, _: Tensor) -> Tensor:
    return out.sum()


# ----------------------------------------------------------------------------------------------------------- precision


def autocast(plan: mural.Plan) -> tuple[float, float, str]:
    case = Case("unet", plan, sizes=((16, 16),))
    pm = mural.parallelize(made("unet").float(), plan)
    image, target = batch(case, 0)
    single = made("unet").float()
    with torch.autocast("cpu", torch.bfloat16):
        expected = sum(
            F.cross_entropy(single(x), t) / 2 for x, t in zip(image.float().chunk(2), target.chunk(2), strict=True)
        )
    first = float(pm.step(image.float(), target))
    return first, float(expected), str(next(p.grad.dtype for p in pm.parameters() if p.grad is not None))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_bfloat16_runs_under_autocast(schedule: str) -> None:
    plan = mural.Plan(stage=2, precision="bfloat16", **PIPED | {"schedule": schedule})
    for got, expected, kind in run_on(2, autocast, plan):
        assert got == pytest.approx(expected, rel=0.02)
        assert kind == "torch.float32"


@pytest.fixture(scope="module", autouse=True)
def _fresh_ranks() -> Any:
    """Ranks of tests that failed on purpose hold groups that nobody uses again."""
    yield
    for world in (2, 3, 4):
        restart(world)


def left_over(schedule: str) -> list[int]:
    """The bytes of tensors that only the garbage collector frees after a step."""
    model = UNet(width=4, depth=2)
    pm = mural.parallelize(model, mural.Plan(stage=2, schedule=schedule, microbatches=2, batchnorm="micro"))
    image, target = torch.randn(2, 3, 16, 16), torch.ones(2, 16, 16).long()
    pm.step(image, target)
    gc.collect()
    gc.disable()
    try:
        pm.step(image, target)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        return [found.nbytes for found in gc.garbage if isinstance(found, Tensor) and not found.is_meta]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize("schedule", ["1f1b", "gems"])
def test_nothing_of_a_step_waits_for_the_garbage_collector(schedule: str) -> None:
    """What a stage was given was part of a cycle: on a GPU, gigabytes stayed until Python looked for cycles."""
    assert run_on(2, left_over, schedule) == [[], []]
