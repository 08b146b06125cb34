"""Measures the I/O speed of drives (ds_io) and finds their best settings (ds_nvme_tune)."""

from .estimates import Difference
from .job import Job, Place
from .measuring import measure
from .results import Figures, Result, Search, Tuning
from .tuner import Order, tune

__all__ = ["Difference", "Figures", "Job", "Order", "Place", "Result", "Search", "Tuning", "measure", "tune"]
