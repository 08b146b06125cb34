"""Where the bytes of samples are, and how they become samples: rows of tensors, windows of tokens, and tar files of WebDataset.

In a tar file, consecutive files whose names are equal up to the first dot are one sample. Hidden files are left out. An archive
is scanned once. Its index is kept in ``$XDG_CACHE_HOME/deepnvme/samples`` (``~/.cache`` without that variable), see
docs/formats.md.
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
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

import torch

from deepnvme.checkpoint.file_io import Version, file_version
from deepnvme.files.manifest import checked_fields, with_checksum
from deepnvme.files.regular_files import open_regular, read_regular
from deepnvme.files.replacing import replacing, with_filename

Entry = tuple[int, int, int, int]
"""Where a sample is: number of its file, offset, bytes, and the CRC-32 of the bytes; -1 if the format has none."""


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

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def entries(self, numbers: Sequence[int]) -> list[Entry]:
        """Return where samples are. Blocks for an index at most. Raises OSError if an index cannot be read or is damaged."""

    @abstractmethod
    def sample(self, data: memoryview) -> Any:
        """Return a sample from its bytes. Tensors may be views of them. Raises ValueError for damaged bytes."""


class StridedLayout(Layout):
    """Tensors of one dtype and shape, the first at ``base``, each ``stride`` bytes after the one before, without an index."""

    def __init__(
        self, path: Path, version: Version, dtype: torch.dtype, shape: tuple[int, ...], base: int, stride: int, samples: int
    ) -> None:  # fmt: skip
        self.files, self.versions = [path], [version]
        self._dtype, self._shape, self._base, self._stride, self._samples = dtype, shape, base, stride, samples
        self._nbytes = math.prod(shape) * dtype.itemsize

    def __len__(self) -> int:
        return self._samples

    def entries(self, numbers: Sequence[int]) -> list[Entry]:
        """Return where tensors are. Never blocks."""
        return [(0, self._base + number * self._stride, self._nbytes, -1) for number in numbers]

    def sample(self, data: memoryview) -> torch.Tensor:
        """Return a sample's bytes as a tensor over them."""
        return tensor_over(data, self._dtype, self._shape)


def tensor_over(data: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return bytes as a tensor: a view, or a copy if the address is not a multiple of the dtype's size."""
    if not data.nbytes:
        return torch.empty(0, dtype=dtype).view(shape)
    found = torch.frombuffer(data, dtype=dtype)
    if found.data_ptr() % dtype.itemsize:
        found = torch.frombuffer(bytearray(data), dtype=dtype)
    return found if found.shape == shape else found.view(shape)


_KIND = ("deepnvme index of a tar file", 1)
_MOST_BYTES = 1 << 30


class TarLayout(Layout):
    """Samples in tar files. A sample's bytes are those of its members, headers included. Raises CorruptSamples and OSError."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.files, self.versions = list(paths), [file_version(path) for path in paths]
        self._indexes = [_index_of(path, version) for path, version in zip(paths, self.versions, strict=True)]
        self._ends = list(accumulate(len(each) // 2 for each in self._indexes))

    def __len__(self) -> int:
        return self._ends[-1]

    def entries(self, numbers: Sequence[int]) -> list[Entry]:
        """Return where samples are. Never blocks."""
        found = []
        for number in numbers:
            file = bisect_right(self._ends, number)
            index = self._indexes[file]
            at = len(index) + 2 * (number - self._ends[file])
            found.append((file, index[at], index[at + 1], -1))
        return found

    def sample(self, data: memoryview) -> dict[str, Any]:
        """Return a sample: ``"__key__"``, and the bytes of each file by its extension."""
        sample: dict[str, Any] = {}
        for member, key, extension, _ in _members(io.BytesIO(data)):
            sample["__key__"] = key
            sample[extension] = bytes(data[member.offset_data : member.offset_data + member.size])
        return sample


def _index_of(path: Path, version: Version) -> array[int]:
    """Return offset and bytes of each sample. Blocks: the first time, it reads the headers of the archive."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser(), "deepnvme", "samples")
    kept = cache / hashlib.blake2b(os.fsencode(path), digest_size=16).hexdigest()
    with contextlib.suppress(OSError, ValueError, RecursionError):
        fields = checked_fields(_KIND, read_regular(kept, _MOST_BYTES))
        if fields["version"] == list(version):
            return array("Q", fields["places"])
    with with_filename(path), open_regular(path) as file:
        try:
            index = array("Q", (number for place in _places(file) for number in place))
        except ValueError as error:
            raise CorruptSamples(path, str(error)) from error
    with contextlib.suppress(OSError):  # an index that cannot be kept is made again
        cache.mkdir(parents=True, exist_ok=True)
        new = kept.with_suffix(f".{secrets.token_hex(4)}")
        with replacing(kept, new):
            new.write_bytes(with_checksum(_KIND, {"version": version, "places": list(index)}))
    return index


def _places(file: IO[bytes]) -> Iterator[tuple[int, int]]:
    """Yield offset and bytes of each sample in an archive. Raises ValueError if it is damaged."""
    last, begin, end = "", 0, 0
    for member, key, _, after in _members(file):
        if key != last and end:
            yield begin, end - begin
        if key != last:
            last, begin = key, member.offset
        end = after
    if end:
        yield begin, end - begin


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
