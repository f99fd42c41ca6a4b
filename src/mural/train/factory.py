"""What a configuration names: a model, a loss, an optimizer, a schedule. The user names them; no file runs code."""

from __future__ import annotations

import hashlib
import importlib
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from mural.data.loading.label_range import LabelRange
from mural.engine.alignment import graph_for
from mural.errors import DISTRIBUTION, ConfigError, MuralError
from mural.shard import dice_loss
from mural.train.config import LossConfig, ModelConfig, OptimizerConfig, ScheduleConfig

LOSSES: dict[str, Callable[..., Tensor]] = {
    "cross_entropy": F.cross_entropy,
    "bce": F.binary_cross_entropy_with_logits,
    "dice": dice_loss,
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": F.smooth_l1_loss,
}

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
        raise ConfigError(f'{key} = "{path}" names {found!r}, which cannot be called')
    return found


def near_callable(module: Any, name: str) -> str:
    """A question with the callable of a module whose name is most like this one, upper or lower case; or nothing.

    >>> near_callable(nn, "conv2D")
    ": did you mean 'Conv2d'?"
    """
    known = {n.lower(): n for n in dir(module) if not n.startswith("_") and callable(getattr(module, n))}
    near = get_close_matches(name.lower(), known, n=1)
    return f": did you mean {known[near[0]]!r}?" if near else ""


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
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name and place.startswith(error.name):
            raise ConfigError(f"{key}: there is no module {error.name!r}: install it, or run where it is") from error
        raise


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
        raise ConfigError(f"{key}: there is no file {path}")
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
        loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def called(function: Callable[..., Any], arguments: Mapping[str, Any], key: str) -> Any:
    """The result of a call with arguments from a configuration."""
    try:
        return function(**arguments)
    except TypeError as error:
        raise ConfigError(f"{key}: {getattr(function, '__name__', function)} does not take these: {error}") from error


def make_model(config: ModelConfig, seed: int) -> nn.Module:
    """The model, with the weights that the seed gives."""
    torch.manual_seed(seed)
    model = called(named(config.factory, "model.factory"), config.arguments, "model.arguments")
    if not isinstance(model, nn.Module):
        raise ConfigError(f'model.factory = "{config.factory}" gave a {type(model).__name__}, not an nn.Module')
    return model.to(getattr(torch, config.dtype))


def make_meta_model(config: ModelConfig) -> nn.Module:
    """The model without memory for its weights, or with it if its making needs their values."""
    try:
        with torch.device("meta"):
            return make_model(config, seed=0)
    except (NotImplementedError, RuntimeError):
        return make_model(config, seed=0)


def load_weights(path: Path, model: nn.Module) -> None:
    """Give the model the weights of a safetensors file, which has to hold all of them and nothing else."""
    try:
        found = load_file(path)
        model.load_state_dict(found)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"model.weights = {str(path)!r} cannot be read as safetensors: {error}") from error
    except RuntimeError as error:
        raise ConfigError(f"model.weights = {str(path)!r} are those of another model: {error}") from error


def make_loss(config: LossConfig, device: torch.device, dtype: torch.dtype) -> Callable[[Any, Any], Tensor]:
    """The loss, with lists of numbers among its arguments as tensors."""

    def value(given: Any) -> Any:
        return torch.tensor(given, device=device, dtype=dtype) if isinstance(given, (list, tuple)) else given

    if config.name not in LOSSES and ":" not in config.name:
        near = get_close_matches(config.name, LOSSES, n=1)
        hint = f": did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f'loss.name = "{config.name}" is not one of {", ".join(LOSSES)}, nor an import path{hint}')
    function = LOSSES.get(config.name) or named(config.name, "loss.name")
    return partial(function, **{key: value(given) for key, given in config.arguments.items()})


def label_range(loss: Callable[..., Any], model: nn.Module, image: Sequence[int]) -> LabelRange | None:
    """The labels that a loss takes of a model's results for an image (C, H, W); None where that is not known.

    A loss of the user's own may take any; so may one of torch's of a model that cannot be captured.
    """
    function, arguments = (loss.func, loss.keywords) if isinstance(loss, partial) else (loss, {})
    if function in (F.binary_cross_entropy_with_logits, F.binary_cross_entropy):
        return LabelRange()
    if function not in (F.cross_entropy, F.nll_loss, dice_loss):
        return None
    try:
        shapes = [value.shape for value in graph_for(model, image).outputs]
    except (MuralError, RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError):
        return None
    ignored = arguments.get("ignore_index", None if function is dice_loss else -100)
    return LabelRange(shapes[0][1], ignored) if len(shapes) == 1 and len(shapes[0]) > 1 else None


def padding_label(loss: Callable[..., Any], labels: LabelRange | None) -> int | None:
    """The label with which masks are padded, that neither loss nor scores count; None where there is none.

    A loss of the user's own is taken at its word, if its arguments have an `ignore_index`.

    >>> padding_label(partial(F.cross_entropy, ignore_index=9), LabelRange(3, 9)), padding_label(F.mse_loss, None)
    (9, None)
    """
    function, arguments = (loss.func, loss.keywords) if isinstance(loss, partial) else (loss, {})
    ignored = arguments.get("ignore_index", -100 if function in (F.cross_entropy, F.nll_loss) else None)
    classes = 0 if labels is None else labels.classes or 0
    return None if ignored is None or 0 <= ignored < classes else ignored


def make_optimizer(config: OptimizerConfig, parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of torch.optim of that name, upper or lower case."""
    known = {
        name.lower(): kind
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    kind = known.get(config.name.lower())
    if kind is None:
        near = get_close_matches(config.name.lower(), known, n=1)
        hint = f": did you mean {known[near[0]].__name__!r}?" if near else ""
        raise ConfigError(f'optimizer.name = "{config.name}" is not an optimizer of torch.optim{hint}')
    arguments: dict[str, Any] = {"lr": config.lr, **config.arguments, "params": list(parameters)}
    try:
        return kind(**arguments)
    except (TypeError, ValueError) as error:
        given = ", ".join(f"{name} = {value!r}" for name, value in arguments.items() if name != "params")
        raise ConfigError(f"optimizer.arguments: {kind.__name__} does not take {given}: {error}") from error


def rate(config: ScheduleConfig, total: int, update: int) -> float:
    """What the learning rate is multiplied by at an update, of `total`.

    >>> [round(rate(ScheduleConfig("cosine", warmup=2), 10, u), 3) for u in (0, 1, 2, 6, 10)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    if update < config.warmup:
        return (update + 1) / config.warmup
    done = min(1.0, (update - config.warmup) / max(1, total - config.warmup))
    fall = {
        "constant": 1.0,
        "linear": 1 - done,
        "cosine": (1 + math.cos(math.pi * done)) / 2,
        "polynomial": (1 - done) ** config.power,
        "step": config.factor ** ((update - config.warmup) // config.period),
    }[config.name]
    falls = config.name in ("linear", "cosine", "polynomial")
    return config.final + (1 - config.final) * fall if falls else fall


def make_schedule(config: ScheduleConfig, optimizer: torch.optim.Optimizer, total: int) -> LambdaLR:
    """The schedule over that many updates."""
    return LambdaLR(optimizer, partial(rate, config, total))
