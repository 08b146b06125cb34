"""Where the bytes of samples are, and how they become samples: rows of tensors, windows of tokens, and tar files of WebDataset.

Files without an index are scanned once. The index is kept in ``$XDG_CACHE_HOME/deepnvme/samples`` (``~/.cache`` without that
variable), see docs/formats.md. In a tar file, consecutive files whose names are equal up to the first dot are one sample. Hidden
files are left out.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import math
import os
import secrets
import tarfile
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, groupby
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from deepnvme.checkpoint.file_io import Version, file_version
from deepnvme.files.manifest import checked_fields, with_checksum
from deepnvme.files.regular_files import open_regular, read_regular
from deepnvme.files.replacing import replacing, with_filename
from deepnvme.memory.tensor_bytes import stack_ranges

Records = Callable[[Path, torch.Tensor, int], torch.Tensor]
"""Returns records of an index: ``(path, numbers of records, words of a record)`` to an int64 tensor of rows. Raises OSError."""
Empty = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
"""Returns a new tensor of a shape and dtype."""


class Places(NamedTuple):
    """Where samples are: int64 tensors with an element for each sample.

    If a sample has several ranges, the second ones of all samples follow the first ones of all samples, and so on.
    """

    files: torch.Tensor
    """Number of the file."""
    offsets: torch.Tensor
    """First byte in the file."""
    nbytes: torch.Tensor
    checksums: torch.Tensor | None = None
    """CRC-32 of the bytes; None if the format has none."""


def distinct(numbers: torch.Tensor) -> list[int]:
    """Return the distinct values of an int64 tensor of small numbers, in ascending order."""
    return numbers.bincount().nonzero().flatten().tolist()


def containing(numbers: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return in which of several consecutive ranges each number is. ``ends``: the end of each range, ascending."""
    # torch searches for more than 200 numbers by threads, which takes 400 us on two processors rather than 20
    return torch.cat([torch.bucketize(part, ends, right=True) for part in torch.split(numbers, 200)])


class CorruptSamples(OSError):
    """Raised (errno EBADMSG) if a file is not a whole file of samples: its header, index or manifest is damaged or incomplete."""

    def __init__(self, path: str | os.PathLike[str], why: str) -> None:
        super().__init__(errno.EBADMSG, f"these are no whole samples: {why}", os.fspath(path))


class SampleUnreadable(OSError):
    """A sample could not be read or is damaged. ``errno`` is the drive's, EBADMSG for damage, ESTALE for a file that changed.

    Attributes:
        sample: Number of the sample.
        offset: Where it begins, in bytes from the start of ``filename``.
    """

    sample = -1
    offset = -1


class Layout(ABC):
    """Samples in files of one format. Knows places and bytes; opens no data file for reading samples."""

    files: Sequence[Path]
    """Files that hold the samples."""
    versions: Sequence[Version] = ()
    """Version of each file, which must not change. Empty for files that may grow."""
    sample_bytes: int | None = None
    """Bytes of each sample if all have the same columns and shapes. Then samples are stacked, otherwise decoded one by one."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def places(self, numbers: torch.Tensor, records: Records) -> Places:
        """Return where samples are. Blocks for an index at most. Raises OSError if an index cannot be read or is damaged."""

    def sample(self, number: int, *data: memoryview) -> Any:
        """Return a sample from the bytes of its ranges. Tensors may be views of them.

        Raises LookupError, RuntimeError, TypeError or ValueError for damaged bytes.
        """
        raise NotImplementedError

    def stacked(self, memory: torch.Tensor, starts: torch.Tensor, empty: Empty | None) -> Any:
        """Return samples in memory as torch's ``default_collate`` would: a tensor, or a dict of tensors. See ``stack_ranges``."""
        raise NotImplementedError


class StridedLayout(Layout):
    """Tensors of one dtype and shape, the first at ``base``, each ``stride`` bytes after the one before, without an index."""

    def __init__(
        self, path: Path, version: Version, dtype: torch.dtype, shape: tuple[int, ...], base: int, stride: int, samples: int
    ) -> None:  # fmt: skip
        self.files, self.versions = [path], [version]
        self._dtype, self._shape, self._base, self._stride, self._samples = dtype, shape, base, stride, samples
        self.sample_bytes: int = math.prod(shape) * dtype.itemsize

    def __len__(self) -> int:
        return self._samples

    def places(self, numbers: torch.Tensor, records: Records) -> Places:
        """Return where tensors are. Never blocks."""
        offsets = self._base + numbers * self._stride
        return Places(torch.zeros_like(numbers), offsets, torch.full_like(numbers, self.sample_bytes))

    def stacked(self, memory: torch.Tensor, starts: torch.Tensor, empty: Empty | None) -> torch.Tensor:
        """Return the samples as one tensor, see :func:`stack_ranges`."""
        return stack_ranges(memory, starts, self._dtype, self._shape, empty)


