"""The programs of the package: ds_report, ds_io and ds_nvme_tune."""
