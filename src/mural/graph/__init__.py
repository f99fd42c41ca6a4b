"""The graph of a model: which calls it makes, on which shapes, and how tensors flow between them."""

from mural.graph.capture import capture
from mural.graph.nodes import Graph, Node, Value

__all__ = ["Graph", "Node", "Value", "capture"]
