"""States under every plan are those of the unsplit model, whatever their tensors are like: as plain torch has them."""

from __future__ import annotations

import warnings
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import orthogonal

import mural
from mural.engine import Parallel
from ranks import restart, run_on

PLANS = [
    mural.Plan(),
    mural.Plan(data=2),
    mural.Plan(spatial=(2, 1)),
    mural.Plan(channel=2, channel_layers="all"),
    mural.Plan(stage=2, cuts=("middle",)),
    mural.Plan(stage=2, data=2, cuts=("middle",)),
    mural.Plan(stage=2, cuts=("middle",), schedule="gems", microbatches=2, batchnorm="micro"),
]


class Noted(nn.Module):
    """A layer with a state besides its tensors."""

    def __init__(self, note: Any):
        super().__init__()
        self.note = note

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state

    def forward(self, x: Tensor) -> Tensor:
        return x * 1.0


class Middle(nn.Module):
    """A layer whose buffers are of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = orthogonal(nn.Linear(4, 4))
        self.noted = Noted({"kind": ("middle", 1), "values": torch.arange(3)})
        self.register_buffer("turned", torch.arange(6.0).view(2, 3).t())
        self.register_buffer("sparse_mask", torch.tensor([True, False, True]))
        self.register_buffer("short", torch.arange(5, dtype=torch.int16))
        self.register_buffer("phase", torch.ones(2))
        self.register_buffer("brief", torch.linspace(0, 1, 4))
        self.register_buffer("nothing", torch.empty(0, 3))
        self.register_buffer("scalar", torch.tensor(2.5))
        self.register_buffer("passing", torch.ones(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        mixed = F.conv2d(x, self.mix.weight[:, :, None, None], self.mix.bias)
        return self.noted(mixed) * self.scalar


class Net(nn.Module):
    """Channels-last weights, a parametrization, buffers of all kinds, a tied weight, extra states."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.begun = Noted("first")
        self.middle = Middle()
        self.norm = nn.BatchNorm2d(4)
        self.again = nn.Conv2d(4, 4, 1)
        self.last = nn.Conv2d(4, 3, 1)
        self.last.weight = nn.Parameter(torch.rand(1, 1, 4, 3).permute(3, 2, 1, 0))
        self.tied = nn.Conv2d(2, 4, 3, padding=1)
        self.tied.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.begun(self.first(x) + self.tied(x))
        return self.last(self.again(self.norm(self.middle(y))))


