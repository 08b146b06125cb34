"""Items of a distributed checkpoint that torch unpickles: NVMeReader checks them first.

A planner unpickles objects that are no tensors with ``weights_only=False``, which can run code.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Iterator
from typing import Any

from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem
from torch.serialization import load as torch_load  # torch.load may be deepnvme.load by now

from deepnvme.checkpoint.formats.contents import DAMAGE
from deepnvme.checkpoint.formats.pickle_scan import why_wasteful
from deepnvme.checkpoint.formats.zip_directory import BadDirectory, data_of, entries
from deepnvme.checkpoint.formats.zip_layout import LOCAL_HEADER


class Damaged(ValueError):
    """The bytes are not, or not wholly, what ``torch.save`` wrote."""


class WeightsOnlyPlanner:
    """Wraps a planner so that it gets only objects that ``torch.load(weights_only=True)`` accepts; all other calls pass through.

    ``load_bytes`` raises UnpicklingError naming what was refused, or Damaged.
    """

    def __init__(self, planner: LoadPlanner) -> None:
        self._planner = planner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        with _told_apart():
            _check_pickle(value)
            value.seek(0)
            torch_load(value, map_location="cpu", weights_only=True)
        value.seek(0)
        self._planner.load_bytes(read_item, value)


def check_tensor(value: io.BytesIO) -> None:
    """Raise UnpicklingError for what ``torch.save`` did not write, and Damaged for a pickle that could take the process with it:
    torch's ``weights_only`` unpickles any number of tuples in tuples, and hashing these recurses in C."""
    with _told_apart():
        _check_pickle(value)


_TRUSTING = "If you trust who wrote the checkpoint, NVMeReader(path, weights_only=False) unpickles whatever there is."


@contextlib.contextmanager
def _told_apart() -> Iterator[None]:
    """What is damaged, and what is refused."""
    try:
        yield
    except Damaged:
        raise
    except pickle.UnpicklingError as error:
        # torch's own advice, around this, is for torch.load.
        raise pickle.UnpicklingError(f"{error.__context__ or error} {_TRUSTING}") from None
    except (BadDirectory, *DAMAGE) as error:
        raise Damaged(str(error)) from error


def _check_pickle(value: io.BytesIO) -> None:
    data = value.getbuffer()
    if bytes(data[:4]) != b"PK\3\4":
        raise pickle.UnpicklingError("it is no archive of torch.save.")
    pickles = [entry for entry in entries(value) if entry.name.partition("/")[2] == "data.pkl"]
    if len(pickles) != 1:
        raise Damaged(f"expected one record data.pkl, found {len(pickles)}")
    (stream,) = pickles
    if not stream.stored:
        raise Damaged("its pickle is compressed, which torch.save never does")
    begin = data_of(bytes(data[stream.header : stream.header + LOCAL_HEADER.size]), stream.header)
    why = why_wasteful(bytes(data[begin : begin + stream.nbytes]))
    if why is not None:
        raise Damaged(f"its pickle {why}")
