"""The report of a run: what its folder tells, as one page for a person."""

from mural.run_report.written_report import write_report

__all__ = ["write_report"]
