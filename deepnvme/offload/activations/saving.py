"""The context manager :class:`save_on_disk`, which moves tensors that autograd saves for the backward to a drive."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

from deepnvme._former_names import former_names
from deepnvme._interrupts import defer_interrupts
from deepnvme.drives.aio_config import AioConfig
from deepnvme.drives.mounts import warn_of_memory
from deepnvme.drives.profiles import AnyPath
from deepnvme.files.replacing import with_filename
from deepnvme.memory.budget import MemoryBudget, budget_bytes
from deepnvme.telemetry.sizes import ByteCount, byte_count

from .report import ActivationReport, StepCounts
from .saved_tensor import KeptTensor, Packed, is_kept_by_user, is_plain, unpack_saved
from .store import ActivationStore

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

DEFAULT_MEMORY_BUDGET = 1 << 30
"""Bytes of a training's memory that stay in memory if no budget is given: of saved tensors, or of all that is offloaded."""
MIN_BYTES = 1 << 20


class save_on_disk:
    """Context manager that moves tensors saved by autograd for the backward to a drive, and reads them back in time.

    >>> activations = deepnvme.save_on_disk("/mnt/nvme/activations", memory_budget="4GB")
    >>> for batch in loader:
    ...     with activations:
    ...         loss = model(batch).sum()
    ...     loss.backward()

    It is used like ``torch.autograd.graph.save_on_cpu``. Saved tensors stay in memory up to the budget. Beyond it, the oldest
    ones are written during the forward, and read back, in reverse order, during the backward. Results are bit-identical to those
    without it.

    These tensors are not written: parameters and views of them; tensors that their user keeps in memory (from the second time
    they are saved on); tensors of fewer than ``min_bytes`` bytes; sparse, quantised and nested tensors, and those of a subclass;
    and tensors that are saved while a backward runs inside of the context, such as those of layers that
    ``torch.utils.checkpoint`` with ``use_reentrant=True`` computes again.

    A storage that several saved tensors share is written once. A tensor that was changed in place after it was saved is an error
    in the backward, as without hooks. When autograd has dropped a tensor, at the end of a backward or with a graph whose backward
    never runs, the next save, backward or :meth:`close` frees its bytes.

    For tensors on a CUDA device, the budget limits the memory that they take on the device.

    An object may be entered once per step, as above, or for parts of the forward; it may be nested, and entered by several
    threads. Objects with the same paths and options share their files, so making a new one for each step costs nothing. Each
    process has its own directory of files below each path. The files are removed by :meth:`close` and at exit; those of a killed
    process are removed by the next process that uses the path.

    If the drive fails, or is full, the forward or the backward raises OSError with errno and file. The next step tries again.

    Args:
        path: Directory, created if it is missing; or several, on several drives, over which large tensors are striped.
        memory_budget: Most bytes of saved tensors in memory, those on their way to and from the drive included. Only a single
            tensor that is larger takes more. Or "8GB", "25%", "auto", see :data:`deepnvme.memory.MemoryBudget`: shares are of the
            memory available when the first of the objects that share the files is entered.
        min_bytes: Tensors that span fewer bytes stay in memory, and do not count for the budget; or a size such as "1MiB".
        aio_config: Settings of the engine; None for the profile of the drive, see :func:`deepnvme.engine_for`.

    Raises:
        TypeError, ValueError: If no path is given, or ``memory_budget`` or ``min_bytes`` is not a number of bytes, or negative.
        OSError: If a path cannot be created, or no file can be created in it. Nothing is left there yet.
    """

    @former_names(config="aio_config")
    def __init__(
        self,
        path: AnyPath | Iterable[AnyPath],
        *,
        memory_budget: MemoryBudget = DEFAULT_MEMORY_BUDGET,
        min_bytes: ByteCount = MIN_BYTES,
        aio_config: AioConfig | None = None,
    ) -> None:
        budget_bytes(memory_budget, "memory_budget")
        self._memory_budget = memory_budget
        self._min_bytes = byte_count(min_bytes, "min_bytes")
        paths = [path] if isinstance(path, str | bytes | os.PathLike) else list(path)
        if not paths or not all(map(os.fspath, paths)):
            raise ValueError(f"save_on_disk needs a directory on the drive, got {path!r}")
        self._paths = tuple(Path(os.path.abspath(os.fsdecode(each))) for each in paths)
        self._config = aio_config
        if self._key() not in _stores:
            self._check_paths()
        self._open = _OpenContexts()
        self._saved_elsewhere: Callable[[torch.Tensor], Packed | None] = lambda tensor: None
        """Returns the object that autograd keeps in place of a tensor that is on a drive already, such as a training's parameter.

        None for any other tensor.
        """

    def leave_out(self, saved_elsewhere: Callable[[torch.Tensor], Packed | None]) -> None:
        """Do not write tensors that are on a drive anyway, such as the parameters of a training.

        Args:
            saved_elsewhere: Returns what autograd keeps in place of such a tensor; None for any other tensor.
        """
        self._saved_elsewhere = saved_elsewhere

    def __enter__(self) -> save_on_disk:
        """Enter the context. Raises OSError if the files cannot be created."""
        store = _uncompiled(self._shared_store)()
        if not self._open.hooks:
            _uncompiled(store.enter)()
        pack = _uncompiled(lambda tensor: self._pack(store, tensor))
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, _uncompiled(unpack_saved))
        try:
            with defer_interrupts():
                hooks.__enter__()
                self._open.hooks.append(hooks)
        except BaseException:
            self._leave(hooks)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if not self._open.hooks:
            raise RuntimeError("save_on_disk is left in another thread than it was entered in")
        _uncompiled(self._leave)(self._open.hooks[-1])

    def _leave(self, hooks: torch.autograd.graph.saved_tensors_hooks) -> None:
        """Leave a context, also one that was only partly entered."""
        with defer_interrupts():
            if hooks in self._open.hooks:
                self._open.hooks.remove(hooks)
                hooks.__exit__()

    def report(self) -> ActivationReport:
        """Return the report of the newest step so far. A step is a forward in this context and the backward that follows."""
        store = _stores.get(self._key())
        return StepCounts().report(0, 0) if store is None else store.report()

    def close(self) -> None:
        """Wait for transfers, and remove the files. Idempotent; the object can be used again afterwards.

        A later backward that needs saved tensors raises RuntimeError, also if another object with the same paths and options
        has saved them.
        """
        key = self._key()
        with _sharing:
            store = _stores.get(key)
        if store is not None:
            store.close()  # Ctrl-C can interrupt it: then it is still there to be closed
            with _sharing:
                if _stores.get(key) is store:
                    del _stores[key]

    def _pack(self, store: ActivationStore, tensor: torch.Tensor) -> Packed:
        saved = self._saved_elsewhere(tensor)
        if saved is not None:
            return saved
        in_backward = torch._C._current_graph_task_id() >= 0  # and wants at once what it saves
        if not (in_backward or is_kept_by_user(tensor)) and is_plain(tensor):
            saved = store.pack(tensor, self._min_bytes)
        return saved or KeptTensor(tensor)

    def _check_paths(self) -> None:
        """Raise OSError if no file can be created in a path, or where it will be made. Warn if it is in memory."""
        for path in self._paths:
            with with_filename(path, instead=True):
                there = next(each for each in (path, *path.parents) if each.exists())
                tempfile.TemporaryFile(dir=there).close()
        warn_of_memory(self._paths)

    def _key(self) -> tuple[object, ...]:
        return os.getpid(), self._paths, self._memory_budget, self._config

    def _shared_store(self) -> ActivationStore:
        """Return the store that all objects with the same paths and options share. Makes one if there is none."""
        with _sharing:
            key = self._key()
            if key not in _stores or _stores[key].closed:
                budget = budget_bytes(self._memory_budget, "memory_budget")
                _stores[key] = ActivationStore(self._paths, budget, self._config)
            return _stores[key]


class _OpenContexts(threading.local):
    """The hooks of the contexts that a thread is in, the innermost last."""

    def __init__(self) -> None:
        self.hooks: list[torch.autograd.graph.saved_tensors_hooks] = []


def _uncompiled(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Return the function excluded from torch.compile, so that it runs as plain Python even in compiled code."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and to import it takes a second
        return function
    disabled: Callable[Parameters, Result] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return disabled


_stores: dict[tuple[object, ...], ActivationStore] = {}
_sharing = threading.Lock()


@atexit.register
def _close_all() -> None:
    """Close all stores and remove their files, at the interpreter's exit."""
    for store in list(_stores.values()):
        with contextlib.suppress(OSError):
            store.close()


def _renew_lock() -> None:
    """Replace the lock in a forked child, where a thread of the parent may have held it."""
    global _sharing
    _sharing = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)
