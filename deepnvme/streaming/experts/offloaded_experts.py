"""Experts on demand: after the router, the chosen experts of a mixture are read from the checkpoint's files."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from deepnvme._interrupts import defer_interrupts
from deepnvme.cache.block import State
from deepnvme.checkpoint.file_io import Version
from deepnvme.drives.profiles import engine_for
from deepnvme.memory.alignment import padded
from deepnvme.memory.budget import MemoryBudget, budget_bytes
from deepnvme.memory.host import trim_heap
from deepnvme.model.weight_differences import WeightInfo
from deepnvme.streaming.placeholder import RESTORE, Placeholder
from deepnvme.streaming.replaced_forward import ReplacedForward, check_process
from deepnvme.telemetry.descriptions import representation, size_for_people, state_text

from .expert_cache import HALF_LIFE, ExpertCache, note_uses
from .expert_files import Checkpoint, places_in, slices_in
from .expert_layers import ExpertLayer, expert_layers
from .expert_reader import ExpertBlock, ExpertReader
from .experts_report import ExpertsReport, LayerUses, most_used_bytes
from .unread_experts import UnreadExperts, UnreadWeight

if TYPE_CHECKING:
    from deepnvme.drives.aio_config import AioConfig

_IN_FLIGHT_BYTES = 32 << 20
"""Most bytes that each of a drive's workers reads at a time. So experts arrive one after the other, and the first can compute."""


def offload_experts(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    *,
    memory_budget: MemoryBudget = "auto",
    modules: Sequence[str] | None = None,
    device: torch.device | str | None = None,
    aio_config: AioConfig | None = None,
) -> OffloadedExperts:
    """Read the experts of a mixture from its checkpoint when tokens have chosen them, and keep in memory those used most.

    >>> with deepnvme.streaming.offload_experts(model, "checkpoint/", memory_budget="4GB") as experts, torch.inference_mode():
    ...     model.generate(input_ids)
    ...     print(experts.report())

    The experts' weights in the model are replaced by placeholders. A call of a layer reads each chosen expert that is not in
    memory once, for all tokens that chose it, in the order in which experts are computed; the next is read while one computes.
    Weights of other modules stay as they are: in memory, or streamed if :func:`stream` is called afterwards. No file is written.

    On the CPU, the model's results are bit-identical to those with all weights in memory, whichever of transformers'
    implementations of experts the model has: eager, grouped_mm or batched_mm. On a CUDA device grouped_mm may round otherwise, as
    the experts are multiplied one by one, and not by CUDA's kernel for groups. Calls from several threads take turns, layer by
    layer. Experts get no gradients, but gradients flow to their inputs, so that adapters of other modules (LoRA) can be trained.
    With grouped_mm, the backward reads the experts again; otherwise, weights that were used stay in memory until the backward: a
    ``memory_budget`` that is too small for those is an OutOfBuffers in the forward.

    Args:
        model: A module on the CPU, a CUDA device or the meta device. The weights of its experts are released.
        checkpoint: Path of the checkpoint of this model, as for :meth:`WeightStore.build`. The files must not change until
            :meth:`OffloadedExperts.close`.
        memory_budget: Most bytes of experts in memory, or "8GB", "50%", "auto", see :data:`deepnvme.memory.MemoryBudget`. A
            smaller budget than two weights of an expert is raised to that: one weight is used while the other is read.
        modules: Names of the modules that have experts, or patterns such as "model.layers.*.mlp.experts", in which ``*`` stands
            for one part of a name. A module with parameters of 3 dimensions has packed experts: it indexes them by number. Any
            other module is one expert. None: all modules that transformers calls experts, and children of lists named "experts".
        device: Where the model computes; None for the device of its weights, or the CPU if they are on the meta device.
        aio_config: Settings of the engine; None for the profile of the drive, see :func:`deepnvme.engine_for`.

    Returns:
        A context manager that ends the offload, see :meth:`OffloadedExperts.close`.

    Raises:
        ValueError: If the model has no such modules; or if the checkpoint has the experts in a form that has to be converted,
            such as quantised; but experts in FP8 with scales are dequantised for each use.
        WeightMismatch: If the checkpoint lacks experts of the model, or has them in another shape.
        CorruptCheckpoint: If a file is damaged, or ends before an expert does.
        RuntimeError: If the model's experts are offloaded or streamed already.
        OSError: If a file cannot be opened.
    """
    return OffloadedExperts(model, checkpoint, memory_budget, modules, device, aio_config)


