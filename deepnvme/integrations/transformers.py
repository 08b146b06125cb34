"""Keep the activations of transformers' ``Trainer`` on a drive, from the forward that saves them to the backward that uses them.

    import deepnvme.integrations.transformers as integration
    integration.enable("/mnt/nvme/activations", memory_budget="8GB")
    trainer.train()

After that, each forward that a ``Trainer`` computes for training runs in a :class:`deepnvme.offload.save_on_disk`, entered by
``Trainer.compute_loss_context_manager``. A training step uses that method for its forward only, so tensors that activation
checkpointing saves while it recomputes layers in the backward stay in memory. Subclasses rarely override that method:
subclasses with a ``compute_loss`` or ``training_step`` of their own still call it. An evaluation, without gradients, saves
nothing.

``Trainer.log`` is replaced as well, and adds the bytes written and read to the logs of training steps. A callback would get the
logs too late.

Two options would offload to CPU memory instead, since the innermost context for saved tensors counts. They are redirected to
the drive: ``activation_offloading`` of TRL's trainers, and ``offload`` among the ``activation_checkpointing_kwargs`` of
transformers.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from deepnvme._former_names import former_names
from deepnvme.memory.budget import MemoryBudget, budget_bytes
from deepnvme.offload import ActivationReport, save_on_disk
from deepnvme.telemetry.callers import stack_level
from deepnvme.telemetry.sizes import ByteCount, byte_count

from .transformers_checkpoints import async_checkpoints as async_checkpoints
from .transformers_training import offload_training as offload_training

if TYPE_CHECKING:
    from deepnvme.drives.aio_config import AioConfig
    from deepnvme.drives.profiles import AnyPath

__all__ = ["async_checkpoints", "disable", "enable", "offload_training", "report"]


class _Offload:
    """The offloading of activations that a call of :func:`enable` sets up.

    Args:
        options: The arguments of the call.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = options
        self.forwards = 0
        self._context = save_on_disk(**options)
        self._saved = False
        self._warned = False

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Context in which autograd saves tensors on the drive, in this thread."""
        self.forwards += 1
        with self._context:
            _thread.depth += 1
            try:
                yield
            finally:
                _thread.depth -= 1
            self._saved = self._saved or self.report().saved_bytes > 0  # in the context, so that no other thread begins a step

    def report(self) -> ActivationReport:
        """Return the report of the last forward and backward: bytes saved, written and read. Creates no files on the drive."""
        return self._context.report()

    def logged(self) -> dict[str, float]:
        """Return the report as values for a log. Warns once, with RuntimeWarning, if no forward has saved anything."""
        report = self.report()
        if not self._saved and not self._warned:
            self._warned = True
            reason = f"no tensor that autograd saved has min_bytes ({self.options['min_bytes']}) or more"
            if not self.forwards:
                reason = "the forward does not run in Trainer.compute_loss_context_manager, which a subclass may have overridden"
            warnings.warn(f"no activations go to the drive: {reason}", RuntimeWarning, stacklevel=stack_level())
        return {
            "activations_saved_gb": report.saved_bytes / 1e9,
            "activations_written_gb": report.bytes_written / 1e9,
            "activations_read_gb": report.bytes_read / 1e9,
            "activations_peak_gb": report.peak_bytes / 1e9,
            "activations_waiting_s": report.waiting,
        }

    def close(self) -> None:
        """Wait for transfers in flight, and remove the files from the drive."""
        self._context.close()


class _Thread(threading.local):
    depth = 0
    """Number of :meth:`_Offload.forward` contexts that this thread is in."""


_thread = _Thread()
_enabled: _Offload | None = None
_changing = threading.Lock()
_originals: dict[str, Callable[..., Any]] = {}
"""The functions that :data:`_OURS` replaces, by name. Kept after :func:`disable`, for replacements that are still called."""
_replaced: dict[str, Any] = {}
"""The class or module of each function that is replaced, by the function's name.

