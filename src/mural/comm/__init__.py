"""How ranks exchange data. Users find the collectives here: `mural.comm.all_reduce(tensor, algorithm="ring")`."""

from typing import TYPE_CHECKING, Any

from mural.comm.exchange import fetch, mark, stack
from mural.comm.messages import Transport
from mural.comm.trace import Record
from mural.comm.watchdog import Watchdog

if TYPE_CHECKING:
    from mural.collectives import all_gather, all_reduce, broadcast, explain, reduce, reduce_scatter

__all__ = [
    "Record",
    "Transport",
    "Watchdog",
    "all_gather",
    "all_reduce",
    "broadcast",
    "explain",
    "fetch",
    "mark",
    "reduce",
    "reduce_scatter",
    "stack",
]


def __getattr__(name: str) -> Any:
    """A collective by name, imported on first use: collectives are built on the messages of this package."""
    if name not in __all__:
        raise AttributeError(f"module 'mural.comm' has no attribute {name!r}")
    from mural import collectives  # noqa: PLC0415

    return getattr(collectives, name)
