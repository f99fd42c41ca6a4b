"""Offload changes no bit: the same losses, gradients and weights, step by step, whatever leaves and when."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from late_copies import LateMemory
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

import mural
from mural.comm.host_staging import PageableMemory
from mural.engine.offloaded_updates import LIVE
from mural.engine.offloading import LEAST, Offloading
from mural.engine.parallel import Parallel
from mural.memory.file_memory import FileMemory
from ranks import DEVICE, run_on
from streamed_models import BLOCKS, NORMS, Spec

KINDS = ("activations", "parameters", "optimizer")
ALL = mural.Plan(offload=KINDS)
Make = Callable[[], nn.Module]


def trained(pm: Parallel, steps: int = 5, size: tuple[int, ...] = (3, 2, 12, 11), adam: bool = True) -> list[Any]:
    """Losses, gradients and the state after some steps, as numbers to be compared."""
    kind: Any = torch.optim.Adam if adam else torch.optim.SGD
    optimizer = kind(pm.parameters(), lr=1e-2)
    found: list[Any] = []
    for step in range(steps):
        draws = torch.Generator().manual_seed(step)
        image = torch.randn(size, generator=draws, dtype=torch.float64).to(pm.device)
        target = torch.randint(0, 3, (size[0], *size[2:]), generator=draws).to(pm.device)
        if step < 2:  # later steps add to the gradients, which may then be away
            optimizer.zero_grad()
        found.append(pm.step(image, target).item())
        found.append({name: p.grad.clone() for name, p in pm.named_parameters() if p.grad is not None})
        optimizer.step()
    return [*found, pm.state_dict()]


def same(one: Any, other: Any) -> bool:
    """Whether two results have the same bits."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def compared(model: nn.Module, plan: mural.Plan, **options: Any) -> Parallel:
    """The model under a plan with offload, after the same steps as without."""
    plain = trained(mural.parallelize(deepcopy(model), mural.Plan(recompute=plan.recompute)), **options)
    pm = mural.parallelize(model, plan)
    assert same(trained(pm, **options), plain)
    return pm


@given(
    block=st.sampled_from(BLOCKS), norm=st.sampled_from(NORMS), act=st.sampled_from(["relu", "gelu", "prelu"]),
    depth=st.integers(1, 2), kinds=st.sets(st.sampled_from(KINDS), min_size=1), adam=st.booleans(),
    memory=st.sampled_from(["", "1KB", "20KB", "60KB", "1MB"]), recompute=st.sampled_from(["", "all"]),
)  # fmt: skip
def test_same_bits(
    block: str, norm: str, act: str, depth: int, kinds: set[str], adam: bool, memory: str, recompute: str
) -> None:
    model = Spec(block=block, norm=norm, act=act, depth=depth, dropout="channels").build()
    plan = mural.Plan(offload=tuple(sorted(kinds)), memory=memory, recompute=recompute or ())  # type: ignore[arg-type]
    compared(model, plan, steps=4, adam=adam)


def test_everything_leaves_and_is_planned() -> None:
    pm = compared(Spec(norm="batch", depth=2).build(), ALL)
    offloading = pm.offloading
    assert offloading is not None
    assert not offloading.lost
    report = offloading.report()
    assert not report["noted"]
    assert report["to_host"] > 0
    assert report["from_host"] > 0
    for part in ("activations", "parameters", "optimizer"):
        only = compared(Spec(norm="batch", depth=2).build(), mural.Plan(offload=(part,)))  # type: ignore[arg-type]
        assert only.offloading is not None
        assert 0 < only.offloading.report()["to_host"] < report["to_host"]


