"""A block that leaves no trace: generators, variables outside the model, warnings, logs and output are as before."""

from __future__ import annotations

import io
import itertools
import logging
import random
import warnings
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from types import GeneratorType
from typing import Any

import numpy as np
import torch
from torch import nn

from mural.engine import Loss
from mural.engine.loss_variables import variables
from mural.graph.commons import Commons, Variable, variables_in
from mural.graph.commons import functions_in as functions_of
from mural.graph.kept_values import FIXED, kept, renew

ONE_WAY = (GeneratorType, itertools.count, itertools.cycle, itertools.chain, io.IOBase)
"""What cannot be put back: iterators, and files."""


@contextmanager
def no_trace(model: nn.Module, loss: Loss) -> Generator[list[str]]:
    """A block in which copies of a model and a loss run; it is given what of theirs could not be put back.

    Copies share the attributes of their classes and the variables outside with the originals.
    """
    commons = Commons.of(model.modules(), hooks=True)
    held = [kept(part) for part in parts_of(loss)]
    python, numbers, default = random.getstate(), np.random.get_state(), torch.get_default_dtype()
    cpu = torch.get_rng_state()
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    disabled = logging.root.manager.disable
    try:
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            logging.disable(logging.CRITICAL)
            stack.enter_context(redirect_stdout(io.StringIO()))
            stack.enter_context(redirect_stderr(io.StringIO()))
            yield [
                *one_way(commons),
                *(
                    f"an iterator or file of the loss ({type(p.value).__name__})"
                    for p in held
                    if isinstance(p.value, ONE_WAY)
                ),
            ]
    finally:
        logging.disable(disabled)
        commons.put_back()
        for part in held:
            renew(part)
        random.setstate(python)
        np.random.set_state(numbers)
        torch.set_rng_state(cpu)
        if gpus:
            torch.cuda.set_rng_state_all(gpus)
        torch.set_default_dtype(default)


def parts_of(loss: Loss) -> Iterator[Any]:
    """What a loss refers to and may change: objects, lists and dicts, near or far, each once."""
    waiting: list[Any] = [loss]
    seen: set[int] = set()
    while waiting:
        part = waiting.pop()
        if id(part) in seen or isinstance(part, torch.Tensor):
            continue
        seen.add(id(part))
        waiting += [value for _, value in variables(part, whole=True)]
        waiting += [v.value for v in variables_in(functions_of(part))]
        if not isinstance(part, FIXED) and not callable(part):
            yield part


def one_way(commons: Commons) -> Iterator[str]:
    """The variables of a model's code that cannot be put back."""
    for variable, was in commons.variables.items():
        if isinstance(was.value, ONE_WAY):
            yield named(variable)
    for kind, values in commons.classes.items():
        yield from (f"{kind.__qualname__}.{name}" for name, was in values.items() if isinstance(was.value, ONE_WAY))


def named(variable: Variable) -> str:
    """A variable as a user finds it."""
    return f"{variable.name} of {variable.owner}"
