"""What a configuration names by an import path: found, with the nearest name where it is not, and called."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

from mural.errors import DISTRIBUTION, ConfigError
from mural.train.failing_code import told_in_one_line
from mural.typed import nearest

SHOWN = 12
"""Names that a message lists."""

# Where torchvision and timm have a classifier that one would look for in mural.models; others have its very name.
SHIPPED = {
    "AlexNet": "alexnet",
    "VGG": "vgg19",
    "ResNet": "resnet50",
    "DenseNet": "densenet121",
    "InceptionV3": "inception_v3",
    "Swin": "swin_t",
    "swin_tiny": "swin_t",
    "ViT": "vit_small_patch16_224",
    "vit_tiny": "vit_tiny_patch16_224",
    "vit_small": "vit_small_patch16_224",
    "vit_base": "vit_base_patch16_224",
}


def named(path: str, key: str) -> Callable[..., Any]:
    """The callable at "package.module:name" or "file.py:name"; modules of the working directory are found."""
    place, _, name = path.rpartition(":")
    if not place or not name:
        raise ConfigError(f'{key} = "{path}" should be "package.module:callable" or "path/to/file.py:callable"')
    module = from_file(Path(place), key) if place.endswith(".py") else from_package(place, key)
    try:
        found: Any = module
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError:
        hint = shipped(path) or near_callable(module, name)
        raise ConfigError(f'{key} = "{path}": {place} has no {name!r}{hint}') from None
    if not callable(found):
        raise ConfigError(f'{key} = "{path}" names {found!r}, which cannot be called: name a class or a function')
    return found


def near_callable(module: Any, name: str) -> str:
    """A question with the callable of a module whose name is most like this one, upper or lower case; or all of them.

    >>> import torch.nn as nn
    >>> near_callable(nn, "conv2D")
    ": did you mean 'Conv2d'?"
    """
    public: list[str] = getattr(module, "__all__", None) or [n for n in dir(module) if not n.startswith("_")]
    known = {n.lower(): n for n in public if callable(getattr(module, n, None))}
    near = get_close_matches(name.lower(), known, n=1)
    if near:
        return f": did you mean {known[near[0]]!r}?"
    shown = ", ".join(list(known.values())[:SHOWN])
    return f": it has {shown}{', …' if len(known) > SHOWN else ''}" if known else ": nothing in it can be called"


def shipped(path: str) -> str:
    """How to name a classifier that is looked for in mural.models, and that torchvision or timm ships; or nothing.

    >>> shipped("mural.models:resnet50")
    ': write "torchvision.models:resnet50" (pip install "mural-train[models]"); its argument for classes is num_classes'
    """
    place, _, name = path.rpartition(":")
    found = SHIPPED.get(name, name)
    if place != "mural.models" or not re.match(r"alexnet|vgg|resnet|densenet|inception|swin|vit", found):
        return ""
    home = "timm.models" if found.startswith("vit") else "torchvision.models"
    return f': write "{home}:{found}" (pip install "{DISTRIBUTION}[models]"); its argument for classes is num_classes'


def from_package(place: str, key: str) -> Any:
    """An installed module, or one in the working directory."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    with told_in_one_line(f"{key}: the module {place}"):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if not error.name or not place.startswith(error.name):
                raise
            hint = near_module(error.name) or ": install it, or run where it is"
            raise ConfigError(f"{key}: there is no module {error.name!r}{hint}") from error


def near_module(name: str) -> str:
    """A question with the module of the same package whose name is most like this one; or nothing.

    >>> near_module("mural.model")
    ": did you mean 'mural.models'?"
    """
    package, _, last = name.rpartition(".")
    folders = getattr(sys.modules.get(package), "__path__", ())
    near = get_close_matches(last, [module.name for module in pkgutil.iter_modules(folders)], n=1)
    return f": did you mean '{package}.{near[0]}'?" if near else ""


class FromSource(SourceFileLoader):
    """Reads a file itself: its compiled form is taken for it where the two are as old as each other, to the second."""

    def path_stats(self, path: str) -> Mapping[str, Any]:
        """Refused, so that no compiled form is read or written."""
        raise OSError(f"{path} is read itself")


def from_file(path: Path, key: str) -> Any:
    """The module in a file, run once in this process; files of one name in two folders are two modules.

    Its name in `sys.modules` follows from the path, so it is the same in every process, as what is pickled needs.
    """
    if not path.is_file():
        raise ConfigError(f"{key}: there is no file {path} (in {Path.cwd()}): correct the path")
    place = path.resolve()
    digest = hashlib.sha256(str(place).encode()).hexdigest()[:8]
    name = f"mural_user_{re.sub(r'[^a-zA-Z0-9]', '_', place.stem)}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    loader = FromSource(name, str(place))
    module = module_from_spec(ModuleSpec(name, loader, origin=str(place)))
    module.__file__ = str(place)
    sys.modules[name] = module  # what is defined there can then be pickled, as workers need
    try:
        with told_in_one_line(f"{key}: the file {path}"):
            loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def called(function: Callable[..., Any], arguments: Mapping[str, Any], key: str) -> Any:
    """The result of a call with arguments from a configuration."""
    check_arguments(function, arguments, key)
    with told_in_one_line(f"{key.partition('.')[0]}: the call of {name_of(function)}"):
        return function(**arguments)


def check_arguments(function: Callable[..., Any], arguments: Mapping[str, Any], key: str, given: int = 0) -> None:
    """Raise unless a function takes arguments of these names, after so many without one.

    >>> import torch.nn as nn
    >>> check_arguments(nn.ReLU, {"in_place": True}, "model.arguments")
    Traceback (most recent call last):
    mural.errors.ConfigError: model.arguments: ReLU does not take 'in_place': did you mean 'inplace'? It takes inplace
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C
        return
    try:
        signature.bind(*[None] * given, **arguments)
    except TypeError as error:
        known = {
            name: name for name, p in signature.parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        }
        unknown = [name for name in arguments if name not in known]
        if not unknown:
            raise ConfigError(f"{key}: {name_of(function)} cannot be called: {error}") from None
        rest = ", ".join(list(known)[given:][:SHOWN]) + (", …" if len(known) - given > SHOWN else "")
        raise ConfigError(
            f"{key}: {name_of(function)} does not take {unknown[0]!r}{nearest(unknown[0], known)} It takes {rest}"
        ) from None


def name_of(function: Callable[..., Any]) -> str:
    """What a function or class is called."""
    return getattr(function, "__name__", None) or type(function).__name__
