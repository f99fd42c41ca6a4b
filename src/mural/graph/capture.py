"""Capture: the graph of an unmodified model, from a forward pass on tensors without memory.

The model runs on meta tensors under a `TorchFunctionMode`, which sees each call where a sharded tensor would
intercept it; what a torch function calls inside is not seen, since the mode is off while it runs. Python's own
control flow on shapes just runs; a decision on values raises.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from mural.channel.share import share_of
from mural.errors import UnsupportedOp
from mural.graph.commons import DRAWS, Name
from mural.graph.held_state import HeldState, Touches, as_it_was
from mural.graph.kept_values import same
from mural.graph.nodes import Graph, Shape
from mural.graph.recorder import Recorder
from mural.graph.without_memory import META, twin_of

Shapes = Sequence[int] | Sequence[Sequence[int]]
Dtypes = torch.dtype | Sequence[torch.dtype] | None
REGISTERED = ("_parameters", "_buffers", "_modules")
PLAIN = (bool, int, float, str, type(None))
"""The types of most attributes, which hold no tensor."""
HOOKS = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
         "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks")  # fmt: skip


def capture(
    model: nn.Module, shape: Shapes, dtype: Dtypes = None, repeated: bool = False, wanted: Sequence[bool] = (),
    values: bool = False,
) -> Graph:  # fmt: skip
    """The graph of the calls that a model makes for an input of this shape, or for inputs of these shapes.

    Nothing is allocated and the model does not change: parameters, buffers and inputs are meta tensors, whatever
    device the model is on. The dtype, one for all inputs or one for each, is that of the parameters unless given.
    `wanted` says of which inputs the gradient is.
    A forward that leaves something is `repeated`, if asked for, to find out what of it the next one would go by.
    It may read the `values` of parameters, buffers and constants if the graph is of this step alone.

    >>> print(capture(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), (1, 3, 4096, 4096)))
    Graph(2 nodes, input (1, 3, 4096, 4096) -> output (1, 8, 4094, 4094))
    site  op      kind       output
    0     conv2d  windowed   (1, 8, 4094, 4094)
    1     relu    pointwise  (1, 8, 4094, 4094)
    """
    check_python(model)
    shapes = shapes_of(shape)
    dtypes = dtypes_of(dtype, model, len(shapes))
    with torch.inference_mode(False):  # inference tensors do not say when they are written to
        named, twins = meta_twins(model)
        images = [torch.empty(s, dtype=d, device=META) for s, d in zip(shapes, dtypes, strict=True)]
        for image, gradient in zip(images, wanted, strict=False):
            image.requires_grad_(gradient)
        names = input_names(model, len(images), taken=named)
        real = named_tensors(model) if values else None

        def begun(constants: dict[int, str]) -> Recorder:
            recorder = Recorder(twins, constants, real)
            for name, tensor in named.items():
                recorder.enter_value(name, tensor, "parameter" if isinstance(tensor, nn.Parameter) else "buffer")
            for name, tensor in zip(names, images, strict=True):
                recorder.enter_value(name, tensor, "input")
            recorder.modules.begin_model(model, tuple(images))
            return recorder

        def run() -> Any:
            return functional_call(model, named, tuple(images), tie_weights=False)

        recorder = begun(constants_of(model))
        touches = Touches(model, lambda: recorder.modules.innermost)
        kept = as_it_was(model), unchanged(model), torch.random.fork_rng(devices=[])
        with kept[0], kept[1], kept[2]:
            with recorder.watching(model):
                with touches.watching():
                    result = run()
                if repeated:
                    recorder.repeat(result)
            left = touches.left if repeated and not touches.carried else {}
            carried = touches.carried | (found_again(model, left, recorder, names, begun, run) if left else set())
        return replace(recorder.graph(names, result), touched=touches.changed, carried=tuple(sorted(carried)))


def found_again(
    model: nn.Module, left: Mapping[Name, Any], first: Recorder, inputs: Sequence[str],
    begun: Callable[[dict[int, str]], Recorder], run: Callable[[], Any],
) -> set[str]:  # fmt: skip
    """What a forward left and the next one goes by, by name: that is run, too.

    self.calls["forward"] += 1                      left again, and other numbers
    y = conv(x) + self.last; self.last = y          made of the image, and read
    if self.mask is None: self.mask = ones(8)       read, but it would be the same in every forward
    self.size = x.shape                             left again, but the same
    """
    tensors = {name: [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)] for name, value in left.items()}
    made = {id(t): name for name, found in tensors.items() for t in found if first.made_of(inputs, t)}
    known = constants_of(model) | {id(t): spelled(name) for name, found in tensors.items() for t in found}
    second = begun({key: name for key, name in known.items() if key not in made})
    held = HeldState.by(dict(model.named_modules()), values=False)
    try:
        with second.watching(model):
            run()
    except UnsupportedOp:  # it reads what none of its own calls made
        return {*map(spelled, made.values() or left)}
    now = held.changes() | held.commons.changes()
    moved = {name for name, value in now.items() if name not in left or not same(forms(value), forms(left[name]))}
    if not any(tensors.values()) and second.operations != first.operations:
        moved |= left.keys()
    return {spelled(name) for name in moved if name not in DRAWS}


def spelled(name: Name) -> str:
    """A name as a user writes it.

    >>> spelled(("", "count")), spelled(("down.0", "count"))
    ('count', 'down.0.count')
    """
    return ".".join(name).lstrip(".")


def forms(value: Any) -> Any:
    """What is in a value, with the shape and type of each tensor for the tensor."""
    return pytree.tree_map_only(Tensor, lambda tensor: (tuple(tensor.shape), tensor.dtype), value)


def check_python(model: nn.Module) -> None:
    """Raise unless all of the model is Python, where each call can be seen."""
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"capture takes an nn.Module, not a {type(model).__name__}: wrap a function in a module")
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedOp(
                f"module {path!r} was compiled by torch.jit, which hides its calls: use the plain module"
            )


def shapes_of(shape: Shapes) -> list[Shape]:
    """One shape for each input.

    >>> shapes_of((1, 3, 8, 8)), shapes_of([(1, 3, 8, 8), (1, 5)])
    ([(1, 3, 8, 8)], [(1, 3, 8, 8), (1, 5)])
    """
    given: list[Any] = list(shape)
    several = bool(given) and all(isinstance(item, Sequence) for item in given)
    shapes: list[tuple[Any, ...]] = [tuple(item) for item in given] if several else [tuple(given)]
    if not shapes[0] or not all(isinstance(extent, int) and extent >= 0 for item in shapes for extent in item):
        raise ValueError(
            f"{shape!r} is neither a shape such as (1, 3, 4096, 4096) nor a sequence of shapes, one for each input"
        )
    return shapes


def dtypes_of(dtype: Dtypes, model: nn.Module, count: int) -> list[torch.dtype]:
    """One dtype for each input: as given, or else that of the first floating-point parameter."""
    if isinstance(dtype, Sequence):
        if len(dtype) != count:
            raise ValueError(f"{len(dtype)} dtypes were given for {count} inputs: give one, or one for each")
        return list(dtype)
    floating = (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    return [dtype or next(floating, torch.get_default_dtype())] * count


def input_names(model: nn.Module, count: int, taken: Container[str]) -> list[str]:
    """The names that the model's forward has for its inputs; one that a parameter has too gets a `_`."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = [p.name for p in inspect.signature(model.forward).parameters.values() if p.kind in kinds]
    names = [named[i] if i < len(named) else f"input{i}" for i in range(count)]
    return [f"{name}_" if name in taken else name for name in names]


