"""The table of formulas: operations and depth of each call, of its result and of its gradients.

Conventions, those of the field where it has one:

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

from mural.graph.counts import (
    adaptive_taps,
    added_bmm,
    added_matmul,
    argument,
    conv,
    conv_transpose,
    einsum,
    extents_behind,
    group,
    input_statistics_given,
    interpolation_taps,
    linear,
    made,
    normalized_shape,
    positions,
    reversed_matmul,
    sampled_taps,
    shape_of,
    statistics_given,
    taps_of,
)
from mural.graph.formulas import (
    Costs,
    Formula,
    Wants,
    Work,
    along,
    beside,
    each,
    free,
    levels,
    norm,
    over,
    product,
    sorting,
    window,
)
from mural.graph.nodes import Node
from mural.shard.functions import KIND as FUNCTION


def attention(node: Node, wants: Wants) -> Costs:
    """Scores of queries and keys, softmax over the keys, a sum of values; four products go back."""
    query, key, value = (shape_of(node, i, name) for i, name in enumerate(("query", "key", "value")))
    scores = math.prod(query[:-1]) * key[-2]
    products = 2 * scores * (query[-1] + value[-1])
    deep = 2 + levels(query[-1]) + levels(key[-2])
    back = Work(2 * products + 4 * scores, deep + 4)
    asked = [w for w in wants[:3] if w is not None]
    return Costs(Work(products + 5 * scores, deep + 3 + 2 * levels(key[-2])), inputs=back if asked else Work())


def multi_head(node: Node, wants: Wants) -> Costs:
    """Projections of queries, keys and values, attention, and the projection of what comes out."""
    query, key, value = (shape_of(node, i, name) for i, name in enumerate(("query", "key", "value")))
    width = query[-1]
    projected = 2 * width * (2 * math.prod(query) + math.prod(key) + math.prod(value))
    batch = math.prod(query[1:-1])
    scores = batch * query[0] * key[0] * int(argument(node, 4, "num_heads", 1))
    products = 4 * batch * query[0] * key[0] * width
    deep = 4 + 3 * levels(width) + levels(key[0])
    result = Work(projected + products + 5 * scores, deep + 3 + 2 * levels(key[0]))
    inside = Work(2 * products + 4 * scores, deep + 4) if any(wants) else Work()
    weights = Work(projected, 1 + levels(query[0] * batch)) if "weight" in wants else Work()
    moving = Work(projected, 1 + levels(width)) if "input" in wants[:3] else Work()
    return Costs(result, weights, beside([inside, moving]))


def cross_entropy(node: Node, wants: Wants) -> Costs:
    """Log-softmax over the classes and the mean of what the target picks."""
    shape = node.input_shapes[0]
    classes = shape[1] if len(shape) > 1 else math.prod(shape)
    size = math.prod(shape)
    result = Work(5 * size + size // max(1, classes), 3 + 2 * levels(classes) + levels(size / max(1, classes)))
    return Costs(result, inputs=Work(2 * size, 2) if wants[:1] == ("input",) else Work())


MATMUL = product(linear)
CHOICE = window(taps_of, gradient=lambda _: 1)
"""A maximum: its gradient goes back to one tap."""
ROWS: tuple[tuple[str, Formula], ...] = (
    ("conv1d conv2d conv3d", product(conv)),
    ("conv_transpose1d conv_transpose2d conv_transpose3d", product(conv_transpose)),
    ("deform_conv2d", product(lambda node: made(node) * math.prod(node.input_shapes[1][1:]))),
    ("linear matmul __matmul__ bmm mm mv dot", MATMUL),
    ("__rmatmul__", product(reversed_matmul)),
    ("addmm baddbmm addmv", product(added_matmul, operands=(1, 2))),
    ("addbmm", product(added_bmm, operands=(1, 2))),
    ("einsum", product(einsum, operands=tuple(range(8)))),
    ("scaled_dot_product_attention", attention),
    ("multi_head_attention_forward", multi_head),
    ("batch_norm", norm(extents_behind, frozen=statistics_given)),
    ("instance_norm", norm(positions, frozen=input_statistics_given)),
    ("group_norm", norm(group)),
    ("layer_norm rms_norm", norm(normalized_shape)),
    ("local_response_norm", each(8, gradient=8)),
    ("max_pool1d max_pool2d max_pool3d", CHOICE),
    ("max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices", CHOICE),
    ("avg_pool1d avg_pool2d avg_pool3d lp_pool1d lp_pool2d lp_pool3d", window(taps_of)),
    ("adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d", window(adaptive_taps)),
    ("adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d", window(adaptive_taps, gradient=lambda _: 1)),
    ("adaptive_max_pool1d_with_indices adaptive_max_pool2d_with_indices", window(adaptive_taps, gradient=lambda _: 1)),
    ("adaptive_max_pool3d_with_indices", window(adaptive_taps, gradient=lambda _: 1)),
    ("interpolate upsample", window(interpolation_taps, operations=2)),
    ("grid_sample grid_sampler grid_sampler_2d grid_sampler_3d", window(sampled_taps, operations=2)),
    ("softmax _softmax softmin log_softmax", along(5, gradient=4, trees=2)),
    ("gumbel_softmax", along(7, gradient=4, trees=2)),
    ("normalize", along(4, gradient=6, trees=1, index=2)),
    ("cosine_similarity", over(6, gradient=6)),
    ("logsumexp", over(4, gradient=1, trees=2)),
    ("var std var_mean std_mean", over(4, gradient=2, trees=2)),
    ("norm vector_norm", over(2, gradient=1)),
    ("cumsum cumprod logcumsumexp cummax cummin", along(1, gradient=1, trees=1)),
    ("topk sort argsort msort kthvalue mode median nanmedian quantile nanquantile", sorting),
    ("cross_entropy nll_loss nll_loss2d nll_loss_nd", cross_entropy),
    ("dropout dropout1d dropout2d dropout3d dropout_", each(2)),
    ("fold col2im", over(1, gradient=0)),
    ("pad roll pixel_shuffle pixel_unshuffle unfold im2col max_unpool1d max_unpool2d max_unpool3d", free),
    ("embedding one_hot channel_shuffle native_channel_shuffle gather scatter scatter_", free),
    ("tril triu tril_ triu_ fill fill_ zero_ copy_ real imag positive", free),
    ("bool byte char double float half int long short bfloat16 cfloat type", free),
)
TABLE: Mapping[str, Formula] = {name: formula for names, formula in ROWS for name in names.split()}
"""The formulas of operations that differ from their kind's."""
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


def costs(node: Node, wants: Wants) -> Costs:
    """What one call costs; `wants` says for each of its inputs which gradient it has."""
    named = TABLE.get(node.op) if node.kind != FUNCTION else None  # a Function may have any name
    formula = named or KIND_OF[node.kind]
    return formula(node, wants)
