"""Check the items of a distributed checkpoint that torch is going to unpickle.

Planners unpickle objects that are not tensors with ``weights_only=False``, which can run code. So NVMeReader checks them first.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path

from torch.serialization import load as torch_load  # deepnvme.load may have replaced torch.load

from deepnvme.checkpoint.formats.pickle_scan import refusal_reason
from deepnvme.checkpoint.formats.pt_records import DAMAGE, CorruptCheckpoint
from deepnvme.checkpoint.formats.zip_directory import LOCAL_HEADER, data_of, entries


def check_object(path: Path, item: str, value: io.BytesIO) -> None:
    """Raise unless ``torch.load(weights_only=True)`` accepts an item that is not a tensor.

    Args:
        path: The file with the item, for errors.
        item: Name of the item, for errors.
        value: Bytes that ``torch.save`` should have written.

    Raises:
        UnpicklingError: If ``weights_only`` does not allow the item (names what was refused), or the bytes are not an archive.
        CorruptCheckpoint: If the archive or its pickle is damaged, or the pickle could end the process: torch's
            ``weights_only`` unpickles tuples nested to any depth, and hashing these recurses in C.
    """
    data = value.getvalue()  # no copy; if a traceback holds its getbuffer(), collecting garbage crashes Python before 3.12.2
    try:
        if data[:4] != b"PK\3\4":
            raise pickle.UnpicklingError("it is no archive of torch.save.")
        (stream,) = [record for record in entries(value) if record.inner_name == "data.pkl"]
        begin = data_of(data[stream.header : stream.header + LOCAL_HEADER.size], stream.header)
        why = "is compressed" if not stream.stored else refusal_reason(data[begin : begin + stream.nbytes])
        if why is not None:
            raise ValueError(f"its pickle {why}")
        value.seek(0)
        torch_load(value, map_location="cpu", weights_only=True)
        value.seek(0)
    except pickle.UnpicklingError as error:  # torch wraps the reason in advice on torch.load: take the reason alone
        text = f"item {item} of '{path}': {error.__context__ or error} {_TRUSTING}"
        raise pickle.UnpicklingError(text) from None
    except DAMAGE as error:
        raise CorruptCheckpoint(path, f"item {item}: {error}") from error


_TRUSTING = "If you trust who wrote the checkpoint, NVMeReader(path, weights_only=False) unpickles whatever there is."
