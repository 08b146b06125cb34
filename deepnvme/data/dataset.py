"""Map-style datasets whose samples stay on the drive: which layout the files at a path have."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from deepnvme.checkpoint.file_io import file_version
from deepnvme.drives.aio_config import AioConfig
from deepnvme.tables.opening import find_layout

from .layouts import Layout, ScannedLayout, StridedLayout, tar_places, tar_sample
from .mds import INDEX_NAME, MDSLayout
from .reading import OnError, StoredSamples
from .sample_files import MANIFEST_NAME, WrittenLayout, load_manifest
from .tfrecord import record_places


class SampleDataset(StoredSamples):
    """Samples on the drive, each of which is read alone, wherever it lies: a map-style dataset for random order.

    For torch's DataLoader, samplers, Lightning and Trainer it is an ordinary dataset; a batch is one call of the engine. With
    :class:`DataLoader` of this package, batches are also read ahead.

    A sample is what the format says:

    | path | a sample |
    |---|---|
    | directory of `SampleWriter` | a dict by column: bytes, str, tensors |
    | `.npy`, `.safetensors` | a row of the tensor: a tensor |
    | `.tar` of WebDataset | a dict: `"__key__"`, and bytes by extension |
    | `.tfrecord` | bytes |
    | directory of MosaicML streaming, or of `save_to_disk`; `.arrow` | a dict by column: bytes, str, tensors |

    Tensors may be views of memory that all samples of a batch share, and keep it alive.

    Args:
        path: File or directory; or a list of tar, TFRecord or Arrow files, whose samples follow one another.
        name: Name of the tensor, in a safetensors file with several.
        errors: "raise", or "skip" to leave unreadable samples out of batches, and count them in :attr:`skipped`.
        aio_config: Settings of the engine; None for the profile of the drive.

    Raises:
        FileNotFoundError: If there is no such file or directory.
        OSError: If a header, an index or a manifest is damaged (``CorruptSamples``, ``CorruptTable``) or cannot be read.
        ValueError: If the format is not one of the table's, the files are compressed or have columns that cannot be read in
            place, or an argument is wrong.
        ImportError: For Arrow files without pyarrow.
    """

    def __init__(
        self, path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], *, name: str | None = None,
        errors: OnError = "raise", aio_config: AioConfig | None = None,
    ) -> None:  # fmt: skip
        paths = [path] if isinstance(path, str | os.PathLike) else list(path)
        super().__init__(_open_layout([Path(each).absolute() for each in paths], name), errors, aio_config)


class TokenDataset(StoredSamples):
    """Windows of a file of tokens, such as nanoGPT's ``train.bin``: sample i is ``length`` tokens from token ``i * stride`` on.

    Args:
        path: The file: numbers without a header.
        dtype: Dtype of a token.
        length: Tokens of a sample.
        stride: Tokens between the beginnings of two samples; None for ``length``. With 1, every window is a sample.
        offset: Bytes from the start of the file to the first token.
        errors: As for :class:`SampleDataset`.
        aio_config: Settings of the engine; None for the profile of the drive.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If ``length`` or ``stride`` is below 1, ``offset`` is negative, or the file is shorter than one window.
    """

    def __init__(
        self, path: str | os.PathLike[str], dtype: torch.dtype, length: int, stride: int | None = None, *, offset: int = 0,
        errors: OnError = "raise", aio_config: AioConfig | None = None,
    ) -> None:  # fmt: skip
        stride = length if stride is None else stride
        if length < 1 or stride < 1 or offset < 0:
            raise ValueError(f"length and stride must be at least 1, and offset 0, got {length}, {stride} and {offset}")
        file = Path(path).absolute()
        version = file_version(file)
        tokens = (file.stat().st_size - offset) // dtype.itemsize
        if tokens < length:
            raise ValueError(f"'{path}' has {max(tokens, 0)} tokens of {dtype} from {offset} on, and a window has {length}")
        samples = (tokens - length) // stride + 1
        windows = StridedLayout(file, version, dtype, (length,), offset, stride * dtype.itemsize, samples)
        super().__init__(windows, errors, aio_config)


def _open_layout(paths: Sequence[Path], name: str | None) -> Layout:
    """Return the samples in files, or in a directory. Blocks while headers or an index are read. Raises as SampleDataset."""
    if not paths:
        raise ValueError("a dataset needs a path")
    path, suffix = paths[0], paths[0].suffix
    version = file_version(path)  # raises FileNotFoundError
    if name is not None and suffix != ".safetensors":
        raise ValueError(f"'{path}' has no tensors with names, got name={name!r}")
    if all(each.suffix == ".tar" for each in paths):
        return ScannedLayout(paths, tar_places, tar_sample)
    if all(".tfrecord" in each.name for each in paths):
        return ScannedLayout(paths, record_places, bytes)
    if all(each.suffix == ".arrow" or (each / "state.json").exists() for each in paths):
        from .arrow import ArrowLayout  # imports pyarrow

        return ArrowLayout(paths)
    if len(paths) > 1:
        lists = ".tar, .tfrecord and .arrow files"
        raise ValueError(f"a list of paths is for {lists}, got '{path}' and others: merge_samples joins directories")
    if suffix in (".npy", ".safetensors"):
        rows = find_layout(path, name, None, None, 0)
        shard, values = rows.shards[0], rows.values
        return StridedLayout(shard.path, version, values.dtype, values.shape, shard.base, rows.record_bytes, rows.rows)
    if (path / MANIFEST_NAME).exists():
        return WrittenLayout(path, load_manifest(path))
    if (path / INDEX_NAME).exists():
        return MDSLayout(path)
    raise ValueError(f"'{path}' is neither a directory of samples nor a .tar, .tfrecord, .arrow, .npy or .safetensors file")
