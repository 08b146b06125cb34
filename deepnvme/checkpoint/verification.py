"""Check whether a checkpoint file is undamaged: its structure, and its contents if the file has checksums for them."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from deepnvme.engine import Future
from deepnvme.files.replacing import with_filename
from deepnvme.memory.pool import BufferPool, buffer_pool
from deepnvme.memory.tensor_bytes import crc32, memory_of
from deepnvme.telemetry.descriptions import printable
from deepnvme.transfer.gather import CHUNK
from deepnvme.transfer.scatter import read_ahead

from .file_io import clearing_frames, shared_engine, started
from .formats import pt_records, safetensors_header
from .formats.pickle_scan import PickleScan
from .formats.pt_records import CorruptCheckpoint, PtRecords, WrongChecksum
from .formats.recognition import guess_format
from .formats.zip_directory import Record

if TYPE_CHECKING:
    from deepnvme.drives.aio_config import AioConfig

_TOO_OLD = "torch.save wrote it before torch 1.6, without checksums or a directory: there is nothing to verify it by"


@dataclass(frozen=True)
class Report:
    """The result of :func:`verify` for one path."""

    path: str
    """Path that was verified, as given."""
    format: str
    """``"pt"`` or ``"safetensors"``."""
    tensors: int
    """Number of storages in a .pt file, or of tensors in a safetensors file."""
    nbytes: int
    """Bytes of all these storages or tensors."""
    checksums: int
    """Number of storages that have a checksum and were compared with it."""
    problems: tuple[str, ...]
    """What is wrong: which storage, what was expected, what was found. Empty if nothing is wrong."""
    compressed: bool = False
    """Whether records are deflated. torch.save never writes such files, but torch.load reads them."""
    checked_nbytes: int = 0
    """Bytes of the storages that have a checksum. Damage to the bytes of other storages cannot be detected."""
    unchecked: str = ""
    """Why nothing in the file could be checked: a format without a checkable structure or checksums. Empty otherwise."""

    @property
    def ok(self) -> bool:
        """Whether no problem was found in the structure, or in the contents that have checksums."""
        return not self.problems

    @property
    def contents_checked(self) -> bool:
        """Whether every byte of the contents was compared with a checksum."""
        return not self.unchecked and self.checked_nbytes == self.nbytes

    def checked(self) -> str:
        """Return a text that says what was checked, such as "structure, and checksums of all 12 storages, 4096 bytes"."""
        if self.unchecked:
            return self.unchecked
        things = "storages" if self.format == "pt" else "tensors"
        if self.contents_checked:
            return f"structure, and checksums of all {self.tensors} {things}, {self.nbytes} bytes"
        has = "the format has" if self.format == "safetensors" else "the file has"
        if not self.checked_nbytes:
            return f"structure; contents of {self.tensors} {things}, {self.nbytes} bytes, not checked: {has} no checksums"
        return (
            f"structure, and checksums of {self.checksums} of {self.tensors} {things}, {self.checked_nbytes} of {self.nbytes}"
            " bytes; contents of the others not checked: they have none"
        )


def verify(path: str | os.PathLike[str], *, pool: BufferPool | None = None, config: AioConfig | None = None) -> Report:
    """Check a .pt file, a .safetensors file, or a .safetensors.index.json with all of its shards. Blocks.

    The structure is checked: that the file is whole, and that its directory, its pickle and its storages fit together.
    Contents are compared with the checksums that the file has: :attr:`Report.checked_nbytes` says for how many bytes. .pt
    files of this package and of torch have checksums unless they were saved without, see :func:`deepnvme.save`;
    .safetensors files have none.

    Reads the pickle and every record that has a checksum, at the speed of the drive. At most 16 MiB are leased. If
    records are deflated, only the checksums are compared, by Python's zipfile.

    Args:
        path: The file.
        pool: Pool of the buffers. None is the process's pool.
        config: Settings of the engine; None for the profile of the drive, see :func:`deepnvme.engine_for`.

    Returns:
        The report. A damaged file is not an error: the report lists what is wrong.

    Raises:
        OSError: If the file cannot be read, or is a FIFO or a device. Names the file.
        TypeError: If ``config`` is something else than an AioConfig.
    """
    name = os.fspath(path)
    problems: list[str] = []
    try:
        with with_filename(path):
            if not pt_records.is_zip(path):
                pt_records.refuse_damaged_beginning(path)
                return _old(name) if pt_records.is_pickle(path) else _safetensors(name)
            found = pt_records.records_of(path)
            if found.stored:
                with contextlib.suppress(WrongChecksum):  # reported below; the references of such a pickle mean nothing
                    problems = _pickle_problems(PickleScan(pt_records.check_pickle(path, found)), found)
                problems += pt_records.wrong_names(path, [found.pickle, *found.others, *found.storages])
                problems += _checksum_problems(path, found, buffer_pool() if pool is None else pool, config)
            else:
                problems = list(_record_problems(path))
    except _DAMAGED as error:
        return Report(name, "pt", 0, 0, 0, (error.why if isinstance(error, CorruptCheckpoint) else str(error),))
    nbytes = sum(record.whole for record in found.storages)
    summed = [record.whole for record in found.storages if record.crc32 != 0]
    return Report(name, "pt", len(found.storages), nbytes, len(summed), tuple(problems), not found.stored, sum(summed))


def _old(path: str) -> Report:
    """Return the report of a file that begins like a pickle: a file of torch before 1.6, which cannot be checked."""
    other = guess_format(path)
    if other is None:
        return Report(path, "pt", 0, 0, 0, (), unchecked=_TOO_OLD)
    return Report(path, "pt", 0, 0, 0, (f"it is no checkpoint, but looks like {other}",))


def _safetensors(path: str) -> Report:
    """Return the report of a safetensors file, or of an index with its shards."""
    tensors = nbytes = 0
    problems = []
    try:
        for shard, names in safetensors_header.shards_of(path).items():
            entries = safetensors_header.read_header(shard)
            tensors += len(entries)
            nbytes += sum(entry.nbytes for entry in entries.values())
            missing = set(names or ()) - entries.keys()
            problems += [f"tensor {name!r}: expected in {shard}, found nowhere in it" for name in sorted(missing)]
    except CorruptCheckpoint as error:
        problems.append(error.why if error.filename == path else f"{error.filename}: {error.why}")
    except FileNotFoundError as error:
        if error.filename == path:
            raise
        problems.append(f"shard {error.filename} is not there")
    return Report(path, "safetensors", tensors, nbytes, 0, tuple(problems))


def _pickle_problems(scan: PickleScan, found: PtRecords) -> list[str]:
    """Return messages for storages that the pickle refers to and that the file lacks, or has with another size."""
    try:
        scan.load()
    except (OSError, MemoryError):
        raise
    except Exception as error:
        return [] if found.script else [f"the pickle cannot be read: {type(error).__name__}: {error}"]
    sizes = {record.key: record.whole for record in found.storages}
    return [
        f"storage {key}: expected {nbytes} bytes, found {sizes.get(key, 'none')}"
        for key, nbytes in scan.nbytes.items()
        if sizes.get(key) != nbytes
    ]


@clearing_frames
def _checksum_problems(path: str | os.PathLike[str], found: PtRecords, pool: BufferPool, config: AioConfig | None) -> list[str]:
    """Return messages for records whose bytes do not match their checksum. Computes checksums while later chunks are read."""
    engine = shared_engine(path, config)
    records = [found.pickle, *found.others, *found.storages]
    located = list(zip(records, pt_records.data_offsets(path, records), strict=True))
    problems = [WrongChecksum(path, *each, 0).why for each in located if each[0].crc32 and not each[0].nbytes]
    parts = (
        (record, offset, at, min(CHUNK, record.nbytes - at))
        for record, offset in located
        for at in range(0, record.nbytes if record.crc32 else 0, CHUNK)
    )
    crc = 0
    with engine.open(os.fspath(path), "r") as file:

        def start(part: tuple[Record, int, int, int], chunk: torch.Tensor) -> Future:
            """Start reading a part of a record into a chunk."""
            _, offset, at, nbytes = part
            return started(engine, chunk[:nbytes], file, offset + at)

        for (record, offset, at, nbytes), chunk in read_ahead(parts, start, pool):
            crc = crc32(memory_of(chunk, 0, nbytes), crc if at else 0)
            if at + nbytes == record.nbytes and crc != record.crc32:
                problems.append(WrongChecksum(path, record, offset, crc).why)
    return problems


def verify_records(path: str | os.PathLike[str]) -> None:
    """Compare the records of a zip archive, deflated or not, with the checksums that they have. Blocks.

    Reads through the page cache, because torch is about to read the file that way.

    Raises:
        CorruptCheckpoint: If the archive cannot be read or a checksum does not match.
    """
    try:
        problem = next(_record_problems(path), None)
    except _DAMAGED as error:
        problem = str(error)
    if problem is not None:
        raise CorruptCheckpoint(path, problem)


def _record_problems(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield messages for the damaged records of an archive. Raises one of ``_DAMAGED`` if its directory cannot be read."""
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            try:
                if entry.CRC:
                    with archive.open(entry) as record:
                        while record.read(CHUNK):
                            pass
            except _DAMAGED as error:
                name = entry.filename.partition("/")[2]
                yield f"{f'storage {name[5:]}' if name.startswith('data/') else f'record {name}'}: {error}"