def test_a_limit_is_kept_and_less_leaves() -> None:
    make = Spec(norm="batch", depth=2, width=4).build
    whole = mural.parallelize(make(), mural.Plan(offload=("activations",)))
    trained(whole)
    assert whole.offloading is not None
    assert whole.offloading.plan is not None
    known = next(iter(whole.offloading.known.values()))
    most, least = max(known.trace.bytes), whole.offloading.plan.peak
    limit = int((most + least) / 2 / 0.93)
    pm = compared(make(), mural.Plan(offload=("activations",), memory=f"{limit}"))
    assert pm.offloading is not None
    assert pm.offloading.plan is not None
    assert pm.offloading.plan.peak <= 0.93 * limit
    assert 0 < pm.offloading.plan.moved[0] < whole.offloading.plan.moved[0]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
@pytest.mark.parametrize("memory", ["", "30KB"])
def test_copies_that_are_late(seed: int, memory: str) -> None:
    """Copies happen when they are waited for, or at random before: a race would change a bit."""
    model = Spec(norm="batch", depth=2, block="residual").build()
    plain = trained(mural.parallelize(deepcopy(model)))
    pm = mural.parallelize(model, mural.Plan(offload=KINDS, memory=memory))
    assert pm.offloading is not None
    pm.offloading.memory.host = LateMemory(seed)
    assert same(trained(pm), plain)


class Branching(nn.Module):
    """Takes another way every third time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.last = nn.Conv2d(4, 3, 1)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.first(x).relu()
        if self.calls % 3:
            x = torch.sigmoid(self.second(x))
        return self.last(x)


def test_a_model_that_takes_another_way() -> None:
    pm = compared(Branching().double(), mural.Plan(offload=KINDS), steps=9)
    assert pm.offloading is not None
    assert pm.offloading.lost


class Borrowing(nn.Module):
    """Uses the weights of a layer that is never called, and one layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.lent, self.twice, self.last = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.conv2d(x, self.lent.weight, self.lent.bias, padding=1)
        return self.last(self.twice(self.twice(x).relu()) * self.lent.weight.mean())


def test_weights_that_others_use() -> None:
    compared(Borrowing().double(), ALL)


class Tied(nn.Module):
    """Two parameters in one memory, one in two places, and a channels-last one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Conv2d(4, 4, 3, padding=1).double() for _ in range(3))
        self.enter, self.last = nn.Conv2d(2, 4, 1).double(), nn.Conv2d(4, 3, 1).double()
        self.second.weight = nn.Parameter(self.first.weight.data)
        self.third.bias = self.first.bias
        self.third.weight.data = self.third.weight.data.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.third(self.second(self.first(self.enter(x)).relu()).relu()))


def test_memory_that_is_shared_stays_shared() -> None:
    found: list[Any] = []
    for plan in (mural.Plan(), ALL):
        torch.manual_seed(5)
        model = Tied()
        found.append(trained(mural.parallelize(model, plan), adam=False))
        assert model.first.weight.data_ptr() == model.second.weight.data_ptr()
        assert model.third.weight.is_contiguous(memory_format=torch.channels_last)
    assert same(*found)
    blocks = {p.untyped_storage()._cdata for p in model.parameters()}
    assert len(blocks) < len(list(model.parameters())) - 1, "small ones are in one block"


class Checkpointed(nn.Module):
    """Has a checkpoint of its own, whose inputs are sharded on ranks, and saves a sparse tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 3, 1)
        self.block = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU())
        self.scale = nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        made: Any = checkpoint(self.block, self.first(x), use_reentrant=False)
        ones = torch.ones(4, 1, dtype=self.scale.dtype)
        return self.last(made) * torch.sparse.mm(self.scale.to_sparse(), ones).mean()


def checkpointed_on_rank() -> bool:
    """Whether losses and gradients are the same with offload and without."""
    found: list[Any] = []
    for kinds in ((), KINDS):
        torch.manual_seed(6)
        pm = mural.parallelize(Checkpointed().double(), mural.Plan(spatial=(2, 1), offload=kinds))
        found.append(trained(pm, steps=3))
    return same(*found)


def test_models_with_checkpoints_of_their_own() -> None:
    compared(Checkpointed().double(), ALL)
    assert all(run_on(2, checkpointed_on_rank))


