"""Capture: nodes, call-sites and dataflow of small nets as literals; the model stays as it was; what it refuses."""

import copy
import doctest
import importlib
import resource
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness.vision import narrowed, torchvision
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mural
from mural import models
from mural.errors import UnsupportedOp
from mural.graph import Graph, capture
from mural.graph.recorder import Recorder

IMAGE = (1, 3, 8, 8)


class Net(nn.Module):
    """A forward given as a function, over modules given by name."""

    def __init__(self, run: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def flow(graph: Graph) -> list[tuple[Any, ...]]:
    """(site, inputs, after) of each node."""
    return [(node.site, node.inputs, node.after) for node in graph]


def sites(graph: Graph) -> list[str]:
    return [node.site for node in graph]


def ops(graph: Graph) -> list[str]:
    return [node.op for node in graph]


# --- nodes ------------------------------------------------------------------------------------------------


def test_a_node_has_site_op_kind_module_inputs_shapes_and_dtype() -> None:
    graph = mural.capture(nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.ReLU()), IMAGE)
    conv, relu = graph.nodes
    assert (conv.id, conv.site, conv.op, conv.kind, conv.module) == (0, "0", "conv2d", "windowed", "0")
    assert (conv.inputs, conv.picks, conv.after) == (("input", "0.weight", "0.bias"), (0, 0, 0), ())
    assert conv.input_shapes == ((1, 3, 8, 8), (4, 3, 3, 3), (4,))
    assert (conv.output_shapes, conv.dtypes) == (((1, 4, 3, 3),), (torch.float32,))
    assert (relu.site, relu.inputs, relu.kind) == ("1", (0,), "pointwise")
    assert [(v.name, v.shape) for v in graph.inputs] == [("input", IMAGE)]
    assert [(v.name, v.shape) for v in graph.parameters] == [("0.weight", (4, 3, 3, 3)), ("0.bias", (4,))]
    assert [(v.name, v.source, v.shape, v.dtype) for v in graph.outputs] == [("output", 1, (1, 4, 3, 3), torch.float32)]
    assert len(graph) == 2
    assert graph["1"] is relu


def test_print_is_an_aligned_table() -> None:
    graph = mural.capture(Net(lambda m, x: torch.sinc(m.conv(x)), conv=nn.Conv2d(3, 4, 1)), (1, 3, 4096, 4096))
    lines = str(graph).splitlines()
    assert lines[0] == repr(graph) == "Graph(2 nodes, x (1, 3, 4096, 4096) -> output (1, 4, 4096, 4096))"
    assert lines[1:] == [
        "site    op      kind       output",
        "conv    conv2d  windowed   (1, 4, 4096, 4096)",
        "sinc:1  sinc    pointwise  (1, 4, 4096, 4096)",
    ]


def test_what_a_torch_function_calls_inside_is_no_node() -> None:
    def run(m: Net, x: Tensor) -> Tensor:
        x = F.layer_norm(F.interpolate(F.gelu(x), scale_factor=2, mode="bilinear"), (16,))
        return F.cross_entropy(x, x.softmax(1))

    assert ops(mural.capture(Net(run), IMAGE)) == ["gelu", "interpolate", "layer_norm", "softmax", "cross_entropy"]