_DAMAGED = (zipfile.BadZipFile, zlib.error, NotImplementedError, CorruptCheckpoint, *pt_records.DAMAGE)
"""Types of the errors that zipfile raises for archives that it cannot read.

These are newer versions of the format, encrypted archives, and damage that zipfile does not check for.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``deepnvme verify``.

    Exits with status 0 if no problem was found in any file, 1 if a file has a problem or cannot be read, and 2 for wrong
    arguments. With ``--require-checksums``, the status is 3 if no problem was found, but a file has no checksums for some
    of its contents.

    Args:
        arguments: Command line without the program's name. None is that of the process.
    """
    description = "Check the structure of checkpoints, and their contents as far as they have checksums; say what was checked."
    parser = argparse.ArgumentParser("deepnvme verify", description=description, epilog=_STATUSES)
    parser.add_argument("files", nargs="+", metavar="FILE", help="a .pt, .safetensors or .safetensors.index.json")
    parser.add_argument(
        "--require-checksums", action="store_true", help="exit with status 3 if a file has no checksums of some of its contents"
    )
    options = parser.parse_args(arguments)
    well = checked = True
    for path in options.files:
        try:
            report = verify(path)
        except OSError as error:
            print(f"{printable(path)}: {error.strerror}", file=sys.stderr)
            well = False
            continue
        print(printable(_line(report)))
        for problem in report.problems:
            print(f"  {printable(problem)}")
        well = well and report.ok
        checked = checked and report.contents_checked
    sys.exit(1 if not well else 3 if options.require_checksums and not checked else 0)


_STATUSES = (
    "Exit status: 0 if nothing is wrong with any file as far as it was checked; 1 if something is, or a file cannot be read; 2"
    " for wrong arguments; 3 with --require-checksums, if nothing is wrong but a file has no checksums of some of its contents."
)


def _line(report: Report) -> str:
    """Return the line that ``deepnvme verify`` prints for a file."""
    sound = "not checked" if report.unchecked else "ok" if report.contents_checked else "ok as far as checked"
    verdict = sound if report.ok else f"{len(report.problems)} wrong"
    if not (report.ok or report.tensors):  # it could not be read so far that there was anything to check
        return f"{report.path}: {verdict}"
    return f"{report.path}: {verdict} ({report.checked()}{'; compressed' if report.compressed else ''})"


if __name__ == "__main__":
    main()
