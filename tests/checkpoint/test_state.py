"""State by names: a training set back to a snapshot goes on as if it had never stopped, to the last bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

import mural
from mural.checkpoint.checkpoints import Checkpoints
from mural.checkpoint.manifest import StoredTensor
from mural.checkpoint.optimizer_state import decode_optimizer, encode_optimizer
from mural.checkpoint.state import restore, state_of
from mural.errors import CheckpointError
from ranks import run_on


class Net(nn.Module):
    """Tied weights, buffers of several kinds, a parameter that gets no gradient."""

    def __init__(self, seed: int = 0, width: int = 6):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(4, width)
        self.norm = nn.BatchNorm1d(width)
        self.second = nn.Linear(width, width)
        self.tied = nn.Linear(width, width)
        self.tied.weight = self.second.weight
        self.unused = nn.Parameter(torch.rand(3))
        self.frozen = nn.Parameter(torch.rand(2), requires_grad=False)
        self.register_buffer("scratch", torch.rand(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(self.second(torch.tanh(self.norm(self.first(x)))))


def train(model: nn.Module, optimizer: Optimizer, scheduler: Any, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x, y = torch.rand(8, 4, generator=generator), torch.rand(8, 6, generator=generator)

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        loss = closure()
        optimizer.step(closure if isinstance(optimizer, torch.optim.LBFGS) else lambda loss=loss: loss)
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(loss.item())
        elif scheduler is not None:
            scheduler.step()


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal, types and bits included."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return type(a) is type(b) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and (a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b)))


def resumed(
    folder: Path,
    make: Callable[[nn.Module], tuple[Optimizer, Any]],
    before: int,
    after: int,
    model: Callable[[int], nn.Module] = Net,
) -> None:
    """Train, save, restore into another training that had gone elsewhere, go on with both: they stay the same."""
    checkpoints = Checkpoints(folder, mural.init())
    one = model(0)
    optimizer, scheduler = make(one)
    train(one, optimizer, scheduler, range(before))
    state = state_of(one, optimizer, scheduler)
    checkpoints.save(before, state.tensors, state.values)
    for stepped in (0, 3):
        other = model(1)
        its_optimizer, its_scheduler = make(other)
        train(other, its_optimizer, its_scheduler, range(50, 50 + stepped))
        restore(checkpoints.read(), other, its_optimizer, its_scheduler)
        assert same(optimizer.state_dict(), its_optimizer.state_dict())
        assert same(dict(one.state_dict()), dict(other.state_dict()))
        if scheduler is not None:
            assert same(scheduler.state_dict(), its_scheduler.state_dict())
        if stepped:
            train(one, optimizer, scheduler, range(before, before + after))
            train(other, its_optimizer, its_scheduler, range(before, before + after))
            assert same(dict(one.state_dict()), dict(other.state_dict()))
            assert same(optimizer.state_dict(), its_optimizer.state_dict())
    checkpoints.close()


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=1e-2, betas=(0.8, 0.99)),
    "amsgrad": lambda m: torch.optim.Adam(m.parameters(), amsgrad=True, maximize=True, foreach=True),
    "fused": lambda m: torch.optim.Adam(m.parameters(), fused=True),
    "tensor lr": lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(0.01)),
    "AdamW": lambda m: torch.optim.AdamW(m.parameters()),
    "named": lambda m: torch.optim.AdamW(m.named_parameters()),
    "Adamax": lambda m: torch.optim.Adamax(m.parameters()),
    "NAdam": lambda m: torch.optim.NAdam(m.parameters()),
    "RAdam": lambda m: torch.optim.RAdam(m.parameters()),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters()),
    "Adadelta": lambda m: torch.optim.Adadelta(m.parameters()),
    "Adafactor": lambda m: torch.optim.Adafactor(m.parameters()),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), momentum=0.5, centered=True),
    "Rprop": lambda m: torch.optim.Rprop(m.parameters()),
    "ASGD": lambda m: torch.optim.ASGD(m.parameters()),
    "LBFGS": lambda m: torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=3, line_search_fn="strong_wolfe"),
    "Muon": lambda m: torch.optim.Muon([p for p in m.parameters() if p.ndim == 2]),
    "groups": lambda m: torch.optim.Adam(
        [{"params": m.first.parameters(), "lr": 0.5}, {"params": m.second.parameters(), "eps": 1e-3, "tag": None}]
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("before", [0, 4])
def test_every_optimizer_goes_on(tmp_path: Path, name: str, before: int) -> None:
    resumed(tmp_path, lambda model: (OPTIMIZERS[name](model), None), before, 3)


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 5]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 9),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 9),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=20),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.2, 3),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1), lr_scheduler.MultiStepLR(o, [1])], [3]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_schedule_goes_on(tmp_path: Path, name: str) -> None:
    def make(model: nn.Module) -> tuple[Optimizer, LRScheduler]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return optimizer, SCHEDULERS[name](optimizer)

    resumed(tmp_path, make, 4, 3)


def test_a_schedule_of_a_tensor_goes_on(tmp_path: Path) -> None:
    def make(model: nn.Module) -> tuple[Optimizer, LRScheduler]:
        optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))
        return optimizer, lr_scheduler.ExponentialLR(optimizer, 0.9)

    resumed(tmp_path, make, 4, 3)


def train_on_ranks(folder: str, steps: int, resume: bool) -> list[float]:
    """Some steps, the same on every rank; the sums of what came out."""
    checkpoints = Checkpoints(folder, mural.init(data=dist.get_world_size()))
    model = Net(int(resume))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = lr_scheduler.MultiStepLR(optimizer, [3, 5], 0.5)
    start = 0
    if resume:
        snapshot = checkpoints.read()
        restore(snapshot, model, optimizer, schedule)
        start = snapshot.step
    train(model, optimizer, schedule, range(start, start + steps))
    state = state_of(model, optimizer, schedule)
    checkpoints.save(start + steps, state.tensors, state.values)
    checkpoints.wait()
    checkpoints.close()
    return [float(tensor.double().sum()) for tensor in state.tensors.values()]


@pytest.mark.parametrize("worlds", [(2, 1), (1, 2), (2, 2)])
def test_a_training_goes_on_with_other_ranks(tmp_path: Path, worlds: tuple[int, int]) -> None:
    run_on(worlds[0], train_on_ranks, str(tmp_path / "split"), 4, False)
    found = run_on(worlds[1], train_on_ranks, str(tmp_path / "split"), 3, True)
    expected = run_on(1, train_on_ranks, str(tmp_path / "whole"), 7, False)
    assert found == expected * worlds[1]


def test_names_are_those_of_the_model() -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))
    train(model, optimizer, None, range(1))
    state = state_of(model, optimizer)
    names = {name for name in state.tensors if name.startswith("model.")}
    assert names == {f"model.{name}" for name in model.state_dict() if name != "tied.weight"}
    assert "model.scratch" not in names
    assert {"optimizer.state.norm.weight.exp_avg", "optimizer.state.norm.weight.step"} <= state.tensors.keys()
    assert "optimizer.state.unused.exp_avg" not in state.tensors
    assert state.tensors["model.first.weight"].data_ptr() == model.first.weight.data_ptr()
    assert state.tensors["optimizer.groups.0.lr"] is optimizer.param_groups[0]["lr"]
    assert state.values["optimizer"]["groups"][0]["options"]["betas"] == {"$tuple": [0.9, 0.999]}


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    made = Checkpoints(tmp_path, mural.init())
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, None, range(2))
    state = state_of(model, optimizer)
    made.save(2, state.tensors, state.values)
    return made


class Renamed(Net):
    def __init__(self) -> None:
        super().__init__(1)
        self.firsts = self.first
        del self.first


class Untied(Net):
    def __init__(self) -> None:
        super().__init__(1)
        self.tied = nn.Linear(6, 6)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Renamed, r"another model: model\.firsts\.weight is not there \(nearest: model\.first\.weight"),
        (Renamed, r"model\.first\.weight is not here \(nearest: model\.firsts\.weight"),
        (lambda: Net(1, 7), r"model\.first\.weight has the shape \(6, 4\) there, but \(7, 4\) here.*and \d+ more"),
        (Untied, r"model\.tied\.weight is not there.*tied parameters are .*second\.weight.* there, but none here"),
        (lambda: Net(1).double(), r"model\.first\.weight has the type torch\.float32 there, but torch\.float64 here"),
    ],
)
def test_another_model_is_refused_and_left_alone(checkpoints: Checkpoints, model: Any, words: str) -> None:
    here = model()
    before = {name: value.clone() for name, value in here.state_dict().items()}
    with pytest.raises(CheckpointError, match=words):
        restore(checkpoints.read(), here)
    assert same(before, dict(here.state_dict()))


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (lambda m: torch.optim.SGD(m.parameters()), "holds the state of Adam, but the optimizer here is SGD"),
        (OPTIMIZERS["groups"], "1 groups of parameters, the optimizer here 2"),
        (
            lambda m: torch.optim.Adam(m.first.parameters()),
            r"groups differ: group 0: .*; group 0: norm\.weight is not here",
        ),
        (
            lambda m: torch.optim.Adam([nn.Parameter(torch.ones(5))]),
            r"has a tensor of shape \(5,\), which is not a parameter",
        ),
    ],
)
def test_another_optimizer_is_refused(checkpoints: Checkpoints, optimizer: Any, words: str) -> None:
    model = Net(1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=words):
        restore(checkpoints.read(), model, optimizer(model))
    assert same(before, dict(model.state_dict()))


def test_what_was_not_saved_is_missed(checkpoints: Checkpoints) -> None:
    model = Net(1)
    optimizer = torch.optim.Adam(model.parameters())
    schedule = lr_scheduler.ExponentialLR(optimizer, 0.9)
    with pytest.raises(CheckpointError, match="saved without scheduler"):
        restore(checkpoints.read(), model, optimizer, schedule)
    restore(checkpoints.read(), model)  # the weights alone
    checkpoints.save(3, {"x": torch.ones(1)}, {})
    with pytest.raises(CheckpointError, match="holds no model"):
        restore(checkpoints.read(), model)


def test_state_that_is_no_data_is_refused() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["hook"] = print
    with pytest.raises(CheckpointError, match=r"optimizer\.groups\.0\.hook is a builtins\.builtin_function_or_method"):
        state_of(model, optimizer)


def test_lazy_parameters_are_refused() -> None:
    with pytest.raises(CheckpointError, match="weight is not initialized yet"):
        state_of(nn.Sequential(nn.LazyLinear(3)))


def test_wrappers_do_not_change_names() -> None:
    model = Net()
    expected = set(state_of(model).tensors)
    compiled = torch.compile(model)
    assert set(state_of(compiled).tensors) == expected  # type: ignore[arg-type]
    model.first = torch.compile(model.first)  # type: ignore[assignment]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = state_of(model, optimizer)
    assert set(state.tensors) == expected
    assert "first.weight" in state.values["optimizer"]["groups"][0]["params"]


class Counting(nn.Module):
    """A module with state beside its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Any = (0, torch.zeros(2))

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


