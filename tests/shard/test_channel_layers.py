"""The law for single layers that are split by channels, drawn by hypothesis; odd uses of them; what is refused."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import mural
from law import difference, image
from mural.channel import layer as channel_layer
from mural.channel.share import share_of
from mural.channel.which_layers import chosen
from mural.errors import PlanError
from ranks import restart, run_on

TOLERANCE = 1e-10
Plan = mural.Plan


def loss_of(output: Any, target: Any) -> Tensor:
    """A loss that weighs every position of an output differently."""
    return (output * output.sin() * target).mean()


def step_of(model: nn.Module, plan: mural.Plan, x: Tensor) -> float:
    """The largest difference of output, loss and gradients of one step from those on one device."""
    plain = deepcopy(model)
    expected = plain(x)
    weights = image(*expected.shape, seed=9)
    loss_of(expected, weights).backward()
    pm = mural.parallelize(model, plan, loss_of)
    outputs: list[Any] = []
    pm.observe = outputs.append
    loss = pm.step(x, weights)
    (output,) = outputs
    whole = output.full() if isinstance(output, mural.ShardedTensor) else output
    worst = max(difference(whole, expected), difference(loss, loss_of(expected, weights)))
    for p, q in zip(plain.parameters(), pm.parameters(), strict=True):
        share = share_of(q)
        worst = max(worst, difference(q.grad, p.grad if share is None or p.grad is None else share.cut(p.grad)))
    return worst


def layer_step(kind: str, arguments: dict[str, Any], plan: mural.Plan, shape: tuple[int, ...]) -> float:
    """One layer between two pointwise ones, so that gradients come from behind and go on before it."""
    torch.manual_seed(1)
    layer: nn.Module = getattr(nn, kind)(**arguments)
    first = nn.Conv2d if len(shape) == 4 else nn.Conv1d if len(shape) == 3 else nn.Conv3d
    around = nn.Sequential(first(shape[1], shape[1], 1), nn.Tanh(), layer, nn.Tanh()).double()
    return step_of(around, plan, image(*shape, seed=2))


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[str, dict[str, Any], mural.Plan, tuple[int, ...]]:
    """A convolution of any kind and arguments, a plan on two to four ranks that splits it, and an image."""
    dims = draw(st.sampled_from([1, 2, 2, 2, 3]))
    transposed = draw(st.booleans())
    ranks = draw(st.sampled_from([2, 2, 3, 4]))
    groups = draw(st.sampled_from([1, 1, 1, ranks, ranks + 1]))
    by = "output" if groups > 1 else draw(st.sampled_from(["output", "input"]))
    inputs, outputs = (groups * draw(st.integers(1, 2)) if groups > 1 else draw(st.integers(ranks, 6)) for _ in "io")
    kernel, stride = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    arguments: dict[str, Any] = {
        "in_channels": inputs,
        "out_channels": outputs,
        "kernel_size": kernel,
        "stride": stride,
        "padding": draw(st.integers(0, kernel // 2)),
        "dilation": draw(st.integers(1, 2)),
        "groups": groups,
        "bias": draw(st.booleans()),
    }
    if not transposed:
        arguments["padding_mode"] = draw(st.sampled_from(["zeros", "zeros", "reflect", "circular"]))
    axes: dict[str, Any] = {"channel": ranks}
    if ranks == 2:
        spatial = {1: [(2,)], 2: [(2, 1), (1, 2)], 3: [(1, 2, 1)]}[dims]
        axes |= draw(st.sampled_from([{}, {"data": 2}, *({"spatial": grid} for grid in spatial)]))
    exchange = draw(st.sampled_from(["batch", "rank", "part"]))
    plan = Plan(**axes, channel_layers=(f"2:{by}",), channel_exchange=exchange)
    extents = tuple(draw(st.integers(10, 14)) for _ in range(dims))
    kind = f"Conv{'Transpose' if transposed else ''}{dims}d"
    return kind, arguments, plan, (draw(st.integers(1, 5)), inputs, *extents)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(convolutions())
def test_a_split_convolution_equals_the_whole(case: tuple[str, dict[str, Any], mural.Plan, tuple[int, ...]]) -> None:
    kind, arguments, plan, shape = case
    assert max(run_on(plan.devices, layer_step, kind, arguments, plan, shape)) < TOLERANCE


class Tokens(nn.Module):
    """Linear layers on channels last, on merged dims, on a plain tensor, called twice; an image without a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.twice, self.head = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 4, bias=False)
        self.query, self.lone, self.up = nn.Linear(4, 3), nn.Conv2d(3, 3, 3, padding=1), nn.ConvTranspose2d(4, 3, 2, 2)
        self.seed = nn.Parameter(torch.randn(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        n, _, h, w = x.shape
        last = self.mix(x.permute(0, 2, 3, 1))
        tokens = self.twice(self.twice(last.reshape(n, h * w, 5)).tanh()) + last.reshape(n, h * w, 5)
        maps = self.head(tokens).transpose(1, 2).reshape(n, 4, h, w)
        made = self.query(self.seed).sum(0) + self.query(self.seed[0])
        one = self.lone(x[0])
        return self.up(maps, output_size=(2 * h + 1, 2 * w)) + (made.view(-1, 1, 1) + one.mean((1, 2)).view(-1, 1, 1))


def tokens(plan: mural.Plan) -> float:
    torch.manual_seed(0)
    return step_of(Tokens().double(), plan, image(3, 3, 9, 8))


@pytest.mark.parametrize(
    "plan",
    [
        Plan(channel=2, channel_layers="all"),
        Plan(channel=2, channel_layers=("mix:input", "twice:input", "head", "query:input", "lone:input", "up:input")),
        Plan(channel=2, spatial=(2, 1), channel_layers="all"),
        Plan(channel=2, spatial=(1, 2), channel_layers=("mix:input", "twice", "head:input"), channel_exchange="rank"),
    ],
    ids=str,
)
def test_layers_in_odd_places(plan: mural.Plan) -> None:
    assert max(run_on(plan.devices, tokens, plan)) < TOLERANCE


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6, bias=False), nn.Linear(6, 6)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x.flatten(1)).tanh()))


