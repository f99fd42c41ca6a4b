"""The table of facts: what each torch operation costs, and what it does to memory and to gradients, in one row.

Conventions of work and depth, those of the field where it has one:

- a multiply-add is 2 operations; a bias is the start of a sum and costs nothing, forward or backward;
- any other function of a number (exp, tanh, gelu, a comparison, a random draw) is 1, and so is its derivative;
- moving data (views, slices, cat, pad, shuffles, gathers, creation) is 0;
- n numbers are reduced by a tree: n operations at depth ⌈log₂ n⌉;
- the gradient of a product costs as much as the product, for each operand that has one.

The work–depth table of document `003` is the asymptotic form of these:

    operator          eval.  work                     depth
    activation        y      N C H W                  1
                      ∇x     N C H W                  1
    fully connected   y      2 N Cin Cout             1 + ⌈log Cin⌉
                      ∇w     2 N Cin Cout             1 + ⌈log N⌉
                      ∇x     2 N Cin Cout             1 + ⌈log Cout⌉
    convolution       y      2 N Cout Cin H' W' K²    1 + ⌈log Cin K²⌉
                      ∇w     2 N Cout Cin H' W' K²    1 + ⌈log N H' W'⌉
                      ∇x     2 N Cout Cin H' W' K²    1 + ⌈log Cout K²⌉ at stride 1
    pooling           y      N C H' W' K²             ⌈log K²⌉
                      ∇x     N C H' W' K²             1
    batch norm        y      8 N C H W                6 + 2 ⌈log N H W⌉
                      ∇w     3 N C H W                1 + ⌈log N H W⌉
                      ∇x     7 N C H W                6 + ⌈log N H W⌉
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from mural.graph import operation_counts as n
from mural.graph.nodes import Node
from mural.graph.work_formulas import (
    CallCosts,
    Formula,
    Wants,
    along,
    attention,
    cross_entropy,
    each,
    free,
    multi_head,
    norm,
    over,
    product,
    sorting,
    window,
)
from mural.shard.functions import KIND as FUNCTION

OTHER = "pointwise"
"""The family of everything that the table does not name: most such calls read and write once."""


@dataclass(frozen=True)
class Fact:
    """What is known of an operation, whatever it is called on.

    Operations of one `family` run kernels of one kind, so that one curve of times serves them. `formula` gives work and
    depth; without one, that of the kind of rule does. The result of an `alias` shares the memory of what it reads,
    where type and order allow. Autograd follows a call with a `gradient`, and `buffers` are all that a norm writes to.
    """

    family: str = OTHER
    formula: Formula | None = None
    alias: bool = False
    gradient: bool = True
    buffers: bool = False


MATMUL = product(n.linear)
LARGEST = window(n.taps_of, gradient=lambda _: 1)
"""A maximum: its gradient goes back to one tap."""
LARGEST_OF_ALL = window(n.adaptive_taps, gradient=lambda _: 1)
ROWS: tuple[tuple[str, Fact], ...] = (
    ("conv1d conv2d conv3d convolution", Fact("conv", product(n.conv))),
    ("conv_transpose1d conv_transpose2d conv_transpose3d", Fact("transposed", product(n.conv_transpose))),
    ("deform_conv2d", Fact(formula=product(lambda node: n.made(node) * math.prod(node.input_shapes[1][1:])))),
    ("linear mm", Fact("linear", MATMUL)),
    ("addmm", Fact("linear", product(n.added_matmul, operands=(1, 2)))),
    ("matmul __matmul__ bmm mv dot", Fact("matmul", MATMUL)),
    ("__rmatmul__", Fact("matmul", product(n.reversed_matmul))),
    ("baddbmm", Fact("matmul", product(n.added_matmul, operands=(1, 2)))),
    ("einsum", Fact("matmul", product(n.einsum, operands=tuple(range(8))))),
    ("addmv", Fact(formula=product(n.added_matmul, operands=(1, 2)))),
    ("addbmm", Fact(formula=product(n.added_bmm, operands=(1, 2)))),
    ("scaled_dot_product_attention", Fact("attention", attention)),
    ("multi_head_attention_forward", Fact(formula=multi_head)),
    ("batch_norm", Fact("batch_norm", norm(n.extents_behind, frozen=n.statistics_given), buffers=True)),
    ("instance_norm", Fact("instance_norm", norm(n.positions, frozen=n.input_statistics_given), buffers=True)),
    ("group_norm", Fact("group_norm", norm(n.group))),
    ("layer_norm rms_norm", Fact("layer_norm", norm(n.normalized_shape))),
    ("local_response_norm", Fact(formula=each(8, gradient=8))),
    ("max_pool1d max_pool2d max_pool3d", Fact("max_pool", LARGEST)),
    ("max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices", Fact("max_pool", LARGEST)),
    ("adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d", Fact("max_pool", LARGEST_OF_ALL)),
    ("adaptive_max_pool1d_with_indices adaptive_max_pool2d_with_indices", Fact("max_pool", LARGEST_OF_ALL)),
    ("adaptive_max_pool3d_with_indices", Fact("max_pool", LARGEST_OF_ALL)),
    ("avg_pool1d avg_pool2d avg_pool3d", Fact("avg_pool", window(n.taps_of))),
    ("lp_pool1d lp_pool2d lp_pool3d", Fact(formula=window(n.taps_of))),
    ("adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d", Fact("mean", window(n.adaptive_taps))),
    ("mean sum amax amin", Fact("mean")),
    ("var std", Fact("mean", over(4, gradient=2, trees=2))),
    ("var_mean std_mean", Fact(formula=over(4, gradient=2, trees=2))),
    ("norm", Fact("mean", over(2, gradient=1))),
    ("vector_norm", Fact(formula=over(2, gradient=1))),
    ("logsumexp", Fact(formula=over(4, gradient=1, trees=2))),
    ("cosine_similarity", Fact(formula=over(6, gradient=6))),
    ("add sub rsub __add__ __radd__ __sub__ __rsub__ __iadd__ __isub__", Fact("add")),
    ("mul div __mul__ __rmul__ __truediv__ __imul__ __itruediv__ where pow", Fact("multiply")),
    ("cat stack hstack vstack concat concatenate", Fact("cat")),
    ("interpolate upsample", Fact("interpolate", window(n.interpolation_taps, operations=2))),
    ("grid_sample", Fact("interpolate", window(n.sampled_taps, operations=2))),
    ("grid_sampler grid_sampler_2d grid_sampler_3d", Fact(formula=window(n.sampled_taps, operations=2))),
    ("pixel_shuffle pixel_unshuffle", Fact("interpolate", free)),
    ("softmax softmin log_softmax", Fact("softmax", along(5, gradient=4, trees=2))),
    ("_softmax", Fact(formula=along(5, gradient=4, trees=2))),
    ("gumbel_softmax", Fact(formula=along(7, gradient=4, trees=2))),
    ("normalize", Fact(formula=along(4, gradient=6, trees=1, index=2))),
    ("cumsum cumprod logcumsumexp cummax cummin", Fact(formula=along(1, gradient=1, trees=1))),
    ("topk sort argsort msort kthvalue mode median nanmedian quantile nanquantile", Fact(formula=sorting)),
    ("cross_entropy nll_loss", Fact("loss", cross_entropy)),
    ("nll_loss2d nll_loss_nd", Fact(formula=cross_entropy)),
    ("mse_loss l1_loss smooth_l1_loss huber_loss kl_div", Fact("loss")),
    ("binary_cross_entropy binary_cross_entropy_with_logits", Fact("loss")),
    ("dropout dropout1d dropout2d dropout3d", Fact("dropout", each(2))),
    ("feature_dropout alpha_dropout", Fact("dropout")),
    ("clone flip rot90 repeat tile repeat_interleave index_select masked_fill __setitem__", Fact("copy")),
    ("zeros ones full zeros_like ones_like full_like arange empty", Fact("copy")),
    ("pad roll gather", Fact("copy", free)),
    ("contiguous to", Fact("copy", alias=True)),
    ("float bfloat16 half double type", Fact("copy", free, alias=True)),
    ("type_as", Fact(alias=True)),
    ("view view_as reshape reshape_as flatten unflatten ravel squeeze unsqueeze", Fact("view", alias=True)),
    ("permute transpose swapaxes swapdims movedim moveaxis t T mT", Fact("view", alias=True)),
    ("expand expand_as broadcast_to broadcast_tensors", Fact("view", alias=True)),
    ("narrow select chunk split split_with_sizes tensor_split unbind __getitem__", Fact("view", alias=True)),
    ("view_as_complex view_as_real", Fact("view", alias=True)),
    ("positive real imag", Fact("view", free, alias=True)),
    ("detach data", Fact("view", alias=True, gradient=False)),
    ("diagonal requires_grad_", Fact("view")),
    ("unfold", Fact("view", free)),
    ("fold col2im", Fact(formula=over(1, gradient=0))),
    ("im2col max_unpool1d max_unpool2d max_unpool3d embedding one_hot scatter scatter_", Fact(formula=free)),
    ("channel_shuffle native_channel_shuffle tril triu fill fill_ zero_ copy_", Fact(formula=free)),
    ("bool byte char int long short cfloat", Fact(formula=free)),
)
FACTS: Mapping[str, Fact] = {name: fact for names, fact in ROWS for name in names.split()}
KIND_OF: Mapping[str | None, Formula] = {
    "pointwise": each(),
    "along a dim": each(),
    "random": each(),
    "windowed": each(),
    "reduction": over(),
    "loss": over(3, gradient=2),
    "product": MATMUL,
    "attention": attention,
    "view": free,
    "creation": free,
    "attribute": free,
    "gradient": free,
    FUNCTION: free,
    None: each(),
}
"""The formula of a kind of rule; an operation without a rule counts 1 per element of its result.

What a custom Function computes is not seen, and counts nothing.
"""
UNKNOWN, MADE = Fact(), Fact(gradient=False)


def fact_of(node: Node) -> Fact:
    """The row of a call's operation; one that writes in place has that of the operation itself."""
    if node.kind == FUNCTION:  # a Function may have any name
        return UNKNOWN
    name = node.op.partition(".")[0]  # an accessor is called `T.__get__`
    plain = name if name.startswith("__") else name.rstrip("_")
    return FACTS.get(name) or FACTS.get(plain, UNKNOWN)


def follows(node: Node) -> bool:
    """Whether autograd follows a call: not one that only takes a shape or type from what it reads."""
    return node.kind != "creation" and fact_of(node).gradient


def costs(node: Node, wants: Wants = ()) -> CallCosts:
    """What one call costs; `wants` says for each of its inputs which gradient it has."""
    formula = free if node.idle else fact_of(node).formula or KIND_OF[node.kind]
    return formula(node, wants)
