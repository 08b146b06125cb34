"""ds_report: what this machine offers to tensor I/O."""

from .ds_report import Report, as_json, gather, main, render

__all__ = ["Report", "as_json", "gather", "main", "render"]