class Functional(nn.Module):
    """A weight that is used past its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        flat = self.fc(x.flatten(1))
        return F.linear(flat, self.fc.weight.t())


def tied(layers: Any) -> tuple[float, bool]:
    torch.manual_seed(0)
    model = Tied().double()
    worst = step_of(model, Plan(channel=2, channel_layers=layers), image(3, 6, 1, 1))
    return worst, model.a.weight is model.b.weight


@pytest.mark.parametrize("layers", ["linear", ("a:input", "b:input"), ("c",)])
def test_tied_parameters_stay_tied(layers: Any) -> None:
    for worst, same in run_on(2, tied, layers):
        assert worst < TOLERANCE
        assert same


def refused_step(make: Callable[[], nn.Module], loss: Callable[..., Any] | None) -> str:
    model = make().double()
    pm = mural.parallelize(model, Plan(channel=2), loss(model) if loss is not None else loss_of)
    try:
        pm.step(image(2, 6, 1, 1), image(2, 6))
    except PlanError as error:
        return str(error)
    return ""


def penalty(model: Any) -> Callable[..., Any]:
    return lambda output, target: loss_of(output, target) + model.fc.weight.norm()


class Alone(Functional):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.flatten(1))


@pytest.mark.parametrize(("make", "loss"), [(Functional, None), (Alone, penalty)])
def test_a_weight_that_is_used_past_its_layer_is_refused(make: Any, loss: Any) -> None:
    for text in run_on(2, refused_step, make, loss):
        assert "fc.weight" in text
        assert "set channel_layers to a list without fc" in text


class Own(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight * 2)


def parametrized() -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("model", "layers", "said"),
    [
        (nn.Sequential(nn.Linear(4, 2)), ("1",), "not a module of the model"),
        (nn.Sequential(nn.Linear(4, 2)), ("0:both",), '"0:output" or "0:input"'),
        (nn.Sequential(nn.Linear(4, 2)), ("0",), "2 outputs for channel = 3"),
        (nn.Sequential(nn.ReLU()), ("0",), "a ReLU: it is neither"),
        (nn.Sequential(nn.ReLU(), nn.Conv2d(3, 3, 1)), "linear", 'set channel_layers = "all"'),
        (nn.Sequential(nn.Conv2d(6, 6, 1, groups=2)), ("0",), "2 groups for channel = 3"),
        (nn.Sequential(nn.Conv2d(6, 6, 1, groups=3)), ("0:input",), "say 0:output"),
        (nn.Sequential(Own(4, 4)), ("0",), "a Own: it is neither"),
        (nn.Sequential(parametrized()), ("0",), "computed from other tensors"),
        (nn.Sequential(nn.LazyLinear(4)), ("0",), "not initialized"),
        (Tied(), ("a", "b:input"), "split both the same way"),
        (Tied(), ("a", "a:input"), "by output and by input"),
        (nn.MultiheadAttention(4, 2), ("out_proj",), "neither"),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(model: nn.Module, layers: Any, said: str) -> None:
    with pytest.raises(PlanError, match=r"(?s).*") as caught:
        chosen(model, 3, layers)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (Plan(channel=2, stage=2), "set stage = 1"),
        (Plan(channel=2, microbatches=2), "microbatches = 1"),
        (Plan(channel=2, data=2, average=3), "average = 0"),
    ],
)
def test_plans_that_do_not_go_with_channels(plan: mural.Plan, said: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan.check_runnable()
    assert said in str(caught.value)


def test_layers_are_chosen_by_kind_or_by_name() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1)))
    assert [s.name for s in chosen(model, 2, "linear")] == ["1.0"]
    assert [s.name for s in chosen(model, 2, "all")] == ["0", "1.0"]
    assert [(s.name, s.by) for s in chosen(model, 2, ("1:input",))] == [("1.0", "input"), ("1.1", "input")]
    with pytest.raises(PlanError, match="channel_layers"):
        Plan(channel=2, channel_layers="convolutions")


def stepped_by(name: str) -> str:
    pm = mural.parallelize(nn.Sequential(nn.Flatten(), nn.Linear(6, 6, bias=False)), Plan(channel=2))
    optimizer = getattr(torch.optim, name)(pm.parameters(), lr=0.01)
    pm.step(torch.randn(2, 6), torch.arange(2))
    try:
        optimizer.step()
    except PlanError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("name", "refused"), [("Adafactor", True), ("Muon", True), ("AdamW", False)])
def test_an_optimizer_that_looks_at_whole_parameters_is_refused(name: str, refused: bool) -> None:
    for text in run_on(2, stepped_by, name):
        assert ("1.weight as a whole" in text) is refused


def failing() -> str:
    """A rank that runs out of memory in a split layer: the others hear of it, and do not wait."""
    pm = mural.parallelize(nn.Sequential(nn.Flatten(), nn.Linear(6, 6)), Plan(channel=2))

    def out_of_memory(_: Tensor) -> Tensor:
        raise MemoryError("no room")

    with pytest.MonkeyPatch.context() as patch:
        if pm.mesh.rank == 1:
            patch.setattr(channel_layer, "computed_in", out_of_memory)
        try:
            pm.step(torch.randn(2, 6), torch.arange(2))
        except (mural.PeerError, MemoryError) as error:
            return f"{type(error).__name__}: {error}"
    return ""


def test_a_failure_in_a_split_layer_ends_the_wait_of_the_others() -> None:
    first, second = run_on(2, failing)
    restart(2)
    assert second == "MemoryError: no room"
    assert first.startswith("PeerError")
    assert "no room" in first


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"channel": 2}, "× channel=2 needs 2 ranks, but 1 run"),
        ({"channel": 0}, "at least 1"),
        ({"channel": 2, "stage": 2}, "does not go with stages"),
        ({"channel": 2, "image": (8, 8)}, "channel=2 does not divide 1 ranks"),
    ],
)
def test_meshes_that_cannot_be_made(sizes: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError) as caught:
        mural.init(**sizes)
    assert said in str(caught.value)
