"""Pickles and zip headers of checkpoints with many small tensors; ``csrc/bindings/checkpoint_binding.cpp``."""

from array import array
from collections.abc import Callable
from typing import Any

from typing_extensions import Buffer

def none_for(types: frozenset[type], otherwise: Callable[[object], Any]) -> Callable[[object], Any]:
    """Return a function that returns None for an object of exactly one of the types, else the result of ``otherwise`` for it."""

def pickle_walk(
    stream: bytes, most_nested: int, most_unregistered: int = ...
) -> tuple[int, int, int, bool, bool, list[bytes] | None]:
    """Scan a pickle without making any object.

    Stops early, not complete, above ``most_nested`` (at most 16382) levels, above ``most_unregistered``
    objects, or at a memo index not below ``len(stream)``.

    Returns:
        (nesting, unregistered, largest_memo_index, changes_globals, complete, names): levels of nesting; most containers and
        call results that were not in the memo at one time, with entries of the memo that no pickler makes; the largest memo
        index; whether it sets the state of a global; whether it ends within the stream; and the globals that it names, each
        once as b"module\\nname", or None if unpickling might find others.
    """

def zip_layout(names: list[str], sizes: Buffer, crcs: Buffer, alignment: int) -> tuple[bytes, array[int], array[int], array[int]]:
    """Place the records of a zip archive one after the other, and return all bytes besides their data.

    Args:
        names: Name of each record.
        sizes: Bytes of each record, an array of uint64 ("Q").
        crcs: CRC-32 of each record, an array of uint64 ("Q").
        alignment: The data of each record begin at a multiple of this many bytes.

    Returns:
        (text, headers, paddings, places): the bytes before the data of each record, in order, and then those after the last
        record; bytes of the text before the data of each record; meaningless bytes between these and the data of each record;
        and three offsets in the file for each record: of its data, and of its CRC-32 behind them and in the directory.
    """

class Checksums:
    """CRC-32s of records, computed from the bytes of their file, which are passed once and in order. Not thread-safe.

    Args:
        places: What :func:`zip_layout` returns for the records.
        sizes: Bytes of each record, an array of uint64 ("Q").
        wanted: A byte for each record: 0 for those whose CRC-32 stays as it was given to :func:`zip_layout`.

    Raises:
        ValueError: If they are not as many, or not in the order of the file.
    """

    def __init__(self, places: Buffer, sizes: Buffer, wanted: bytes) -> None: ...
    def advance(self, begin: int, address: int, nbytes: int) -> None:
        """Add the next bytes of the file to the checksums, and write the CRC-32s that belong into these bytes there.

        Bytes that are data of records only are not written to. Blocks, without the GIL.

        Args:
            begin: Their offset in the file, where those of the last call ended.
            address: Where they are in host memory, which has to stay allocated.
            nbytes: How many.

        Raises:
            ValueError: If they begin elsewhere.
        """
