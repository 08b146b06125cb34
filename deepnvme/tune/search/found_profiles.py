"""The drive profiles that follow from the results of a search."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from deepnvme.drives import drive_of
from deepnvme.profiles import DriveProfile

from .results import Figures, Search, Tuning


@dataclass(frozen=True)
class FoundProfile:
    """The profile of a drive, before it is stored."""

    profile: DriveProfile
    """The profile."""
    folder: str
    """The folder on the drive whose search found it."""
    recommended: bool
    """Whether its settings are the ones that the tuner recommends. With several folders those are the best for all at the same
    time, but an engine has queues and workers for each drive."""


@dataclass(frozen=True)
class FoundProfiles:
    """The profiles of all drives that were measured."""

    profiles: tuple[FoundProfile, ...]
    """One for each drive, in the order of the folders; of several folders on one drive it is the first one's."""
    without: tuple[str, ...]
    """For each folder that can have none: why, in one line."""


def found_profiles(tuning: Tuning, measured: datetime) -> FoundProfiles:
    """Return the profiles of the drives that the folders are on, each with the best settings of a folder alone.

    Args:
        tuning: The results; not of GPUDirect Storage, whose settings are those of another op.
        measured: When the run ended.

    Raises:
        ValueError: If the run was interrupted.
        OSError: If a folder cannot be reached any more.
    """
    if not tuning.complete:
        raise ValueError("the search was interrupted: its settings are not the best")
    found: dict[Path, FoundProfile] = {}
    without = []
    for search in tuning.searches:
        if len(search.folders) > 1:
            continue
        folder = search.folders[0].path
        drive = drive_of(Path(folder))
        if drive.kind == "memory":
            without.append(f"no drive profile for '{folder}': its files are in memory, not on a drive")
            continue
        try:
            profile = DriveProfile.of(drive, search.best.setting, **_measured(search, measured))
        except ValueError as error:
            without.append(f"no drive profile for '{folder}': {error}".splitlines()[0])
            continue
        found.setdefault(profile.path, FoundProfile(profile, folder, recommended=search is tuning.chosen))
    return FoundProfiles(tuple(found.values()), tuple(without))


def _measured(search: Search, when: datetime) -> dict[str, float | str | None]:
    """Return the fields of a profile that say what was measured with its settings."""

    def rate(figures: Figures | None) -> float | None:
        return None if figures is None else round(figures.gb_per_second, 3)

    return {
        "read_gb_per_second": rate(search.best.read),
        "write_gb_per_second": rate(search.best.write),
        "measured": when.isoformat(timespec="seconds"),
    }
