"""Reports which drive profile applies to a directory, as a line of ds_report."""

from __future__ import annotations

import shlex
from pathlib import Path

from deepnvme.drives.aio_config import AioConfig
from deepnvme.drives.mounts import Drive, Kind
from deepnvme.drives.profiles import PROFILE_VARIABLE, DriveProfile, default_settings, profile_of, profiles_enabled

from .facts import Fact

_NAME = "drive profile"
_KIND_TEXT: dict[Kind, str] = {
    "nvme": "an NVMe drive",
    "ssd": "an SSD",
    "rotational": "a rotational drive",
    "virtual": "a virtual drive",
    "memory": "files in memory",
    "unknown": "a drive of unknown kind",
}


def profile_fact(directory: Path, drive: Drive, tunable: bool) -> Fact:
    """Return the report's line about the drive profile that applies to a directory.

    Its value is the path of the profile's file, or None if the default settings apply.

    Args:
        directory: The directory.
        drive: The drive that the directory is on.
        tunable: Whether files can be stored in the directory, so that ``ds_nvme_tune`` can find settings.
    """
    default = f"the default of {_KIND_TEXT[drive.kind]}: {settings_text(default_settings(drive))}"
    tune = f"ds_nvme_tune --nvme_dir {shlex.quote(str(directory))} --save_profile"
    try:
        used = profiles_enabled()
    except ValueError as error:
        problem = f"{error}: unset {PROFILE_VARIABLE}; until then no engine can be made for a file or directory"
        return Fact.checked(_NAME, None, f"{PROFILE_VARIABLE} is neither on nor off", problem)
    try:
        profile = profile_of(drive)
    except ValueError as error:  # says what to do
        return Fact.checked(_NAME, None, f"not usable: {default}", f"{error} ({tune})")
    if not used:
        otherwise = () if profile is None else (f"without {PROFILE_VARIABLE}=off it would be {_profile_text(profile)}",)
        return Fact(_NAME, None, f"off by {PROFILE_VARIABLE}: {default}", problems=otherwise)
    if profile is None:
        can_have_one = tunable and drive.mount is not None and drive.kind != "memory"
        remedy = (f"to find the best settings, and use them from then on: {tune}",) if can_have_one else ()
        return Fact(_NAME, None, f"none: {default}", problems=remedy)
    return Fact(_NAME, str(profile.path), _profile_text(profile))


def settings_text(settings: AioConfig) -> str:
    """Return an engine's settings in words: "block_size 1048576, queue_depth 32, 1 worker"."""
    workers = settings.intra_op_parallelism
    parts = [f"block_size {settings.block_size}", f"queue_depth {settings.queue_depth}"]
    parts.append("1 worker" if workers == 1 else f"{workers} workers")
    if settings.single_submit:
        parts.append("single_submit")
    if settings.backend != "auto":
        parts.append(settings.backend)
    return ", ".join(parts)


def _profile_text(profile: DriveProfile) -> str:
    """Return a text with a profile's settings, the rates measured with them, and the path of its file."""
    directions = (("read", profile.read_gb_per_second), ("write", profile.write_gb_per_second))
    rates = ", ".join(f"{operation} {rate:.2f}" for operation, rate in directions if rate is not None)
    when = f"measured {profile.measured_at.partition('T')[0]}".rstrip()
    measured = f"{when}: {rates} GB/s" if rates else when if profile.measured_at else ""
    return f"{settings_text(profile.settings)}{measured and '; '}{measured} ({profile.path})"
