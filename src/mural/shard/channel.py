"""Model parallelism by channels: layers of a model whose parameters are divided over the channel axis of the mesh.

What is split is replaced in place: the module keeps its name, its hooks and its parameters' names, and its parameters
become this rank's shares. Everything else of the model stays as it is, and sees tensors as it always does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mural.comm import Mesh
from mural.geometry import Cuts, Interval
from mural.shard.channel_choice import Layers, Split, chosen
from mural.shard.channel_layer import ChannelLayer, Channels, Exchange, shared
from mural.shard.channel_share import Share, mark_share
from mural.shard.channel_watch import watch_optimizers
from mural.shard.tensor import ShardedTensor

CONVOLUTIONS: dict[int, Callable[..., Any]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED: dict[int, Callable[..., Any]] = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def split_channels(model: nn.Module, mesh: Mesh, layers: Layers = "linear", exchange: Exchange = "batch") -> list[str]:
    """The names of the layers that are divided over the mesh's channel axis from now on, as "name:output".

    `layers`: "linear" for linear layers alone (the hybrid of "one weird trick": convolutions stay data-parallel), "all"
    for convolutions too, or names as "classifier.1:input"; without a word behind it a name is split by output, and the
    name of a block stands for all layers in it. Every rank calls it with equal weights; afterwards each holds its
    shares, and `reduce_gradients` averages those over the ranks that hold the same.

    >>> from mural.comm import init
    >>> split_channels(nn.Sequential(nn.Linear(4, 2)), init())
    ['0:output']
    """
    splits = chosen(model, mesh.size("channel"), layers)
    known: dict[int, nn.Parameter] = {}
    watch_optimizers()
    for split in splits:
        divide(split, mesh, exchange, known)
    return [f"{split.name}:{split.by}" for split in splits]


def divide(split: Split, mesh: Mesh, exchange: Exchange, known: dict[int, nn.Parameter]) -> None:
    """Replace a layer's parameters by this rank's shares, and its forward by that of all ranks together.

    `known` are shares by the identity of the parameter that they are of: tied parameters stay tied.
    """
    module, channels = split.module, channels_of(split, mesh.size("channel"))
    weight_dim, intervals = share_of_weight(split, channels)

    def share(name: str, dim: int, intervals: tuple[Interval, ...]) -> None:
        whole = module._parameters[name]
        if whole is None:
            return
        if id(whole) not in known:
            found = Share(f"{split.name}.{name}", tuple(whole.shape), dim, intervals, mesh)
            part = found.cut(whole.detach()).clone(memory_format=torch.preserve_format)
            known[id(whole)] = mark_share(nn.Parameter(part, whole.requires_grad), found)
            known[id(known[id(whole)])] = known[id(whole)]
        module._parameters[name] = known[id(whole)]

    share("weight", weight_dim, intervals)
    if channels.outputs is not None:
        share("bias", 0, channels.outputs)
    run, late = computation(split, mesh, channels)

    def trains() -> bool:
        with torch._C.DisableTorchFunction():
            return module.weight.requires_grad

    widths = (split.inputs, split.outputs)
    layer = ChannelLayer(split.name, mesh, channels, widths, -1 - split.spatial, exchange, run, late, trains)
    module.forward = forward_of(module, layer)


def channels_of(split: Split, ranks: int) -> Channels:
    """The channels of every rank: as equal as can be, a grouped convolution's in whole groups."""
    if split.groups > 1:
        groups = Cuts.even(split.groups, ranks).intervals()
        return Channels(*(tuple(scaled(i, n // split.groups) for i in groups) for n in (split.inputs, split.outputs)))
    if split.by == "output":
        return Channels(None, Cuts.even(split.outputs, ranks).intervals())
    return Channels(Cuts.even(split.inputs, ranks).intervals(), None)


def scaled(interval: Interval, width: int) -> Interval:
    """The channels of some groups."""
    return Interval(interval.start * width, interval.stop * width)


def share_of_weight(split: Split, channels: Channels) -> tuple[int, tuple[Interval, ...]]:
    """The dim of the weight that is cut, and the intervals: a grouped convolution's first dim counts its groups."""
    inputs, outputs = channels.inputs, channels.outputs
    if split.transposed:
        return (0, inputs) if inputs is not None else (1, outputs or ())
    return (0, outputs) if outputs is not None else (1, inputs or ())


def computation(
    split: Split, mesh: Mesh, channels: Channels
) -> tuple[Callable[..., ShardedTensor], Callable[[Tensor], Tensor]]:
    """What a rank computes of its channels, and what is done to the whole result: a bias that no rank has alone."""
    module, spatial = split.module, split.spatial
    groups = 1
    if split.groups > 1:
        groups = Cuts.even(split.groups, mesh.size("channel")).interval(mesh.coordinates["channel"]).size

    def run(x: ShardedTensor, *args: Any) -> ShardedTensor:
        weight = shared(module.weight, mesh)
        bias = shared(module.bias, mesh) if module.bias is not None and channels.outputs is not None else None
        if not spatial:
            return F.linear(x, weight, bias)  # type: ignore[return-value]
        if split.transposed:
            more = module._output_padding(
                x,
                args[0] if args else None,
                module.stride,
                module.padding,
                module.kernel_size,
                spatial,
                module.dilation,
            )
            return TRANSPOSED[spatial](x, weight, bias, module.stride, module.padding, more, groups, module.dilation)
        padding = module.padding
        if module.padding_mode != "zeros":
            x = F.pad(x, module._reversed_padding_repeated_twice, mode=module.padding_mode)  # type: ignore[assignment]
            padding = 0
        return CONVOLUTIONS[spatial](x, weight, bias, module.stride, padding, module.dilation, groups)

    def late(y: Tensor) -> Tensor:
        if module.bias is None or channels.outputs is not None:
            return y
        return y + module.bias.to(y.dtype).view(-1, *(1,) * spatial)

    return run, late


def forward_of(module: Any, layer: ChannelLayer) -> Callable[..., Tensor]:
    """The module's forward; a capture, which runs without memory, puts the whole parameters in the shares' place."""
    plain = type(module).forward

    def forward(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if input.is_meta:
            return plain(module, input, *args, **kwargs)
        return layer(input, *args, *kwargs.values())

    return forward
