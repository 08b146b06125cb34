"""Replace accelerate's disk offload: weights are streamed from a store, read ahead of their use.

    import deepnvme.integrations.accelerate as integration
    integration.enable()
    model = AutoModelForCausalLM.from_pretrained(name, device_map={"": "disk"}, offload_folder=folder)

After that, weights that a device map sends to the disk are streamed by :func:`deepnvme.streaming.stream`. This holds for
``accelerate.disk_offload``, ``accelerate.dispatch_model`` and their callers, such as ``load_checkpoint_and_dispatch`` and
transformers' ``from_pretrained``. The ``Streaming`` object that ``stream`` returns is the model's attribute ``streaming``.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from deepnvme._former_names import former_names
from deepnvme.checkpoint.formats.safetensors_header import read_offload_index
from deepnvme.checkpoint.weight_locations import weights_in_index
from deepnvme.files.regular_files import open_regular
from deepnvme.memory.budget import MemoryBudget, budget_bytes
from deepnvme.memory.tensor_bytes import crc32, memory_of
from deepnvme.model.structure import UNBLOCKED_EXTENT, find_ties, weights_by_name
from deepnvme.streaming.located_weights import with_dtypes_kept
from deepnvme.streaming.pretrained import locating_weights
from deepnvme.streaming.streamed_model import Streaming, check_not_streamed, streaming_of
from deepnvme.streaming.weights.build_once import opened_or_built
from deepnvme.streaming.weights.weight_store import WeightStore
from deepnvme.telemetry.callers import stack_level
from deepnvme.telemetry.descriptions import shorten

if TYPE_CHECKING:
    from deepnvme.drives.aio_config import AioConfig

__all__ = ["STORE", "disable", "disk_offload", "dispatch_model", "enable"]

STORE = "deepnvme"
"""Name of the store's directory, within the offload folder that accelerate is given."""


class _StreamOptions(NamedTuple):
    """The arguments of the last call of :func:`enable`, where they are described."""

    memory_budget: MemoryBudget
    prefetch: int
    aio_config: AioConfig | None


_enabled: _StreamOptions | None = None
_originals: dict[str, Callable[..., nn.Module]] = {}
_changing = threading.Lock()


@former_names(config="aio_config")
def enable(*, memory_budget: MemoryBudget = 0, prefetch: int = 2, aio_config: AioConfig | None = None) -> None:
    """Stream models that accelerate offloads to the disk, from now on.

    May be called before or after transformers is imported. Idempotent; the options of the last call count.

    If a device map also names accelerators, or a call gives no offload folder for the store, accelerate offloads the model
    itself, and a RuntimeWarning says so.

    Args:
        memory_budget: Bytes of weights to keep in memory, or "8GB", "50%", "auto": see :func:`deepnvme.streaming.stream`. If
            the weights that a device map leaves on the CPU take more, their size is used instead.
        prefetch: Number of extents to read ahead: see :func:`deepnvme.streaming.stream`.
        aio_config: Settings of the engine; None for the profile of the drive, see :func:`deepnvme.engine_for`.

    Raises:
        ImportError: If accelerate is not installed.
    """
    global _enabled
    budget_bytes(memory_budget, "memory_budget")  # checked now; a share is of what is available when a model is streamed
    try:
        import accelerate
        import accelerate.big_modeling
    except ImportError as error:
        raise ImportError(f"{error}: there is nothing to enable; pip install 'deepnvme[transformers]'") from error
    with _changing:
        if not _originals:
            _originals.update((name, getattr(accelerate.big_modeling, name)) for name in _OURS)
        _enabled = _StreamOptions(memory_budget, prefetch, aio_config)
        _replace(_originals, _OURS)


def disable() -> None:
    """Restore accelerate's own disk offload. Models that are streamed already stay streamed. Idempotent."""
    global _enabled
    with _changing:
        _enabled = None
        _replace(_OURS, _originals)


def disk_offload(model: nn.Module, offload_dir: Any, execution_device: Any = None, *arguments: Any, **options: Any) -> nn.Module:
    """Replace ``accelerate.disk_offload``: stream all weights of the model, or call accelerate's own after :func:`disable`.

    Args:
        model: The model. Weights on the meta device must be in ``offload_dir``.
        offload_dir: Folder of the store, which is built in its subdirectory :data:`STORE`. It may have weights that accelerate
            wrote before.
        execution_device: Where the model runs; by default the device of its first parameter.
        *arguments: Further arguments, which only accelerate's own function uses.
        **options: Further options, which only accelerate's own function uses.

    Raises:
        ValueError: If weights are on the meta device and not in ``offload_dir``.
        OSError: From building or opening the store.
    """
    enabled = _options()
    check_not_streamed(model)
    if enabled is None:
        return _originals["disk_offload"](model, offload_dir, execution_device, *arguments, **options)
    index = _index_in(offload_dir)
    device = execution_device if execution_device is not None else next((each.device for each in model.parameters()), None)
    kept = {name: weight for name, weight in weights_by_name(model).items() if name not in index}
    if device is not None and torch.device(device).type == "meta":
        device = None
    return _Hook(index, offload_dir, kept, device, enabled).attach(model)


