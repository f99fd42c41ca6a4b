"""Families of operations: which torch functions run kernels of one kind, so that one curve serves them."""

from __future__ import annotations

DIMS = (1, 2, 3)
INDICES = ("", "_with_indices")
VIEWS = frozenset([
    "view", "view_as", "permute", "transpose", "t", "T.__get__", "mT.__get__", "flatten", "unflatten", "squeeze",
    "unsqueeze", "expand", "expand_as", "chunk", "split", "unbind", "narrow", "select", "__getitem__", "detach",
    "reshape", "movedim", "swapaxes", "unfold", "diagonal", "tensor_split", "ravel", "requires_grad_", "data.__get__",
])  # fmt: skip
"""Calls that make no new values; a few of them copy when the values do not lie in order."""
FAMILIES: dict[str, frozenset[str]] = {
    "conv": frozenset(["conv1d", "conv2d", "conv3d", "convolution"]),
    "transposed": frozenset(["conv_transpose1d", "conv_transpose2d", "conv_transpose3d"]),
    "linear": frozenset(["linear", "addmm", "mm"]),
    "matmul": frozenset(["matmul", "__matmul__", "__rmatmul__", "bmm", "baddbmm", "einsum", "mv", "dot"]),
    "attention": frozenset(["scaled_dot_product_attention"]),
    "batch_norm": frozenset(["batch_norm"]),
    "instance_norm": frozenset(["instance_norm"]),
    "group_norm": frozenset(["group_norm"]),
    "layer_norm": frozenset(["layer_norm", "rms_norm"]),
    "max_pool": frozenset(f"{a}max_pool{n}d{b}" for a in ("", "adaptive_") for n in DIMS for b in INDICES),
    "avg_pool": frozenset(f"avg_pool{n}d" for n in DIMS),
    "mean": frozenset([*(f"adaptive_avg_pool{n}d" for n in DIMS), "mean", "sum", "amax", "amin", "std", "var", "norm"]),
    "add": frozenset(["add", "sub", "rsub", "__add__", "__radd__", "__sub__", "__rsub__", "__iadd__", "__isub__"]),
    "multiply": frozenset(["mul", "div", "__mul__", "__rmul__", "__truediv__", "__imul__", "__itruediv__", "where",
                           "pow"]),
    "cat": frozenset(["cat", "stack", "hstack", "vstack", "concat", "concatenate"]),
    "interpolate": frozenset(["interpolate", "upsample", "grid_sample", "pixel_shuffle", "pixel_unshuffle"]),
    "softmax": frozenset(["softmax", "log_softmax", "softmin"]),
    "loss": frozenset(["cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div",
                       "binary_cross_entropy", "binary_cross_entropy_with_logits"]),
    "dropout": frozenset(f"{a}dropout{n}" for a in ("", "feature_", "alpha_") for n in ("", "1d", "2d", "3d")),
    "copy": frozenset(["contiguous", "clone", "pad", "roll", "flip", "rot90", "repeat", "tile", "to", "float",
                       "bfloat16", "half", "double", "type", "index_select", "gather", "masked_fill", "zeros", "ones",
                       "full", "zeros_like", "ones_like", "full_like", "arange", "empty", "repeat_interleave",
                       "__setitem__"]),
    "view": VIEWS,
}  # fmt: skip
OF_NAME = {name: family for family, names in FAMILIES.items() for name in names}
OTHER = "pointwise"
"""The family of everything else: most calls that the table does not name read and write once."""


def family_of(op: str) -> str:
    """The family of an operation.

    >>> family_of("conv2d"), family_of("relu_"), family_of("add_"), family_of("view")
    ('conv', 'pointwise', 'add', 'view')
    """
    return OF_NAME.get(op) or OF_NAME.get(op.rstrip("_") if not op.startswith("__") else op, OTHER)
