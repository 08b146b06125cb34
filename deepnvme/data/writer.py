"""Writes samples, and commits them: a reader sees whole commits, whenever the writer dies.

1. Samples go to data files and an index of the writer's own, which no manifest names before the first commit.
2. A commit pads the data files to pages, writes and flushes them, flushes the index, and then replaces the manifest.
3. What is written after a commit is beyond the sizes that the manifest says. The next writer of the directory begins files of
   its own. It removes each index in the directory that the manifest does not name, and data files that have the index's name:
   those of a writer that failed or died before its first commit.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from deepnvme.drives.aio_config import AioConfig
from deepnvme.drives.profiles import engine_for
from deepnvme.files.directory_lock import DirectoryLock, DirectoryOwner
from deepnvme.files.replacing import sync_directory, with_filename
from deepnvme.memory.alignment import PAGE
from deepnvme.memory.tensor_bytes import crc32
from deepnvme.telemetry.descriptions import representation, state_text
from deepnvme.transfer.appending import AppendedFile

from .sample_files import ENTRY, MANIFEST_NAME, ColumnKind, Manifest, Part, RecordFormat, columns_from, load_manifest, path_in

_SECTOR = 512
_SECTORS_FROM = 10 << 10
"""Bytes of a record from which it begins at a sector, so that no more sectors are read than it has: at most 5 % of padding."""
_ALIGNMENT = 64
"""Bytes. Shorter records begin at a multiple of this."""
_PREFIX, _DATA, _INDEX = "deepnvme-", ".samples", ".index"


class SampleWriter:
    """Writes samples into a directory, for :class:`SampleDataset`. Use it in a ``with`` block, whose end is a commit.

    >>> with SampleWriter(path, {"image": "bytes", "label": torch.int64}) as writer:
    ...     writer.append(image=jpeg, label=3)

    A directory that has samples already is continued. Not thread-safe; several processes write into directories of their own,
    which :func:`merge_samples` joins. If the process is killed, or the ``with`` block raises, the last commit remains.

    Args:
        path: The directory; created if it is missing.
        columns: What each sample has, by name: "bytes", "str", a dtype for one number, or ``(dtype, shape)``, where the first
            size may be -1 for any number of rows. None for those of the samples that the directory has.
        directories: Directories for the data, such as one on each drive, which have the samples in turn. None for ``path``.
        aio_config: Settings of the engine; None for the profile of the drive.

    Raises:
        TypeError, ValueError: If ``columns`` are invalid, or others than those of the samples that the directory has.
        CorruptSamples: If the manifest of the directory is damaged.
        StoreLocked: If the directory has another writer.
        OSError: If a file cannot be created.
    """

    def __init__(
        self, path: str | os.PathLike[str], columns: Mapping[str, ColumnKind] | None = None, *,
        directories: Sequence[str | os.PathLike[str]] | None = None, aio_config: AioConfig | None = None,
    ) -> None:  # fmt: skip
        self._path = Path(path).absolute()
        self._process = os.getpid()
        self._closed = self._failed = False
        self.samples = self.padding = 0
        """Samples appended by this writer, and bytes of padding between them."""
        self._directories = [Path(each).absolute() for each in directories or [self._path]]
        with contextlib.ExitStack() as stack:
            stack.enter_context(DirectoryLock(self._path, DirectoryOwner("SampleWriter")))
            self._manifest = self._load(columns)
            self._records = RecordFormat(self._manifest.columns)
            for directory in self._directories:
                directory.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
            self._engine = stack.enter_context(engine_for(self._directories, aio_config))
            name = f"{_PREFIX}{secrets.token_hex(8)}"
            self._index_path = self._path / f"{name}{_INDEX}"
            self._index = stack.enter_context(open(self._index_path, "xb"))
            self._data: list[AppendedFile] = []
            for number, directory in enumerate(self._directories):
                self._data.append(AppendedFile(self._engine, directory / f"{name}-{number}{_DATA}"))
                stack.callback(self._data[-1].file.close)
            self._resources = stack.pop_all()

    def _load(self, kinds: Mapping[str, ColumnKind] | None) -> Manifest:
        """Return the manifest of the directory, or one without samples."""
        wanted = None if kinds is None else Manifest(columns_from(kinds), ())
        if not (self._path / MANIFEST_NAME).exists():
            if wanted is None:
                raise ValueError(f"'{self._path}' has no samples yet: give columns")
            return wanted
        found = load_manifest(self._path)
        if wanted is not None and wanted.columns != found.columns:
            raise ValueError(f"'{self._path}' has samples with other columns: {found.columns}")
        return found

    def _remove_leftovers(self) -> None:
        """Remove files of writers of this dataset that died before their first commit."""
        named = {part.index for part in self._manifest.parts}
        for index in self._path.glob(f"{_PREFIX}*{_INDEX}"):
            if index.name not in named:
                for data in (data for each in self._directories for data in each.glob(f"{index.stem}-*{_DATA}")):
                    data.unlink()
                index.unlink()

    def append(self, **sample: Any) -> int:
        """Add a sample. Blocks while the drive is slower.

        Args:
            sample: A value for each column. Tensors, arrays and numbers for columns with a dtype.

        Returns:
            The sample's number, among those that this writer has appended.

        Raises:
            TypeError, ValueError: If a value does not fit its column. The writer can be used on.
            OSError: If earlier samples could not be written. Only :meth:`close` is allowed then.
        """
        record = self._records.pack(sample)
        with self._changing():
            data = self._data[self.samples % len(self._data)]
            self.padding += data.pad(_SECTOR if len(record) >= _SECTORS_FROM else _ALIGNMENT)
            self._index.write(ENTRY.pack(data.position, len(record), crc32(record)))
            data.append(record)
            self.samples += 1
        return self.samples - 1

    def commit(self) -> int:
        """Make all samples so far visible to readers that open the dataset from now on. Blocks until they are on stable storage.

        Returns:
            The number of samples in the directory.

        Raises:
            OSError: If the drive cannot be written. The last commit remains, and only :meth:`close` is allowed.
        """
        with self._changing():
            for data in self._data:
                self.padding += data.pad(PAGE)
                data.flush()
            with with_filename(self._index_path):
                self._index.flush()
                os.fsync(self._index.fileno())
            for directory in {self._path, *self._directories}:
                sync_directory(directory)
            files = tuple(os.path.relpath(each.path, self._path) for each in self._data)
            part = Part(self._index_path.name, files, self.samples, tuple(each.position for each in self._data))
            manifest = replace(self._manifest, parts=(*self._manifest.parts, *([part] if self.samples else [])))
            manifest.save(self._path)
        return manifest.samples

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Refuse to go on if an earlier ``with`` body has raised: what was written last is uncertain then."""
        if self._closed or self._process != os.getpid():
            raise ValueError(f"the writer is {state_text(self._closed, self._process)}")
        if self._failed:
            raise ValueError("an earlier write failed or was interrupted: close the writer, and continue from the last commit")
        self._failed = True
        yield
        self._failed = False

    def close(self) -> None:
        """Close the files without a commit. Samples since the last commit are lost. Idempotent."""
        if not self._closed and self._process == os.getpid():
            self._closed = True
            self._resources.close()

    def __enter__(self) -> SampleWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with contextlib.closing(self):
            if kind is None and not self._closed:
                self.commit()

    def __repr__(self) -> str:
        return representation(self, lambda: f"'{self._path}'", lambda: state_text(self._closed, self._process))