def dispatch_model(
    model: nn.Module,
    device_map: Mapping[str, Any],
    main_device: Any = None,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    offload_dir: Any = None,
    offload_index: Mapping[str, Any] | None = None,
    *arguments: Any,
    **options: Any,
) -> nn.Module:
    """Replace ``accelerate.dispatch_model``: stream a model whose map names the disk and no other device than the CPU.

    Calls accelerate's own function for other device maps, and after :func:`disable`. If weights go to the disk, but the map
    also names other devices or ``offload_dir`` is None, a RuntimeWarning says why they are not streamed.

    Args:
        model: The model. Weights that the map sends to the disk may be on the meta device. Changed in place, and returned.
        device_map: Where each module goes: its name -> "disk", "cpu" or another device.
        main_device: Where the streamed model computes; None, "cpu" or "disk" for the CPU.
        state_dict: Values of weights by name. Not used for weights that are read from the disk.
        offload_dir: The offload folder, in which the store is made.
        offload_index: Where each weight is on the disk, by name; None for the index that accelerate wrote to ``offload_dir``.
        arguments: Used by accelerate's own function only.
        options: Used by accelerate's own function only.

    Raises:
        ValueError: If weights are on the meta device, and neither the index nor ``offload_dir`` has them.
        OSError: From building or opening the store.
    """
    enabled = _options()
    check_not_streamed(model)
    placed = {str(device) for device in device_map.values()}
    if enabled is not None and "disk" in placed:
        others = placed - {"disk", "cpu"}
        if not others and offload_dir is not None:
            index = offload_index if offload_index is not None else _index_in(offload_dir)
            weights = weights_by_name(model)
            kept = {name: weight for name, weight in weights.items() if name not in index or _is_buffer_in_memory(weight)}
            kept |= {name: weight for name, weight in (state_dict or {}).items() if name in kept}
            on_cpu = [name for name in weights if _device_of(name, device_map) != "disk"]
            device = None if main_device is None or str(main_device) in ("cpu", "disk") else main_device
            _Hook(index, offload_dir, kept, device, enabled, on_cpu).attach(model)
            model.hf_device_map = dict(device_map)  # type: ignore[assignment]  # transformers reads it
            return model
        obstacle = "no offload_folder (of accelerate: offload_dir) is given to put the store in"
        if others:
            obstacle = f"the device map names {', '.join(sorted(others))} too"
        text = f"{obstacle}: weights on the disk are read by accelerate itself, one at a time, and not streamed"
        warnings.warn(text, RuntimeWarning, stacklevel=stack_level())
    original = _originals["dispatch_model"]
    return original(model, device_map, main_device, state_dict, offload_dir, offload_index, *arguments, **options)


@dataclass(eq=False, repr=False)
class _Hook:
    """The hook at a model's root through which ``accelerate.hooks.remove_hook_from_submodules`` undoes the offload.

    Has the methods of ``accelerate.hooks.ModelHook``. Does not change calls of the model.
    """

    no_grad = False

    index: Mapping[str, Any]
    """accelerate's offload index of the weights that are in files."""
    folder: Any
    """The offload folder."""
    kept: Mapping[str, torch.Tensor] | None
    """Weights by name. A weight that is in memory is used even if the index has it too.

    Set to None once the weights are used, so that the hook does not keep them alive: after the offload is undone, the model
    itself has them.
    """
    device: Any
    """Where the model runs; None for the CPU."""
    options: _StreamOptions
    """Options of :func:`enable`."""
    on_cpu: Sequence[str] = ()
    """Names of the weights that may stay in memory."""

    def __post_init__(self) -> None:
        self.execution_device = torch.device("cpu" if self.device is None else self.device)  # transformers reads it
        self._streaming: Streaming | None = None

    def attach(self, model: nn.Module) -> nn.Module:
        """Stream the model, set this hook on it, and return it."""
        self._in_memory = not any(weight.is_meta for weight in weights_by_name(model).values())
        try:
            self.init_hook(model)
            model._hf_hook = self  # type: ignore[assignment]  # only now, so that accelerate's own hooks stay if ours fails
        except BaseException:
            self.detach_hook(model)
            raise
        return model

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Stream the model. Raises RuntimeError when accelerate has undone that, and calls it again for another hook."""
        if self.kept is None:
            raise RuntimeError("a streamed model takes no other hook, and its offload is undone now: load or offload it again")
        self._streaming = self._offload(module)
        module.streaming = self._streaming  # type: ignore[assignment]  # it is neither a module nor a tensor
        return module

    def _offload(self, model: nn.Module) -> Streaming:
        """Build or open the store, and start streaming the model from it."""
        in_memory = {name: weight for name, weight in (self.kept or {}).items() if not weight.is_meta}
        index, self.kept = self.index, None
        if hasattr(model, "_get_dtype_plan"):  # a model of transformers
            index = with_dtypes_kept(model, index)
        if callable(tie := getattr(model, "tie_weights", None)):
            tie()  # code that set weights one by one has separated tied ones
        weights = weights_by_name(model)
        ties = find_ties(weights)
        known = {ties.get(name, name) for name in (*index, *in_memory) if name in weights or name in in_memory}
        absent = [name for name in weights if ties.get(name, name) not in known]
        if absent:
            raise ValueError(f"weights are on the meta device, and '{self.folder}' does not have them: {shorten(absent)}")
        where = [Path(self.folder) / STORE]
        origin = _origin(index, self.folder, in_memory)
        on_disk = {name: entry for name, entry in index.items() if name in weights and name not in in_memory}

        def build(_: Path) -> WeightStore:
            source = {**weights_in_index(on_disk, self.folder), **in_memory}
            return WeightStore.build(source, where, model=model, origin=json.dumps(origin), aio_config=self.options.aio_config)

        store = opened_or_built(where, origin, build, self.options.aio_config)
        try:
            names = {ties.get(name, name) for name in self.on_cpu}
            extents = [extent for extent in store.extents.values() if extent.name != UNBLOCKED_EXTENT]
            staying = sum(each.nbytes for each in extents if all(weight.name in names for weight in each.weights))
            _remove_hooks(model)
            options = self.options
            return Streaming(
                model, store, options.prefetch, options.memory_budget, self.device, owns_store=True, least_budget=staying
            )
        except BaseException:
            if streaming_of(model) is None:  # otherwise undoing the offload closes the store
                store.close()
            raise

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a forward call unchanged."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Return the output of a forward call unchanged."""
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """End streaming, and close the store. Returns the model. Blocks.

        If all weights were in memory before, they are read back, and require grad if they did. Otherwise the blocks' weights are
        lost: load the model again. If reading raises OSError, the model is still streamed and keeps this hook.
        """
        streaming = self._streaming or streaming_of(module)  # the latter if init_hook was interrupted
        if streaming is not None:
            streaming.close(restore=self._in_memory)
            module.__dict__.pop("streaming", None)
            self._streaming = None
        return module


