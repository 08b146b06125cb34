"""Named ranges in the traces of torch.profiler, around what this package waits for and starts."""

from __future__ import annotations

import contextlib

from torch._C._autograd import _profiler_enabled
from torch.autograd.profiler import record_function

_NO_RANGE = contextlib.nullcontext()


def profiler_range(name: str) -> contextlib.AbstractContextManager[object]:
    """Return a context that is a range ``deepnvme::NAME`` in a trace, if this thread is being profiled.

    ``record_function`` takes 7 us also where nothing is profiled, and this 0.2 us.
    """
    return record_function(f"deepnvme::{name}") if _profiler_enabled() else _NO_RANGE
