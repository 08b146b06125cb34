"""Public names of ``ds_io`` and ``ds_nvme_tune``, which are in :mod:`deepnvme.tools.tune`."""

from deepnvme.tools.tune import Difference, Figures, Job, Order, Place, Result, Search, Tuning, measure, tune

__all__ = ["Difference", "Figures", "Job", "Order", "Place", "Result", "Search", "Tuning", "measure", "tune"]
