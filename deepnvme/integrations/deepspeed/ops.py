"""Make DeepSpeed's op builders load this package's ops, and its accelerator's ``is_pinned`` recognise their pinned memory.

The builders' methods are replaced rather than the classes, because programs may have imported a class already, by any name.
"""

from __future__ import annotations

import ctypes
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from deepnvme.ops.op_builder import AsyncIOBuilder, GDSBuilder, OpBuilder
from deepnvme.telemetry.callers import stack_level
from deepnvme.version import __version__

from .replacement import Replacement, UnexpectedDeepSpeed, around, attribute, module


def replacements() -> Iterator[Replacement]:
    """Return the replacements of the builders' methods and of the accelerator's ``is_pinned``.

    A builder is left alone if DeepSpeed has no such op for its accelerator, such as gds on a CPU.

    Raises:
        UnexpectedDeepSpeed: If a part of DeepSpeed is not where it is expected.
        RuntimeError: If this package's async_io op cannot be loaded.
    """
    builders = module("deepspeed.ops.op_builder")
    accelerator = module("deepspeed.accelerator").get_accelerator()
    pin_memory = attribute(builders, "PinMemoryBuilder")
    load_pin_memory = attribute(pin_memory, "load", ("verbose",))
    for name, ours in (("AsyncIOBuilder", AsyncIOBuilder()), ("GDSBuilder", GDSBuilder())):
        theirs = getattr(builders, name, None)
        if getattr(theirs, "NAME", None) != ours.NAME:
            if name == "AsyncIOBuilder":
                raise UnexpectedDeepSpeed(f"there is no deepspeed.ops.op_builder.{name} of the op async_io")
            continue
        yield from _builder(theirs, ours, lambda: load_pin_memory(pin_memory()))
    op = AsyncIOBuilder().load()
    pins = types.SimpleNamespace(pin_handle=PinHandle)
    yield Replacement(pin_memory, "load", lambda self, verbose=False: pins)
    yield around(
        type(accelerator),
        "is_pinned",
        lambda original, self, tensor: original(self, tensor) or _recorded(op, tensor),
        ("tensor",),
    )


def _builder(theirs: Any, ours: OpBuilder, before_theirs: Callable[[], object]) -> Iterator[Replacement]:
    """Return the replacements for one of DeepSpeed's builders.

    ``load`` falls back to DeepSpeed's own op if this package's op cannot be loaded, and DeepSpeed's op then reports what it
    lacks.

    Args:
        theirs: DeepSpeed's builder.
        ours: The builder of this package.
        before_theirs: Called before DeepSpeed's op is loaded: loads the pin_memory op, which DeepSpeed's op is linked with.
    """
    warned = False

    def load(original: Any, self: Any, verbose: bool = False) -> Any:
        """Load this package's op or, with a RuntimeWarning, DeepSpeed's own op."""
        nonlocal warned
        try:
            return ours.load(verbose)
        except RuntimeError as error:
            if not warned:
                warned = True
                warnings.warn(f"DeepSpeed's own {ours.NAME} op stays: {error}", RuntimeWarning, stacklevel=stack_level())
            before_theirs()
            return original(self, verbose)

    def is_compatible(original: Any, self: Any, verbose: bool = False) -> bool:
        """Return whether this package's op, or else DeepSpeed's own, can be loaded."""
        compiled = not ours.lacking() and ours.existing_build() is not None
        if not ours.is_compatible(verbose) and not compiled:
            return bool(original(self, verbose))
        if verbose:  # called by ds_report
            print(f" [INFO]  {ours.NAME} is that of deepnvme {__version__}")
        return True

    yield around(theirs, "load", load, ("verbose",))
    yield around(theirs, "jit_load", load, ("verbose",))
    yield around(theirs, "is_compatible", is_compatible, ("verbose",))


class PinHandle:
    """Replaces DeepSpeed's ``pin_handle``, which pins memory with ``DS_PIN_MEMORY_BACKEND=native``.

    All handles of this package recognise the memory as pinned.

    Contract: the op of DeepSpeed's ``PinMemoryBuilder``, as ``deepspeed/utils/pin_memory.py`` of 0.19 calls it.
    """

    def __init__(self) -> None:
        handle = AsyncIOBuilder().load().aio_handle()
        self.new_cpu_locked_tensor: Callable[[int, torch.Tensor], torch.Tensor] = handle.new_cpu_locked_tensor
        self.free_cpu_locked_tensor: Callable[[torch.Tensor], bool] = handle.free_cpu_locked_tensor
        self.is_pinned: Callable[[torch.Tensor], bool] = handle.is_pinned

    def free_cpu_locked_tensor_by_ptr(self, address: int) -> bool:
        """Unpin the memory of :meth:`new_cpu_locked_tensor` at this address, and return whether it was pinned.

        Views of the tensor may still exist.
        """
        first = torch.frombuffer((ctypes.c_char * 1).from_address(address), dtype=torch.uint8)
        return self.free_cpu_locked_tensor(first)


def _recorded(op: Any, tensor: torch.Tensor) -> bool:
    """Return whether this package has pinned the tensor's memory. False for fake and meta tensors, which a compiler passes."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu" and bool(op.is_pinned(tensor))