def net(seed: int, dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(seed)
    made = Net().to(dtype)
    made.middle.brief = made.middle.brief.bfloat16()
    made.middle.phase = torch.tensor([1 + 2j, 3 - 1j])
    with torch.no_grad():
        for buffer in made.buffers():
            if buffer.is_floating_point() or buffer.is_complex():
                buffer.add_(seed)
    made.middle.noted.note = {"kind": ("middle", seed), "values": torch.arange(3) + seed}
    made.begun.note = f"first {seed}"
    return made


def unlike(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """What of a state differs from the one wanted."""
    if list(found) != list(wanted):
        return [f"keys {list(found)}"]
    faults: list[str] = []
    for key, value in wanted.items():
        mine = found[key]
        if isinstance(value, Tensor):
            faults += [] if mine.is_cpu and mine.dtype == value.dtype and torch.equal(mine, value) else [key]
        elif isinstance(value, dict):
            faults += [] if mine["kind"] == value["kind"] and torch.equal(mine["values"], value["values"]) else [key]
        elif mine != value:
            faults.append(key)
    return faults


def given(state: dict[str, Any], pm: Parallel, rank0: bool) -> dict[str, Any]:
    return state if not rank0 or pm.world_mesh.rank == 0 else {}


def round_trip(plan: mural.Plan) -> list[str]:
    """A state taken and given, on every rank and on the first alone."""
    plain, pm = net(1), mural.parallelize(net(1), plan, image=(2, 12, 8))
    state = pm.state_dict()
    faults = [f"taken: {fault}" for fault in unlike(state, plain.state_dict())]
    if plan.channel == 1 and not state["first.weight"].is_contiguous(memory_format=torch.channels_last):
        faults.append("channels-last weights came otherwise")
    if len({v.data_ptr() for v in state.values() if isinstance(v, Tensor) and v.numel()}) < len(state) - 3:
        faults.append("two tensors share memory")
    lone = pm.state_dict(rank0=True)
    faults += [f"on rank 0: {fault}" for fault in unlike(lone, given(plain.state_dict(), pm, rank0=True))]
    for rank0 in (False, True):
        other = mural.parallelize(net(2), plan, image=(2, 12, 8))
        other.load_state_dict(given(plain.state_dict(), pm, rank0), rank0=rank0)
        faults += [f"given, rank0={rank0}: {fault}" for fault in unlike(other.state_dict(), plain.state_dict())]
    return faults


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_states_of_all_kinds_of_tensors_come_and_go_as_in_plain_torch(plan: mural.Plan) -> None:
    """Under stages, tensors that are not contiguous were scrambled, and extra states were those of the wrong rank."""
    assert run_on(plan.devices, round_trip, plan) == [[]] * plan.devices


def cast(plan: mural.Plan, stored: torch.dtype, held: torch.dtype) -> list[str]:
    """A state of another dtype than the model's."""
    faults: list[str] = []
    for rank0 in (False, True):
        plain, pm = net(2, held), mural.parallelize(net(2, held), plan, image=(2, 12, 8))
        state = net(1, stored).state_dict()
        plain.load_state_dict(state)
        pm.load_state_dict(given(state, pm, rank0), rank0=rank0)
        faults += [f"rank0={rank0}: {fault}" for fault in unlike(pm.state_dict(), plain.state_dict())]
    return faults


@pytest.mark.parametrize("plan", [PLANS[0], PLANS[2], PLANS[3], PLANS[4]], ids=str)
@pytest.mark.parametrize("types", [(torch.float32, torch.float64), (torch.float64, torch.float32)], ids=str)
def test_a_state_of_another_type_is_cast(plan: mural.Plan, types: tuple[torch.dtype, torch.dtype]) -> None:
    """Bytes of float32 were taken for float64."""
    assert run_on(plan.devices, cast, plan, *types) == [[]] * plan.devices


def partly(plan: mural.Plan, rank0: bool) -> list[str]:
    """What `strict=False` takes, what it returns, and what `strict=True` says."""
    plain, pm = net(2), mural.parallelize(net(2), plan, image=(2, 12, 8))
    state = {k: v for k, v in net(1).state_dict().items() if not k.startswith(("last", "begun"))} | {"more": 1}
    theirs = plain.load_state_dict(dict(state), strict=False)
    ours = pm.load_state_dict(given(dict(state), pm, rank0), strict=False, rank0=rank0)
    faults = unlike(pm.state_dict(), plain.state_dict())
    faults += [f"{ours}"] if (ours.missing_keys, ours.unexpected_keys) != tuple(theirs) else []
    for wrong in (state, net(1).state_dict() | {"last.bias": torch.zeros(7)}):
        words: list[str] = []
        for load in (plain.load_state_dict, lambda s: pm.load_state_dict(given(s, pm, rank0), rank0=rank0)):
            try:
                load(dict(wrong))
            except (RuntimeError, mural.PeerError) as error:
                words.append(str(error))
        faults += [] if len(words) == 2 and all(line in words[1] for line in words[0].splitlines()[1:]) else words
    return faults


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("rank0", [False, True])
def test_keys_that_are_missing_or_too_many_are_told_as_torch_tells_them(plan: mural.Plan, rank0: bool) -> None:
    assert run_on(plan.devices, partly, plan, rank0) == [[]] * plan.devices


def noted_by_rank(plan: mural.Plan) -> tuple[Any, Any]:
    """The extra states where each rank has one of its own."""
    pm = mural.parallelize(net(1), plan, image=(2, 12, 8))
    model: Any = pm.module
    model.begun.note, model.middle.noted.note = f"begun on {pm.world_mesh.rank}", f"middle on {pm.world_mesh.rank}"
    state = pm.state_dict()
    return state["begun._extra_state"], state["middle.noted._extra_state"]


def test_an_extra_state_is_that_of_the_rank_whose_stage_has_the_module() -> None:
    plan = mural.Plan(stage=2, cuts=("middle",))
    assert run_on(2, noted_by_rank, plan) == [("begun on 0", "middle on 1")] * 2


class Unpicklable(Noted):
    """A layer whose extra state cannot travel."""

    def get_extra_state(self) -> Any:
        return lambda: self.note


def unsendable() -> str:
    model = nn.Sequential(nn.Conv2d(2, 4, 1), Unpicklable("a"), nn.Conv2d(4, 3, 1))
    pm = mural.parallelize(model, mural.Plan(stage=2, cuts=("2",)))
    try:
        pm.state_dict()
    except (RuntimeError, mural.MuralError) as error:
        return str(error)
    return ""


def test_an_extra_state_that_cannot_travel_is_named_on_every_rank() -> None:
    for text in run_on(2, unsendable):
        assert "get_extra_state() of 1 (Unpicklable)" in text


class Hooked(nn.Module):
    """A layer that saves its weight under another name, turned, and an old one that loads states of version 1."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 1)
        self.norm = nn.BatchNorm2d(3)
        self._register_state_dict_hook(self.saved)
        self.register_load_state_dict_pre_hook(self.loading)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))

    @staticmethod
    def saved(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[f"{prefix}turned"] = state.pop(f"{prefix}conv.weight").transpose(0, 1) * 2

    @staticmethod
    def loading(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[f"{prefix}conv.weight"] = state.pop(f"{prefix}turned").transpose(0, 1) / 2


def hooked(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(2, 2, 1), Hooked(), nn.Conv2d(3, 3, 1)).double()


def with_hooks(plan: mural.Plan) -> list[str]:
    plain, faults = hooked(1), list[str]()
    old = {k: v for k, v in plain.state_dict().items() if not k.endswith("num_batches_tracked")}  # as torch 0.3 had it
    for rank0 in (False, True):
        for state in (plain.state_dict(), old):
            pm = mural.parallelize(hooked(2), plan)
            pm.load_state_dict(given(dict(state), pm, rank0), rank0=rank0)
            faults += [f"rank0={rank0}: {fault}" for fault in unlike(pm.state_dict(), plain.state_dict())]
    return faults


@pytest.mark.parametrize("plan", [mural.Plan(stage=2, cuts=("1",)), mural.Plan(stage=2, cuts=("2",))], ids=str)
def test_hooks_of_states_see_the_whole_model_under_stages(plan: mural.Plan) -> None:
    """Keys that a hook made were left on meta, and what a hook or a version would load was refused."""
    assert run_on(2, with_hooks, plan) == [[], []]


class Expanded(nn.Module):
    """A buffer of which many entries are one place in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 1)
        self.register_buffer("wide", torch.tensor([[1.0], [2.0]]).expand(2, 5))
        self.last = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.conv(x * self.wide.sum()))