class Spoiling(nn.Module):
    """Changes in place what backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).exp()
        y = x * x
        x.add_(1.0)
        return y


def test_what_torch_refuses_is_refused() -> None:
    pm = mural.parallelize(Spoiling().double(), mural.Plan(offload=("activations",)))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        trained(pm, steps=1)


def test_a_step_that_fails_leaves_all_here() -> None:
    pm = mural.parallelize(Spec(depth=2).build(), ALL)
    before = trained(pm, steps=3)[-1]
    with pytest.raises(Exception, match=r"(?i)target|size|shape"):
        pm.step(torch.zeros(3, 2, 12, 11, dtype=torch.float64), torch.zeros(1, 1).long())
    assert same(pm.state_dict(), before)
    trained(pm, steps=2)


def test_accumulated_gradients() -> None:
    """Those that a step adds to leave with the parameters, and are back before backward reaches their module."""
    model = Spec(norm="batch").build()
    found: list[dict[str, Tensor]] = []
    left: list[int] = []
    for plan in (mural.Plan(), mural.Plan(offload=("parameters",))):
        pm = mural.parallelize(deepcopy(model), plan)
        for part in range(6):
            image = torch.full((2, 2, 9, 8), part / 6, dtype=torch.float64)
            pm.step(image, torch.ones(2, 9, 8).long(), reduce=part % 2 == 1, weight=0.5)
            left.append(0 if pm.offloading is None else pm.offloading.memory.moved[0])
        found.append({name: p.grad.clone() for name, p in pm.named_parameters() if p.grad is not None})
    assert same(*found)
    parameters = sum(p.nbytes for p in model.parameters())
    assert left[-1] > 1.5 * parameters, "parameters and gradients"


def test_what_the_host_has_no_room_for_is_in_files(tmp_path: Path) -> None:
    model = Spec(norm="batch", depth=2).build()
    plain = trained(mural.parallelize(deepcopy(model), mural.Plan(recompute="all")))
    pm = mural.parallelize(model, mural.Plan(recompute="all", offload=("activations",), offload_folder=str(tmp_path)))
    assert pm.offloading is not None
    pm.offloading.memory.host.most = 2000.0
    assert same(trained(pm), plain)
    kinds = Counter(type(buffer) for buffer in pm.offloading.memory.host.idle)
    assert kinds[FileMemory] > 0
    assert kinds[PageableMemory] > 0
    assert list(tmp_path.iterdir()) == [], "files have no names"
    pm = mural.parallelize(model, mural.Plan(offload=("activations",), offload_folder=str(tmp_path / "nowhere")))
    assert pm.offloading is not None
    pm.offloading.memory.host.most = 0.0
    with pytest.raises(mural.MuralError, match=r"offload_folder = .*nowhere.*No such file"):
        trained(pm)


# -- the optimizer's numbers on the host -------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda p: torch.optim.Adam(p, 1e-2, amsgrad=True),
    "AdamW, one by one": lambda p: torch.optim.AdamW(p, 1e-2, foreach=False),
    "SGD": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9, nesterov=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 1e-3, momentum=0.5, centered=True),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "ASGD": lambda p: torch.optim.ASGD(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "Muon": lambda p: torch.optim.Muon(q for q in p if q.ndim == 2),
    "fused": lambda p: torch.optim.Adam(p, fused=True),
    "of another name": lambda p: Renamed(p),
    "two groups": lambda p: torch.optim.Adam([{"params": (q := list(p))[::2], "lr": 0.1}, {"params": q[1::2]}]),
}


class Renamed(torch.optim.AdamW):
    """Steps as torch's own does."""


