"""Archives of single tensors, as ``torch.save`` writes them into distributed checkpoints.

A checkpoint has thousands of them. Archives of tensors with the same dtype, shape and strides differ only in the bytes of the
storage. So the bytes around the storage are made once for each such kind, and one archive of each kind is examined.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Sequence
from typing import BinaryIO

import torch

from deepnvme.memory.tensor_bytes import memory_of, span_nbytes

from .elements import Elements
from .pickle_scan import refusal_reason
from .pt_image import pt_image
from .pt_pickle import is_plain, unpickled
from .pt_records import DAMAGE
from .zip_directory import Record, data_of, entries

_ALIGNMENT = 64
"""Alignment of the records in an archive, in bytes: torch's default, so that a small tensor does not take whole pages.

The storage of a large tensor is page-aligned by the offset at which its archive begins in the file.
"""


def memory_of_item(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor with the same elements and no gaps in memory: the tensor itself if it has no gaps, otherwise a copy.

    Returns:
        The tensor, on the CPU or a CUDA device. None for a tensor that is more than its elements, such as a quantised one.
    """
    tensor = tensor.detach()
    if tensor.device.type not in ("cpu", "cuda"):
        tensor = tensor.cpu()
    if type(tensor) is not torch.Tensor or not is_plain(tensor):
        return None
    if tensor.is_contiguous() or span_nbytes(tensor.shape, tensor.stride(), tensor.itemsize) == tensor.nbytes:
        return tensor
    return tensor.clone()


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a 1-D view of the elements of a tensor that has no gaps in memory, in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


@functools.lru_cache(maxsize=4096)
def frame(dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[bytes, bytes]:
    """Return the bytes before and after a tensor's own bytes in the archive that ``torch.save`` writes for that tensor.

    The tensor's elements must fill a contiguous range of memory, in any order.
    """
    like = torch.empty_strided(shape, stride, dtype=dtype, device="cpu")  # cheap: no page of a large one is touched
    storage = like.untyped_storage()
    image = pt_image(like, 2, False, alignment=_ALIGNMENT)
    begin = image.begin_of(storage)

    def text(first: int, last: int) -> bytes:
        """Return bytes [first, last) of the archive."""
        copied = torch.empty(last - first, dtype=torch.uint8, device="cpu")
        image.copy(first, last, copied)
        return memory_of(copied).tobytes()

    return text(0, begin), text(begin + storage.nbytes(), image.nbytes)


HEAD = 4 << 10
"""Bytes at the beginning of an archive that are compared with archives examined before. They include the pickle."""
_LONG_HEAD = 64 << 10
"""Bytes at the beginning of an archive that are read to examine it. The storage begins within them."""


class KnownArchives:
    """Archives of ``torch.save`` examined so far. An archive with the same length and first bytes is not examined again.

    Archives of tensors with the same dtype, shape and strides have the same length and first bytes.
    """

    def __init__(self) -> None:
        self._known: dict[int, list[tuple[bytes, Elements]]] = {}

    def elements(self, file: BinaryIO, head: memoryview, offset: int, length: int) -> Elements | None:
        """Return where the tensor of an archive is in the file. Blocks to examine an archive of an unknown kind.

        Args:
            file: The file. Its position is changed.
            head: The first bytes of the archive: HEAD of them, or all.
            offset: Where the archive begins in the file.
            length: Bytes of the archive.

        Returns:
            The place of the elements. None for anything but the archive of a plain tensor, stored without compression.

        Raises:
            OSError: If the file cannot be read.
        """
        for known, elements in self._known.get(length, ()):
            if head[: len(known)] == known:
                return elements._replace(offset=elements.offset + offset)
        file.seek(offset)
        beginning = file.read(min(length, _LONG_HEAD))
        try:
            found = _examined(beginning, entries(file, offset, offset + length), length)
        except (pickle.UnpicklingError, *DAMAGE):
            return None
        if found is not None:
            self._known.setdefault(length, []).append((beginning[: min(found.offset, HEAD)], found))
            found = found._replace(offset=found.offset + offset)
        return found


def _examined(beginning: bytes, found: Sequence[Record], length: int) -> Elements | None:
    """Return where the tensor of an archive is, in bytes from the start of the archive.

    None unless the archive has one plain tensor, stored without compression.
    """
    records = {record.inner_name: record for record in found}
    stream = records["data.pkl"]
    begin = data_of(beginning[stream.header :], stream.header)
    text = beginning[begin : begin + stream.nbytes]
    if not stream.stored or refusal_reason(text) is not None:
        return None
    sizes: dict[str, int] = {}

    def place(key: str, nbytes: int, location: str) -> torch.UntypedStorage:
        """Return a storage without memory, and note its key and size."""
        sizes[key] = nbytes
        return torch.UntypedStorage(nbytes, device="meta")  # type: ignore[no-untyped-call]

    tensor = unpickled(text, place, weights_only=True)
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or len(sizes) != 1:
        return None
    if tensor.is_quantized or tensor.is_nested or tensor.storage_offset() or tensor.is_conj() or tensor.is_neg():
        return None
    ((key, nbytes),) = sizes.items()
    storage = records[f"data/{key}"]
    begin = data_of(beginning[storage.header :], storage.header)
    elements = Elements(begin, tensor.dtype, tuple(tensor.shape), tensor.stride())
    whole = storage.stored and begin + nbytes <= length
    return elements if whole and elements.nbytes <= nbytes else None
