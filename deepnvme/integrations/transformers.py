"""Send the activations of transformers' ``Trainer`` to a drive: what autograd saves in the forward, until the backward wants it.

    import deepnvme.integrations.transformers as integration
    integration.enable("/mnt/nvme/activations", memory_budget="8GB")
    trainer.train()

After that, each forward that a ``Trainer`` computes for training runs in a :class:`deepnvme.offload.save_on_disk`, entered by
``Trainer.compute_loss_context_manager``. A training step uses that method for its forward only, so that nothing goes out that a
backward saves while activation checkpointing computes layers again. It is also what subclasses rarely override: those with a
``compute_loss`` or ``training_step`` of their own still call it. An evaluation, without gradients, saves nothing.

``Trainer.log`` is replaced as well, and adds what went out to the logs of training steps: a callback would get them too late.

Options that offload activations to the memory of the CPU are refused, since the innermost such context counts:
``activation_offloading`` of TRL's trainers, and ``offload`` among the ``activation_checkpointing_kwargs`` of transformers.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
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
            yield
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


_enabled: _Offload | None = None
_changing = threading.Lock()
_originals: dict[str, Callable[..., Any]] = {}
"""The methods of ``Trainer`` that :data:`_OURS` replace. Never removed: other code may still call one of ours."""
_replaced: set[str] = set()
"""Names of the methods that ours are in place of, perhaps inside of a wrapper of other code."""


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
        ValueError: If no path is given, or a number of bytes is negative. The forward of a trainer raises ValueError if an option
            of the trainer offloads activations to the memory of the CPU.
    """
    global _enabled
    budget_bytes(memory_budget, "memory_budget")  # checked now; a share is of what is available when the first tensor is saved
    min_bytes = byte_count(min_bytes, "min_bytes")
    try:
        trainer: Any = importlib.import_module("transformers").Trainer
        importlib.import_module("accelerate")
    except ImportError as error:
        raise ImportError(f"{error}: there is nothing to enable; pip install 'deepnvme[transformers]'") from error
    options = {"path": path, "memory_budget": memory_budget, "min_bytes": min_bytes, "config": config}
    with _changing:
        before = _enabled
        if before is None or before.options != options:
            _enabled = _Offload(options)
            if before is not None:
                before.close()
        for name in _OURS.keys() - _replaced:
            _originals[name] = vars(trainer)[name]
            setattr(trainer, name, _OURS[name])
            _replaced.add(name)


def disable() -> None:
    """Have trainers keep activations in memory again, and remove the files. Idempotent.

    Not to be called while a training step runs.
    """
    global _enabled
    with _changing:
        before, _enabled = _enabled, None
        if before is None:
            return
        trainer: Any = importlib.import_module("transformers").Trainer
        for name in list(_replaced):
            if vars(trainer)[name] is _OURS[name]:
                setattr(trainer, name, _originals[name])
                _replaced.remove(name)
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
        _refuse_other_offloading(trainer.args)
        contexts.enter_context(enabled.forward())  # at once, as transformers does it with contexts of its own
    return contexts


def _log(trainer: Any, logs: dict[str, float], *arguments: Any, **options: Any) -> None:
    """Replace ``Trainer.log``: logs of training steps have the values of the report as well."""
    enabled = _enabled
    if enabled is not None and "loss" in logs:
        logs.update(enabled.logged())
    _originals["log"](trainer, logs, *arguments, **options)


def _refuse_other_offloading(arguments: Any) -> None:
    """Raise ValueError if the options of a trainer offload activations to the memory of the CPU."""
    checkpointing = [getattr(arguments, f"{kind}_checkpointing_kwargs", None) or {} for kind in ("activation", "gradient")]
    if getattr(arguments, "activation_offloading", False) or any(options.get("offload") for options in checkpointing):
        raise ValueError("activations go to the drive: leave out activation_offloading, and offload of the checkpointing kwargs")


_OURS: dict[str, Callable[..., Any]] = {"compute_loss_context_manager": _compute_loss_context_manager, "log": _log}
"""What replaces methods of ``Trainer``, by their names."""
