"""Split layers and what holds on to them: optimizers, hooks, copies, states with hooks, weights put in their place."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mural
from law import difference, image
from mural.channel.share import share_of
from mural.errors import LayoutError, PlanError
from ranks import run_on

SPLIT = mural.Plan(channel=2)


class Net(nn.Module):
    """Two linear layers that a plan splits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(12, 9), nn.Linear(9, 5)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.first(x.flatten(1))))


def batch() -> tuple[Tensor, Tensor]:
    return image(5, 3, 2, 2), torch.arange(5) % 5


def trained(run: Any, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        run(*batch())
        optimizer.step()


def plain_steps(model: Net) -> Any:
    return lambda x, y: F.cross_entropy(model(x), y).backward()


def far(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(difference(found[name], value) for name, value in expected.items())


def held_before() -> float:
    """An optimizer and a hook that were there before the model was split."""
    ours, theirs = Net(), Net()
    for model in (ours, theirs):
        model.first.weight.register_hook(lambda grad: 0.5 * grad)
        plain_steps(model)(*batch())  # a gradient that is there already counts as before
    optimizer, other = (torch.optim.SGD(m.parameters(), 0.5, momentum=0.9) for m in (ours, theirs))
    weight = ours.first.weight
    pm = mural.parallelize(ours, SPLIT)
    assert ours.first.weight is weight
    assert share_of(weight) is not None
    for step, used in ((pm.step, optimizer), (plain_steps(theirs), other)):
        step(*batch())
        used.step()
    trained(pm.step, optimizer)
    trained(plain_steps(theirs), other)
    return far(pm.state_dict(), theirs.state_dict())


def copied() -> float:
    """A copy keeps its weights while the model goes on, and is split as the model is."""
    pm = mural.parallelize(Net(), SPLIT)
    expected = Net()(batch()[0])
    kept = copy.deepcopy(pm.module)
    trained(pm.step, torch.optim.SGD(pm.parameters(), 0.5))
    again = mural.shard(batch()[0], pm.mesh)
    assert share_of(kept.first.weight) is not None
    return difference(kept(again).full(), expected)


def swapped() -> list[str]:
    """What is said of whole weights in the place of shares."""
    said: list[str] = []
    pm = mural.parallelize(Net(), SPLIT)
    whole = pm.state_dict()
    x = mural.shard(batch()[0], pm.mesh)
    with pytest.raises(LayoutError) as error:
        torch.func.functional_call(pm.module, whole, (x,))
    said.append(str(error.value))
    pm.module.first.weight.data = whole["first.weight"]
    with pytest.raises(LayoutError) as error:
        pm.state_dict()
    said.append(str(error.value))
    with pytest.raises(PlanError) as twice:
        mural.parallelize(pm.module, SPLIT)
    return [*said, str(twice.value)]


def hooked() -> tuple[float, list[tuple[int, ...]]]:
    """Hooks on states see whole tensors, whichever plan."""
    ours, theirs = Net(), Net()

    def flip(state: dict[str, Any], prefix: str, *_: object) -> None:
        state[prefix + "first.weight"] = state.pop(prefix + "old.weight").flip(0)

    def shorten(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> dict[str, Any]:
        return {key: value.float() for key, value in state.items()}

    given = {("old.weight" if k == "first.weight" else k): v + 1 for k, v in Net().state_dict().items()}
    for model in (ours, theirs):
        model._register_load_state_dict_pre_hook(flip)
    pm = mural.parallelize(ours, SPLIT)
    rank = torch.distributed.get_rank()
    pm.load_state_dict(dict(given) if rank == 0 else None, rank0=True)
    theirs.load_state_dict(dict(given))
    gap = far(pm.state_dict(), theirs.state_dict())
    ours._register_state_dict_hook(shorten)
    return gap, [(tuple(v.shape), v.dtype) for v in pm.state_dict().values()]


def test_what_was_held_before_stays() -> None:
    """An optimizer made before `parallelize` trained nothing of the split layers, without a word."""
    assert max(run_on(2, held_before)) < 1e-10


def test_a_copy_has_weights_of_its_own() -> None:
    """A copy computed with the weights of the model that it was made from."""
    assert max(run_on(2, copied)) < 1e-10


def test_whole_weights_in_the_place_of_shares_raise() -> None:
    """They were cut in silence."""
    for said in run_on(2, swapped):
        assert "first.weight, of shape (9, 12), is split by channels" in said[0]
        assert "was replaced by a tensor of (9, 12)" in said[1]
        assert "split by channels already" in said[2]


def test_hooks_of_states_see_whole_tensors() -> None:
    """Values of a hook before loading were written over, and one on saving made parts pass for wholes."""
    shapes = [(tuple(v.shape), torch.float32) for v in Net().state_dict().values()]
    for gap, found in run_on(2, hooked):
        assert gap < 1e-10
        assert found == shapes


def test_a_lazy_layer_is_refused() -> None:
    with pytest.raises(PlanError, match=r"0\.weight has no shape yet: run the model once"):
        mural.parallelize(nn.Sequential(nn.LazyLinear(3)), mural.Plan())