def test_extra_state_of_modules(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, mural.init())
    model, other = nn.Sequential(Counting(), nn.Linear(1, 1)), nn.Sequential(Counting(), nn.Linear(1, 1))
    model[0].seen = (5, torch.tensor([1.0, 2.0]))
    state = state_of(model)
    checkpoints.save(1, state.tensors, state.values)
    restore(checkpoints.read(), other)
    assert same(model[0].seen, other[0].seen)
    assert torch.equal(model[1].weight, other[1].weight)


def test_a_scaler_goes_on(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, mural.init())
    model, scaler = Net(), torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        scaler.scale(model(torch.rand(8, 4)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    state = state_of(model, optimizer, scaler=scaler)
    checkpoints.save(1, state.tensors, state.values)
    other = torch.amp.GradScaler("cpu")
    restore(checkpoints.read(), model, optimizer, scaler=other)
    assert same(scaler.state_dict(), other.state_dict())


def test_how_the_optimizer_works_is_not_restored(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, mural.init())
    model = Net()
    state = state_of(model, torch.optim.Adam(model.parameters(), lr=0.5, fused=True))
    checkpoints.save(1, state.tensors, state.values)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    restore(checkpoints.read(), model, optimizer)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["fused"], group["foreach"]) == (0.5, None, False)


def test_state_returns_to_the_memory_it_was_in() -> None:
    """NAdam keeps a product in host memory beside parameters on a GPU, ASGD keeps its count of steps on the GPU."""
    parameter = nn.Parameter(torch.empty(3, device="meta"))  # stands for one on a GPU
    names = {id(parameter): "w"}
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter] = {"product": torch.ones(()), "step": torch.empty((), device="meta")}
    tensors: dict[str, Tensor] = {}
    packed = encode_optimizer(optimizer, names, tensors)
    assert packed["host"] == ["optimizer.state.w.product"]
    entries = {name: StoredTensor(tensor.dtype, tuple(tensor.shape), ()) for name, tensor in tensors.items()}
    found = decode_optimizer(packed, torch.optim.SGD([parameter]), names, entries, {}).state[parameter]
    assert {key: value.device.type for key, value in found.items()} == {"product": "cpu", "step": "meta"}
    found = decode_optimizer(packed | {"host": None}, torch.optim.SGD([parameter]), names, entries, {}).state[parameter]
    assert {key: value.device.type for key, value in found.items()} == {"product": "meta", "step": "cpu"}
