"""Drive profiles: the settings that ``ds_nvme_tune`` has found for a drive, and engines that use them.

All engines that this package makes for a file or directory get their settings from :func:`settings_for`, except for
DeepSpeed's handles and swappers, which are given the ``aio`` block of DeepSpeed's JSON.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import warnings
from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel, ValidationError

from deepnvme._former_names import former_names
from deepnvme.drives.aio_config import AioConfig
from deepnvme.drives.mounts import Drive, drive_of
from deepnvme.engine import Engine
from deepnvme.files.regular_files import NotARegularSmallFile, read_regular
from deepnvme.files.replacing import replacing, with_filename
from deepnvme.telemetry.callers import stack_level
from deepnvme.telemetry.descriptions import printable
from deepnvme.telemetry.sizes import ByteCount, byte_count

_logger = logging.getLogger(__name__)

AnyPath = str | os.PathLike[str]
_MIN_QUEUE_DEPTH = 128
"""Smallest queue depth of an engine whose settings the user has not given; docs/tuning.md has the reason."""
_MAX_FILE_BYTES = 1 << 16
"""Most bytes of a profile's file."""


class _ProfileFile(BaseModel):
    """The part of a profile's file that is read. The rest of the file tells people which drive the profile is of."""

    settings: AioConfig


def profile_directory() -> Path:
    """Return the directory of the profiles: ``deepnvme/drives`` under ``$XDG_CONFIG_HOME``, or ``~/.config`` if that is not set.

    Raises:
        RuntimeError: If neither that variable nor the user's home directory is known.
    """
    base = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".config") / "deepnvme" / "drives"


def profile_path(drive: Drive) -> Path:
    """Return the path of the JSON file that a drive's profile is in, if it has one.

    A drive is identified by its mount point, the type of its file system and the models of its disks. If a disk reports
    no model, as with virtio, the mounted device takes the place of the models, such as ``/dev/vda1``; its name may change
    after a restart. The file's name has the mount's name, for people, and a hash that identifies the drive.

    Raises:
        ValueError: If the drive's mount is not known.
        RuntimeError: If the user has no home directory.
    """
    if drive.mount is None:
        raise ValueError("it is not known on which file system it is: /proc/self/mountinfo cannot be read")
    mount = drive.mount.point
    identity = "\0".join((mount, drive.mount.filesystem, drive.models)).encode(errors="surrogateescape")
    readable = os.path.basename(mount).encode(errors="ignore")[:64].decode(errors="ignore")
    return profile_directory() / f"{readable or 'root'}-{hashlib.sha256(identity).hexdigest()[:16]}.json"


def store_profile(drive: Drive, settings: AioConfig) -> Path:
    """Store settings as the profile of a drive, in place of an older one. Blocks. Returns the path of its file.

    Raises:
        ValueError, RuntimeError: As for :func:`profile_path`.
        OSError: If the file cannot be written.
    """
    path, mount = profile_path(drive), drive.mount
    assert mount is not None
    names = {"mount": mount.point, "filesystem": mount.filesystem, "disk_models": drive.models}
    document = {**{name: printable(text) for name, text in names.items()}, "settings": settings.model_dump()}
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    with with_filename(path, instead=True), replacing(path, new):
        new.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return path


def profile_of(drive: Drive) -> AioConfig | None:
    """Return the settings that are stored as the profile of a drive; None if there are none.

    Raises:
        ValueError: If the profile cannot be read, is damaged, or has settings that this version does not know. The
            message says what to do.
    """
    try:
        path = profile_path(drive)
    except (ValueError, RuntimeError):  # a user without a home directory has no profiles
        return None
    try:
        return _ProfileFile.model_validate_json(read_regular(path, _MAX_FILE_BYTES)).settings
    except (FileNotFoundError, NotADirectoryError, PermissionError):  # of a service, the home directory may be another user's
        return None
    except (OSError, NotARegularSmallFile, ValidationError) as error:
        reason = str(error)
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            reason = ": ".join((*map(str, first["loc"]), first["msg"]))
        raise ValueError(f"the drive profile '{path}' is damaged ({reason}): remove it, or tune the drive again") from error


