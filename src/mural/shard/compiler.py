"""Sharded tensors under `torch.compile`: their operations run uncompiled, one by one.

A compiled module sees plain and sharded tensors alike. By default dynamo would trace through the rules into the
messages, which takes minutes; told not to, it breaks its graph at each sharded operation and continues after it.
"""

from __future__ import annotations

import sys
from typing import Any

HIDDEN = ["mural.shard", "mural.comm"]
"""What dynamo does not trace; others add themselves."""
_told: list[Any] = []


def hide_from_compiler(kind: type) -> None:
    """Tell dynamo, once it is loaded, not to trace sharded tensors and the code that serves them."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    rules: Any = getattr(dynamo, "trace_rules", None)
    if _told or rules is None:
        return
    dynamo.config.nontraceable_tensor_subclasses.add(kind)
    for name in HIDDEN:
        rules.add(name)
    _told.append(dynamo)