class Matrices(nn.Module):
    """Has parameters of two dims, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 8, 3, padding=1), nn.Conv2d(8, 3, 1)
        self.many = nn.Parameter(torch.rand(8, 8) + torch.eye(8)), nn.Parameter(torch.rand(8, 8) + torch.eye(8))
        self.one, self.other = self.many

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).movedim(1, -1) @ self.one @ self.other
        return self.last(x.movedim(-1, 1))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_in_chunks(name: str) -> None:
    model, found = Matrices().double() if name == "Muon" else Spec(norm="batch", depth=2).build(), []
    for plan in (mural.Plan(), mural.Plan(offload=("optimizer",), memory="1KB" if name == "Muon" else "3KB")):
        pm = mural.parallelize(deepcopy(model), plan)
        optimizer = OPTIMIZERS[name](pm.parameters())
        rates = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for step in range(4):
            optimizer.zero_grad()
            pm.step(torch.full((1, 2, 8, 8), step + 0.5, dtype=torch.float64), torch.ones(1, 8, 8).long())
            optimizer.step()
            rates.step()
        found.append([pm.state_dict(), optimizer.state_dict()])
        if pm.offloading is not None:
            (updates,) = pm.offloading.updates.optimizers.values()
            assert updates.chunked
            assert len(updates.buffers) or name == "Adagrad", "its numbers rest there; Adagrad's did before"
            assert not updates.params, "it has its parameters back"
    assert same(*found)


def test_numbers_that_others_replace_are_not_kept() -> None:
    """Each `load_state_dict` of the optimizer left the host memory of the numbers before it."""
    pm = mural.parallelize(Spec(norm="batch", depth=2).build(), mural.Plan(offload=("optimizer",), memory="3KB"))
    optimizer = torch.optim.Adam(pm.parameters())

    def step() -> None:
        pm.step(torch.ones(1, 2, 8, 8, dtype=torch.float64), torch.ones(1, 8, 8).long())
        optimizer.step()

    step()
    assert pm.offloading is not None
    (updates,) = pm.offloading.updates.optimizers.values()
    assert len(updates.buffers)
    optimizer.load_state_dict(deepcopy(optimizer.state_dict()))
    step()
    assert not len(updates.buffers), "a CPU's numbers rest where they were loaded"


def test_an_update_that_fails_leaves_the_optimizer_its_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """It kept those of the chunk that failed, and never updated the others again."""
    pm = mural.parallelize(Spec(depth=2).build(), mural.Plan(offload=("optimizer",), memory="1KB"))
    optimizer, plain, calls = torch.optim.Adam(pm.parameters()), torch.optim.Adam._init_group, list[int]()

    def failing(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("broken")
        return plain(*given)

    monkeypatch.setattr(torch.optim.Adam, "_init_group", failing)
    pm.step(torch.ones(1, 2, 8, 8, dtype=torch.float64), torch.ones(1, 8, 8).long())
    with pytest.raises(RuntimeError, match="broken"):
        optimizer.step()
    assert len(optimizer.param_groups[0]["params"]) == len(list(pm.parameters()))


@pytest.mark.parametrize("keyword", [False, True])
@pytest.mark.parametrize("memory", ["", "1KB"])
def test_closures(memory: str, keyword: bool) -> None:
    """One given by name was called after the update, of which nothing was left to do."""
    model, found = Spec(norm="batch").build(), list[Any]()
    for plan in (mural.Plan(), mural.Plan(offload=("optimizer",), memory=memory)):
        pm = mural.parallelize(deepcopy(model), plan)
        optimizer = torch.optim.Adam(pm.parameters(), 0.1)
        for step in range(4):

            def closure(pm: Parallel = pm, step: int = step) -> Tensor:
                pm.zero_grad()
                return pm.step(torch.full((1, 2, 8, 8), step + 0.5, dtype=torch.float64), torch.ones(1, 8, 8).long())

            loss: Any = optimizer.step(closure=closure) if keyword else optimizer.step(closure)
            found.append(loss.item())
        found.append(pm.state_dict())
    assert same(found[:5], found[5:])


@pytest.mark.parametrize("memory", ["", "1KB"])
def test_hooks_of_updates(memory: str) -> None:
    """Those before an update in chunks came after it, and those after it saw no parameters."""
    model, found = Spec(norm="batch").build(), list[Any]()

    def halved(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for p in optimizer.param_groups[0]["params"]:
            p.grad.mul_(0.5)

    def decayed(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for p in optimizer.param_groups[0]["params"]:
            p.data.mul_(0.9)

    for plan in (mural.Plan(), mural.Plan(offload=("optimizer",), memory=memory)):
        pm = mural.parallelize(deepcopy(model), plan)
        optimizer = torch.optim.SGD(pm.parameters(), 0.1, momentum=0.9)
        optimizer.register_step_pre_hook(halved)
        for _ in range(2):
            optimizer.register_step_post_hook(decayed)
            for _ in range(2):
                optimizer.zero_grad()
                pm.step(torch.ones(1, 2, 8, 8, dtype=torch.float64), torch.ones(1, 8, 8).long())
                optimizer.step()
        found.append([pm.state_dict(), optimizer.state_dict()])
    assert same(*found)


class Normalised(torch.optim.SGD):
    """Looks at all gradients together."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 0.01)
        return super().step(closure)