def default_settings(drive: Drive, concurrent_drives: int = 1) -> AioConfig:
    """Return the settings for a drive without a profile, by its kind and number of disks.

    Args:
        drive: The drive.
        concurrent_drives: Number of drives that are to be used at the same time.
    """
    if drive.kind == "rotational":  # long transfers, and few of them, so that the head seldom moves from one file to another
        return AioConfig(block_size=4 << 20, queue_depth=4)
    # One worker saturates a drive of any kind. A RAID gets one for each of its disks, as long as half of the cores are left to
    # whatever uses the tensors.
    cores = len(os.sched_getaffinity(0))
    return AioConfig(queue_depth=128, intra_op_parallelism=max(1, min(len(drive.disks), cores // 2 // concurrent_drives)))


def settings_for(paths: AnyPath | Iterable[AnyPath], aio_config: AioConfig | None = None) -> AioConfig:
    """Return the settings of an engine for files or directories: ``aio_config``, or else from the profiles of their drives.

    A drive without a profile has the default settings of its kind. An engine has one set of settings, which it applies to
    each drive separately. If the settings of the drives differ, the engine gets the largest block size, queue depth and
    number of workers, the backend if all drives have the same (otherwise "auto"), and ``single_submit`` if all drives
    have it.

    Args:
        paths: A file or directory, or several. They may not exist yet.
        aio_config: Settings that are used instead of profiles and defaults.

    Raises:
        TypeError: If ``aio_config`` is not an AioConfig.
        ValueError: If no path is given.
        OSError: If a path cannot be reached, for another reason than that it does not exist.
    """
    if aio_config is not None:
        if not isinstance(aio_config, AioConfig):
            raise TypeError(f"aio_config must be an AioConfig, got {type(aio_config).__name__}")
        return aio_config
    if isinstance(paths, str | os.PathLike):  # otherwise a string would be taken for many paths, each of one letter
        paths = [paths]
    drives = list(dict.fromkeys(drive_of(Path(os.fsdecode(path))) for path in paths))
    found = [_profile_settings(drive) or default_settings(drive, len(drives)) for drive in drives]
    if not found:
        raise ValueError("an engine needs a file or directory to look up the drive of")
    backends = {each.backend for each in found}
    return AioConfig(
        block_size=max(each.block_size for each in found),
        queue_depth=max(each.queue_depth for each in found),
        intra_op_parallelism=max(each.intra_op_parallelism for each in found),
        single_submit=all(each.single_submit for each in found),
        backend=backends.pop() if len(backends) == 1 else "auto",
    )


@former_names(config="aio_config")
def engine_for(
    paths: AnyPath | Iterable[AnyPath], aio_config: AioConfig | None = None, in_flight_bytes: ByteCount | None = None
) -> Engine:
    """Return a new engine for files or directories, with the settings of :func:`settings_for`.

    The engine has separate queues and workers for each drive that it is used with. If a backend that a profile names does
    not work any more, the engine uses "auto" and a RuntimeWarning is issued.

    >>> with deepnvme.engine_for(["/mnt/nvme0", "/mnt/nvme1"]) as engine:
    ...     engine.write(tensor, "/mnt/nvme0/tensor").result()

    Args:
        paths: A file or directory, or several. They may not exist yet.
        aio_config: Settings that are used instead of profiles and defaults. Without effect: ``use_gds`` and ``overlap_events``.
        in_flight_bytes: Most bytes in flight for each worker, or a size such as "8MiB"; ignored with ``aio_config``. With a
            limit, transfers end one after the other, which suits a caller that waits for the first of them. None for no
            limit besides the settings.

    Raises:
        TypeError: If ``aio_config`` is not an AioConfig.
        ValueError: If no path is given.
        OSError: If a path cannot be reached, for another reason than that it does not exist; or if the kernel refuses the
            backend that ``aio_config`` names.
        RuntimeError: If the op cannot be built.
    """
    in_flight = None if in_flight_bytes is None else byte_count(in_flight_bytes, "in_flight_bytes", least=None)
    return create_engine(settings_for(paths, aio_config), from_user=aio_config is not None, in_flight_bytes=in_flight)


def create_engine(settings: AioConfig, from_user: bool, in_flight_bytes: int | None = None) -> Engine:
    """Return a new engine from settings, adapted to small transfers unless the user has given the settings.

    Profiles and defaults are tuned for large transfers. An engine from such settings keeps their limit of bytes in flight
    (block size times queue depth, for each worker), but has a queue depth of at least 128, for small transfers.

    Args:
        settings: The settings.
        from_user: Whether the user has given the settings: then a backend that does not work is an error. Otherwise
            "auto" is used instead, with a RuntimeWarning.
        in_flight_bytes: Most bytes in flight for each worker; ignored with ``from_user``. None for no further
            limit.

    Raises:
        OSError: If the kernel refuses the backend.
        RuntimeError: If the op cannot be built.
    """
    arguments = settings.engine_arguments()
    if not from_user:
        most = settings.block_size * settings.queue_depth
        arguments["in_flight_bytes"] = most if in_flight_bytes is None else min(most, in_flight_bytes)
        arguments["queue_depth"] = max(settings.queue_depth, _MIN_QUEUE_DEPTH)
    _logger.debug("engine settings, %s: %s", "given by the caller" if from_user else "of the drive", arguments)
    try:
        return Engine(**arguments)
    except (OSError, RuntimeError, ValueError) as error:
        if from_user or settings.backend == "auto":
            raise
        text = f"backend {settings.backend} of the drive profile does not work ({error}): using auto; tune the drive again"
        warnings.warn(text, RuntimeWarning, stacklevel=stack_level())
        return Engine(**{**arguments, "backend": "auto"})


def _profile_settings(drive: Drive) -> AioConfig | None:
    """Return the settings of a drive's profile; None if there is none. Warns of an unusable profile."""
    try:
        return profile_of(drive)
    except ValueError as error:
        warnings.warn(f"{error}; until then it is ignored", RuntimeWarning, stacklevel=stack_level())
        return None
