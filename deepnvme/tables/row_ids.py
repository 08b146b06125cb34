"""Numbers of rows that a user has given, checked before anything is read."""

from __future__ import annotations

import torch

from deepnvme.ops import load_async_io


def check_integers(ids: torch.Tensor) -> None:
    """Raise TypeError if numbers of rows are no integers."""
    if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool:
        raise TypeError(f"ids must be integers, got {ids.dtype}")


def checked_ids(ids: torch.Tensor, rows: int) -> torch.Tensor:
    """Return numbers of rows as contiguous int64 on the CPU.

    Args:
        ids: Integers of any shape, on any device; or what ``torch.as_tensor`` makes such of.
        rows: How many rows there are.

    Returns:
        The numbers, in the shape of ``ids``. It may be ``ids`` itself.

    Raises:
        TypeError: If ``ids`` are no integers.
        IndexError: For a number outside 0 to ``rows - 1``: the first one, with its position in ``ids``.
    """
    if not isinstance(ids, torch.Tensor):
        ids = torch.as_tensor(ids)
    check_integers(ids)
    numbers = ids.detach().to("cpu", torch.int64).contiguous()
    outside = load_async_io().tables.first_outside(numbers.data_ptr(), numbers.numel(), rows)
    if outside is not None:
        where = torch.unravel_index(torch.tensor(outside), numbers.shape) if numbers.dim() else ()
        which = f"ids[{', '.join(str(int(each)) for each in where)}]" if numbers.dim() else "ids"
        held = f"the rows 0 to {rows - 1}" if rows else "no rows"
        raise IndexError(f"{which} is {ids.flatten()[outside].item()}, and the table has {held}")
    return numbers


def last_of_each(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each number once, ascending, and where it is for the last time."""
    ordered, positions = torch.sort(numbers, stable=True)
    last = torch.ones(ordered.numel(), dtype=torch.bool)
    if ordered.numel():
        last[:-1] = ordered[1:] != ordered[:-1]
    return ordered[last].contiguous(), positions[last]
