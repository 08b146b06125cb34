"""What a pickle refers to, found without importing or calling anything of it."""

from __future__ import annotations

import pickle
from typing import IO, Any

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


class PickleScan(pickle._Unpickler):
    """Of a file whose position is where a pickle begins. :meth:`load` raises what unpickling raises, and TypeError and its like
    for what torch has not pickled; the file's position is the pickle's end then."""

    # In Python, as torch's own for weights_only: of a hostile pickle the one in C fills gigabytes, for the number of a memo.

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self.nbytes: dict[str, int] = {}
        """Of each storage, by its key, in the order of the file."""
        self.plain = True
        """Whether nothing that it calls could look at the contents of storages."""

    def find_class(self, module: str, name: str) -> Any:
        import torch

        if module in ("torch", "torch.storage") and name.endswith("Storage"):
            return _StorageKind(name)
        if (module, name) not in _PLAIN and not (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            self.plain = False
        return _Anything

    def persistent_load(self, saved: Any) -> Any:
        _, kind, key, _, numel = saved
        self.nbytes[key] = numel * kind.itemsize
        return _anything


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