def merge_samples(path: str | os.PathLike[str], sources: Sequence[str | os.PathLike[str]]) -> int:
    """Make a dataset of the samples of other datasets, one after the other, without copying them. Blocks.

    Args:
        path: Directory of the new dataset. One that has samples already gets those of ``sources`` in addition.
        sources: Directories of datasets with the same columns. They must stay where they are, relative to ``path``.

    Returns:
        The number of samples in ``path``.

    Raises:
        ValueError: If the columns differ, or there are no sources.
        FileNotFoundError: If a source has no samples.
        StoreLocked: If ``path`` has a writer.
    """
    directory = Path(path).absolute()
    with DirectoryLock(directory, DirectoryOwner("SampleWriter")):
        manifests = [(Path(each).absolute(), load_manifest(Path(each).absolute())) for each in sources]
        if (directory / MANIFEST_NAME).exists():
            manifests.insert(0, (directory, load_manifest(directory)))
        if len({manifest.columns for _, manifest in manifests}) != 1:
            raise ValueError("the datasets to merge must have the same columns, and there must be one at least")

        def moved(source: Path, name: str) -> str:
            """Return the path of a file of ``source``, relative to the merged dataset."""
            return os.path.relpath(path_in(source, name), directory)

        parts = tuple(
            replace(part, index=moved(source, part.index), files=tuple(moved(source, name) for name in part.files))
            for source, manifest in manifests
            for part in manifest.parts
        )
        merged = Manifest(manifests[0][1].columns, parts)
        merged.save(directory)
        return merged.samples