def expanded(plan: mural.Plan) -> tuple[bool, str]:
    model = Expanded()
    pm = mural.parallelize(model, plan)
    state = pm.state_dict()
    try:
        pm.load_state_dict(state)
    except (RuntimeError, mural.PeerError) as error:
        return torch.equal(state["wide"], Expanded().wide), str(error)
    return False, ""


@pytest.mark.parametrize("plan", [mural.Plan(data=2), mural.Plan(stage=2, cuts=("last",))], ids=str)
def test_an_expanded_buffer_is_taken_as_plain_torch_takes_it(plan: mural.Plan) -> None:
    """Plain torch does not load into one, and says so; `parallelize` itself failed on it."""
    for same, words in run_on(2, expanded, plan):
        assert same
        assert 'the parameter named "wide"' in words


class Bare(nn.Module):
    """A layer on meta that gives itself values."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x))


def from_meta(plan: mural.Plan, rank0: bool) -> list[str]:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last), Bare(), nn.Conv2d(2, 3, 1))
    with warnings.catch_warnings(action="error"):
        empty = deepcopy(plain).to("meta")
        empty[1].two.weight = empty[1].one.weight
        empty[2] = deepcopy(plain[2])  # has values already
        pm = mural.parallelize(empty, plan, device="cpu")
        kept = pm.state_dict()
        faults = [key for key in ("2.weight", "2.bias") if not torch.equal(kept[key], plain.state_dict()[key])]
        faults += [] if torch.equal(kept["1.one.weight"], kept["1.two.weight"]) else ["untied"]
        state = plain.state_dict()
        pm.load_state_dict(given(state, pm, rank0), rank0=rank0)
    return [*faults, *unlike(pm.state_dict(), plain.state_dict())]


@pytest.mark.parametrize("plan", [mural.Plan(), mural.Plan(data=2), mural.Plan(stage=2, cuts=("1",))], ids=str)
@pytest.mark.parametrize("rank0", [False, True])
def test_a_model_on_meta_keeps_its_ties_and_what_has_values(plan: mural.Plan, rank0: bool) -> None:
    """Memory for tensors on meta untied weights, and took the values of those that had some."""
    assert run_on(plan.devices, from_meta, plan, rank0) == [[]] * plan.devices


class Mute(Noted):
    """A layer whose state its rank cannot give."""

    def get_extra_state(self) -> Any:
        raise OSError("the note is lost")


def asked_in_vain() -> str:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), Mute(0), nn.Conv2d(4, 2, 1))
    pm = mural.parallelize(model, mural.Plan(stage=2, cuts=("2",)), image=(3, 8, 8))
    try:
        pm.state_dict()
    except (OSError, mural.PeerError) as error:
        return str(error)
    return "nothing"


def test_a_state_that_one_rank_cannot_give_keeps_nobody_waiting() -> None:
    found = run_on(2, asked_in_vain)
    restart(2)
    assert all("the note is lost" in text for text in found), found
