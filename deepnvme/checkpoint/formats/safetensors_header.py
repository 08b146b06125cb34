"""The safetensors format: 8 bytes with the length of the header, the header in JSON, and the tensors' bytes without gaps.

Contract: https://github.com/huggingface/safetensors, and what its library writes: tensors ordered by dtype, those with the
strictest alignment first, then by name; the header padded with spaces to a multiple of 8 bytes.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from pydantic_core import from_json, to_json

from deepnvme.files.regular_files import NotARegularSmallFile, open_regular, read_regular
from deepnvme.memory.tensor_bytes import contiguous_strides, span_nbytes
from deepnvme.telemetry.descriptions import shorten

from .elements import Elements
from .pt_records import CorruptCheckpoint

T = TypeVar("T")

LONGEST_HEADER = 100_000_000
"""Most bytes of a header. No library reads more."""
_LENGTH = struct.Struct("<Q")
_METADATA = "__metadata__"

_NAMES = [
    ("U64", "uint64"), ("I64", "int64"), ("F64", "float64"), ("C64", "complex64"), ("F32", "float32"), ("U32", "uint32"),
    ("I32", "int32"), ("BF16", "bfloat16"), ("F16", "float16"), ("U16", "uint16"), ("I16", "int16"),
    ("F8_E5M2FNUZ", "float8_e5m2fnuz"), ("F8_E4M3FNUZ", "float8_e4m3fnuz"), ("F8_E8M0", "float8_e8m0fnu"),
    ("F8_E4M3", "float8_e4m3fn"), ("F8_E5M2", "float8_e5m2"), ("I8", "int8"), ("U8", "uint8"), ("F4", "float4_e2m1fn_x2"),
    ("BOOL", "bool"),
]  # fmt: skip
"""Names of the dtypes in the format and in torch, in the order of the file. Not every version of torch has all of them."""
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, dtype) for name, dtype in _NAMES if hasattr(torch, dtype)}
_KINDS = {dtype: (rank, name) for rank, (name, dtype) in enumerate(_DTYPES.items())}


class UnknownDtype(KeyError, ValueError):
    """A tensor has a dtype that the format does not have. Also a KeyError, as in safetensors."""

    def __str__(self) -> str:
        return str(self.args[0])


def make_header(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None) -> tuple[bytes, list[str]]:
    """Return the header of a file, and the names of the tensors in the order of the file.

    Args:
        tensors: Tensors by name.
        metadata: Strings by name, or None.

    Returns:
        (header, names): all bytes of the file before the tensors, including the length of the header; and the names in the
        order of the tensors in the file.

    Raises:
        UnknownDtype: If the format does not have a tensor's dtype.
        TypeError: If the metadata are not strings.
        ValueError: If the header would be longer than any library reads, or have more values than this package reads.
    """
    fields: dict[str, Any] = {}
    if metadata is not None:
        wrong = next((pair for pair in metadata.items() if not all(isinstance(each, str) for each in pair)), None)
        if wrong is not None:
            raise TypeError(f"metadata must be strings with names that are strings, got {wrong}")
        fields[_METADATA] = dict(metadata)
    for name, tensor in tensors.items():
        if tensor.dtype not in _KINDS:
            raise UnknownDtype(f"tensor {name!r} is of {tensor.dtype}, which the format has not: convert it, or save a .pt")
    names = sorted(tensors, key=lambda name: (_KINDS[tensors[name].dtype][0], name))
    end = 0
    for name in names:
        tensor = tensors[name]
        shape, begin = list(tensor.shape), end
        kind = _KINDS[tensor.dtype][1]
        if kind == "F4" and shape:
            shape[-1] *= 2  # torch counts pairs of 4-bit elements
        end += tensor.nbytes
        fields[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > LONGEST_HEADER:
        raise ValueError(f"the header would have {len(text)} bytes, and no library reads more than {LONGEST_HEADER}")
    if _values(text) > _MOST_VALUES:
        raise ValueError(f"the header would have up to {_values(text)} values, and may have {_MOST_VALUES}: use several files")
    return _LENGTH.pack(len(text)) + text, names


def read_header(path: str | os.PathLike[str]) -> dict[str, Elements]:
    """Read the header of a safetensors file and return its tensors by name, in the order of the file. Blocks.

    Raises:
        CorruptCheckpoint: If the header is damaged, or the file has fewer or more bytes than the tensors.
        OSError: If the file cannot be read.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(_LENGTH.size)
        if len(start) < _LENGTH.size:
            raise CorruptCheckpoint(path, f"the length of its header is cut off: expected 8 bytes, found {len(start)}")
        (length,) = _LENGTH.unpack(start)
        if length > LONGEST_HEADER:
            why = f"it begins with {start!r}: its header would have {length} bytes, and may have {LONGEST_HEADER}"
            hint = "Git LFS left a pointer here: run git lfs pull" if start == b"version " else "Is it a safetensors file?"
            raise CorruptCheckpoint(path, f"{why}. {hint}")
        text = file.read(length)
    if len(text) < length:
        raise CorruptCheckpoint(path, f"its header is cut off: expected {length} bytes, found {len(text)}")
    try:
        return parse_header(text, _LENGTH.size + length, size)
    except ValueError as error:
        raise CorruptCheckpoint(path, str(error)) from None


