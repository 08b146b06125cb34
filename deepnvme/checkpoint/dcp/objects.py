"""Check the items of a distributed checkpoint that torch is going to unpickle.

Planners unpickle objects that are not tensors with ``weights_only=False``, which can run code. So NVMeReader checks them first.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Iterator
from typing import Any

from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem
from torch.serialization import load as torch_load  # deepnvme.load may have replaced torch.load

from deepnvme.checkpoint.formats.pickle_scan import refusal_reason
from deepnvme.checkpoint.formats.pt_records import DAMAGE
from deepnvme.checkpoint.formats.zip_directory import LOCAL_HEADER, BadDirectory, data_of, entries


class Damaged(ValueError):
    """The bytes of an item are not, or not completely, what ``torch.save`` wrote."""


class CheckingPlanner:
    """A load planner that checks objects before the wrapped planner gets them, and records whether that planner was used.

    All other calls pass through.

    Args:
        planner: The planner to wrap.
        weights_only: Whether the planner gets only objects that ``torch.load(weights_only=True)`` accepts.
    """

    def __init__(self, planner: LoadPlanner, weights_only: bool) -> None:
        self._planner = planner
        self._weights_only = weights_only
        self.used = False
        """Whether any attribute or method of the wrapped planner was used since the caller last set this to False."""

    def __getattr__(self, name: str) -> Any:
        self.used = True
        return getattr(self._planner, name)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Check an item that is not a tensor, then give it to the wrapped planner.

        Args:
            read_item: The request.
            value: Bytes that ``torch.save`` wrote.

        Raises:
            UnpicklingError: If ``weights_only`` does not allow the item. Names what was refused.
            Damaged: If the bytes are not what ``torch.save`` wrote.
        """
        self.used = True
        if self._weights_only:
            check_archive(value)
            value.seek(0)
            with _as_damaged_or_refused():
                torch_load(value, map_location="cpu", weights_only=True)
            value.seek(0)
        self._planner.load_bytes(read_item, value)


_TRUSTING = "If you trust who wrote the checkpoint, NVMeReader(path, weights_only=False) unpickles whatever there is."


@contextlib.contextmanager
def _as_damaged_or_refused() -> Iterator[None]:
    """Turn errors of the ``with`` block into UnpicklingError if ``weights_only`` refused an object, otherwise into Damaged."""
    try:
        yield
    except Damaged:
        raise
    except pickle.UnpicklingError as error:
        # torch wraps the reason in advice on torch.load: take the reason alone.
        raise pickle.UnpicklingError(f"{error.__context__ or error} {_TRUSTING}") from None
    except (BadDirectory, *DAMAGE) as error:
        raise Damaged(str(error)) from error


@_as_damaged_or_refused()
def check_archive(value: io.BytesIO) -> None:
    """Check the bytes of an object or a tensor before torch unpickles them.

    Args:
        value: Bytes that ``torch.save`` should have written.

    Raises:
        UnpicklingError: If the bytes are no archive of ``torch.save``.
        Damaged: If the archive or its pickle is damaged, or the pickle could end the process: torch's ``weights_only``
            unpickles tuples nested to any depth, and hashing these recurses in C.
    """
    data = value.getvalue()  # no copy; if a traceback holds its getbuffer(), collecting garbage crashes Python before 3.12.2
    if data[:4] != b"PK\3\4":
        raise pickle.UnpicklingError("it is no archive of torch.save.")
    pickles = [record for record in entries(value) if record.inner_name == "data.pkl"]
    if len(pickles) != 1:
        raise Damaged(f"expected one record data.pkl, found {len(pickles)}")
    (stream,) = pickles
    if not stream.stored:
        raise Damaged("its pickle is compressed, which torch.save never does")
    begin = data_of(data[stream.header : stream.header + LOCAL_HEADER.size], stream.header)
    why = refusal_reason(data[begin : begin + stream.nbytes])
    if why is not None:
        raise Damaged(f"its pickle {why}")