class OffloadedExperts(contextlib.AbstractContextManager["OffloadedExperts"]):
    """The experts of a model that are read on demand: reports on them, and ends the offload. Made by :func:`offload_experts`.

    As a context manager it calls :meth:`close` on exit. Thread-safe.

    The arguments are those of :func:`offload_experts`, but ``checkpoint`` may also be a mapping of the names in the model to
    places in files. ``versions`` are then those of the files, by path, from before the headers were read; None: those of now.
    """

    def __init__(
        self,
        model: nn.Module,
        checkpoint: Checkpoint,
        memory_budget: MemoryBudget,
        modules: Sequence[str] | None,
        device: torch.device | str | None,
        aio_config: AioConfig | None,
        versions: Mapping[str, Version] | None = None,
    ) -> None:
        budget = budget_bytes(memory_budget, "memory_budget")
        self._model, self._process = type(model).__name__, os.getpid()
        self._device = None if device is None else torch.device(device)
        self._layers = expert_layers(model, modules)
        _check_in_module(self._layers)
        numbers = {name: layer.number for layer in self._layers for name in layer.weights}
        places, current = places_in(model, checkpoint, numbers)
        slices = slices_in(model, places, numbers)
        self._blocks = {name: [ExpertBlock(part) for part in parts] for name, parts in slices.items()}
        blocks = list(itertools.chain.from_iterable(self._blocks.values()))
        paths = {each.path for block in blocks for each in (*block.part.ranges, *block.part.scale_ranges)}
        self._lock = threading.RLock()
        self._running = 0  # identifier of the thread in whose call of a layer experts are read; 0 if there is none
        self._ended = self._restored = self._trimmed = False
        self._tokens: Counter[str] = Counter()  # by mixture; of experts that are modules, how often one was called once more
        self._called_once: dict[str, set[str]] = {layer.mixture: set() for layer in self._layers}
        self._requires_grad = {name for layer in self._layers for name, weight in layer.tensors() if weight.requires_grad}
        with contextlib.ExitStack() as undo:
            self._engine = engine_for(paths, aio_config, _IN_FLIGHT_BYTES)
            undo.callback(self._engine.close)
            self._reader = ExpertReader(self._engine, [block.part for block in blocks], versions or current)
            undo.callback(self._reader.close)
            self.set_memory_budget(budget)
            self.reset()
            self._replace_all(undo)

    def __repr__(self) -> str:
        return representation(
            self,
            lambda: f"of {self._model}",
            lambda: f"memory_budget={size_for_people(self._budget)}",
            lambda: state_text(self._ended, self._process),
        )

    def report(self) -> ExpertsReport:
        """Return the counters since the experts were offloaded or last :meth:`reset`.

        Waits until a call of a layer in another thread has ended.
        """
        with self._lock:
            uses = [
                (count, sum(self._blocks[name][expert].nbytes for name in layer.weights))
                for layer in self._layers
                for expert, count in self._experts_used[layer.name].items()
            ]
            chosen: Counter[str] = Counter()
            for layer in self._layers:
                chosen[layer.mixture] += self._experts_used[layer.name].total()
            packed = [layer.mixture for layer in self._layers if layer.number is None]
            return ExpertsReport(
                layers={name: LayerUses(count, self._hits[name]) for name, count in chosen.items()},
                tokens=max((self._tokens[name] - self._tokens_before[name] for name in packed), default=0),
                bytes_read=self._reader.bytes_read - self._read_before,
                bytes_missed=self._missed,
                seconds=self._seconds,
                seconds_reading=self._reader.seconds_reading - self._reading_before,
                seconds_waited=self._cache.seconds_waited - self._waited_before,
                memory_budget=self._budget,
                budget_for_90_percent=most_used_bytes(uses, 0.9),
            )

    def reset(self) -> None:
        """Set the report's counters to zero. Waits until a call of a layer in another thread has ended."""
        with self._lock:
            self._experts_used: dict[str, Counter[int]] = {layer.name: Counter() for layer in self._layers}
            self._hits: Counter[str] = Counter()  # by mixture
            self._missed = 0
            self._seconds = 0.0
            self._tokens_before = self._tokens.copy()
            self._read_before, self._waited_before = self._reader.bytes_read, self._cache.seconds_waited
            self._reading_before = self._reader.seconds_reading

    def set_memory_budget(self, nbytes: int) -> None:
        """Set the most bytes of experts in memory: at least two parts of experts, at most all.

        Raises:
            RuntimeError: If experts have been read already.
        """
        if self._reader.bytes_read:
            raise RuntimeError("the memory budget of experts can only be set before experts are read")
        sizes = [block.nbytes for blocks in self._blocks.values() for block in blocks]
        self._budget = min(max(nbytes, 2 * max(sizes)), sum(sizes))
        self._cache = ExpertCache(self._reader, padded(self._budget))

    def close(self, restore: bool = False) -> None:
        """End the offload: release the memory, close the files, and restore the modules' forwards. Idempotent.

        Waits for a call of a layer in another thread and for reads in flight. If reading fails or is interrupted, the experts
        are still offloaded.

        Args:
            restore: False leaves placeholders for the experts' weights. True reads all experts into newly allocated memory, which
                has to be large enough, and leaves the model as if its experts had never been offloaded.

        Raises:
            RuntimeError: If called within a forward of a layer; or with ``restore`` after a close without it.
            OSError: If reading fails.
        """
        if self._running == threading.get_ident():
            raise RuntimeError("close() within the forward of a layer: its experts are in use")
        with self._lock:
            if self._ended:
                if restore and not self._restored:
                    raise RuntimeError("the experts were closed without restore, and are no longer read: load the model again")
                return
            whole = {name: self._whole(layer, name) for layer in self._layers for name in layer.weights} if restore else {}
            self._cache.close()
            with defer_interrupts(), contextlib.ExitStack() as closing:
                closing.callback(self._engine.close)
                closing.callback(self._reader.close)
                self._ended, self._restored = True, restore
                for layer in self._layers:
                    layer.unwrap()
                    for name, weight in whole.items():
                        if name in layer.weights:
                            layer.put(name, nn.Parameter(weight, requires_grad=name in self._requires_grad))

    def __exit__(self, *_: object) -> None:
        self.close()

    def _replace_all(self, undo: contextlib.ExitStack) -> None:
        """Replace the layers' weights and forwards, or none of them if an interrupt comes. Empties ``undo`` after success."""
        with defer_interrupts() as interrupts:
            for layer in self._layers:
                for name, weight in layer.tensors():
                    undo.callback(layer.put, name, weight)
                self._replace(layer)
                undo.callback(layer.unwrap)
            if not interrupts:
                undo.pop_all()

    def _replace(self, layer: ExpertLayer) -> None:
        """Replace a layer's weights by placeholders, and its forward by one that reads experts."""
        for name, weight in layer.tensors():
            device = self._device or (torch.device("cpu") if weight.is_meta else weight.device)
            info, read = WeightInfo.of(weight), functools.partial(self._read, layer, name)
            if layer.number is None:
                is_read = functools.partial(self._is_read, name)
                layer.put(name, UnreadExperts.make(name, layer.name, info, device, read, is_read))
            else:
                layer.put(name, UnreadWeight.make(name, layer.name, info, device, functools.partial(read, 0)))
        layer.wrap(ReplacedForward(self._called, layer.module.forward, functools.partial(self._run, layer)))

    def _called(self, call: Callable[[], Any]) -> Any:
        """Run the forward of a layer, one at a time. Raises RuntimeError if the offload has ended, or in a forked child."""
        check_process(self._process)
        with self._lock:
            if self._ended:
                raise RuntimeError("the experts of this model are not read any more: their OffloadedExperts was closed")
            if not self._trimmed:
                trim_heap()  # not before: an interrupt meanwhile would leave placeholders that nobody can replace
                self._trimmed = True
            began = time.perf_counter()
            try:
                self._running = threading.get_ident()
                return call()
            finally:
                self._running = 0
                self._seconds += time.perf_counter() - began

    def _run(self, layer: ExpertLayer, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the forward of a layer, after starting to read the experts that its arguments choose."""
        chosen, tokens = layer.chosen(args, kwargs)
        with torch._C._DisableFuncTorch():
            self._note(layer, chosen, tokens)
            self._cache.end_use()  # of a call that was interrupted
            self._cache.expect([self._blocks[name][expert] for name, expert in layer.order(list(chosen))])
        try:
            return forward(*args, **kwargs)
        finally:
            self._cache.end_use()
            self._cache.expect(())

    def _note(self, layer: ExpertLayer, chosen: Mapping[int, int], tokens: int) -> None:
        """Count the uses of experts, and make the chosen ones more worth keeping."""
        if layer.number is not None:  # a token does not call an expert twice, and the next one probably calls one of its experts
            called = self._called_once[layer.mixture]
            tokens = int(layer.name in called)
            if tokens:
                called.clear()
            called.add(layer.name)
        self._tokens[layer.mixture] += tokens
        now = self._tokens[layer.mixture]
        self._experts_used[layer.name].update(chosen.keys())
        for expert, uses in chosen.items():
            blocks = [self._blocks[name][expert] for name in layer.weights]
            missed = [block.part.info.nbytes for block in blocks if not block.in_memory]
            self._hits[layer.mixture] += not missed
            self._missed += sum(missed)
            note_uses(dict.fromkeys(blocks, uses * min(1, HALF_LIFE / max(tokens, 1))), now)  # a long prompt counts as its end

    def _read(self, layer: ExpertLayer, name: str, number: int) -> torch.Tensor:
        """Return an expert's weight, within a call of its layer, or the backward of one."""
        if self._running == threading.get_ident():
            return self._cache.weight(self._blocks[name][number])
        if torch._C._current_graph_task_id() < 0:  # no backward either
            raise RuntimeError(
                f"{name!r} has experts that are read in the forward of {layer.name!r}: use them there, or {RESTORE}"
            )
        # A copy: as soon as the call has ended, a forward in another thread may read other experts into the same memory.
        return cast(torch.Tensor, self._called(lambda: self._cache.weight(self._blocks[name][number]).clone()))

    def _is_read(self, name: str, number: int) -> bool:
        """Return whether an expert's weight is in memory."""
        return self._blocks[name][number].state is State.CLEAN

    def _whole(self, layer: ExpertLayer, name: str) -> torch.Tensor:
        """Read a whole weight into new memory. Blocks."""
        placeholder: Placeholder = layer.tensor(name)
        blocks = self._blocks[name]
        with torch.inference_mode(False), torch.no_grad():
            whole = torch.empty(placeholder.shape, dtype=placeholder.dtype, device=placeholder.device)
            places: Iterator[torch.Tensor] = iter(whole) if layer.number is None else iter([whole])
            self._cache.expect(blocks)
            for block, place in zip(blocks, places, strict=True):
                place.copy_(self._cache.weight(block))
            self._cache.end_use()
        return whole


def _check_in_module(layers: Sequence[ExpertLayer]) -> None:
    """Raise RuntimeError if the weights of experts are not in the modules, but streamed or offloaded already."""
    for layer in layers:
        for name, weight in layer.tensors():
            if isinstance(weight, Placeholder):
                raise RuntimeError(
                    f"{name!r} is streamed or offloaded already: close() that first; to stream others, stream last"
                )
