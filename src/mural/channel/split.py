"""Model parallelism by channels: layers of a model whose parameters are divided over the channel axis of the mesh.

Layers are split in place: the module keeps its name, its hooks and its parameters' names, and its parameters become
this rank's shares. The rest of the model does not change, and sees the same tensors as before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mural.channel.layer import ChannelLayer, ChannelParts, Exchange, shared
from mural.channel.misuse import watch_optimizers
from mural.channel.share import Share, mark_share, share_of
from mural.channel.which_layers import Layers, Split, chosen
from mural.geometry import Cuts, Interval
from mural.ranks import Mesh
from mural.shard.tensor import ShardedTensor

CONVOLUTIONS: dict[int, Callable[..., Any]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED: dict[int, Callable[..., Any]] = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def split_channels(model: nn.Module, mesh: Mesh, layers: Layers = "linear", exchange: Exchange = "batch") -> list[str]:
    """The names of the layers that are divided over the mesh's channel axis from now on, as "name:output".

    `layers`: "linear" for linear layers only (the hybrid of "one weird trick": convolutions stay data-parallel), "all"
    for convolutions too, or names such as "classifier.1:input"; without a suffix a layer is split by output, and the
    name of a block stands for all layers in it. Every rank calls this with equal weights; afterwards each holds its
    shares, and `reduce_gradients` averages their gradients over the ranks that hold the same ones.

    >>> from mural.ranks import init
    >>> split_channels(nn.Sequential(nn.Linear(4, 2)), init())
    ['0:output']
    """
    splits = chosen(model, mesh.size("channel"), layers)
    watch_optimizers()
    for split in splits:
        divide(split, mesh, exchange)
    return [f"{split.name}:{split.by}" for split in splits]


def divide(split: Split, mesh: Mesh, exchange: Exchange) -> None:
    """Cut a layer's parameters to this rank's shares, and replace its forward by that of all ranks together.

    Parameters remain the same objects, so an optimizer, a hook or a second layer that refers to one still does.
    """
    channels = channels_of(split, mesh.size("channel"))
    weight_dim, intervals = share_of_weight(split, channels)

    def share(name: str, dim: int, intervals: tuple[Interval, ...]) -> None:
        parameter = split.module._parameters[name]
        if parameter is None or share_of(parameter) is not None:  # a tied one has been cut with its other layer
            return
        found = Share(f"{split.name}.{name}", tuple(parameter.shape), dim, intervals, mesh)
        held = [None if t is None else found.cut(t).clone() for t in (parameter.detach(), parameter.grad)]
        parameter.grad = None  # until the parameter has its new shape
        parameter.data, parameter.grad = held
        mark_share(parameter, found)

    share("weight", weight_dim, intervals)
    if channels.outputs is not None:
        share("bias", 0, channels.outputs)
    shares = {name: s for name, p in split.module._parameters.items() if (s := share_of(p)) is not None}
    split.module.forward = SplitForward(split, mesh, channels, exchange, shares)


def channels_of(split: Split, ranks: int) -> ChannelParts:
    """The channels of every rank: as equal as possible, for a grouped convolution in whole groups."""
    if split.groups > 1:
        groups = Cuts.even(split.groups, ranks).intervals()
        return ChannelParts(
            *(tuple(scaled(i, n // split.groups) for i in groups) for n in (split.inputs, split.outputs))
        )
    if split.by == "output":
        return ChannelParts(None, Cuts.even(split.outputs, ranks).intervals())
    return ChannelParts(Cuts.even(split.inputs, ranks).intervals(), None)


def scaled(interval: Interval, width: int) -> Interval:
    """The channels of some groups."""
    return Interval(interval.start * width, interval.stop * width)


def share_of_weight(split: Split, channels: ChannelParts) -> tuple[int, tuple[Interval, ...]]:
    """The dim of the weight that is cut, and the intervals: a grouped convolution's first dim counts its groups."""
    inputs, outputs = channels.inputs, channels.outputs
    if split.transposed:
        return (0, inputs) if inputs is not None else (1, outputs or ())
    return (0, outputs) if outputs is not None else (1, inputs or ())


def computation(
    split: Split, mesh: Mesh, channels: ChannelParts
) -> tuple[Callable[..., ShardedTensor], Callable[[Tensor], Tensor]]:
    """What a rank computes with its channels, and what is done to the whole result: adding a bias that is not cut."""
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


class SplitForward:
    """The forward of a split layer; a capture, which runs without memory, replaces the shares by whole parameters.

    A copy of the module computes with the copy's parameters, which are shares too.
    """

    def __init__(
        self, split: Split, mesh: Mesh, channels: ChannelParts, exchange: Exchange, shares: Mapping[str, Share]
    ):
        self.split, self.mesh, self.channels, self.shares = split, mesh, channels, shares
        self.exchange: Exchange = exchange
        module = split.module
        run, late = computation(split, mesh, channels)

        def trains() -> bool:
            with torch._C.DisableTorchFunction():
                return module.weight.requires_grad

        widths = (split.inputs, split.outputs)
        self.layer = ChannelLayer(split.name, mesh, channels, widths, -1 - split.spatial, exchange, run, late, trains)

    def __call__(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The result of the whole layer."""
        if input.is_meta:
            return type(self.split.module).forward(self.split.module, input, *args, **kwargs)
        with torch._C.DisableTorchFunction():
            for name, share in self.shares.items():
                share.check(getattr(self.split.module, name))
        return self.layer(input, *args, *kwargs.values())

    def __deepcopy__(self, memo: dict[int, Any]) -> SplitForward:
        module = memo.get(id(self.split.module), self.split.module)
        for name, share in self.shares.items():
            mark_share(deepcopy(self.split.module._parameters[name], memo), share)
        split = replace(self.split, module=module)
        return SplitForward(split, self.mesh, self.channels, self.exchange, self.shares)
