"""What a model draws at random in micro-batches, beside what it draws for the whole batch: rows of it, or an error."""

from __future__ import annotations

from mural.errors import PlanError
from mural.graph import Graph, Node
from mural.graph.nodes import Shape, reached_from
from mural.pipeline.route import draws
from mural.shard.draws import FILLS, MAKES, Draws
from mural.shard.rows import Rows, in_batch, rows_of_batch

INSIDE = frozenset(["multi_head_attention_forward"])
"""Calls that draw for tensors of their own, which begin with the images whatever their result does."""


def draws_in_parts(part: Graph, whole: Graph, count: int, total: int) -> Draws:
    """For plain tensors that a micro-batch of `count` images draws, the shapes in the batch of `total`.

    Random layers on the image itself find their rows by the images that come first in their shape.
    """
    reached = reached_from({value.name for value in part.inputs}, part.nodes)
    known = {node.site: node for node in whole}
    found: dict[tuple[str, Shape], Shape] = {}
    for node in (node for node in part if draws(node)):
        if node.site not in known:
            raise refused(node, count, "the batch does not have the call")
        mine, all_of = node.output_shapes[0], known[node.site].output_shapes[0]
        with rows_of_batch(Rows(0, count, total)):
            grown = in_batch(mine)[0]
        if node.id in reached:
            if all_of != grown and node.op not in INSIDE:
                raise refused(node, count, f"the batch draws {all_of}, which does not begin with the images")
            continue
        able = all_of == mine or (all_of == grown and (node.op in FILLS or node.op in MAKES))
        if not able or found.setdefault((node.op, mine), all_of) != all_of:
            raise refused(node, count, f"the batch draws {all_of}")
    return {call: shape for call, shape in found.items() if shape != call[1]}


def refused(node: Node, count: int, why: str) -> PlanError:
    """The error for a draw that micro-batches cannot make as the batch would."""
    return PlanError(
        f"{node.site} draws random numbers of shape {node.output_shapes[0]} for micro-batches of {count} images, and "
        f"{why}: they would not be those of the whole batch. Use microbatches = 1"
    )
