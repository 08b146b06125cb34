"""Public names of ``ds_report``, which is in :mod:`deepnvme.tools.report`."""

from deepnvme.tools.report import Report, as_json, gather, main, render

__all__ = ["Report", "as_json", "gather", "main", "render"]
