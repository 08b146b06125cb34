"""Send the activations of transformers' ``Trainer`` to a drive: what autograd saves in the forward, until the backward wants it.

    import deepnvme.integrations.transformers as integration
    integration.enable("/mnt/nvme/activations", memory_budget="8GB")
    trainer.train()

After that, each forward that a ``Trainer`` computes for training runs in a :class:`deepnvme.offload.save_on_disk`, entered by
``Trainer.compute_loss_context_manager``. A training step uses that method for its forward only, so that nothing goes out that a
backward saves while activation checkpointing computes layers again. It is also what subclasses rarely override: those with a
``compute_loss`` or ``training_step`` of their own still call it. An evaluation, without gradients, saves nothing.

``Trainer.log`` is replaced as well, and adds what went out to the logs of training steps: a callback would get them too late.

Two options that would offload to the memory of the CPU instead, since the innermost such context counts, offload to the drive:
``activation_offloading`` of TRL's trainers, and ``offload`` among the ``activation_checkpointing_kwargs`` of transformers.
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

from deepnvme._lazy import public_names
from deepnvme.memory.budget import MemoryBudget, budget_bytes
from deepnvme.offload import ActivationReport, save_on_disk
from deepnvme.telemetry.sizes import ByteCount, byte_count

from .transformers_training import offload_training as offload_training

if TYPE_CHECKING:
    from deepnvme.drives.aio_config import AioConfig
    from deepnvme.drives.profiles import AnyPath

__all__ = ["disable", "enable", "offload_training", "report"]

__dir__ = public_names(__name__)


class _Offload:
    """Where the activations go, since a call of :func:`enable`.

    Args:
        options: The arguments of that call.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = options
        self.forwards = 0
        self._context = save_on_disk(**options)
        self._saved = False
        self._warned = False

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Have autograd save on the drive, in this thread."""
        self.forwards += 1
        with self._context:
            _thread.depth += 1
            try:
                yield
            finally:
                _thread.depth -= 1
            self._saved = self._saved or self.report().saved_bytes > 0  # in the context, so that no other thread begins a step

    def report(self) -> ActivationReport:
        """Return what the last forward and backward have saved, written and read. Creates no files."""
        return self._context.report()

    def logged(self) -> dict[str, float]:
        """Return the report as values of a log. Warns once if no forward has saved anything."""
        report = self.report()
        if not self._saved and not self._warned:
            self._warned = True
            reason = f"no tensor that autograd saved has min_bytes ({self.options['min_bytes']}) or more"
            if not self.forwards:
                reason = "the forward does not run in Trainer.compute_loss_context_manager, which a subclass may have overridden"
            warnings.warn(f"no activations go to the drive: {reason}", RuntimeWarning, stacklevel=3)
        return {
            "activations_saved_gb": report.saved_bytes / 1e9,
            "activations_written_gb": report.bytes_written / 1e9,
            "activations_read_gb": report.bytes_read / 1e9,
            "activations_peak_gb": report.peak_bytes / 1e9,
            "activations_waiting_s": report.waiting,
        }

    def close(self) -> None:
        """Wait for transfers, and remove the files from the drive."""
        self._context.close()


class _Thread(threading.local):
    depth = 0
    """Number of contexts of :meth:`_Offload.forward` that this thread is in."""


_thread = _Thread()
_enabled: _Offload | None = None
_changing = threading.Lock()
_originals: dict[str, Callable[..., Any]] = {}
"""What :data:`_OURS` replace. Never removed: somebody may still have one of ours."""
_replaced: dict[str, Any] = {}
"""Where ours are in place, perhaps inside of a wrapper of somebody else's: the class or module, by their names."""