def meta_twins(model: nn.Module) -> tuple[dict[str, Tensor], dict[int, Tensor]]:
    """A meta tensor for each parameter and buffer, by name and by `id`; tied ones share one, split ones are whole."""
    named: dict[str, Tensor] = {}
    twins: dict[int, Tensor] = {}
    for name, tensor in named_tensors(model).items():
        if id(tensor) not in twins:
            share = share_of(tensor)
            twins[id(tensor)] = twin_of(tensor if share is None else share.without_memory(tensor))
        named[name] = twins[id(tensor)]
    return named, twins


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers by name; tied ones have several."""
    # Each module once: a slot that is swapped under two names would not be given back as it was.
    return {
        f"{path}.{name}" if path else name: tensor
        for path, module in model.named_modules()
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
    }


def constants_of(model: nn.Module) -> dict[int, str]:
    """The names of the tensors that modules hold as plain attributes, alone or in lists and dicts, by `id`."""
    names: dict[int, str] = {}
    for path, module in model.named_modules():
        for attribute, held in vars(module).items():
            if attribute in REGISTERED or type(held) in PLAIN:
                continue
            tensors = [leaf for leaf in pytree.tree_leaves(held) if isinstance(leaf, Tensor)]
            for i, tensor in enumerate(tensors):
                name = f"{path}.{attribute}" if path else attribute
                names.setdefault(id(tensor), name if len(tensors) == 1 else f"{name}.{i}")
    return names


@contextmanager
def unchanged(model: nn.Module) -> Generator[None]:
    """Give all modules their attributes back as they were, so that what a forward keeps there is forgotten."""
    held = [vars(module) for module in model.modules()]
    held += [attributes[name] for attributes in held for name in (*REGISTERED, *HOOKS)]
    before = [dict(attributes) for attributes in held]
    try:
        yield
    finally:
        for attributes, old in zip(held, before, strict=True):
            attributes.clear()
            attributes.update(old)
