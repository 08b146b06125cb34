"""Measures the I/O speed of drives (ds_io) and finds their best settings (ds_nvme_tune)."""

from .measure.job import Job, Place
from .measure.measuring import measure
from .search.tuner import Order, tune

__all__ = ["Job", "Order", "Place", "measure", "tune"]
