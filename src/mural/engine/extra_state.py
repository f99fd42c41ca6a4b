"""What modules keep besides tensors (`get_extra_state`), and values of one rank on every rank of a run."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.utils import _pytree as pytree

from mural.channel.share import share_of
from mural.comm.failure.agree import gather, together
from mural.errors import LayoutError
from mural.ranks import Mesh

# -- values of one rank, on every rank ---------------------------------------------------------------------------------


def shared(value: Tensor, mesh: Mesh, owner: int) -> Tensor:
    """A rank's tensor on every rank, contiguous; each gives one of its shape and type. Collective.

    Bytes travel, since no backend knows every type. One that a rank has on meta arrives on its CPU. The owner gets
    its own tensor back, if that is contiguous.
    """
    home = torch.device("cpu") if value.is_meta else value.device
    if mesh.rank == owner or mesh.world == 1:
        plain = value.detach().resolve_conj().resolve_neg().contiguous()
    else:
        plain = torch.empty(value.shape, dtype=value.dtype, device=home)
    if mesh.world == 1 or not plain.numel():
        return plain
    sent = mesh.transport.in_common(plain.reshape(-1).view(torch.uint8))
    with mesh.transport.meeting("state"):
        dist.broadcast(sent, src=owner, group=mesh.transport.group)
    return sent.to(home).view(plain.dtype).view(plain.shape)


@torch.no_grad()
def fill(tensor: Tensor, values: Tensor) -> None:
    """Give a tensor other values, in place; one that was expanded has each of its places in memory written once."""
    narrow, given = compact(tensor), values
    for dim, extent in enumerate(narrow.shape):
        given = given.narrow(dim, 0, extent)
    narrow.copy_(given)


def compact(tensor: Tensor) -> Tensor:
    """The tensor with one entry along each dim that was expanded."""
    for dim, (extent, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if extent > 1 and stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def host_memory(tensor: Tensor) -> Tensor:
    """New memory on the CPU for a tensor's values, with its strides, or without gaps where it has some."""
    return torch.empty_like(compact(tensor.detach()), device="cpu").expand(tensor.shape)


def share_from_first(model: nn.Module, mesh: Mesh) -> None:
    """Give every rank the parameters and buffers of rank 0; those that are split stay. Collective."""
    if mesh.world == 1:
        return
    for tensor in (*model.parameters(), *model.buffers()):
        if share_of(tensor) is None:
            values = shared(tensor, mesh, 0)
            if mesh.rank != 0:
                fill(tensor, values)


# -- extra state -------------------------------------------------------------------------------------------------------


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
