"""What ds_nvme_tune says about drive profiles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from deepnvme.profiles import PROFILE_VARIABLE, DriveProfile
from deepnvme.tools.report.profile_probe import settings_text
from deepnvme.tools.tune.search.found_profiles import FoundProfile


def save_question(found: Sequence[FoundProfile]) -> str:
    """Return the question whether to store profiles; at least one."""
    return f"Let deepnvme use {_settings(found)} for files on {_drives(found)} from now on?"


def save_hint(found: Sequence[FoundProfile]) -> str:
    """Return how to store profiles, at least one, in the next run."""
    return f"with --save_profile, deepnvme would use {_settings(found)} for files on {_drives(found)} from then on"


def saved_message(profile: DriveProfile, path: Path, used: bool) -> str:
    """Return what it means that a profile was stored.

    Args:
        profile: The profile.
        path: Its file.
        used: Whether profiles are used; otherwise the environment variable switches them off.
    """
    when = "from now on" if used else f"as soon as {PROFILE_VARIABLE} is not off any more"
    what = f"deepnvme uses these settings for files on {profile.mount}: {settings_text(profile.settings)}"
    return f"stored in '{path}': {when}, {what}"


def _settings(found: Sequence[FoundProfile]) -> str:
    """Return which settings the profiles have: others than the printed ones, if several folders were measured together."""
    if all(each.recommended for each in found):
        return "these settings"
    return f"the best settings of {found[0].folder} alone" if len(found) == 1 else "the best settings of each drive alone"


def _drives(found: Sequence[FoundProfile]) -> str:
    """Return the mount points of the drives."""
    return " and ".join(each.profile.mount for each in found)
