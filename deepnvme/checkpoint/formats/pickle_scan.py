"""Find what a pickle refers to, without importing or calling any of it."""

from __future__ import annotations

import io
import operator
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from deepnvme.ops import load_async_io

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
"""Functions and classes, by (module, name), that make objects without looking at the contents of storages."""
DEEPEST = 10_000
"""Deepest nesting that is accepted in a pickle. No pickler nests deeper."""


def is_plain(stream: bytes) -> bool:
    """Return whether unpickling looks at no storage's contents, so that they may be read afterwards."""
    names = load_async_io().checkpoint.pickle_walk(stream, DEEPEST)[-1]  # takes a thousandth of the time of a scan
    if names is not None and all(_is_plain_name(*name.decode(errors="replace").split("\n", 1)) for name in names):
        return True
    scan = PickleScan(stream)
    try:
        scan.load()
    except Exception:  # not a pickle of torch.save, or one that torch is going to refuse
        return False
    return scan.plain


def _is_plain_name(module: str, name: str) -> bool:
    """Return whether the name is in ``_PLAIN``, a storage class or a dtype of torch."""
    if _is_storage(module, name) or (module, name) in _PLAIN:
        return True
    return module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)


def _is_storage(module: str, name: str) -> bool:
    """Return whether this is the name of a storage class of torch."""
    return module in ("torch", "torch.storage") and name.endswith("Storage")


def refusal_reason(stream: bytes) -> str | None:
    """Return why a pickle must not be unpickled ("is cut off ..."), or None if it may be.

    A pickle is refused if no pickler writes such a pickle and unpickling it could take minutes or gigabytes, or end the
    process: nesting deeper than DEEPEST, a memo index beyond the pickle's own size, very many objects outside the memo or
    memo entries that no pickler makes, setting attributes of a class or a function for the whole process, or a pickle
    that is cut off.
    """
    walk = load_async_io().checkpoint.pickle_walk
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
"""Most objects that a pickle may leave out of its memo; they take less than 300 MB.

Not 0, because ``pickletools.optimize`` omits memo entries that are not used.
"""


class PickleScan(pickle._Unpickler):
    """An unpickler that makes no objects, but records the storages that a pickle refers to.

    :meth:`load` raises what unpickling raises, and TypeError and similar for what torch has not pickled. Time and memory are
    bounded by the size of a pickle that :func:`refusal_reason` has accepted.

    Args:
        stream: The pickle.
    """

    # Based on the unpickler in Python, as torch's own for weights_only: the one in C allocates gigabytes for a large memo index
    # in a hostile pickle.

    def __init__(self, stream: bytes) -> None:
        super().__init__(io.BytesIO(stream))
        self.nbytes: dict[str, int] = {}
        """Bytes of each storage by its key, in the order in which the pickle refers to the storages, and the file has them."""
        self.plain = True
        """Whether nothing that the pickle calls could look at the contents of storages. Final after ``load``."""

    def load_nothing(self: Any) -> None:
        """Handle the opcodes for an empty list, dict or set: push a stand-in, which stores nothing."""
        self.append(_anything)

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **pickle._Unpickler.dispatch,
        **dict.fromkeys([pickle.EMPTY_LIST[0], pickle.EMPTY_DICT[0], pickle.EMPTY_SET[0]], load_nothing),
    }

    def find_class(self, module: str, name: str) -> Any:
        """Return a stand-in for a class or function, and record whether it is plain."""
        if not _is_plain_name(module, name):
            self.plain = False
        return _StorageKind(name) if _is_storage(module, name) else _Anything

    def persistent_load(self, saved: Any) -> Any:
        """Record the size of a storage that the pickle refers to, and return a stand-in for it."""
        _, kind, key, _, numel = saved
        self.nbytes[key] = operator.index(numel) * kind.itemsize
        return _anything


class _Anything:
    """Stands for any object or class that a pickle makes or names."""

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
    """Stands for a storage class of torch, of which only the element size is known."""

    def __init__(self, name: str) -> None:
        kind = getattr(torch, name, None)
        self.itemsize: int = 1 if kind is None or name == "UntypedStorage" else kind._dtype.itemsize
