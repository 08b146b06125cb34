"""Objects (not tensors) in a distributed checkpoint.

A planner unpickles them with ``weights_only=False``, which can run code, so NVMeReader checks them first.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem
from torch.serialization import load as torch_load  # torch.load may be deepnvme.load by now

from .contents import DAMAGE, why_wasteful
from .zip_directory import BadDirectory, data_of, entries


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
        _check(value)
        value.seek(0)
        self._planner.load_bytes(read_item, value)


_TRUSTING = "If you trust who wrote the checkpoint, NVMeReader(path, weights_only=False) unpickles whatever there is."


def _check(value: io.BytesIO) -> None:
    data = value.getvalue()
    if data[:4] != b"PK\3\4":
        raise pickle.UnpicklingError(f"it is no archive of torch.save. {_TRUSTING}")
    try:
        (stream,) = (entry for entry in entries(value) if entry.name.partition("/")[2] == "data.pkl")
        if not stream.stored:
            raise Damaged("its pickle is compressed, which torch.save never does")
        begin = data_of(data[stream.header : stream.header + 64], stream.header)
        why = why_wasteful(data[begin : begin + stream.nbytes])
        if why is not None:
            raise Damaged(f"its pickle {why}")
        value.seek(0)
        torch_load(value, map_location="cpu", weights_only=True)
    except Damaged:
        raise
    except pickle.UnpicklingError as error:
        # torch's own advice, around this, is for torch.load.
        raise pickle.UnpicklingError(f"{error.__context__ or error} {_TRUSTING}") from None
    except (BadDirectory, *DAMAGE) as error:
        raise Damaged(str(error)) from error
