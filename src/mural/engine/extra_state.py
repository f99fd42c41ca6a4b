"""What modules keep besides tensors (`get_extra_state`), where the ranks of a run have different ones."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.utils import _pytree as pytree

from mural.comm.failure.agree import gather, together
from mural.engine.broadcast_values import share_from_first
from mural.errors import LayoutError
from mural.ranks import Mesh


def keepers(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that have an extra state, by path."""
    plain = nn.Module.get_extra_state
    return {path: m for path, m in model.named_modules() if type(m).get_extra_state is not plain}


def on_cpu(value: Any) -> Any:
    """A value with copies of its tensors in host memory."""
    return pytree.tree_map_only(Tensor, lambda t: t.detach().to("cpu", copy=True), value)


@contextmanager
def extra_of_owners(model: nn.Module, mesh: Mesh, owner: Callable[[str], int]) -> Generator[None]:
    """A block in which every module's extra state is that of the rank that owns it. Collective.

    `owner` gives the rank for a module's path. torch's own `state_dict` asks the modules, so hooks see it too.
    """
    found: dict[str, bytes] = {}
    modules = keepers(model)
    with together(mesh, "state_dict"):
        for path, module in modules.items():
            if owner(path) == mesh.rank:
                found[path] = packed(module.get_extra_state(), path, module)
    told = gather(mesh, found, "extra states") if modules else {}
    with ExitStack() as stack:
        for path, text in (item for part in told.values() for item in part.items()):
            stack.enter_context(method(modules[path], "get_extra_state", partial(pickle.loads, text)))
        yield


def packed(value: Any, path: str, module: nn.Module) -> bytes:
    """An extra state as it travels, or an error that names the module."""
    try:
        return pickle.dumps(on_cpu(value))
    except Exception as error:
        raise LayoutError(
            f"get_extra_state() of {path or 'the model'} ({type(module).__name__}) gave a {type(value).__name__} that "
            f"cannot be sent to other ranks ({error}): return tensors, numbers, strings, and lists and dicts of these"
        ) from error


@contextmanager
def extra_noted(model: nn.Module) -> Generator[dict[str, Any]]:
    """What a state that is loaded inside the block would give to `set_extra_state`, by the module's path."""
    noted: dict[str, Any] = {}
    with ExitStack() as stack:
        for path, module in model.named_modules():
            stack.enter_context(method(module, "set_extra_state", partial(noted.__setitem__, path)))
        yield noted


@contextmanager
def method(module: nn.Module, name: str, function: Callable[..., Any]) -> Generator[None]:
    """A block in which a module has another method of that name."""
    before = vars(module).get(name)
    vars(module)[name] = function
    try:
        yield
    finally:
        del vars(module)[name]
        if before is not None:
            vars(module)[name] = before


def load_replicated(
    model: nn.Module, state: Mapping[str, Any], mesh: Mesh, strict: bool, rank0: bool
) -> _IncompatibleKeys:
    """Take over the state of a model that every rank holds whole; all get rank 0's tensors. Collective."""
    extra: dict[str, Any] = {}
    if rank0:
        keys, extra = load_from_first(model, state, mesh, strict)
    else:
        with together(mesh, "load_state_dict"):
            keys = model.load_state_dict(state, strict=strict)
    share_from_first(model, mesh)
    set_extra(model, extra, mesh)
    return keys


def load_from_first(
    model: nn.Module, state: Mapping[str, Any], mesh: Mesh, strict: bool
) -> tuple[_IncompatibleKeys, dict[str, Any]]:
    """Load a state on rank 0 alone; its missing and unexpected keys, and the extra states, on all ranks. Collective.

    The extra states are still to be set: `set_extra`.
    """
    answer: tuple[_IncompatibleKeys, dict[str, bytes]] = _IncompatibleKeys([], []), {}
    with together(mesh, "load_state_dict"):
        if mesh.rank == 0:
            with extra_noted(model) as noted:
                keys = model.load_state_dict(state, strict=strict)
            modules = dict(model.named_modules())
            answer = keys, {path: packed(value, path, modules[path]) for path, value in noted.items()}
    keys, texts = gather(mesh, answer, "load_state_dict")[0]
    return keys, {path: pickle.loads(text) for path, text in texts.items()}


def set_extra(model: nn.Module, values: Mapping[str, Any], mesh: Mesh) -> None:
    """Give modules their extra states. Collective."""
    modules = dict(model.named_modules())
    with together(mesh, "load_state_dict"):
        for path, value in values.items():
            modules[path].set_extra_state(value)
