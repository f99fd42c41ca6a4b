"""What is proved: a copy of a model and its loss that takes no memory to speak of, and copies of that to run.

Large parameters are kept as a few thousand of their values, from which new ones are drawn: a proof compares two runs of
the same weights, whatever they are. So a copy can be kept from `parallelize` until the first step.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from mural.check.copies import changeable, copy_of
from mural.engine import Loss
from mural.engine.alignment import without_hooks
from mural.engine.loss_variables import variables

SMALL = 2**12
"""How many values of a parameter are kept; one that has no more is kept whole."""
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


@dataclass(frozen=True)
class Subject:
    """A model and its loss, as they were when they were given."""

    model: nn.Module
    loss: Loss
    samples: Mapping[str, Tensor]
    """Some values of each parameter that the model has on meta."""
    omitted: tuple[str, ...] = ()
    """What of the user's the copy does not have, each with the reason."""

    @classmethod
    def of(cls, model: nn.Module, loss: Loss) -> Subject:
        """A copy of a model and its loss; raises what they raise if they cannot be copied."""
        memo: dict[int, Any] = {}
        samples: dict[str, Tensor] = {}
        for name, p in model.named_parameters():
            if type(p) is nn.Parameter and p.numel() > SMALL:
                memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
                samples[name] = sampled(p)
        omitted = [f"hooks on the parameter {name}" for name, p in model.named_parameters() if hooked(p)]
        fresh = dict(memo)
        try:
            copy = deepcopy(model, memo)
        except Exception as error:  # whatever a hook's object says to a copy
            memo = fresh
            with without_hooks(model):
                copy = deepcopy(model, memo)
            omitted.append(f"hooks on modules, which cannot be copied ({type(error).__name__}: {error})")
        hooks = shared_hooks(copy)
        omitted += hooks if len(hooks) < 3 else [f"{hooks[0]}, and {len(hooks) - 1} more hooks"]
        return cls(copy, copy_of(loss, memo), samples, tuple(omitted))

    def like(self, model: nn.Module) -> None:
        """Take over what a model says of training: the mode of each module, and which parameters are trained."""
        modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
        for name, module in self.model.named_modules():
            if name in modules:
                module.training = modules[name].training
        for name, p in self.model.named_parameters():
            if name in parameters and p.is_leaf:
                p.requires_grad_(parameters[name].requires_grad)

    def bytes(self) -> int:
        """The memory of its parameters, in double precision."""
        return sum(8 * p.numel() for p in self.model.parameters())

    @torch.no_grad()
    def realized(self, device: torch.device, double: bool) -> tuple[nn.Module, Loss]:
        """A copy with values in all parameters, none of which is a constant any more, that nothing shares."""
        draws = torch.Generator().manual_seed(20)
        memo: dict[int, Any] = {}
        for name, p in self.model.named_parameters():
            if p.is_meta:
                made = torch.empty_like(p, device=device)
                values = self.samples[name]
                made.copy_(values[torch.randint(len(values), (p.numel(),), generator=draws)].view(p.shape))
                memo[id(p)] = nn.Parameter(made, p.requires_grad)
        model = deepcopy(self.model, memo)
        for p in model.parameters():
            if p.is_floating_point():
                p.copy_(speaking(p, draws))
        loss = copy_of(self.loss, memo)
        if double:
            model.double()
            in_double(loss, set())
        return model.to(device), loss


def sampled(p: Tensor, most: int = SMALL) -> Tensor:
    """Some of a tensor's values, evenly spaced."""
    places = torch.linspace(0, p.numel() - 1, min(most, p.numel()), dtype=torch.float64, device=p.device).long()
    return p.detach()[torch.unravel_index(places, p.shape)].cpu() if p.ndim else p.detach().cpu().view(1)


def hooked(p: nn.Parameter) -> bool:
    """Whether somebody watches a parameter's gradient."""
    return bool(p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None))


def shared_hooks(model: nn.Module) -> list[str]:
    """Take the hooks of a copy away that share something with the original's, and name them.

    Methods, `partial`s and objects were copied with their model; of functions, those stay that refer to nothing.
    """
    found = list[str]()
    for name, module in model.named_modules():
        for kind in HOOKS:
            hooks: dict[int, Any] = getattr(module, kind)
            for key, hook in list(hooks.items()):
                file = str(getattr(sys.modules.get(getattr(hook, "__module__", "")), "__file__", None))
                own = type(hook).__module__.startswith("torch.nn.utils.") or "site-packages" in file  # the model's own
                if not own and isinstance(hook, type(hooked)) and changeable(hook, set()):
                    del hooks[key]
                    found.append(f"the hook {hook.__qualname__} on {name or 'the model'}, which has variables outside")
    return found


def speaking(p: Tensor, draws: torch.Generator) -> Tensor:
    """A parameter with each value moved by some percent, and small values in place of zeros."""
    noise = torch.randn(p.shape, generator=draws).clamp_(-3, 3).to(p.device, p.dtype)
    size = 0.5 / sqrt(max(1, p.numel() // p.shape[0])) if p.ndim > 1 and p.shape[0] else 0.1
    return torch.where(p == 0, noise * size, p * (1 + 0.1 * noise))


def in_double(value: Any, seen: set[int]) -> None:
    """Turn the numbers in a copy of a loss into double precision."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        value.double()
    elif isinstance(value, Tensor):
        if value.is_floating_point() and value.is_leaf:
            value.data = value.data.double()
    else:
        for _, part in variables(value, whole=True):
            in_double(part, seen)
