"""Measures drives, and finds their best settings: ds_io and ds_nvme_tune."""

from .job import Job, Place
from .measuring import measure
from .tuner import Order, tune

__all__ = ["Job", "Order", "Place", "measure", "tune"]