_MOST_VALUES = 8_000_000
"""Most values of a header or an index: enough for a million tensors, and few enough for any JSON to be read in seconds."""


def _values(text: bytes) -> int:
    """Return an upper bound on the number of values of a JSON text: brackets and commas in strings are counted, too."""
    return sum(map(text.count, (b"[", b"{", b",")))


def _parsed(text: bytes) -> Any:
    """Return the value of a JSON text.

    Raises ValueError if the text is not JSON, has too many values, or has an object with the same name twice.
    """
    if _values(text) > _MOST_VALUES:
        raise ValueError(f"it has up to {_values(text)} values, and may have {_MOST_VALUES}")
    value = from_json(text, allow_inf_nan=False)
    if to_json(value) != text.rstrip(b" "):
        # It is not as the library writes it, or a name is there twice, of which from_json takes the last in silence.
        json.loads(text, object_pairs_hook=_unique)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> None:
    """Raise ValueError if a name occurs twice in a JSON object."""
    names: set[str] = set()
    for name, _ in pairs if len(dict(pairs)) != len(pairs) else ():
        if name in names:
            raise ValueError(f"the name {name!r:.200} is there twice")
        names.add(name)


def parse_header(text: bytes, data: int, size: int) -> dict[str, Elements]:
    """Parse a header, and check that its tensors cover the data without gaps. Return them by name, in the order of the file.

    Args:
        text: The header, without its length.
        data: Where the data of tensors begins, in bytes from the start of the file.
        size: Bytes of the file.

    Raises:
        ValueError: If the header is malformed, or is not that of a file of this size.
    """
    try:
        header = _parsed(text)
    except ValueError as error:
        raise ValueError(f"its header is no JSON: {error}") from None
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    metadata = header.pop(_METADATA, None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its metadata are not strings")
    found = {name: _elements(name, field, data) for name, field in header.items()}
    tensors = dict(sorted(found.items(), key=lambda item: (item[1].offset, item[1].nbytes)))
    end = data
    for name, elements in tensors.items():
        if elements.offset != end:
            what = "overlaps the one before it" if elements.offset < end else "leaves a gap before it"
            raise ValueError(f"tensor {name!r} {what}: expected at byte {end}, found at {elements.offset}")
        end += elements.nbytes
        if end > size:
            there = max(0, size - elements.offset)
            raise ValueError(f"tensor {name!r} is cut off: expected {elements.nbytes} bytes, found {there}")
    if end != size:
        raise ValueError(f"it should end with its last tensor at byte {end}, and has {size}")
    return tensors


_MOST_DIMENSIONS = 64
"""Most dimensions of a tensor, as many as NumPy's arrays may have."""


def _elements(name: str, field: Any, data: int) -> Elements:
    """Return where one tensor is in the file, after checking that its shape, dtype and offsets in the header agree."""
    try:
        kind, shape, (begin, end) = field["dtype"], field["shape"], field["data_offsets"]
        numbers = [*shape, begin, end]
        if not isinstance(kind, str):
            raise TypeError(kind)
    except (TypeError, KeyError, ValueError):
        raise ValueError(f"tensor {name!r} has no dtype, shape and data_offsets") from None
    possible = len(shape) <= _MOST_DIMENSIONS and all(type(number) is int and 0 <= number < 1 << 63 for number in numbers)
    if not possible or begin > end or math.prod(size or 1 for size in shape) >= 1 << 63:
        raise ValueError(f"tensor {name!r} has the shape {shape!s:.200} and the data_offsets {[begin, end]!s:.200}")
    if kind not in _DTYPES:
        raise ValueError(f"tensor {name!r} is of {kind!r}, which this torch has not")
    dtype = _DTYPES[kind]
    if kind == "F4" and shape:
        if shape[-1] % 2:
            raise ValueError(f"tensor {name!r} ends in the middle of a byte: its shape is {shape}")
        shape = [*shape[:-1], shape[-1] // 2]
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes != end - begin:
        raise ValueError(f"tensor {name!r} should have {nbytes} bytes by its shape, and has {end - begin} by its data_offsets")
    return Elements(data + begin, dtype, tuple(shape), contiguous_strides(shape))


def _index(path: str | os.PathLike[str], expected: str) -> dict[str, Any]:
    """Read an index file and return its JSON object.

    Raises OSError if the file cannot be read; CorruptCheckpoint, with a message that begins with ``expected``, if it is not JSON.
    """
    try:
        index = _parsed(read_regular(path, LONGEST_HEADER))
    except NotARegularSmallFile as error:
        raise CorruptCheckpoint(path, str(error)) from None
    except ValueError as error:
        raise CorruptCheckpoint(path, f"{expected}: {error}") from None
    if not isinstance(index, dict):
        raise CorruptCheckpoint(path, expected)
    return index


def read_offload_index(path: str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
    """Read accelerate's index of offloaded weights. Blocks.

    Returns:
        The entries of the index, by the weight's name. The fields of an entry are strings, such as its dtype, and a shape.

    Raises:
        CorruptCheckpoint: If the file is not such an index, or is larger than 100 MB.
        OSError: If the file cannot be read. Names the file.
    """
    index = _index(path, "it is no index of offloaded weights")
    for name, entry in index.items():
        if not isinstance(entry, dict) or not all(map(_is_offloaded_field, entry.values())):
            raise CorruptCheckpoint(path, f"it is no index of offloaded weights: {name!r} has no dtype and shape")
    return index


def _is_offloaded_field(field: Any) -> bool:
    """Return whether the field of an index entry is a string, such as the dtype, or a shape."""
    return isinstance(field, str) or (isinstance(field, list) and all(type(size) is int and size >= 0 for size in field))


def shards_of(path: str | os.PathLike[str]) -> Mapping[str, list[str] | None]:
    """Return the files that an index lists, with the names of the tensors in each.

    Args:
        path: An index (.json) or a safetensors file.

    Returns:
        For each file, by path, the names of its tensors. For a safetensors file: that file, with None for all tensors.

    Raises:
        CorruptCheckpoint: If the index is damaged, or refers to files outside its directory.
    """
    name = os.fspath(path)
    if not name.endswith(".json"):
        return {name: None}
    expected = 'it is no index: expected a JSON object with "weight_map"'
    shards = _index(path, expected).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
        raise CorruptCheckpoint(path, expected)
    found: dict[str, list[str]] = {}
    for tensor, shard in shards.items():
        if os.path.basename(shard) != shard or shard in ("", ".", "..") or "\0" in shard:
            raise CorruptCheckpoint(path, f"shard {shard!r} of tensor {tensor!r} is no name of a file beside the index")
        found.setdefault(os.path.join(os.path.dirname(name), shard), []).append(tensor)
    return found


def indexed(path: str | os.PathLike[str], shard: str, names: Sequence[str] | None, found: Mapping[str, T]) -> dict[str, T]:
    """Return the entries of a shard that the index assigns to it.

    Args:
        path: The index, for errors.
        shard: The shard, for errors.
        names: Names of the tensors, as :func:`shards_of` returns them. None for all.
        found: All entries of the shard, by name.

    Raises:
        CorruptCheckpoint: If the shard lacks some of ``names``. The message lists them.
    """
    if names is None:
        return dict(found)
    missing = [name for name in names if name not in found]
    if missing:
        raise CorruptCheckpoint(path, f"its index has tensors in {shard} that are not there: {shorten(missing)}")
    return {name: found[name] for name in names}


def check_savable(tensors: Mapping[str, torch.Tensor]) -> None:
    """Check that each tensor can be saved as the bytes of its elements, under the conditions of the safetensors library.

    Args:
        tensors: Tensors by name.

    Raises:
        TypeError: If a name is not a string.
        ValueError: If ``tensors`` is not a dict, a value is not a dense, contiguous tensor, or a name is reserved.
        NotImplementedError: If a tensor is on the meta device.
        RuntimeError: If tensors share memory.
    """
    if not isinstance(tensors, dict):
        raise ValueError(f"tensors must be a dict of names and tensors, got {type(tensors).__name__}")
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise TypeError(f"names must be strings, got {name!r}")
        if name == _METADATA:
            raise ValueError(f"{_METADATA!r} is the format's own name: give the tensor another, or use metadata=")
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name!r} must be a tensor, got {type(tensor).__name__}")
        if tensor.layout is not torch.strided:
            raise ValueError(f"tensor {name!r} is sparse ({tensor.layout}), which the format has not: save tensor.to_dense()")
        if tensor.device.type == "meta":
            raise NotImplementedError(f"tensor {name!r} is on the meta device, and has no bytes to save")
    for names in overlapping((str(tensor.device), name, tensor) for name, tensor in tensors.items() if tensor.numel()):
        if len(names) > 1:
            raise RuntimeError(
                f"tensors {', '.join(map(repr, names))} share memory, which the format cannot say: leave out all but one of"
                " them, save tensor.clone(), or use a .pt"
            )
    check_contiguous(tensors, "save tensor.contiguous()")


def check_contiguous(tensors: Mapping[str, torch.Tensor], remedy: str) -> None:
    """Raise ValueError naming the remedy if a dense tensor is not contiguous."""
    for name, tensor in tensors.items():
        if tensor.layout is torch.strided and not tensor.is_contiguous():
            raise ValueError(f"tensor {name!r} is not contiguous (strides {tensor.stride()}): {remedy}")


def overlapping(tensors: Iterable[tuple[Any, str, torch.Tensor]]) -> list[list[str]]:
    """Group the names of tensors by overlapping memory. A tensor that overlaps no other is a group of its own.

    The tensors are sorted by address. A tensor joins the group of the previous tensor if it begins before the end of that
    tensor, as in safetensors.

    Args:
        tensors: (place, name, tensor) of each. Tensors of different places, such as devices, never overlap.
    """
    spans = []
    for place, name, tensor in tensors:
        begin = tensor.data_ptr()
        spans.append((place, begin, begin + span_nbytes(tensor.shape, tensor.stride(), tensor.itemsize), name))
    groups: list[list[str]] = []
    last: tuple[Any, int] = (None, 0)
    for place, begin, end, name in sorted(spans):
        if groups and place == last[0] and begin < last[1]:
            groups[-1].append(name)
        else:
            groups.append([name])
        last = place, end
    return groups
