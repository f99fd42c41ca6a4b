"""Which layers of a model are split by channels: by kind, or by name, and what cannot be split."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torch.nn.modules.conv import _ConvTransposeNd

from mural.channel.share import share_of
from mural.errors import PlanError

Layers = str | Sequence[str]
By = Literal["output", "input"]


@dataclass(frozen=True)
class Split:
    """A layer that is split: by its output or its input channels. `spatial` is 0 for a linear layer."""

    name: str
    module: Any
    by: By
    inputs: int
    outputs: int
    spatial: int = 0
    groups: int = 1
    transposed: bool = False

    @classmethod
    def of(cls, name: str, module: nn.Module, by: By) -> Split | None:
        """The layer, or None for a module that is neither a linear layer nor a convolution of torch's own."""
        kind = own_kind(module)
        layer: Any = module
        if kind is nn.Linear:
            return cls(name, module, by, layer.in_features, layer.out_features)
        if kind is None:
            return None
        spatial, transposed = len(layer.kernel_size), isinstance(module, _ConvTransposeNd)
        return cls(name, module, by, layer.in_channels, layer.out_channels, spatial, layer.groups, transposed)

    def refusal(self, ranks: int) -> str:
        """Why the layer cannot be split over that many ranks; empty if it can."""
        if self.groups > 1 and self.by == "input":
            return f"it has {self.groups} groups, which are split as a whole: say {self.name}:output"
        width, what = (self.outputs, "outputs") if self.by == "output" else (self.inputs, "inputs")
        width, what = (self.groups, "groups") if self.groups > 1 else (width, what)
        if width < ranks:
            return f"it has {width} {what} for channel = {ranks} ranks: leave it out, or set channel = {max(1, width)}"
        for name in ("weight", "bias"):
            held = self.module._parameters.get(name, self)
            if held is self:
                return f"its {name} is computed from other tensors (a parametrization): leave it out"
            if held is not None and nn.parameter.is_lazy(held):
                return "it is not initialized yet: run the model once before"
        return ""


PLAIN = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
METHODS = ("__call__", "forward", "_conv_forward", "_output_padding")


def own_kind(module: nn.Module) -> type[nn.Module] | None:
    """The torch class whose computation a module inherits unchanged, or None.

    Attention passes the weight of its output projection to a function directly, so that module is None.
    """
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear) or "forward" in vars(module):
        return None
    for kind in PLAIN:
        own = type(module)
        if isinstance(module, kind) and all(getattr(own, m, None) is getattr(kind, m, None) for m in METHODS):
            return kind
    return None


def chosen(model: nn.Module, ranks: int, layers: Layers) -> list[Split]:
    """The layers to split over that many ranks.

    By kind, what cannot be split stays whole; what is named and cannot be split raises, with the reason.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    if split := next((name for name, p in model.named_parameters() if share_of(p) is not None), None):
        raise PlanError(f"the model is split by channels already ({split}): give a model that is whole")
    if layers in ("linear", "all"):
        found = of_kind(modules, ranks, linear=layers == "linear")
        if not found and ranks > 1:
            what = "linear layer" if layers == "linear" else "linear layer or convolution"
            fix = 'set channel_layers = "all", or ' if layers == "linear" else ""
            raise PlanError(
                f"channel = {ranks} with channel_layers = {layers!r}: the model has no {what} of at least {ranks} "
                f"outputs that could be split: {fix}give the ranks to data or spatial"
            )
        return found
    if isinstance(layers, str):
        raise PlanError(f'channel_layers = {layers!r}: give "linear", "all", or names of layers such as "fc:output"')
    return of_names(modules, ranks, layers)


def of_kind(modules: Mapping[str, nn.Module], ranks: int, *, linear: bool) -> list[Split]:
    """Linear layers, or those and convolutions, that can be split by output."""
    every = list(within(modules, "", "output"))
    wanted = [s for s in every if not (linear and s.spatial) and not s.refusal(ranks)]
    while True:
        shared = tied(modules, wanted)
        kept = [s for s in wanted if s.name not in shared]
        if len(kept) == len(wanted):
            return kept
        wanted = kept


def of_names(modules: Mapping[str, nn.Module], ranks: int, layers: Sequence[str]) -> list[Split]:
    """The named layers, or all layers of named blocks that can be split."""
    found: dict[str, Split] = {}
    for given in layers:
        name, _, word = given.partition(":")
        by = word or "output"
        if by not in ("output", "input"):
            raise PlanError(f'channel_layers names {given!r}: write "{name}:output" or "{name}:input"')
        if name not in modules:
            some = [n for n, m in modules.items() if Split.of(n, m, "output") is not None]
            raise PlanError(f"channel_layers names {name!r}, not a module of the model: choose from {some[:8]}…")
        inside = list(within(modules, name, by))
        if not inside:
            raise PlanError(
                f"channel_layers names {name!r}, a {type(modules[name]).__name__}: it is neither a linear layer nor a "
                f"convolution of torch's own computation, and holds none"
            )
        able = [split for split in inside if not split.refusal(ranks)]
        if not able:
            reason = inside[0].refusal(ranks)
            raise PlanError(f"channel_layers names {given!r}, but {inside[0].name} cannot be split: {reason}")
        for split in able:
            if split.name in found and found[split.name].by != split.by:
                raise PlanError(f"channel_layers splits {split.name} by output and by input: choose one")
            found[split.name] = split
    shared = tied(modules, list(found.values()))
    if shared:
        name, other = next(iter(shared.items()))
        raise PlanError(
            f"channel_layers names {name!r}, whose parameter {other} shares: split both the same way, or leave it out"
        )
    return list(found.values())


def within(modules: Mapping[str, nn.Module], name: str, by: By) -> Iterator[Split]:
    """The layers of a module: itself, or those inside it; a layer with several names has its first one."""
    first = {id(module): path for path, module in reversed([*modules.items()])}
    inside = {
        id(module): first[id(module)]
        for path, module in modules.items()
        if path == name or path.startswith(f"{name}." if name else "")
    }
    for path in inside.values():
        split = Split.of(path, modules[path], by)
        if split is not None:
            yield split


def tied(modules: Mapping[str, nn.Module], splits: Sequence[Split]) -> dict[str, str]:
    """Layers to split that share a parameter with a module that is not split the same way, each with that module."""
    ways = {id(s.module): (s.by, s.spatial, s.transposed, s.groups) for s in splits}
    holders: dict[int, list[tuple[str, str, nn.Module]]] = {}
    for path, module in modules.items():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append((path, key, module))
    found: dict[str, str] = {}
    for split in splits:
        for key in ("weight", "bias"):
            for path, name, module in holders.get(id(split.module._parameters[key]), []):
                if name != key or ways.get(id(module)) != ways[id(split.module)]:
                    found[split.name] = f"{path}.{name}"
    return found
