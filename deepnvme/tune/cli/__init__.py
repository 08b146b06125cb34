"""The command lines of ds_io and ds_nvme_tune."""
