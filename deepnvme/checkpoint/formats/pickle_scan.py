"""Find what a pickle refers to, without importing or calling any of it."""

from __future__ import annotations

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
    """Return whether unpickling looks at no storage's contents, so that they may be read afterwards.

    False if that is not known, as for a pickle of protocol 4, which takes names from its stack.
    """
    names = load_async_io().checkpoint.pickle_walk(stream, DEEPEST)[-1]
    return names is not None and all(_is_plain_name(*name.decode(errors="replace").split("\n", 1)) for name in names)


def _is_plain_name(module: str, name: str) -> bool:
    """Return whether the name is in ``_PLAIN``, a storage class or a dtype of torch."""
    if (module in ("torch", "torch.storage") and name.endswith("Storage")) or (module, name) in _PLAIN:
        return True
    return module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)


def refusal_reason(stream: bytes) -> str | None:
    """Return why a pickle must not be unpickled ("is cut off ..."), or None if it may be.

    A pickle is refused if no pickler writes it, and unpickling it could take minutes or gigabytes, or end the process. Reasons:
    nesting deeper than DEEPEST, a memo index beyond the pickle's own size, very many objects outside the memo, memo entries that
    no pickler makes, setting attributes of a class or a function for the whole process, or the end is cut off.
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
