"""Check whether a checkpoint file is undamaged: its structure, and its contents if the file has checksums for them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from deepnvme._former_names import former_names
from deepnvme.engine import Future
from deepnvme.files.replacing import with_filename
from deepnvme.memory.pool import buffer_pool
from deepnvme.memory.tensor_bytes import crc32, memory_of
from deepnvme.telemetry.descriptions import printable
from deepnvme.transfer.gather import CHUNK
from deepnvme.transfer.scatter import transfer_ahead

from .file_io import shared_engine, started
from .formats import pt_records, safetensors_header
from .formats.pt_records import CorruptCheckpoint, PtRecords, WrongChecksum
from .formats.zip_directory import Record

if TYPE_CHECKING:
    from deepnvme.drives.aio_config import AioConfig


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
    checked_nbytes: int
    """Bytes of the storages that have a checksum. Damage to the bytes of other storages cannot be detected."""
    problems: tuple[str, ...]
    """What is wrong: which storage, what was expected, what was found. Empty if nothing is wrong."""

    @property
    def ok(self) -> bool:
        """Whether no problem was found in the structure, or in the contents that have checksums."""
        return not self.problems

    def checked(self) -> str:
        """Return a text that says what was checked, such as "structure, and checksums of 4096 of 4096 bytes"."""
        if self.checked_nbytes or not self.nbytes:
            return f"structure, and checksums of {self.checked_nbytes} of {self.nbytes} bytes"
        has = "the format has" if self.format == "safetensors" else "the file has"
        return f"structure; {self.nbytes} bytes of contents not checked: {has} no checksums"


@former_names(config="aio_config")
def verify(path: str | os.PathLike[str], *, aio_config: AioConfig | None = None) -> Report:
    """Check a .pt file, a .safetensors file, or a .safetensors.index.json with all of its shards. Blocks.

    The structure is checked: that the file is whole, and that its directory and its records fit together. Contents are
    compared with the checksums that the file has: :attr:`Report.checked_nbytes` says for how many bytes. .pt files of this
    package and of torch have checksums unless they were saved without, see :func:`deepnvme.save`; .safetensors files have
    none.

    Reads every record that has a checksum, at the speed of the drive. At most 16 MiB are leased.

    Args:
        path: The file.
        aio_config: Settings of the engine; None for the profile of the drive, see :func:`deepnvme.engine_for`.

    Returns:
        The report. A damaged file is not an error: the report lists what is wrong. That includes files of torch before 1.6,
        files whose records another program has compressed, and files that are not checkpoints.

    Raises:
        OSError: If the file cannot be read, or is a FIFO or a device. Names the file.
        TypeError: If ``aio_config`` is not an AioConfig.
    """
    name = os.fspath(path)
    try:
        with with_filename(path):
            if not pt_records.is_zip(path):
                return _safetensors(name)
            found = pt_records.records_of(path)
            if not found.stored:
                raise CorruptCheckpoint(path, "its records are compressed, which torch.save never does")
            problems = _checksum_problems(path, found, aio_config)
            if not problems:
                pt_records.check_pickle(path, found)
    except CorruptCheckpoint as error:
        return Report(name, "pt", 0, 0, 0, (error.why,))
    sizes = [(record.nbytes, record.crc32) for record in found.storages]
    checked = sum(nbytes for nbytes, crc in sizes if crc)
    return Report(name, "pt", len(sizes), sum(nbytes for nbytes, _ in sizes), checked, tuple(problems))


def _safetensors(path: str) -> Report:
    """Return the report of a safetensors file, or of an index with its shards."""
    tensors = nbytes = 0
    problems = []
    try:
        for shard, names in safetensors_header.shards_of(path).items():
            entries = safetensors_header.read_header(shard)
            tensors += len(entries)
            nbytes += sum(entry.nbytes for entry in entries.values())
            safetensors_header.indexed(path, shard, names, entries)
    except CorruptCheckpoint as error:
        problems.append(error.why if error.filename == path else f"{error.filename}: {error.why}")
    except FileNotFoundError as error:
        if error.filename == path:
            raise
        problems.append(f"shard {error.filename} is not there")
    return Report(path, "safetensors", tensors, nbytes, 0, tuple(problems))


def _checksum_problems(path: str | os.PathLike[str], found: PtRecords, aio_config: AioConfig | None) -> list[str]:
    """Return messages for records whose bytes do not match their checksum. Computes checksums while later chunks are read."""
    engine = shared_engine(path, aio_config)
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

        for (record, offset, at, nbytes), chunk in transfer_ahead(parts, start, buffer_pool()):
            crc = crc32(memory_of(chunk, 0, nbytes), crc if at else 0)
            if at + nbytes == record.nbytes and crc != record.crc32:
                problems.append(WrongChecksum(path, record, offset, crc).why)
    return problems


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``deepnvme verify``.

    Exits with status 0 if no problem was found in any file, 1 if a file has a problem or cannot be read, and 2 for wrong
    arguments.

    Args:
        arguments: Command line without the program's name; None for ``sys.argv[1:]``.
    """
    description = "Check the structure of checkpoints, and their contents as far as they have checksums; say what was checked."
    statuses = "Exit status: 0 if nothing is wrong as far as it was checked; 1 if something is, or a file cannot be read."
    parser = argparse.ArgumentParser("deepnvme verify", description=description, epilog=statuses)
    parser.add_argument("files", nargs="+", metavar="FILE", help="a .pt, .safetensors or .safetensors.index.json")
    well = True
    for path in parser.parse_args(arguments).files:
        try:
            report = verify(path)
        except OSError as error:
            print(f"{printable(path)}: {error.strerror}", file=sys.stderr)
            well = False
            continue
        print(printable(f"{path}: {'ok' if report.ok else f'{len(report.problems)} wrong'} ({report.checked()})"))
        for problem in report.problems:
            print(f"  {printable(problem)}")
        well = well and report.ok
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()