def enable(
    path: AnyPath | Sequence[AnyPath],
    *,
    memory_budget: MemoryBudget = 1 << 30,
    min_bytes: ByteCount = 1 << 20,
    config: AioConfig | None = None,
) -> None:
    """Send the activations of trainers to a drive from now on.

    Holds for trainers that exist and for new ones, with activation checkpointing or without: with it, autograd saves little more
    than the inputs of layers, and only those go out. Logs of training steps then have values of the last forward and backward in
    this process: ``activations_saved_gb``, ``activations_written_gb``, ``activations_read_gb``, ``activations_peak_gb`` (most in
    memory at a time; all four in 10**9 bytes) and ``activations_waiting_s`` (seconds of waiting for the drive).

    Idempotent; the options of the last call count. Not to be called while a training step runs.

    Args:
        path: Directory on the drive, or one on each of several drives.
        memory_budget: Bytes of activations to keep in memory, or "8GB", "25%", "auto": see
            :class:`deepnvme.offload.save_on_disk`.
        min_bytes: Smaller tensors stay in memory; bytes, or a size such as "1MiB". The input of a layer, which activation
            checkpointing keeps, has ``batch * sequence * hidden`` elements: with small models, choose no more than their bytes.
            If no tensor is large enough, the first log warns with RuntimeWarning.
        config: Settings of the engine; None for the profile of the drive, see :func:`deepnvme.engine_for`.

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
    options = {"path": path, "memory_budget": memory_budget, "min_bytes": min_bytes, "config": config}
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
    """Have trainers keep activations in memory again, and remove the files. Idempotent.

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
    """Return what the last forward and backward of a trainer have saved, written and read so far.

    Raises:
        RuntimeError: If not enabled.
    """
    enabled = _enabled
    if enabled is None:
        raise RuntimeError("there is no report: activations stay in memory until enable() is called")
    return enabled.report()


def _compute_loss_context_manager(trainer: Any) -> Any:
    """Replace ``Trainer.compute_loss_context_manager``: the same contexts, and in training, that of the drive as well."""
    contexts = _originals["compute_loss_context_manager"](trainer)
    enabled = _enabled
    if enabled is not None and torch.is_grad_enabled() and not hasattr(trainer, "offloaded_training"):  # has its own
        contexts.enter_context(enabled.forward())  # at once, as transformers does it with contexts of its own
    return contexts


def _log(trainer: Any, logs: dict[str, float], *arguments: Any, **options: Any) -> None:
    """Replace ``Trainer.log``: logs of training steps have the values of the report as well."""
    enabled = _enabled
    if enabled is not None and "loss" in logs:
        logs.update(enabled.logged())
    _originals["log"](trainer, logs, *arguments, **options)


def _save_on_cpu(*arguments: Any, **options: Any) -> Any:
    """Replace transformers' name for ``torch.autograd.graph.save_on_cpu``, which would win over the context it is entered in."""
    return contextlib.nullcontext() if _thread.depth else _originals["save_on_cpu"](*arguments, **options)


def _get_act_offloading_ctx_manager(*arguments: Any, **options: Any) -> Any:
    """Replace the function of the same name of TRL."""
    original = _originals["get_act_offloading_ctx_manager"]
    if _enabled is None:
        return original(*arguments, **options)
    return _EitherOffload(lambda: original(*arguments, **options))


class _EitherOffload:
    """The context that TRL's trainers run their training steps in: that of the drive, or after :func:`disable`, TRL's own.

    Args:
        make: Returns TRL's own, which needs an accelerator.
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
"""What replaces functions of transformers and TRL, by their names."""


def _owners() -> dict[str, Any]:
    """Return the class or module that defines each of the functions that are replaced, as far as they are installed."""
    transformers = importlib.import_module("transformers")
    importlib.import_module("accelerate")
    owners: dict[str, Any] = {"compute_loss_context_manager": transformers.Trainer, "log": transformers.Trainer}
    if hasattr(transformers.modeling_utils, "save_on_cpu"):  # not before transformers has offload
        owners["save_on_cpu"] = transformers.modeling_utils
    with contextlib.suppress(ImportError):
        owners["get_act_offloading_ctx_manager"] = importlib.import_module("trl.models.activation_offloading")
    return owners


def _replace(owner: Any, function: Callable[..., Any], other: Callable[..., Any]) -> bool:
    """Set the other function where the owner, and modules of TRL that have imported it, have this one.

    Returns:
        Whether the owner had it.
    """
    name = next(name for name, each in _OURS.items() if each in (function, other))
    found = vars(owner).get(name) is function
    trl = [module for path, module in list(sys.modules.items()) if path.partition(".")[0] == "trl"]
    for each in (owner, *(module for module in trl if isinstance(module, ModuleType))):
        if vars(each).get(name) is function:
            setattr(each, name, other)
    return found