class Counting(torch.optim.Adam):
    """Counts its steps."""

    def step(self, closure: Any = None) -> Any:
        self.steps = getattr(self, "steps", 0) + 1
        self.param_groups[0]["lr"] = 0.1 / self.steps
        return super().step(closure)


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Normalised, Counting])
def test_optimizers_that_may_look_at_everything_need_room(kind: Any) -> None:
    """They updated chunk by chunk, each time by another norm or as another step."""
    model, found = Spec().build(), list[Any]()
    plan = mural.Plan(offload=("optimizer",))
    for one in (mural.Plan(), plan, replace(plan, memory="1MB"), replace(plan, memory="1KB")):
        pm = mural.parallelize(deepcopy(model), one)
        optimizer = kind(pm.parameters(), 0.1)

        def closure(pm: Parallel = pm) -> Tensor:
            pm.zero_grad()
            return pm.step(torch.ones(1, 2, 8, 8, dtype=torch.float64), torch.ones(1, 8, 8).long())

        if one.memory == "1KB":
            before = deepcopy(pm.state_dict())
            with pytest.raises(mural.PlanError, match=kind.__name__ + r".*memory = 1000 bytes.*Set memory = \"\d+\""):
                optimizer.step(closure)
            assert same(pm.state_dict(), before)
        else:
            for _ in range(3):
                optimizer.step(closure)
            found.append(pm.state_dict())
    assert same(found[0], found[1])
    assert same(found[0], found[2])


def updated_in_backward(pm: Parallel) -> tuple[list[torch.optim.Optimizer], list[Any]]:
    """Optimizers, one for each parameter, that step as soon as its gradient is there; and what ends that."""
    adams = {p: torch.optim.Adam([p], 1e-2) for p in pm.parameters()}
    hooks = [p.register_post_accumulate_grad_hook(lambda p: adams[p].step()) for p in adams]
    return list(adams.values()), hooks


@pytest.mark.parametrize("steps", [0, 1, 4])
@pytest.mark.parametrize("plan", [ALL, replace(ALL, memory="8KB"), *(replace(ALL, offload=(k,)) for k in KINDS[1:])])
def test_optimizers_in_backward_are_refused(plan: mural.Plan, steps: int) -> None:
    """Updates were lost when parameters came back from the host, and numbers that were there ended the process."""
    model, found = Spec(depth=2).build(), list[Any]()
    for one in (mural.Plan(), plan):
        pm = mural.parallelize(deepcopy(model), one)
        first = trained(pm, steps)
        if one.offload:
            optimizers, hooks = updated_in_backward(pm)
            with pytest.raises(mural.PlanError, match=r"Adam.step\(\) was called while a step of the model ran"):
                trained(pm)
            assert not any(optimizer.state for optimizer in optimizers)
            for hook in hooks:
                hook.remove()
        pm.zero_grad()
        found.append([first, trained(pm)])
    assert same(*found)


