"""Measures drives, and finds their best settings: ds_io and ds_nvme_tune."""
