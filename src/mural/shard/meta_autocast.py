"""Autocast for tensors without memory, which torch does not cast: the types are those that a GPU would compute in.

The lists are those of torch's autocast for CUDA. It acts on the calls that rules make on their pieces, and casts of
parameters are kept until the block ends, as torch keeps them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from mural.shard.autocasting import META_CASTS, meta_casts
from mural.shard.tensor import ShardedTensor

LOWER = frozenset((
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution", "prelu",
    "addmm", "addmv", "addr", "matmul", "__matmul__", "__rmatmul__", "einsum", "mm", "mv", "linear", "addbmm",
    "baddbmm", "bmm", "scaled_dot_product_attention",
))  # fmt: skip
"""Functions that run in the lower type."""
WIDE = frozenset((
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow", "__pow__", "softplus", "layer_norm", "rms_norm", "group_norm", "cosine_similarity", "nll_loss",
    "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "logsumexp", "binary_cross_entropy_with_logits",
    "interpolate", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d",
    "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d",
))  # fmt: skip
"""Functions that run in float32."""
TYPED = frozenset(("prod", "softmax", "log_softmax", "cumprod", "cumsum", "sum"))
"""Functions whose result is float32, unless a type is given."""


class MetaAutocast(TorchFunctionMode):
    """A block in which calls on tensors without memory are cast as a GPU's autocast casts them."""

    def __init__(self, lower: torch.dtype):
        super().__init__()
        self.lower = lower
        self.casts: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if torch._C._is_torch_function_enabled() and any(issubclass(t, ShardedTensor) for t in types):
            with self:  # rules call torch on their pieces
                return ShardedTensor.__torch_function__(func, types, args, kwargs)
        if META_CASTS[-1] is None:
            return func(*args, **kwargs)
        if name == "cross_entropy" and not args[1].is_floating_point():
            return class_loss(*args, **kwargs)
        if name in TYPED:
            single = isinstance(args[0], Tensor) and args[0].dtype in (torch.bfloat16, torch.float16)
            return func(*args, **(kwargs if not single or kwargs.get("dtype") else {**kwargs, "dtype": torch.float32}))
        to = self.lower if name in LOWER else torch.float32 if name in WIDE else None
        if to is None:
            return func(*args, **kwargs)
        args, kwargs = pytree.tree_map_only(Tensor, lambda tensor: self.cast(tensor, to), (args, kwargs))
        return func(*args, **kwargs)

    def cast(self, tensor: Tensor, to: torch.dtype) -> Tensor:
        """A tensor in another type; that of a parameter is kept."""
        if not tensor.is_floating_point() or tensor.dtype in (to, torch.float64) or not tensor.is_meta:
            return tensor
        if to != self.lower or not tensor.requires_grad or not tensor.is_leaf or tensor._base is not None:
            return tensor.to(to)
        if id(tensor) not in self.casts or self.casts[id(tensor)][1].requires_grad != torch.is_grad_enabled():
            self.casts[id(tensor)] = tensor, tensor.to(to)
        return self.casts[id(tensor)][1]


@contextmanager
def meta_autocast(lower: torch.dtype | None) -> Generator[None]:
    """A block in which tensors without memory are cast as on a GPU; None: they are not."""
    if lower is None:
        yield
        return
    with MetaAutocast(lower), meta_casts(lower):
        yield


def class_loss(
    scores: Tensor, target: Tensor, weight: Tensor | None = None, *others: Any, reduction: str = "mean",
    ignore_index: int = -100, **named: Any,
) -> Tensor:  # fmt: skip
    """Cross entropy as torch makes it under autocast: log-probabilities in the type of the scores, then float32."""
    wide = torch.log_softmax(scores, 1, dtype=scores.dtype).float()
    return F.nll_loss(wide, target, weight, ignore_index=ignore_index, reduction=reduction)