@pytest.mark.parametrize("memory", ["", "8KB"])
def test_optimizers_in_backward_while_activations_are_away(memory: str) -> None:
    model, found = Spec(depth=2, norm="batch").build(), list[Any]()
    for plan in (mural.Plan(), mural.Plan(offload=("activations",), memory=memory)):
        pm = mural.parallelize(deepcopy(model), plan)
        updated_in_backward(pm)
        found.append(trained(pm))
    assert same(*found)


class Looked(nn.Module):
    """Takes channels from a table, whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.table, self.last = nn.Conv2d(2, 4, 1), nn.Embedding(9, 4, sparse=True), nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) * self.table(torch.arange(0, 9, 2)).sum(0).view(4, 1, 1))


@pytest.mark.parametrize("memory", ["", "3KB"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sparse_gradients(momentum: float, memory: str) -> None:
    """Their bytes were asked for as those of a dense tensor: a RuntimeError of torch. Momentum is sparse then, too."""
    model, found = Looked().double(), list[Any]()
    for plan in (mural.Plan(), mural.Plan(offload=KINDS, memory=memory)):
        pm = mural.parallelize(deepcopy(model), plan)
        optimizer = torch.optim.SGD(pm.parameters(), 0.1, momentum)
        for _ in range(4):
            pm.zero_grad()
            pm.step(torch.ones(1, 2, 8, 8, dtype=torch.float64), torch.ones(1, 8, 8).long())
            optimizer.step()
        found.append(pm.state_dict())
    assert same(*found)


@pytest.mark.parametrize("memory", ["", "1KB"])
def test_an_optimizer_ends_with_its_last_use(memory: str) -> None:
    """Those of one model, made in turn, all stayed, each with its numbers."""
    pm, made = mural.parallelize(Spec().build(), mural.Plan(offload=("optimizer",), memory=memory)), list[Any]()
    assert pm.offloading is not None
    for _ in range(3):
        optimizer = torch.optim.Adam(pm.parameters())
        pm.step(torch.zeros(1, 2, 8, 8, dtype=torch.float64), torch.ones(1, 8, 8).long())
        optimizer.step()
        made.append(weakref.ref(optimizer))
        del optimizer
    gc.collect()
    assert all(one() is None for one in made)
    assert not pm.offloading.updates.optimizers


def test_models_share_a_hook_and_end() -> None:
    """A hook of each model was removed with it, whenever that was: even while torch went through its hooks."""
    models = [mural.parallelize(Spec().build(), ALL)]
    gc.collect()
    before, live = len(_global_optimizer_pre_hooks), len(LIVE)
    models.append(mural.parallelize(Spec().build(), ALL))
    assert (len(_global_optimizer_pre_hooks), len(LIVE)) == (before, live + 1)
    assert isinstance(models[1].offloading, Offloading)
    models.clear()
    gc.collect()
    assert (len(_global_optimizer_pre_hooks), len(LIVE)) == (before, live - 1)


def test_a_model_may_end_while_torch_goes_through_its_hooks() -> None:
    models = [mural.parallelize(Spec().build(), ALL)]
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    handle = register_optimizer_step_pre_hook(lambda *_: (models.clear(), gc.collect(), None)[-1])
    try:
        torch.optim.SGD([p], lr=0.1).step()
    finally:
        handle.remove()


# -- with other parallelisms -------------------------------------------------------------------------------------------


def split_on_rank() -> bool:
    """Whether layers that are split by channels have the same bits with offload and without."""
    found: list[Any] = []
    for kinds in ((), KINDS):
        torch.manual_seed(3)
        layers = nn.Flatten(2), nn.Linear(80, 24), nn.ReLU(), nn.Linear(24, 80), nn.Unflatten(2, (10, 8))
        model = nn.Sequential(*layers, nn.Conv2d(2, 3, 3, padding=1)).double()
        pm = mural.parallelize(model, mural.Plan(channel=2, channel_layers="all", offload=kinds))
        found.append(trained(pm, steps=4, size=(4, 2, 10, 8)))
    return same(*found)


def test_layers_that_are_split_by_channels() -> None:
    """A gate that looked at a share was taken for the model's own use of it, and refused."""
    assert all(run_on(2, split_on_rank))