A function stays in this dict after :func:`disable` if another project's wrapper around the replacement is still in place.
"""


@former_names(config="aio_config")
def enable(
    path: AnyPath | Sequence[AnyPath],
    *,
    memory_budget: MemoryBudget = 1 << 30,
    min_bytes: ByteCount = 1 << 20,
    aio_config: AioConfig | None = None,
) -> None:
    """Send the activations of trainers to a drive, from now on.

    Applies to existing and new trainers. With activation checkpointing, autograd saves little more than the inputs of layers,
    and only those are written. Logs of training steps then have values of the last forward and backward in this process:
    ``activations_saved_gb``, ``activations_written_gb``, ``activations_read_gb``, ``activations_peak_gb`` (most in memory at a
    time; all four in 10**9 bytes) and ``activations_waiting_s`` (seconds of waiting for the drive).

    Idempotent; the options of the last call count. Not to be called while a training step runs.

    Args:
        path: Directory on the drive, or one on each of several drives.
        memory_budget: Bytes of activations to keep in memory, or "8GB", "25%", "auto": see
            :class:`deepnvme.offload.save_on_disk`.
        min_bytes: Smaller tensors stay in memory; bytes, or a size such as "1MiB". The input of a layer, which activation
            checkpointing keeps, has ``batch * sequence * hidden`` elements: with small models, choose at most the size of that
            input. If no tensor is large enough, the first log warns with RuntimeWarning.
        aio_config: Settings of the engine; None for the profile of the drive, see :func:`deepnvme.engine_for`.

    Raises:
        ImportError: If transformers, or accelerate that its trainer needs, is not installed.
        ValueError: If no path is given, or a number of bytes is negative.
    """
    global _enabled
    budget_bytes(memory_budget, "memory_budget")  # checked now; a share is of what is available when the first tensor is saved
    min_bytes = byte_count(min_bytes, "min_bytes")
    try:
        owners = _owners()
    except ImportError as error:
        raise ImportError(f"{error}: there is nothing to enable; pip install 'deepnvme[transformers]'") from error
    options = {"path": path, "memory_budget": memory_budget, "min_bytes": min_bytes, "aio_config": aio_config}
    with _changing:
        before = _enabled
        if before is None or before.options != options:
            _enabled = _Offload(options)
            if before is not None:
                before.close()
        for name, owner in owners.items():
            if name not in _replaced:
                _originals[name] = vars(owner)[name]
                _replace(owner, _originals[name], _OURS[name])
                _replaced[name] = owner


def disable() -> None:
    """Keep the activations of trainers in memory again, and remove the files from the drive. Idempotent.

    Not to be called while a training step runs.
    """
    global _enabled
    with _changing:
        before, _enabled = _enabled, None
        if before is None:
            return
        for name, owner in list(_replaced.items()):
            if _replace(owner, _OURS[name], _originals[name]):
                del _replaced[name]
        before.close()


def report() -> ActivationReport:
    """Return the report of a trainer's last forward and backward: bytes saved, written and read so far.

    Raises:
        RuntimeError: If :func:`enable` was not called.
    """
    enabled = _enabled
    if enabled is None:
        raise RuntimeError("there is no report: activations stay in memory until enable() is called")
    return enabled.report()


def _compute_loss_context_manager(trainer: Any) -> Any:
    """Replace ``Trainer.compute_loss_context_manager``: add the context that saves on the drive if gradients are enabled."""
    contexts = _originals["compute_loss_context_manager"](trainer)
    enabled = _enabled
    if enabled is not None and torch.is_grad_enabled() and not hasattr(trainer, "offloaded_training"):  # has its own
        contexts.enter_context(enabled.forward())  # at once, as transformers does it with contexts of its own
    return contexts


def _log(trainer: Any, logs: dict[str, float], *arguments: Any, **options: Any) -> None:
    """Replace ``Trainer.log``: add the report's values to the logs of training steps."""
    enabled = _enabled
    if enabled is not None and "loss" in logs:
        logs.update(enabled.logged())
    _originals["log"](trainer, logs, *arguments, **options)


def _save_on_cpu(*arguments: Any, **options: Any) -> Any:
    """Replace ``torch.autograd.graph.save_on_cpu`` in transformers: do nothing while activations go to the drive.

    Otherwise the context would keep the tensors in memory, because the innermost context for saved tensors counts.
    """
    return contextlib.nullcontext() if _thread.depth else _originals["save_on_cpu"](*arguments, **options)


def _get_act_offloading_ctx_manager(*arguments: Any, **options: Any) -> Any:
    """Replace TRL's ``get_act_offloading_ctx_manager``: return a context that saves on the drive while enabled."""
    original = _originals["get_act_offloading_ctx_manager"]
    if _enabled is None:
        return original(*arguments, **options)
    return _EitherOffload(lambda: original(*arguments, **options))


class _EitherOffload:
    """Context for the training steps of TRL's trainers: saves on the drive, or, after :func:`disable`, as TRL itself does.

    Args:
        make: Returns TRL's own context, which needs an accelerator. Called only if that context is used.
    """

    def __init__(self, make: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        self._make = make
        self._own: contextlib.AbstractContextManager[Any] | None = None
        self._entered: list[contextlib.AbstractContextManager[Any]] = []

    def __enter__(self) -> _EitherOffload:
        enabled = _enabled
        if enabled is not None:
            context: contextlib.AbstractContextManager[Any] = enabled.forward()
        else:
            self._own = context = self._own or self._make()
        context.__enter__()
        self._entered.append(context)
        return self

    def __exit__(self, *raised: Any) -> bool | None:
        return self._entered.pop().__exit__(*raised)


_OURS: dict[str, Callable[..., Any]] = {
    "compute_loss_context_manager": _compute_loss_context_manager,
    "log": _log,
    "save_on_cpu": _save_on_cpu,
    "get_act_offloading_ctx_manager": _get_act_offloading_ctx_manager,
}
"""This module's replacements of functions of transformers and TRL, by the functions' names."""


def _owners() -> dict[str, Any]:
    """Return the class or module that defines each function to replace, by the function's name.

    Functions of projects or versions that are not installed are left out.
    """
    transformers = importlib.import_module("transformers")
    importlib.import_module("accelerate")
    owners: dict[str, Any] = {"compute_loss_context_manager": transformers.Trainer, "log": transformers.Trainer}
    if hasattr(transformers.modeling_utils, "save_on_cpu"):  # not before transformers has offload
        owners["save_on_cpu"] = transformers.modeling_utils
    with contextlib.suppress(ImportError):
        owners["get_act_offloading_ctx_manager"] = importlib.import_module("trl.models.activation_offloading")
    return owners


def _replace(owner: Any, function: Callable[..., Any], other: Callable[..., Any]) -> bool:
    """Replace ``function`` by ``other`` in its owner, and in all modules of TRL that have imported it.

    Returns:
        Whether the owner had ``function``.
    """
    name = next(name for name, each in _OURS.items() if each in (function, other))
    found = vars(owner).get(name) is function
    trl = [module for path, module in list(sys.modules.items()) if path.partition(".")[0] == "trl"]
    for each in (owner, *(module for module in trl if isinstance(module, ModuleType))):
        if vars(each).get(name) is function:
            setattr(each, name, other)
    return found
