"""The law for plans: a step under a plan equals a step on one device, in float64 to 1e-10, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mural
from law import difference, image
from mural.engine import Parallel
from mural.models import UNet
from ranks import DEVICE, run_on

PLANS = [
    mural.Plan(),
    mural.Plan(data=2),
    mural.Plan(spatial=(2, 1)),
    mural.Plan(data=2, spatial=(1, 2)),
    mural.Plan(spatial=(2, 2)),
    mural.Plan(data=4),
]
TOLERANCE = 1e-10


def segmenter(device: str = DEVICE) -> nn.Module:
    torch.manual_seed(3)
    with torch.device("meta" if device == "meta" else "cpu"):
        model = UNet(in_channels=2, classes=3, width=4, depth=2, norm="batch").double()
    return model.to(device)


def classifier() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    ).to(DEVICE, torch.float64)


def batch(images: int, kind: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (images, 36, 29) if kind == "mask" else (images,)
    return image(images, 2, 36, 29, seed=seed).to(DEVICE), torch.randint(0, 3, shape, generator=generator).to(DEVICE)


def apart(pm: Parallel, plain: nn.Module) -> float:
    pairs = zip(plain.named_parameters(), pm.named_parameters(), strict=True)
    buffers = zip(plain.named_buffers(), pm.named_buffers(), strict=True)
    return max(
        *(difference(q, p) for (_, p), (_, q) in pairs),
        *(difference(q, p) for (_, p), (_, q) in buffers),
        0.0,
    )


def trained(plan: mural.Plan, make: Callable[[], nn.Module], kind: str, images: int) -> float:
    plain, pm = make(), mural.parallelize(make(), plan)
    ours = torch.optim.SGD(pm.parameters(), lr=0.1, momentum=0.9)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    worst = 0.0
    for step in range(3):
        x, target = batch(images, kind, step)
        expected = F.cross_entropy(plain(x), target)
        theirs.zero_grad()
        expected.backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        theirs.step()
        loss = pm.step(x, target)
        worst = max(worst, difference(loss, expected.detach()), difference(pm.clip_grad_norm_(0.5), norm))
        ours.step()
        pm.updated()
        pm.zero_grad()
    return max(worst, apart(pm, plain))


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize(("make", "kind"), [(segmenter, "mask"), (classifier, "label")])
def test_training_equals_one_device(plan: mural.Plan, make: Callable[[], nn.Module], kind: str) -> None:
    assert max(run_on(plan.devices, trained, plan, make, kind, 5)) < TOLERANCE


@pytest.mark.parametrize("images", [1, 2, 3])
def test_fewer_images_than_ranks(images: int) -> None:
    assert max(run_on(4, trained, mural.Plan(data=4), segmenter, "mask", images)) < TOLERANCE


def accumulated(plan: mural.Plan) -> float:
    plain, pm = segmenter().eval(), mural.parallelize(segmenter().eval(), plan)
    x, target = batch(6, "mask")
    F.cross_entropy(plain(x), target).backward()
    for i, part in enumerate((slice(0, 3), slice(3, 5), slice(5, 6))):
        pm.step(x[part], target[part], reduce=i == 2, weight=(part.stop - part.start) / 6)
    pairs = zip(plain.parameters(), pm.parameters(), strict=True)
    return max(difference(q.grad, p.grad) for p, q in pairs)


@pytest.mark.parametrize("plan", [mural.Plan(data=2), mural.Plan(spatial=(2, 1)), mural.Plan(data=2, spatial=(1, 2))])
def test_accumulated_gradients_equal_those_of_one_batch(plan: mural.Plan) -> None:
    assert max(run_on(plan.devices, accumulated, plan)) < TOLERANCE


def clipped_late(plan: mural.Plan) -> float:
    """`clip_grad_norm_` after steps that did not reduce: the norm is still that of the whole gradient."""
    plain, pm = segmenter(), mural.parallelize(segmenter(), plan)
    x, target = batch(4, "mask")
    F.cross_entropy(plain(x), target).backward()
    pm.step(x, target, reduce=False)
    norms = nn.utils.clip_grad_norm_(plain.parameters(), 1.0), pm.clip_grad_norm_(1.0)
    return max(difference(norms[1], norms[0]), float(pm.found_inf()))


def test_what_was_not_reduced_is_reduced_before_it_is_clipped() -> None:
    assert max(run_on(2, clipped_late, mural.Plan(data=2))) < TOLERANCE


def inferred(plan: mural.Plan) -> float:
    plain, pm = segmenter().eval(), mural.parallelize(segmenter(), plan).eval()
    x, _ = batch(3, "mask")
    out = pm(x)
    assert isinstance(out, mural.ShardedTensor)
    assert not out.requires_grad
    return difference(out.full(), plain(x).detach())


def test_inference_equals_one_device() -> None:
    assert max(run_on(4, inferred, mural.Plan(data=2, spatial=(2,)))) < TOLERANCE


def round_trip(plan: mural.Plan) -> dict[str, Any]:
    pm = mural.parallelize(segmenter(), plan)
    pm.step(*batch(2, "mask"))
    state = pm.state_dict()
    assert (pm.state_dict(rank0=True) == {}) == (pm.world_mesh.rank != 0)
    other = mural.parallelize(segmenter(), plan)
    with torch.no_grad():
        for p in other.parameters():
            p.fill_(pm.world_mesh.rank)
    other.load_state_dict(state if pm.world_mesh.rank == 0 else {}, rank0=True)
    same = all(torch.equal(a, b) for a, b in zip(other.state_dict().values(), state.values(), strict=True))
    try:
        other.load_state_dict({}, rank0=True)
    except (RuntimeError, mural.PeerError) as error:
        return {"same": same, "names": list(state), "error": str(error)}
    return {"same": same}


def test_the_state_is_that_of_the_unsplit_model() -> None:
    names = list(segmenter().state_dict())
    for found in run_on(2, round_trip, mural.Plan(spatial=(2, 1))):
        assert found["same"]
        assert found["names"] == names
        assert "Missing key" in found["error"]


def dropping(plan: mural.Plan) -> tuple[float, float]:
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Dropout(0.5), nn.Conv2d(4, 3, 1)).double()
    pm = mural.parallelize(model, plan, seed=5)
    x, target = batch(4, "mask")
    with torch.no_grad():
        for i, p in enumerate(pm.parameters()):
            p.copy_(torch.linspace(-1, 1, p.numel()).view(p.shape) + i)
    return float(pm.step(x, target)), float(pm.step(x, target))


def test_dropout_is_the_same_under_every_plan_and_another_in_every_step() -> None:
    one = run_on(1, dropping, mural.Plan())[0]
    assert one[0] != one[1]
    for plan in (mural.Plan(data=2), mural.Plan(data=2, spatial=(2, 1))):
        for found in run_on(plan.devices, dropping, plan):
            assert found == pytest.approx(one, rel=1e-12)


def from_meta(plan: mural.Plan) -> list[float]:
    model = segmenter("meta")
    pm = mural.parallelize(model, plan)
    assert not any(p.is_meta for p in pm.parameters())
    return [float(p.double().sum()) for p in pm.parameters()]


def test_a_model_on_meta_gets_the_same_weights_everywhere() -> None:
    first, second = run_on(2, from_meta, mural.Plan(data=2))
    assert first == second
    with torch.device("meta"):
        bare = nn.ParameterList([nn.Parameter(torch.empty(3))])
    with pytest.raises(mural.PlanError, match="reset_parameters"):
        mural.parallelize(bare)


class Recorded:
    """A source that remembers what was read."""

    def __init__(self, pixels: Tensor):
        self.pixels, self.shape, self.boxes = pixels, tuple(pixels.shape), list[Any]()

    def read(self, box: Any) -> Tensor:
        self.boxes.append(tuple(tuple(i) for i in box))
        return self.pixels[tuple(slice(*i) for i in box)]


def from_sources(plan: mural.Plan) -> tuple[float, list[Any]]:
    plain, pm = segmenter(), mural.parallelize(segmenter(), plan)
    x, target = batch(2, "mask")
    images, masks = [Recorded(i) for i in x], [Recorded(t[None].int()) for t in target]
    loss = pm.step(images, masks)
    return difference(loss, F.cross_entropy(plain(x), target).detach()), [s.boxes for s in images]


def test_sources_are_read_where_a_rank_owns_them() -> None:
    for rank, (gap, boxes) in enumerate(run_on(4, from_sources, mural.Plan(data=2, spatial=(2, 1)))):
        assert gap < TOLERANCE
        mine, other = boxes[rank // 2], boxes[1 - rank // 2]
        assert other == []
        (_, rows, columns) = mine[0]
        assert columns == (0, 29)
        assert rows[1] - rows[0] <= 20


def alone(plan: mural.Plan, every: int) -> float:
    """Local SGD against the same written by hand: each part of the batch by a model of its own, then the mean."""
    pm = mural.parallelize(segmenter(), plan)
    ours = torch.optim.SGD(pm.parameters(), lr=0.1, momentum=0.9)
    hands = [segmenter() for _ in range(plan.data)]
    theirs = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in hands]
    for step in range(1, 2 * every + 1):
        x, target = batch(5, "mask", step)
        parts = mural.Cuts.even(5, plan.data).intervals()
        losses = [F.cross_entropy(m(x[i:j]), target[i:j]) for m, (i, j) in zip(hands, parts, strict=True)]
        for loss, optimizer in zip(losses, theirs, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if step % every == 0:
            average(hands, theirs)
        loss = pm.step(x, target)
        assert difference(loss, torch.stack(losses).mean().detach()) < TOLERANCE
        ours.step()
        pm.updated(ours)
        pm.zero_grad()
    return apart(pm, hands[0])


def average(models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> None:
    with torch.no_grad():
        for same in zip(*(m.state_dict().values() for m in models), strict=True):
            if same[0].is_floating_point():
                mean = torch.stack(same).mean(0)
                for tensor in same:
                    tensor.copy_(mean)
        for p in zip(*(m.parameters() for m in models), strict=True):
            states = [o.state[q]["momentum_buffer"] for o, q in zip(optimizers, p, strict=True)]
            mean = torch.stack(states).mean(0)
            for state in states:
                state.copy_(mean)


@pytest.mark.slow
@pytest.mark.parametrize("plan", [mural.Plan(data=2, average=2), mural.Plan(data=2, spatial=(2, 1), average=3)])
def test_local_sgd_equals_the_same_by_hand(plan: mural.Plan) -> None:
    assert max(run_on(plan.devices, alone, plan, plan.average)) < TOLERANCE


def checked(plan: mural.Plan, dropout: bool) -> dict[str, float]:
    model = nn.Sequential(segmenter(), nn.Dropout(0.3)) if dropout else segmenter()
    before = deepcopy(model.state_dict())
    found = mural.check(model, plan, *batch(2, "mask"))
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [False, True])
def test_check_compares_a_plan_with_one_device(dropout: bool) -> None:
    for found in run_on(2, checked, mural.Plan(spatial=(1, 2)), dropout):
        assert set(found) == {"output", "loss", "gradients", "buffers"}
        assert max(found.values()) < TOLERANCE


def test_check_sees_a_difference() -> None:
    """A check that cannot fail shows nothing: per-rank BatchNorm is another function, and it says so."""
    found = run_on(2, checked, mural.Plan(data=2, batchnorm="rank"), False)
    assert min(f["gradients"] for f in found) > 1e-4


def halved() -> tuple[torch.dtype, float]:
    pm = mural.parallelize(segmenter().float(), mural.Plan(spatial=(2, 1), precision="bfloat16"))
    x, target = batch(2, "mask")
    seen: list[torch.dtype] = []
    pm.module.register_forward_hook(lambda _m, _a, out: seen.append(out.dtype))
    loss = pm.step(x.float(), target)
    return seen[0], float(loss)


def test_bfloat16_is_autocast() -> None:
    (kind, loss), _ = run_on(2, halved)
    assert kind == torch.bfloat16
    x, target = batch(2, "mask")
    assert loss == pytest.approx(float(F.cross_entropy(segmenter()(x), target).detach()), rel=0.02)


def test_a_plan_for_other_ranks_is_refused() -> None:
    with pytest.raises(mural.PlanError, match="needs 4 ranks, but 1 run"):
        mural.parallelize(segmenter(), mural.Plan(data=4))
    with pytest.raises(mural.PlanError, match="stage=2 needs 2 ranks"):
        mural.parallelize(segmenter(), mural.Plan(stage=2))
    with pytest.raises(mural.LayoutError, match="one number"):
        mural.parallelize(segmenter(), loss=lambda y, t: y).step(*batch(1, "mask"))