def test_questions_about_a_tensor_are_no_nodes() -> None:
    def run(m: Net, x: Tensor) -> Tensor:
        if x.shape[2] > 4 and x.size(3) and x.dim() == 4 and not x.is_cuda and len(x) and x.is_contiguous():
            x = x.mul(2)
        x.requires_grad_(False)
        return x[:, : x.numel() // 192] if x.dtype == torch.float32 else x

    assert sites(mural.capture(Net(run), IMAGE)) == ["mul:1", "__getitem__:1"]


def test_the_recorder_is_not_asked_about_its_own_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five of six calls that it saw of a U-Net were its own, about memory: a third of a capture's time."""
    seen: list[str] = []
    plain = Recorder.__torch_function__

    def told(self: Recorder, func: Any, *others: Any) -> Any:
        seen.append(func.__name__)
        return plain(self, func, *others)

    monkeypatch.setattr(Recorder, "__torch_function__", told)
    capture(models.UNet(width=4, depth=2), (1, 3, 32, 32))
    assert "conv2d" in seen
    assert not {"untyped_storage", "storage_offset", "stride"} & set(seen)


def test_operators_keep_the_names_of_the_table() -> None:
    graph = mural.capture(Net(lambda m, x: (1 - x) / -x), IMAGE)
    assert flow(graph) == [("__rsub__:1", ("x",), ()), ("__neg__:1", ("x",), ()), ("div:1", (0, 1), ())]
    assert {node.kind for node in graph} == {"pointwise"}


# --- call-sites -------------------------------------------------------------------------------------------


def test_sites_of_modules_called_twice_and_of_forwards_with_several_ops() -> None:
    block = Net(lambda m, x: m.act(m.conv(x) + x), conv=nn.Conv2d(3, 3, 3, padding=1), act=nn.ReLU())
    graph = mural.capture(Net(lambda m, x: m.block(m.block(x)).flatten(1) * 2, block=block), IMAGE)
    assert sites(graph) == [
        *("block.conv", "block/add:1", "block.act"),
        *("block.conv@2", "block@2/add:1", "block.act@2"),
        *("flatten:1", "mul:1"),
    ]
    assert [node.module for node in graph] == [*["block.conv", "block", "block.act"] * 2, "", ""]


def test_an_op_is_counted_in_its_call_of_the_module() -> None:
    twice = Net(lambda m, x: x.relu() + x.relu())
    graph = mural.capture(Net(lambda m, x: m.twice(m.twice(x)), twice=twice), IMAGE)
    first = ["twice/relu:1", "twice/relu:2", "twice/add:1"]
    assert sites(graph) == [*first, *(site.replace("twice", "twice@2") for site in first)]


def test_the_only_op_of_a_module_has_the_name_of_the_innermost_module() -> None:
    inner = nn.Sequential(nn.Identity(), nn.Conv2d(3, 3, 1))
    assert sites(mural.capture(Net(lambda m, x: m.inner(x), inner=inner), IMAGE)) == ["inner.1"]
    # With another padding, the module pads first.
    reflect = nn.Conv2d(3, 3, 3, padding=1, padding_mode="reflect")
    assert sites(mural.capture(nn.Sequential(reflect), IMAGE)) == ["0/pad:1", "0/conv2d:1"]


def test_a_module_in_two_places_has_its_first_name() -> None:
    act = nn.ReLU()
    assert sites(mural.capture(nn.Sequential(act, nn.Conv2d(3, 3, 1), act), IMAGE)) == ["0", "1", "0@2"]


def test_what_hooks_call_belongs_to_their_module() -> None:
    net = nn.Sequential(nn.Conv2d(3, 3, 1))
    net[0].register_forward_hook(lambda module, args, out: out * 2)
    net[0].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    assert flow(mural.capture(net, IMAGE)) == [
        ("0/add:1", ("input",), ()),
        ("0/conv2d:1", (0, "0.weight", "0.bias"), ()),
        ("0/mul:1", (1,), ()),
    ]


def test_an_unknown_site_names_those_of_its_module() -> None:
    graph = mural.capture(Net(lambda m, x: m.act(x), act=nn.ReLU()), IMAGE)
    with pytest.raises(KeyError, match=r"'act@2' is not a call-site of this graph; module 'act' has \['act'\]"):
        graph["act@2"]


# --- dataflow ---------------------------------------------------------------------------------------------


def test_an_in_place_op_makes_a_new_version() -> None:
    def run(m: Net, x: Tensor) -> Tensor:
        y = m.conv(x)
        z = m.act(y)  # in place: y and z are one tensor
        return y + z

    graph = mural.capture(Net(run, conv=nn.Conv2d(3, 3, 1, bias=False), act=nn.ReLU(inplace=True)), IMAGE)
    assert flow(graph) == [("conv", ("x", "conv.weight"), ()), ("act", (0,), ()), ("add:1", (1, 1), ())]


def test_a_write_through_a_view_comes_before_what_reads_the_whole() -> None:
    def run(m: Net, x: Tensor) -> Tensor:
        y = x + 1
        y[:, :1].relu_()
        return y * 2

    assert flow(mural.capture(Net(run), IMAGE)) == [
        ("add:1", ("x",), ()),
        ("__getitem__:1", (0,), ()),
        ("relu_:1", (1,), ()),
        ("mul:1", (0,), (2,)),
    ]


def test_a_view_sees_what_is_written_to_the_whole() -> None:
    def run(m: Net, x: Tensor) -> Tensor:
        y = x + 1
        view = y.view(-1)
        y.relu_()
        return view * 2

    graph = mural.capture(Net(run), IMAGE)
    assert flow(graph)[2:] == [("relu_:1", (0,), ()), ("mul:1", (1,), (2,))]


def test_assignment_to_a_part_is_a_version_of_the_whole() -> None:
    def run(m: Net, x: Tensor) -> Tensor:
        y = x + 1
        y[:, 0] = x[:, 1]
        return y

    graph = mural.capture(Net(run), IMAGE)
    assert flow(graph) == [
        ("add:1", ("x",), ()),
        ("__getitem__:1", ("x",), ()),
        ("__setitem__:1", (0, 1), ()),
    ]
    assert graph.outputs[0].source == 2
    assert graph["__setitem__:1"].output_shapes == (IMAGE,)


def test_an_output_written_through_a_view_says_so() -> None:
    def run(m: Net, x: Tensor) -> Tensor:
        y = x + 1
        y[:, 0].zero_()
        return y

    (output,) = mural.capture(Net(run), IMAGE).outputs
    assert (output.source, output.after) == (0, (2,))


def test_which_of_several_outputs_is_read() -> None:
    def run(m: Net, x: Tensor) -> Tensor:
        a, _, c = x.split([1, 1, 1], dim=1)
        return torch.cat([c, a, x.max(dim=1, keepdim=True).values], 1)

    graph = mural.capture(Net(run), IMAGE)
    assert (graph["cat:1"].inputs, graph["cat:1"].picks) == ((0, 0, 1), (2, 0, 0))
    assert graph["split:1"].output_shapes == ((1, 1, 8, 8),) * 3
    assert graph["max:1"].dtypes == (torch.float32, torch.int64)


def test_tied_parameters_are_one_parameter() -> None:
    net = nn.Sequential(nn.Conv2d(3, 3, 1, bias=False), nn.Conv2d(3, 3, 1, bias=False))
    net[1].weight = net[0].weight
    graph = mural.capture(net, IMAGE)
    assert [node.inputs[1] for node in graph] == ["0.weight", "0.weight"]
    assert net[1].weight is net[0].weight


def test_a_parameter_held_in_a_list_is_still_the_parameter() -> None:
    net = Net(lambda m, x: F.conv2d(x, m.held[0]), conv=nn.Conv2d(3, 3, 1))
    net.held = [net.conv.weight]
    assert flow(mural.capture(net, IMAGE)) == [("conv2d:1", ("x", "conv.weight"), ())]


def test_constants_have_names_and_fresh_tensors_take_no_memory() -> None:
    def run(m: Net, x: Tensor) -> Tensor:
        ramp = torch.linspace(0, 1, x.shape[-1]) + torch.zeros(x.shape, device="cpu")
        return (x.to("cpu") - m.mean) * ramp.to(x)

    net = Net(run)
    net.mean = torch.ones(3, 1, 1)
    graph = mural.capture(net, (1, 3, 131072, 131072))
    assert graph["sub:1"].inputs == (graph["to:1"].id, "mean")
    assert [value.name for value in graph.parameters] == ["mean"]
    assert graph["linspace:1"].kind is None
    assert graph.unsupported() == ()  # on plain tensors everything goes


def test_autograd_functions_backward_hooks_and_checkpoints_keep_the_flow() -> None:
    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return grads[0]

    def run(m: Net, x: Tensor) -> Tensor:
        return Same.apply(checkpoint(m.conv, x, use_reentrant=False)) * 2  # type: ignore[operator]

    net = Net(run, conv=nn.Conv2d(3, 3, 1))
    assert [(node.site, node.inputs[0]) for node in mural.capture(net, IMAGE)] == [
        ("conv", "x"),
        ("Same:1", 0),
        ("mul:1", 1),
    ]
    net.conv.register_full_backward_hook(lambda *_: None)
    graph = mural.capture(net, IMAGE)
    assert graph["mul:1"].inputs == (graph["mul:1"].id - 1,)


def test_several_inputs_and_outputs() -> None:
    class Two(nn.Module):
        def forward(self, image: Tensor, mask: Tensor, *more: Tensor) -> dict[str, Any]:
            return {"sum": (image + mask, image * more[0]), "mask": mask, "n": 3}

    graph = mural.capture(Two(), [IMAGE, (8, 8), (1,)], dtype=[torch.float16, torch.float32, torch.int64])
    assert [(v.name, v.dtype) for v in graph.inputs] == [
        ("image", torch.float16),
        ("mask", torch.float32),
        ("input2", torch.int64),
    ]
    assert [(v.name, v.source) for v in graph.outputs] == [
        ("output['sum'][0]", 0),
        ("output['sum'][1]", 1),
        ("output['mask']", "mask"),
    ]
    assert flow(graph) == [("add:1", ("image", "mask"), ()), ("mul:1", ("image", "input2"), ())]


def test_an_input_with_a_parameters_name() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = nn.Parameter(torch.ones(1, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.x

    (node,) = mural.capture(Scale(), IMAGE)
    assert node.inputs == ("x_", "x")
    assert node.dtypes == (torch.float64,)  # inputs have the parameters' dtype


# --- batch norm, dropout, shapes --------------------------------------------------------------------------


def test_counting_batches_is_no_node_so_training_has_the_sites_of_evaluation() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.ReLU(inplace=True))
    training, evaluation = mural.capture(net, (2, *IMAGE[1:])), mural.capture(net.eval(), IMAGE)
    assert sites(training) == sites(evaluation) == ["0", "1", "2", "3"]
    assert ops(training) == ["conv2d", "batch_norm", "dropout", "relu"]


def test_running_statistics_order_the_two_calls_of_a_norm() -> None:
    norm = nn.BatchNorm2d(3)
    graph = mural.capture(Net(lambda m, x: m.norm(x) + m.norm(-x), norm=norm), IMAGE)
    assert graph["norm@2"].inputs == (
        1,
        *("norm.running_mean", "norm.running_var", "norm.weight", "norm.bias"),
    )
    assert graph["norm@2"].after == (0,)
    assert mural.capture(Net(lambda m, x: m.norm(x) + m.norm(-x), norm=norm).eval(), IMAGE)["norm@2"].after == ()


def test_python_decides_on_shapes() -> None:
    def run(m: Net, x: Tensor) -> Tensor:
        while x.shape[-1] > 2:
            x = F.max_pool2d(x, 2)
        return x

    assert [len(mural.capture(Net(run), (1, 1, n, n))) for n in (2, 8, 131072)] == [0, 2, 16]


def test_calls_on_parameters_alone_are_nodes_where_the_image_meets_them() -> None:
    def run(m: Net, x: Tensor) -> Tensor:
        return F.conv2d(x, m.conv.weight / m.conv.weight.norm()) if m.conv.bias.sum() is not None else x

    graph = mural.capture(Net(run, conv=nn.Conv2d(3, 3, 1)), IMAGE)
    assert ops(graph) == ["norm", "div", "conv2d"]


def test_unsupported_are_the_nodes_without_a_rule() -> None:
    graph = mural.capture(Net(lambda m, x: torch.fft.fft2(x).abs()), IMAGE)
    assert [(node.site, node.kind) for node in graph.unsupported()] == [("fft_fft2:1", None)]
    assert "no rule" in str(graph)


# --- the model stays as it was ----------------------------------------------------------------------------


def test_the_model_and_the_generator_stay_as_they_were() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(3)
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.last = x
            self.register_buffer("cache", x.mean())
            return F.dropout(self.norm(x))

    net = Keeps()
    net.norm.bias.requires_grad_(False)
    ran: list[str] = []
    net.norm.register_forward_hook(lambda *_: ran.append("hook"))
    before, tensors = copy.deepcopy(net.state_dict()), [id(t) for t in net.state_dict(keep_vars=True).values()]
    state = torch.get_rng_state()
    mural.capture(net, (2, 3, 8, 8))
    assert ran == ["hook"]
    assert torch.equal(torch.get_rng_state(), state)
    assert [id(t) for t in net.state_dict(keep_vars=True).values()] == tensors
    assert list(net.state_dict()) == list(before)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert (net.calls, hasattr(net, "last"), net.training, net.norm.training) == (0, False, True, True)
    assert [p.requires_grad for p in net.parameters()] == [True, False]
    assert not any(p.is_meta for p in net.parameters())


def test_a_failing_model_is_given_back_too() -> None:
    net = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Conv2d(5, 3, 1))
    plain = nn.Module.__call__
    with pytest.raises(RuntimeError, match="channel"):  # torch's own error
        mural.capture(net, IMAGE)
    assert nn.Module.__call__ is plain
    assert net[0](torch.zeros(IMAGE)).shape == IMAGE


def test_a_model_on_meta_and_inference_mode() -> None:
    with torch.device("meta"):
        net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
    version = net[1].num_batches_tracked._version
    with torch.inference_mode():
        graph = mural.capture(net, IMAGE)
    assert flow(graph)[2] == ("2", (1,), ())
    assert net[1].num_batches_tracked._version == version


def test_a_large_image_and_large_parameters_take_no_memory() -> None:
    net = nn.Sequential(nn.Conv2d(3, 2048, 3, bias=False), nn.Conv2d(2048, 4096, 3, bias=False))  # 300 MB
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    graph = mural.capture(net, (4, 3, 131072, 131072))
    assert graph.outputs[0].shape == (4, 4096, 131068, 131068)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # KiB


# --- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "name", "line"),
    [
        (lambda m, x: x if x.sum() > 0 else -x, "__bool__", "if x.sum"),
        (lambda m, x: x * x.max().item(), "item", r"x\.max\(\)\.item"),
        (lambda m, x: x[x > 0], "__getitem__", r"x\[x > 0\]"),
        (lambda m, x: x.nonzero(), "nonzero", r"x\.nonzero"),
        (lambda m, x: x[: x.sum().int()], "__getitem__", r"x\[: x"),
        (lambda m, x: x.tolist(), "tolist", r"x\.tolist"),
        (lambda m, x: torch.equal(x, x), "equal", r"torch\.equal"),
    ],
)
def test_a_decision_on_values_names_the_users_line(run: Callable[..., Any], name: str, line: str) -> None:
    net = Net(lambda m, x: m.inner(x), inner=Net(run))
    with pytest.raises(
        UnsupportedOp, match=rf"{name} needs the values.*test_capture\.py:\d+ in module 'inner'.*{line}"
    ):
        mural.capture(net, IMAGE)


