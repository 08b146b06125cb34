"""The programs of the package: ds_report, ds_io and ds_nvme_tune."""

from deepnvme._lazy import public_names

__all__: list[str] = []

__dir__ = public_names(__name__)
