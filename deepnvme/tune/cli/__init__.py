"""The command-line programs ds_io and ds_nvme_tune."""
