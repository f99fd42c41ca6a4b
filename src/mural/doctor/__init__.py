"""The doctor: what mural finds on a machine, how fast it is, and what is missing for which feature."""

from mural.doctor.examination import examine
from mural.doctor.findings import Finding, Report, Section

__all__ = ["Finding", "Report", "Section", "examine"]
