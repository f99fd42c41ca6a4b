"""The layer in which an error was raised, by its name in the model."""

from __future__ import annotations

from traceback import walk_tb

from torch import nn


def in_layer(error: BaseException, model: nn.Module) -> str:
    """The innermost layer of the model that was being called, in words; nothing where the error came from elsewhere.

    >>> import torch
    >>> model = nn.Sequential(nn.ReLU(), nn.Linear(3, 1))
    >>> try:
    ...     model(torch.ones(1, 2))
    ... except RuntimeError as error:
    ...     in_layer(error, model)
    ', in the layer 1 (Linear)'
    """
    names = {id(module): name for name, module in model.named_modules()}
    called = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
    inside = [module for module in called if isinstance(module, nn.Module) and names.get(id(module))]
    return f", in the layer {names[id(inside[-1])]} ({type(inside[-1]).__name__})" if inside else ""
