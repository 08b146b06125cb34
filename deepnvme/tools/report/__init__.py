"""ds_report: which ops, backends and system settings for tensor I/O this machine has, and how to fix what is missing."""

from .directory_probes import open_descriptor, try_direct_io
from .ds_report import Report, as_json, emit, gather, main, render

__all__ = ["Report", "as_json", "emit", "gather", "main", "open_descriptor", "render", "try_direct_io"]
