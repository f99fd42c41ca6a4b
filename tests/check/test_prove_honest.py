"""A proof says what it does not show, leaves nothing behind, and is remembered for as long as it holds."""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_prove import Small, batch, proof_of
from torch import Tensor, nn
from torch.nn import functional as F

import mural
from mural import Plan
from mural.check import small_proofs
from ranks import run_on

STREAM, RECOMPUTE = Plan(stream=(16, 16)), Plan(recompute=("first",))
CALLS = [0]


# -- what is not proved -----------------------------------------------------------------------------------------------


class BySize(Small):
    """A model that makes another call for large images."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x).tanh() if x.shape[-1] > 150 else super().forward(x)


class Once(Small):
    """A model that counts its calls, and goes by the number."""

    def forward(self, x: Tensor) -> Any:
        CALLS[0] += 1
        return super().forward(x) * CALLS[0]


class Late(Small):
    """A model whose numbers have another type than its weights."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x + torch.ones(1, dtype=torch.float32)[0]).float()


class Single(nn.Module):
    """A model that takes images of one size alone, as it has a position for each patch."""

    def __init__(self, side: int = 8) -> None:
        super().__init__()
        self.first, self.head = nn.Conv2d(2, 4, 8, 8), nn.Linear(4, 3)
        self.positions = nn.Parameter(torch.zeros(1, side * side, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.first(x).flatten(2).transpose(1, 2) + self.positions).tanh().mean(1))


def test_a_model_that_goes_by_the_size_is_not_proved_where_it_does(tmp_path: Path) -> None:
    found = proof_of(STREAM, tmp_path, BySize(), given=batch(1, 200))
    assert found.proved
    assert len(found.unproved) == 1
    assert found.unproved[0].startswith("the real size (200 × 200): tanh at 'model")


def test_a_model_of_one_size_is_proved_in_its_own(tmp_path: Path) -> None:
    x = torch.rand(2, 2, 64, 64)
    found = proof_of(RECOMPUTE, tmp_path, Single(), given=(x, torch.tensor([0, 2])))
    assert "1 of 64 × 64" in found.proved[0]
    assert not found.unproved


def test_a_plain_run_that_differs_from_itself_is_not_proved(tmp_path: Path) -> None:
    CALLS[0] = 0
    found = proof_of(RECOMPUTE, tmp_path, Once())
    assert not found.proved
    assert "one device differs from itself from run to run" in found.unproved[0]
    assert CALLS == [0]


def test_targets_that_are_all_ignored_are_told(tmp_path: Path) -> None:
    x, target = batch()
    found = proof_of(RECOMPUTE, tmp_path, Small(), given=(x, torch.full_like(target, -100)))
    assert not found.proved
    assert found.unproved == (
        "the plan: the loss of the small case is nan on one device, too: all its targets are -100",
    )


def test_a_loss_that_is_not_a_number_is_not_proved(tmp_path: Path) -> None:
    found = proof_of(RECOMPUTE, tmp_path, Small(), lambda o, t: F.cross_entropy(o, t) * (o.sum() * 0 - 1).log())
    assert not found.proved
    assert "the loss of the small case is nan on one device" in found.unproved[0]


def test_what_cannot_be_copied_or_has_no_time_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Small()
    model.numbers = (n for n in range(3))
    found = proof_of(RECOMPUTE, tmp_path, model)
    assert not found.proved
    assert "the model cannot be copied (TypeError: cannot pickle 'generator' object)" in found.unproved[0]
    monkeypatch.setattr(small_proofs, "pace", lambda _: 1e-3)
    text = str(proof_of(RECOMPUTE, tmp_path, Small()))
    assert text.startswith("not proved: the plan: its small case (1 of 9 × 9) would take ")
    assert not list(tmp_path.glob("*.json"))  # another time there may be more


def test_a_model_is_proved_in_its_own_type_where_it_takes_no_other(tmp_path: Path) -> None:
    class Typed(Small):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x.float())

    found = proof_of(RECOMPUTE, tmp_path, Typed())
    assert "in the type of the model" in found.proved[0]


def test_zero_initialised_branches_speak(tmp_path: Path) -> None:
    class Zero(Small):
        def __init__(self) -> None:
            super().__init__()
            self.branch, self.gate = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
            nn.init.zeros_(self.gate.weight)
            nn.init.zeros_(self.gate.bias)  # type: ignore[arg-type]

        def forward(self, x: Tensor) -> Any:
            return self.head(torch.relu(self.norm(self.first(x))) + self.gate(self.branch(x)))

    found = proof_of(STREAM, tmp_path, Zero())
    assert found.proved
    assert not found.unproved  # no gradient of the branch is zero


# -- no trace ---------------------------------------------------------------------------------------------------------


