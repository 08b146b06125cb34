"""What a pickle refers to, found without importing or calling anything of it."""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable
from typing import IO, Any, ClassVar

from deepnvme.ops.op_builder import AsyncIOBuilder

_PLAIN = {
    ("torch._utils", "_rebuild_tensor"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_tensor_v3"),
    ("torch._utils", "_rebuild_parameter"),
    ("torch", "Size"),
    ("torch", "device"),
    ("collections", "OrderedDict"),
    ("collections", "defaultdict"),
    ("argparse", "Namespace"),
    ("pathlib", "PosixPath"),
    ("_codecs", "encode"),  # of bytes, in protocol 2
    *((builtins, name) for builtins in ("builtins", "__builtin__") for name in ("set", "frozenset", "list", "dict")),
}
"""Make objects without looking at the contents of storages."""
DEEPEST = 10_000
"""Times that a pickle is nested; no pickler nests more."""
_MOST_OPERATIONS = 60_000_000
"""Reads, two of most operations: of half a million tensors."""


def names_only_plain(stream: bytes) -> bool:
    """Whether all that a pickle names is plain, as :attr:`PickleScan.plain` says of one; False also where only a scan can tell.
    In a thousandth of its time."""
    names = AsyncIOBuilder().load().pickle_walk(stream, DEEPEST)[-1]
    return names is not None and all(_is_plain_name(*name.decode(errors="replace").split("\n", 1)) for name in names)


def _is_plain_name(module: str, name: str) -> bool:
    import torch

    if _is_storage(module, name) or (module, name) in _PLAIN:
        return True
    return module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)


def _is_storage(module: str, name: str) -> bool:
    return module in ("torch", "torch.storage") and name.endswith("Storage")


def why_wasteful(stream: bytes) -> str | None:
    """Why a pickle must not be unpickled ("is cut off ..."), or None if it may be.

    Refused is what no pickler writes and what could take minutes, gigabytes or the process: nesting deeper than DEEPEST, a memo
    index beyond the pickle's own size, very many objects outside the memo or entries of it that picklers do not make, setting
    attributes of a class or a function for the whole process, or a pickle that is cut off.
    """
    walk = AsyncIOBuilder().load().pickle_walk
    nesting, unregistered, largest_memo_index, changes_globals, complete, _ = walk(stream, DEEPEST, _MOST_UNREGISTERED)
    if nesting > DEEPEST:
        return f"is nested more than {DEEPEST} times"
    if largest_memo_index >= max(len(stream), 1):
        return f"has {len(stream)} bytes, and numbers the entries of its memo up to {largest_memo_index}"
    if unregistered > _MOST_UNREGISTERED:
        return f"leaves more than {_MOST_UNREGISTERED} objects out of its memo, or enters others"
    if changes_globals:
        return "changes a class or a function that it names: it is made to do harm"
    return None if complete else f"is cut off at its byte {len(stream)}"


_MOST_UNREGISTERED = 1_000_000
"""They take less than 300 MB. Not 0: ``pickletools.optimize`` leaves out of the memo what is not used again."""


class PickleScan(pickle._Unpickler):
    """Of a file whose position is where a pickle begins. :meth:`load` raises what unpickling raises, and TypeError and its like
    for what torch has not pickled; the file's position is the pickle's end then."""

    # In Python, as torch's own for weights_only: of a hostile pickle the one in C fills gigabytes, for the number of a memo.

    def __init__(self, file: IO[bytes], most: int = _MOST_OPERATIONS) -> None:
        """``most``: reads after which it is given up, two of most operations; a pickle of known size has no more than bytes."""
        super().__init__(_Counted(file, most))
        self.nbytes: dict[str, int] = {}
        """Of each storage, by its key, in the order of the file."""
        self.plain = True
        """Whether nothing that it calls could look at the contents of storages."""

    def load_mark(self: Any) -> None:
        if len(self.metastack) == DEEPEST:
            raise pickle.UnpicklingError(f"it is nested more than {DEEPEST} times")
        pickle._Unpickler.dispatch[pickle.MARK[0]](self)

    def load_nothing(self: Any) -> None:
        self.append(_anything)

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **pickle._Unpickler.dispatch,
        pickle.MARK[0]: load_mark,
        **dict.fromkeys([pickle.EMPTY_LIST[0], pickle.EMPTY_DICT[0], pickle.EMPTY_SET[0]], load_nothing),
    }

    def find_class(self, module: str, name: str) -> Any:
        if not _is_plain_name(module, name):
            self.plain = False
        return _StorageKind(name) if _is_storage(module, name) else _Anything

    def persistent_load(self, saved: Any) -> Any:
        _, kind, key, _, numel = saved
        self.nbytes[key] = operator.index(numel) * kind.itemsize
        return _anything


class _Counted:
    """A file that ends where a pickle has more operations than any that is looked through: each takes time, and memory."""

    def __init__(self, file: IO[bytes], most: int) -> None:
        self._read = file.read
        self.readline = file.readline
        self._most = self._left = most

    def read(self, nbytes: int) -> bytes:
        self._left -= 1
        if self._left < 0:
            raise pickle.UnpicklingError(f"it has more than {self._most} operations")
        return self._read(nbytes)


class _Anything:
    """Stands for whatever a pickle makes."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _Anything:
        return _anything

    def __setstate__(self, state: Any) -> None: ...
    def __setitem__(self, key: Any, value: Any) -> None: ...
    def append(self, value: Any) -> None: ...
    def extend(self, values: Any) -> None: ...
    def add(self, value: Any) -> None: ...
    def __call__(self, *args: Any, **kwargs: Any) -> _Anything:
        return self


_anything: _Anything = object.__new__(_Anything)


class _StorageKind:
    def __init__(self, name: str) -> None:
        import torch

        kind = getattr(torch, name, None)
        self.itemsize: int = 1 if kind is None or name == "UntypedStorage" else kind._dtype.itemsize
