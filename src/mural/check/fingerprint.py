"""The fingerprint of a proof: all that its result depends on, as one number; and the files that remember proofs."""

from __future__ import annotations

import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, cast

import torch
from torch import nn

from mural.check.sampled_batch import SampledBatch
from mural.check.subject import Subject
from mural.comm.failure.agree import gather
from mural.cost.cache import cache_folder
from mural.engine.loss_variables import variables
from mural.engine.proof import Proof
from mural.graph.commons import codes_in, functions_in, own_kinds, package_of
from mural.plans import Plan
from mural.ranks import Mesh
from mural.text_files import write_whole
from mural.typed import dump

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.Size)
FOLDER = "proofs"
PLACES = ("site-packages", "dist-packages", sysconfig.get_path("stdlib"), str(Path(__file__).parents[1]))
"""Where the code of packages is that have versions; mural's own is looked at as a whole."""


def fingerprint(subject: Subject, plan: Plan, batch: SampledBatch, device: torch.device, mesh: Mesh) -> str:
    """A number of all that a proof depends on: code, flags, shapes and types, the plan, versions, the machine."""
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    lines = [dump(plan), str(batch.shapes), str(batch.dtypes), kind, torch.__version__, package_digest()]
    lines += [str(mesh.sizes), mesh.transport.describe()]
    lines += [f"{n} {tuple(p.shape)} {p.dtype} {p.requires_grad}" for n, p in subject.model.named_parameters()]
    lines += [f"{n} {tuple(b.shape)} {b.dtype}" for n, b in subject.model.named_buffers()]
    seen: set[int] = set()
    for name, module in subject.model.named_modules():
        lines += [name, *described(module, seen)]
    lines += described(subject.loss, seen)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


@lru_cache(maxsize=1)
def package_digest() -> str:
    """A number of mural's own code."""
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()


def described(value: Any, seen: set[int]) -> Iterator[str]:
    """A value in lines: its code, and what it holds that a call may go by; tensors by shape and type."""
    if isinstance(value, PLAIN):
        yield repr(value)
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield f"tensor {tuple(value.shape)} {value.dtype}"
    elif isinstance(value, (list, tuple)):
        for part in cast("list[Any]", value):
            yield from described(part, seen)
    elif isinstance(value, dict):
        for key, part in cast("dict[Any, Any]", value).items():
            yield str(key)
            yield from described(part, seen)
    elif isinstance(value, (FunctionType, MethodType, partial)):
        yield from of_functions(list(functions_in(value)), seen)
        for name, part in variables(value, whole=False):
            yield name
            yield from () if installed(part) else described(part, seen)
    elif isinstance(value, type):
        yield from of_kind(value, seen)
    elif isinstance(value, ModuleType):
        yield value.__name__
    else:
        yield from of_kind(type(value), seen)
        for name, part in held(value):
            yield name
            yield from described(part, seen)


def held(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object of the user's, or a module, holds besides parameters, buffers and modules."""
    if isinstance(value, nn.Module) or not installed(type(value)):
        attributes: dict[str, Any] = vars(value) if hasattr(value, "__dict__") else {}
        yield from ((n, part) for n, part in attributes.items() if n not in ("_parameters", "_buffers", "_modules"))


def installed(value: Any) -> bool:
    """Whether code is of an installed package, whose version stands for it, or of Python."""
    package = package_of(value)
    file = str(getattr(sys.modules.get(package), "__file__", None) or "")
    return package in sys.builtin_module_names or any(place in file for place in PLACES)


def of_kind(kind: type, seen: set[int]) -> Iterator[str]:
    """A class: its name, and the code of its own methods; or the version of the package that it is of."""
    yield f"{kind.__module__}.{kind.__qualname__} {getattr(sys.modules.get(package_of(kind)), '__version__', '')}"
    for own in () if installed(kind) else own_kinds(kind):
        if id(own) not in seen and not installed(own):
            seen.add(id(own))
            yield from of_functions([f for value in vars(own).values() for f in functions_in(value)], seen)
            yield from (f"{n} {v!r}" for n, v in vars(own).items() if isinstance(v, PLAIN) and not n.startswith("__"))


def of_functions(functions: list[FunctionType], seen: set[int]) -> Iterator[str]:
    """The code of functions, and of those of the same package that they name."""
    while functions:
        function = functions.pop()
        if id(function) in seen or installed(function):
            continue
        seen.add(id(function))
        yield from (repr(part) for _, part in variables(function, whole=False) if isinstance(part, PLAIN))
        for code in codes_in(function.__code__):
            yield from of_code(code)
            for name in code.co_names:
                value = function.__globals__.get(name)
                if isinstance(value, FunctionType) and package_of(value) == package_of(function):
                    functions.append(value)
                elif isinstance(value, PLAIN):
                    yield f"{name} {value!r}"


def of_code(code: CodeType) -> Iterator[str]:
    """A function's code, without the places where it stands."""
    yield code.co_code.hex()
    yield f"{code.co_names} {code.co_varnames} {[c for c in code.co_consts if not isinstance(c, CodeType)]!r}"


# -- memory -----------------------------------------------------------------------------------------------------------


def proofs_folder(folder: Path | bool) -> Path:
    """Where proofs are remembered: the folder itself, or `proofs` in the user's cache folder (`$MURAL_CACHE`)."""
    return folder if isinstance(folder, Path) else cache_folder() / FOLDER


def remembered(folder: Path, key: str, mesh: Mesh) -> Proof | None:
    """The proof that rank 0 finds, if all ranks ask for the same one. Collective."""
    path = folder / f"{key}.json"
    found: dict[str, Any] | None = None
    if mesh.rank == 0:
        with suppress(OSError, ValueError):
            found = json.loads(path.read_text())
    told = gather(mesh, (key, str(path), found), "proofs")
    if len({mine for mine, _, _ in told.values()}) > 1:
        return None
    _, place, values = told[mesh.everyone[0]]
    return None if values is None else Proof.of({**values, "remembered": place})


def remember(folder: Path, key: str, proof: Proof, mesh: Mesh) -> None:
    """Write a proof; a folder that cannot be written to remembers nothing."""
    if mesh.rank == 0:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / f"{key}.json", json.dumps(proof.values(), indent=1) + "\n")
