"""Engine settings that ``ds_nvme_tune`` stored for a drive, and engines made with them: public names of ``deepnvme.drives``."""

from .drives.mounts import Drive, drive_of
from .drives.profiles import default_settings, engine_for, profile_directory, profile_of, settings_for, store_profile

__all__ = [
    "Drive", "default_settings", "drive_of", "engine_for", "profile_directory", "profile_of", "settings_for", "store_profile",
]  # fmt: skip
