"""Choose which name of a tensor a safetensors file has if several names share it: the format cannot express sharing.

Contract: ``save_model`` and ``load_model`` of https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch

from .safetensors_header import extent


def left_out(tensors: Mapping[str, torch.Tensor], preferred: Collection[str] = ()) -> dict[str, str]:
    """Return the names that are left out, each with the name that is saved in its place.

    Of the names that share memory, the alphabetically first is kept that covers the whole storage, or the first of
    ``preferred`` among these.

    Args:
        tensors: All tensors by name.
        preferred: Names to keep if there is a choice.

    Raises:
        RuntimeError: If no name covers the whole storage.
    """
    kept_for = {}
    for names in _overlapping(tensors):
        whole = sorted(name for name in names if _is_whole(tensors[name]))
        if not whole:
            raise RuntimeError(
                f"tensors {', '.join(map(repr, sorted(names)))} are parts of a larger storage, of which no name has all: save"
                " clones of them, by save_file, or use a .pt"
            )
        kept = next((name for name in whole if name in preferred), whole[0])
        kept_for.update({name: kept for name in sorted(names) if name != kept})
    return kept_for


def _overlapping(tensors: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
    """Yield groups of names whose tensors overlap in a storage. A group may have a single name."""
    storages: dict[tuple[torch.device, int, int], list[tuple[int, int, str]]] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or tensor.device.type == "meta":
            continue  # save_file refuses it
        storage = tensor.untyped_storage()
        if storage.nbytes():
            begin = tensor.data_ptr()
            place = begin, begin + (extent(tensor) if tensor.numel() else 0), name
            storages.setdefault((tensor.device, storage.data_ptr(), storage.nbytes()), []).append(place)
    for places in storages.values():
        group: list[str] = []
        last_end = 0
        for begin, end, name in sorted(places):
            if group and begin >= last_end:
                yield group
                group = []
            group.append(name)
            last_end = end
        yield group


def _is_whole(tensor: torch.Tensor) -> bool:
    """Return whether the tensor covers its whole storage."""
    storage = tensor.untyped_storage()
    return tensor.data_ptr() == storage.data_ptr() and tensor.nbytes == storage.nbytes()