def on_rank(plan: mural.Plan, norm: str, images: int) -> tuple[bool, int]:
    """Whether a rank has the same bits with offload and without, and how many bytes left in the last step."""
    torch.use_deterministic_algorithms(DEVICE == "cuda", warn_only=True)
    LEAST["cuda"] = 1
    found: list[Any] = []
    left = 0
    for kinds in ((), KINDS):
        torch.manual_seed(3)
        model = Spec(norm=norm, depth=2, block="residual").build().to(DEVICE)
        # A GPU lets leave what costs no time, which is not much here, unless there is a limit.
        limit = "1KB" if kinds and (DEVICE == "cuda" or plan.piped) and not plan.stream else ""
        pm = mural.parallelize(model, replace(plan, offload=kinds, memory=limit))
        found.append(trained(pm, steps=4, size=(images, 2, 16, 12)))
        left = 0 if pm.offloading is None else pm.offloading.memory.moved[0]
    return same(*found), left


PLANS = {
    "data": (2, mural.Plan(data=2)),
    "spatial": (2, mural.Plan(spatial=(2, 1))),
    "spatial, recomputed": (2, mural.Plan(spatial=(1, 2), recompute="all")),
    "data and spatial": (4, mural.Plan(data=2, spatial=(2, 1))),
    "1f1b": (2, mural.Plan(stage=2, schedule="1f1b", microbatches=4)),
    "gpipe, recomputed": (2, mural.Plan(stage=2, schedule="gpipe", microbatches=2, recompute="stages")),
    "gems": (2, mural.Plan(stage=2, schedule="gems", microbatches=2, replications=1)),
    "gems, replications": (2, mural.Plan(stage=2, schedule="gems", microbatches=4, replications=2)),
    "streamed and spatial": (2, mural.Plan(stream=(8, 8), spatial=(2, 1))),
    "average": (2, mural.Plan(data=2, average=2)),
}


OFTEN = ("data", "spatial, recomputed", "1f1b", "gems")


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in PLANS]
)
def test_with_other_parallelisms(name: str) -> None:
    world, plan = PLANS[name]
    for equal, left in run_on(world, on_rank, plan, "group" if plan.piped else "batch", 4):
        assert equal
        assert left > 0


class Scaled(nn.Module):
    """Has parameters of its own next to its layers, as a transformer has its positions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 3, 1)
        self.early, self.late = nn.Parameter(torch.rand(4, 1, 1)), nn.Parameter(torch.rand(3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(F.pad(x, [1] * 4)) * self.early
        return self.last(self.inner(x.sigmoid())) * self.late


def cut_on_rank(plan: mural.Plan) -> tuple[bool, bool, int]:
    """Whether a rank has the same bits with offload and without, and noted no step in vain; what left in the last."""
    found: list[Any] = []
    for kinds in ((), KINDS):
        torch.manual_seed(3)
        pm = mural.parallelize(Scaled().double(), replace(plan, offload=kinds))
        found.append(trained(pm, steps=6, size=(4, 2, 16, 12)))
    assert pm.offloading is not None
    return same(*found), not pm.offloading.lost, pm.offloading.memory.moved[0]


@pytest.mark.parametrize("name", ["1f1b", "gems"])
def test_a_model_whose_own_parameters_are_in_several_stages(name: str) -> None:
    """The gates of such parameters were taken for a user's hooks, and refused: every transformer with stages was."""
    for equal, kept, left in run_on(2, cut_on_rank, PLANS[name][1]):
        assert equal
        assert kept
        assert left > 0


def test_streamed() -> None:
    for memory in ("", "20KB"):
        plain = mural.Plan(stream=(8, 8), memory=memory)
        plans = plain, replace(plain, offload=("optimizer",))
        found = [trained(mural.parallelize(Spec(norm="batch").build(), plan), size=(1, 2, 16, 16)) for plan in plans]
        assert same(*found)