class Counting:
    """A loss whose state is plain Python."""

    def __init__(self) -> None:
        self.steps, self.seen = 0, list[int]()

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.steps += 1
        self.seen.append(self.steps)
        return F.cross_entropy(output, target) / self.steps


HEARD = list[str]()


class Noisy(Small):
    """A model that prints, warns, logs, counts on its class and draws from every generator."""

    calls = 0

    def forward(self, x: Tensor) -> Any:
        type(self).calls += 1
        HEARD.append("forward")
        print("forward")
        warnings.warn("forward", stacklevel=1)
        logging.getLogger("noisy").warning("forward")
        random.random(), np.random.rand()
        return super().forward(x)


def test_no_trace_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(1)
    model, loss, seen = Noisy(0.3), Counting(), list[str]()
    model.first.register_forward_hook(lambda *_: seen.append("hook"))
    model.norm.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    pm = mural.parallelize(model, RECOMPUTE, loss, prove=tmp_path)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index]
    found = pm.prove(*batch())
    assert found is not None
    assert found.proved, str(found)
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]  # type: ignore[index]
    assert torch.equal(torch.get_rng_state(), states[2])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not [p for p in model.parameters() if p.grad is not None]
    assert [m.training for m in model.modules()] == [True, True, False, True, True]
    assert (loss.steps, loss.seen, seen, HEARD, Noisy.calls, pm.calls) == (0, [], [], [], 0, 0)
    assert len(model.first._forward_hooks) == 1
    assert (capsys.readouterr().out, caplog.records, logging.root.manager.disable) == ("", [], 0)
    assert found.unproved == ("the hook test_no_trace_is_left.<locals>.<lambda> on first, which has variables outside",)


def test_a_step_after_a_proof_is_the_step_without_one(tmp_path: Path) -> None:
    losses = list[Tensor]()
    for prove in (False, tmp_path):
        torch.manual_seed(2)
        pm = mural.parallelize(Small(0.3), STREAM, prove=prove)
        losses += [pm.step(*batch()), *(p.grad for p in pm.parameters() if p.grad is not None)]
    half = len(losses) // 2
    assert all(torch.equal(a, b) for a, b in zip(losses[:half], losses[half:], strict=True))


# -- memory -----------------------------------------------------------------------------------------------------------


def variant(times: int) -> Callable[[], nn.Module]:
    class Other(Small):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x) * times

    return Other


def test_a_proof_is_remembered_until_something_changes(tmp_path: Path) -> None:
    first = proof_of(RECOMPUTE, tmp_path, variant(1)())
    assert not first.remembered
    again = proof_of(RECOMPUTE, tmp_path, variant(1)())
    assert (again.proved, again.unproved) == (first.proved, first.unproved)
    assert again.remembered.startswith(str(tmp_path))
    source = proof_of(RECOMPUTE, tmp_path, variant(2)())
    plan = proof_of(Plan(recompute=("norm",)), tmp_path, variant(1)())
    flag = variant(1)()
    flag.norm.eval()  # type: ignore[union-attr]
    flags = proof_of(RECOMPUTE, tmp_path, flag)
    loss = proof_of(RECOMPUTE, tmp_path, variant(1)(), lambda o, t: F.cross_entropy(o, t, label_smoothing=0.1))
    shape = proof_of(RECOMPUTE, tmp_path, variant(1)(), given=batch(1))
    assert not any(found.remembered for found in (source, plan, flags, loss, shape))


def on_two(folder: Path) -> tuple[str, str, list[str]]:
    rank = torch.distributed.get_rank()
    plan = Plan(spatial=(2, 1))
    first = proof_of(plan, folder / str(rank), Small())  # rank 0's folder counts
    second = proof_of(plan, folder / str(rank), Small())
    return first.remembered, second.remembered, sorted(path.name for path in folder.iterdir())


def test_ranks_agree_on_what_is_remembered(tmp_path: Path) -> None:
    found = run_on(2, on_two, tmp_path)
    assert {first for first, _, _ in found} == {""}
    assert {second.split("/")[-2] for _, second, _ in found} == {"0"}
    assert [names for _, _, names in found] == [["0"], ["0"]]


def test_a_plan_that_is_plain_has_nothing_to_prove() -> None:
    pm = mural.parallelize(Small(), Plan(precision="bfloat16"), prove=True)
    assert str(pm.prove(*batch())) == "nothing to prove"


def test_the_gradient_of_an_image_is_not_proved(tmp_path: Path) -> None:
    x, target = batch()
    found = proof_of(RECOMPUTE, tmp_path, Small(), given=(x.requires_grad_(), target))
    assert found.unproved == ("the gradient of the image, which is not compared",)