def _remove_hooks(model: nn.Module) -> None:
    """Remove accelerate's own hooks from a model that accelerate has offloaded. Its weights stay on the meta device."""
    from accelerate.hooks import remove_hook_from_module

    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        if hook is None:
            continue
        for each in getattr(hook, "hooks", (hook,)):
            getattr(each, "original_devices", {}).clear()  # otherwise detaching reads the weights back to these devices
        remove_hook_from_module(module)


def _origin(index: Mapping[str, Any], folder: Any, in_memory: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return facts that identify the weights, to check whether an existing store was built from the same weights.

    The facts are size and modification time of a checkpoint's files, and checksums of the weights ``in_memory``. Files in the
    offload folder are checksummed as well, because they are rewritten, with a new time, whenever a model is loaded.
    """
    facts: dict[str, Any] = {}
    for name, entry in index.items():
        if name in in_memory:
            continue
        file = os.fspath(entry.get("safetensors_file") or os.path.join(folder, f"{name}.dat"))
        key = os.path.basename(file)
        if key not in facts:
            status = os.stat(file)
            own = Path(file).resolve().parent == Path(folder).resolve()
            facts[key] = [status.st_size, _crc32(file) if own else status.st_mtime_ns]
    return facts | {name: crc32(memory_of(weight.detach().cpu().contiguous())) for name, weight in in_memory.items()}


def _crc32(path: str) -> int:
    """Return the CRC-32 of a file's bytes. The file is read in parts of 1 MiB."""
    crc = 0
    with open_regular(path) as file:
        while part := file.read(1 << 20):
            crc = crc32(part, crc)
    return crc


def _index_in(folder: Any) -> Mapping[str, Any]:
    """Return the offload index that accelerate wrote to the folder; an empty one if there is none."""
    with contextlib.suppress(FileNotFoundError):
        return read_offload_index(Path(folder, "index.json"))
    return {}


def _device_of(name: str, device_map: Mapping[str, Any]) -> str:
    """Return the device that the map gives for a weight, or for the innermost of its modules that is in the map."""
    while name and name not in device_map:
        name = name.rpartition(".")[0]
    return str(device_map.get(name))


def _options() -> _StreamOptions | None:
    """Return the options of :func:`enable`; None if not enabled, or while ``locating_weights`` is set."""
    return None if locating_weights.get() else _enabled


def _is_buffer_in_memory(weight: torch.Tensor) -> bool:
    """Return whether a tensor is a buffer in memory, since accelerate loads buffers there and never reads them from disk."""
    return not isinstance(weight, nn.Parameter) and not weight.is_meta


_OURS: dict[str, Callable[..., nn.Module]] = {"disk_offload": disk_offload, "dispatch_model": dispatch_model}
"""This module's replacements of accelerate's functions, by name."""


def _replace(functions: Mapping[str, Callable[..., Any]], others: Mapping[str, Callable[..., Any]]) -> None:
    """Replace each of the functions by the function of the same name in ``others``, in all imported modules that have it."""
    for path in ("accelerate", "accelerate.big_modeling", "transformers.integrations.accelerate"):
        module = sys.modules.get(path)
        for name, function in functions.items():
            if getattr(module, name, None) is function:
                setattr(module, name, others[name])
