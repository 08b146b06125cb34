"""Pickles and zip headers of checkpoints with many small tensors; ``csrc/bindings/checkpoint_binding.cpp``."""

from array import array
from collections.abc import Callable
from typing import Any

from typing_extensions import Buffer

def none_for(types: frozenset[type], otherwise: Callable[[object], Any]) -> Callable[[object], Any]:
    """A function that returns None for an object of exactly one of the types, and otherwise what ``otherwise`` returns for it."""

def pickle_walk(
    stream: bytes, most_nested: int, most_unregistered: int = ...
) -> tuple[int, int, int, bool, bool, list[bytes] | None]:
    """Look through a pickle without making anything of it.

    Stops early, not complete, above ``most_nested`` (at most 16382) levels, above ``most_unregistered``
    objects, or at a memo index not below ``len(stream)``.

    Returns:
        (nesting, unregistered, largest_memo_index, changes_globals, complete, names): levels of nesting; most containers and
        call results that were not in the memo at one time, with entries of the memo that no pickler makes; the largest memo
        index; whether it sets the state of a global; whether it ends within the stream; and the globals that it names, each
        once as b"module\\nname", or None if unpickling might find others.
    """

def zip_layout(names: list[str], sizes: Buffer, crcs: Buffer, alignment: int) -> tuple[bytes, array[int], array[int]]:
    """Place the records of a zip archive one after the other, and return all bytes besides their data.

    Args:
        names: Name of each record.
        sizes: Bytes of each record, an array of uint64 ("Q").
        crcs: CRC-32 of each record, an array of uint64 ("Q").
        alignment: The data of each record begin at a multiple of this many bytes.

    Returns:
        (text, headers, paddings): the bytes before the data of each record, in order, and then those after the last record;
        bytes of the text before the data of each record; and meaningless bytes between these and the data of each record.
    """