def test_a_refusal_stands_even_if_the_model_catches_it() -> None:
    def run(m: Net, x: Tensor) -> Tensor:
        try:
            return x if x.max() > 0 else -x
        except NotImplementedError:
            return x

    with pytest.raises(UnsupportedOp, match="__bool__ needs the values"):
        mural.capture(Net(run), IMAGE)


@pytest.mark.parametrize("function", [torch.relu, torch.sin, lambda x: x * 2])  # torch writes relu out for meta tensors
def test_compiled_code_hides_its_calls_and_is_refused(function: Callable[[Tensor], Tensor]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        script, traced = torch.jit.script(nn.ReLU()), torch.jit.trace(function, torch.zeros(1))
    with pytest.raises(UnsupportedOp, match=r"module '0' was compiled by torch\.jit"):
        mural.capture(nn.Sequential(script), IMAGE)
    with pytest.raises(UnsupportedOp, match=r"(relu|sin|_lambda) was compiled by torch\.jit.*at .*test_capture\.py"):
        mural.capture(Net(lambda m, x: traced(x) + 1), IMAGE)


@pytest.mark.parametrize("shape", [(), (1, 3, -8, 8), ((1, 3), 8), (1.0, 2), [(1, 3), (2.5,)]])
def test_what_is_no_shape_raises(shape: Any) -> None:
    with pytest.raises(ValueError, match="is neither a shape such as"):
        mural.capture(nn.ReLU(), shape)


def test_dtypes_must_fit_the_inputs() -> None:
    with pytest.raises(ValueError, match="1 dtypes were given for 2 inputs"):
        mural.capture(nn.ReLU(), [IMAGE, IMAGE], dtype=[torch.float32])
    with pytest.raises(TypeError, match=r"takes an nn\.Module, not a"):
        mural.capture(torch.relu, IMAGE)  # type: ignore[arg-type]


# --- whole models -----------------------------------------------------------------------------------------


def test_unet_joins_each_level_with_its_skip() -> None:
    graph = mural.capture(models.UNet(width=2, depth=2), (1, 3, 131072, 131070))
    assert graph.unsupported() == ()
    assert graph.outputs[0].shape == (1, 2, 131072, 131070)
    # 131070 → 65535 → 32767: only the lower level has to be interpolated to its skip.
    assert [node.site for node in graph if "/" in node.site] == ["up.0/interpolate:1", "up.0/cat:1", "up.1/cat:1"]
    assert graph["up.0/cat:1"].inputs == (graph["down.0.1.5"].id, graph["up.0/interpolate:1"].id)
    assert graph["up.1/cat:1"].inputs == (graph["stem.5"].id, graph["up.1.enlarge"].id)


def test_resnet_adds_what_the_blocks_began_with() -> None:
    graph = mural.capture(narrowed("resnet18", 16), (2, 3, 64, 64))
    assert graph.unsupported() == ()
    assert sites(graph)[:6] == ["conv1", "bn1", "relu", "maxpool", "layer1.0.conv1", "layer1.0.bn1"]
    assert sites(graph)[-3:] == ["avgpool", "flatten:1", "fc"]
    assert graph["layer1.0/add_:1"].inputs == (graph["layer1.0.bn2"].id, graph["maxpool"].id)
    assert graph["layer1.0.relu@2"].inputs == (graph["layer1.0/add_:1"].id,)
    assert graph["layer2.0/add_:1"].inputs == (graph["layer2.0.bn2"].id, graph["layer2.0.downsample.1"].id)


def test_torchvision_resnet50_has_a_rule_for_every_node() -> None:
    with torch.device("meta"):
        net = torchvision.models.resnet50()
    graph = mural.capture(net, (1, 3, 16384, 16384))
    assert graph.unsupported() == ()
    # 53 convolutions and norms, 49 ReLUs, 16 additions; and a pool, an average, flatten, a linear layer.
    assert len(graph) == 53 + 53 + 49 + 16 + 4


@pytest.mark.slow
def test_monai_unet_has_a_rule_for_every_node() -> None:
    nets = pytest.importorskip("monai.networks.nets")
    net = nets.UNet(3, 1, 2, channels=(4, 8, 16), strides=(2, 2), num_res_units=2, dropout=0.1)
    graph = mural.capture(net, (1, 1, 512, 512, 512))
    assert graph.unsupported() == ()
    assert graph["model.1/cat:1"].inputs[0] == graph["model.0/add:1"].id
    assert graph.outputs[0].shape == (1, 2, 512, 512, 512)


def test_examples_in_docstrings() -> None:
    for name in ("capture", "nodes", "origins", "recorder", "sites"):
        assert doctest.testmod(importlib.import_module(f"mural.graph.{name}")).failed == 0


class Hooking(nn.Module):
    """Registers a hook in its first forward, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        if not getattr(self, "hooked", False):
            self.conv.register_forward_hook(lambda module, given, result: result * 2)
            self.hooked = True
        return self.conv(x)


def test_hooks_of_a_first_forward_are_forgotten() -> None:
    """The hook stayed and the note of it did not, so each capture, and the model's own forward, had one hook more."""
    model = Hooking()
    assert [len(capture(model, (1, 2, 4, 4))) for _ in range(3)] == [2, 2, 2]
    assert not model.conv._forward_hooks