class OffsetsLayout(Layout):
    """Samples in blocks that know the offsets of their samples. All offsets are kept in memory, 8 bytes each.

    Args:
        paths: The files.
        blocks: Returns the blocks of a file: for each range of a sample, the offset of each sample and the end of the last one.
            Called with the number of the file and its path.

    Raises:
        OSError: As ``blocks``, or if there is no such file.
        ValueError: If there are no samples.
    """

    def __init__(self, paths: Sequence[Path], blocks: Callable[[int, Path], Iterable[torch.Tensor]]) -> None:
        self.files, self.versions = list(paths), [file_version(path) for path in paths]
        found = [(number, block) for number, path in enumerate(paths) for block in blocks(number, path)]
        if not found:
            raise ValueError(f"there are no samples in {', '.join(map(str, paths[:1]))}")
        self._block_files = torch.tensor([number for number, _ in found])
        self._offsets = torch.cat([block for _, block in found], 1)
        self._ends = torch.tensor([block.shape[1] - 1 for _, block in found]).cumsum(0)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def places(self, numbers: torch.Tensor, records: Records) -> Places:
        """Return where samples are. Never blocks."""
        blocks = containing(numbers, self._ends)
        at = numbers + blocks  # each block has one more offset than samples
        begins, ends = self._offsets[:, at], self._offsets[:, at + 1]
        return Places(self._block_files[blocks].repeat(len(begins)), begins.flatten(), (ends - begins).flatten())


_KIND = ("deepnvme index of samples", 1)
_MOST_BYTES = 1 << 30
Scan = Callable[[IO[bytes]], Iterator[tuple[int, int]]]
"""Yields offset and bytes of each sample in a file. Raises ValueError if the file is damaged."""


class ScannedLayout(Layout):
    """Samples that are found by reading the headers of a file, which happens once. Raises CorruptSamples and OSError.

    Args:
        paths: The files, whose samples follow one another.
        scan: Finds the samples of a file.
        decode: Returns a sample from its bytes.
    """

    def __init__(self, paths: Sequence[Path], scan: Scan, decode: Callable[[memoryview], Any]) -> None:
        self._decode = decode
        self.files, self.versions = list(paths), [file_version(path) for path in paths]
        indexes = [_index_of(path, version, scan) for path, version in zip(paths, self.versions, strict=True)]
        self._index = torch.tensor([number for index in indexes for number in index], dtype=torch.int64).view(-1, 2)
        self._ends = torch.tensor(list(accumulate(len(index) // 2 for index in indexes)))

    def __len__(self) -> int:
        return len(self._index)

    def places(self, numbers: torch.Tensor, records: Records) -> Places:
        """Return where samples are. Never blocks."""
        return Places(containing(numbers, self._ends), *self._index[numbers].unbind(1))

    def sample(self, number: int, *data: memoryview) -> Any:
        """Return a sample, as ``decode`` makes it of its bytes."""
        return self._decode(*data)


def _index_of(path: Path, version: Version, scan: Scan) -> array[int]:
    """Return offset and bytes of each sample. Blocks: the first time, it scans the file."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "deepnvme", "samples")
    kept = cache / hashlib.blake2b(os.fsencode(path), digest_size=16).hexdigest()
    with contextlib.suppress(OSError, ValueError, RecursionError):
        fields = checked_fields(_KIND, read_regular(kept, _MOST_BYTES))
        if fields["version"] == list(version):
            return array("Q", fields["places"])
    with with_filename(path), open_regular(path) as file:
        try:
            index = array("Q", (number for place in scan(file) for number in place))
        except ValueError as error:
            raise CorruptSamples(path, str(error)) from error
    with contextlib.suppress(OSError):  # an index that cannot be kept is made again
        cache.mkdir(parents=True, exist_ok=True)
        new = kept.with_suffix(f".{secrets.token_hex(4)}")
        with replacing(kept, new):
            new.write_bytes(with_checksum(_KIND, {"version": version, "places": list(index)}))
    return index


def tar_sample(data: memoryview) -> dict[str, Any]:
    """Return a sample of a tar file from its members: ``"__key__"``, and the bytes of each file by its extension."""
    sample: dict[str, Any] = {}
    for member, key, extension, _ in _members(io.BytesIO(data)):
        sample["__key__"] = key
        sample[extension] = bytes(data[member.offset_data : member.offset_data + member.size])
    return sample


def tar_places(file: IO[bytes]) -> Iterator[tuple[int, int]]:
    """Yield offset and bytes of each sample in an archive, headers included. Raises ValueError if it is damaged."""
    for _, members in groupby(_members(file), key=lambda member: member[1]):
        found = list(members)
        begin = found[0][0].offset
        yield begin, found[-1][3] - begin


def _members(file: IO[bytes]) -> Iterator[tuple[tarfile.TarInfo, str, str, int]]:
    """Yield each file of an archive, or of a part of one: its member, key and extension, and where the next member begins.

    Raises ValueError if the archive is damaged.
    """
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            while (member := archive.next()) is not None:
                folder, slash, name = member.name.rpartition("/")
                stem, _, extension = name.partition(".")
                if member.issparse():
                    raise ValueError(f"'{member.name}' is sparse: its bytes do not lie one after the other")
                if member.isfile() and stem and extension:  # for WebDataset, hidden files are no part of a sample
                    yield member, folder + slash + stem, extension.lower(), archive.offset
                archive.members.clear()  # type: ignore[attr-defined]  # they would be kept until the end
            file.seek(archive.offset)
            if any(file.read(tarfile.BLOCKSIZE)):  # for tarfile, a damaged header is the end
                raise ValueError(f"no header of a file at offset {archive.offset}")
    except tarfile.TarError as error:
        raise ValueError(f"no tar archive: {error}") from error
