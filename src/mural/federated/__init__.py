"""Federated averaging: many owners of data, one model."""

from mural.federated.federation import Federation, Round
from mural.federated.roster import Patience

__all__ = ["Federation", "Patience", "Round"]
