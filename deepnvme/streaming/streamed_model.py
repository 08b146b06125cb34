"""Weight streaming: a model's weights are read from the drive shortly before the forward of the block that uses them."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from deepnvme._interrupts import defer_interrupts
from deepnvme.memory.budget import MemoryBudget, budget_bytes, is_automatic
from deepnvme.memory.host import trim_heap
from deepnvme.memory.system_memory import available_memory
from deepnvme.model.structure import UNBLOCKED_EXTENT
from deepnvme.model.weight_differences import WeightMismatch
from deepnvme.telemetry.descriptions import representation, size_for_people, state_text
from deepnvme.telemetry.sizes import ByteCount

from .experts.offloaded_experts import OffloadedExperts
from .extent_cache import ExtentCache
from .extent_memory import PinnedSlots, Slots
from .extent_reader import ExtentReader
from .module_weights import ModuleWeights
from .replaced_forward import FIRST
from .resident_weights import residents
from .stream_report import StreamReport
from .streamed_forwards import StreamedForward, StreamedForwards
from .table_weights import MIN_TABLE_BYTES, OffloadedTables
from .weights.checkpoint_weights import CheckpointWeights, located_in
from .weights.extent_store import ExtentStore

if TYPE_CHECKING:
    from deepnvme.drives.aio_config import AioConfig
    from deepnvme.tables.table import Table


def stream(
    model: nn.Module,
    store: ExtentStore | str | os.PathLike[str],
    *,
    prefetch: int = 2,
    memory_budget: MemoryBudget = 0,
    min_table_bytes: ByteCount | None = MIN_TABLE_BYTES,
    device: torch.device | str | None = None,
    aio_config: AioConfig | None = None,
) -> Streaming:
    """Read a model's weights from the drive while it runs, and keep them in memory only while its blocks use them.

    >>> with deepnvme.streaming.stream(model, "checkpoint/", memory_budget="4GB") as streaming, torch.inference_mode():
    ...     model(input_ids)
    ...     print(streaming.report())

    The model's results are bit-identical to those with all weights in memory: in its own forward, in ``generate``, and wherever
    its blocks are called. For a checkpoint, this is the model whose weights were loaded in place (safetensors' ``load_file`` with
    ``load_state_dict(assign=True)``, transformers' ``from_pretrained``): in float32, weights elsewhere in memory may give other
    last bits, because kernels depend on alignment. The blocks are the modules for which the store was built; for a checkpoint,
    those that :func:`deepnvme.model.structure.structure_of` finds. Outside the forward of its block, a weight is a placeholder
    with a shape and a dtype but no data; an operation that needs the data raises RuntimeError.
    Weights in no block are read before this function returns, and stay in memory.

    Gradients flow to the inputs; weights get none. Calls from several threads run one after the other. If a forward makes other
    threads call the model's blocks, and waits for them, it deadlocks.

    Args:
        model: A module on the CPU or the meta device. Its own weight tensors are released.
        store: The store of this model's weights; or a checkpoint, whose weights are read from the checkpoint's own files:
            a .safetensors file, a .pt file that torch.save wrote of a state_dict, the index.json of several such files, or the
            directory that they are in. Nothing is written then. The files must not change until the stream ends: a read of a
            file that was changed raises CorruptCheckpoint. Floating-point weights of another dtype are converted to the
            model's as they are read, FP8 weights with their scales. Experts that :func:`offload_experts` reads are left out.
        prefetch: Number of extents (units of reading) that are read ahead, 0 or more. Memory is allocated for ``prefetch + 1``
            extents of the largest size; smaller extents are read further ahead into it.
        memory_budget: Bytes of weights, beside the memory for reading ahead, that stay in memory once they have been read. They
            are chosen so that a pass reads as little as possible. Or "8GB", "50%", "auto", see
            :data:`deepnvme.memory.MemoryBudget`: a share of host memory, or of the memory of the CUDA device on which the model
            computes. "auto" keeps no weights if that is too little for the smallest extent.
        min_table_bytes: For a checkpoint: of an ``nn.Embedding`` (or a subclass) with at least so many bytes, only the rows are
            read that ids look up, in each lookup; or a size such as "1GB". Beside the budget, such tables take up to 112 MiB of
            memory together. An embedding whose weight another module has too, such as a tied output layer, or with
            ``max_norm``, is streamed as a whole. None to stream all as a whole, as from a store, with which any other value than
            the default raises ValueError.
        device: Where the model computes; the CPU if None. Inputs have to be there. The model's buffers are moved there.
        aio_config: Settings of the engine that reads a checkpoint; None for the profile of the drive, see
            :func:`deepnvme.engine_for`. A store has its own engine.

    Returns:
        The stream: a context manager that ends it, see :meth:`Streaming.close`. If an interrupt (Ctrl-C) comes after the model's
        own weights were released, the stream stays open, and :func:`streaming_of` returns it.

    Raises:
        WeightMismatch: If model and store differ; the message names the differences.
        ValueError: If ``prefetch`` or ``memory_budget`` is negative, ``memory_budget`` is not 0 and smaller than the smallest
            extent, ``device`` is neither a CPU nor a CUDA device, or a buffer that no store holds (a non-persistent one) is on
            the meta device; or if ``aio_config`` or ``min_table_bytes`` is given with a store.
        RuntimeError: If the model is streamed already.
        CorruptCheckpoint: If the checkpoint is damaged, lacks a tensor that its index lists, or has FP8 weights without scales
            that fit.
        OSError: If reading fails.
    """
    if isinstance(store, ExtentStore):
        if aio_config is not None:
            raise ValueError("aio_config is for a checkpoint: a store is opened with settings of its own")
        check_no_table_bytes(min_table_bytes)
        return Streaming(model, store, prefetch, memory_budget, device)
    check_not_streamed(model)
    weights, versions = located_in(store, model)
    with contextlib.ExitStack() as undo:
        tables = OffloadedTables(model, weights, versions, min_table_bytes, device, aio_config)
        undo.callback(_close_unless_streamed, model, tables)
        streamed = {name: place for name, place in weights.items() if name not in tables.names}
        with _hint_for_transformers(model):
            files = CheckpointWeights(streamed, versions, model, device, aio_config)
        undo.callback(_close_unless_streamed, model, files)
        made = Streaming(model, files, prefetch, memory_budget, device, owns_store=True, tables=tables)
    return made


def check_no_table_bytes(min_table_bytes: ByteCount | None) -> None:
    """Raise ValueError if ``min_table_bytes`` is given with a store, from which embeddings are streamed as a whole."""
    if min_table_bytes not in (None, MIN_TABLE_BYTES):
        text = "min_table_bytes is for a checkpoint: a store has embeddings as a whole"
        raise ValueError(f"{text}; leave it out, got {min_table_bytes!r}")


@contextlib.contextmanager
def _hint_for_transformers(model: nn.Module) -> Iterator[None]:
    """Add to the text of a WeightMismatch what to call instead, if the model is one of transformers."""
    try:
        yield
    except WeightMismatch as error:
        transformers = sys.modules.get("transformers")
        if transformers is not None and isinstance(model, transformers.PreTrainedModel):
            text = "transformers may rename or merge weights while it loads them"
            error.args = (f"{error}\n{text}: deepnvme.streaming.from_pretrained(checkpoint) does so and streams the model",)
        raise


def streaming_of(model: nn.Module) -> Streaming | None:
    """Return the :class:`Streaming` that :func:`stream` made of a model or of one of its submodules; None if there is none."""
    forwards = (module.__dict__.get("forward") for module in model.modules())
    return next((forward.streaming for forward in forwards if isinstance(forward, StreamedForward)), None)


def check_not_streamed(model: nn.Module) -> None:
    """Raise RuntimeError if the model is streamed already."""
    if streaming_of(model) is not None:
        kind = type(model).__name__
        raise RuntimeError(f"this {kind} is streamed already: close() that stream, deepnvme.streaming.streaming_of(model), first")


def _close_unless_streamed(model: nn.Module, resource: OffloadedTables | CheckpointWeights) -> None:
    """Close what the stream of a model would own, if there is no such stream: it failed, or was interrupted, before it began."""
    if streaming_of(model) is None:
        resource.close()


def end_stream_of(model: nn.Module) -> None:
    """Close the stream of a model, if there is one: an interrupt may come between the making of a stream and its return."""
    streamed = streaming_of(model)
    if streamed is not None:
        streamed.close()


class Streaming(contextlib.AbstractContextManager["Streaming"]):
    """A model's active weight stream: reports on it, and ends it. Made by :func:`stream`.

    As a context manager it calls :meth:`close` on exit. Thread-safe.

    The arguments are those of :func:`stream`, and more for functions that open the store themselves and return only the
    model. ``owns_store``: whether :meth:`close` also closes the store. ``least_budget``: lower bound of the budget, in bytes.
    ``experts``: the model's experts, if they are read on demand. ``tables``: its embeddings that are read by rows. :meth:`close`
    ends these too.
    """

    def __init__(
        self,
        model: nn.Module,
        store: ExtentStore,
        prefetch: int,
        memory_budget: MemoryBudget,
        device: torch.device | str | None,
        owns_store: bool = False,
        least_budget: int = 0,
        experts: OffloadedExperts | None = None,
        tables: OffloadedTables | None = None,
    ) -> None:
        device = torch.device("cpu" if device is None else device)
        budget = budget_on(device, memory_budget)
        if prefetch < 0:
            raise ValueError(f"prefetch must not be negative, got {prefetch}")
        check_not_streamed(model)
        store.check(model)
        self._store = store
        self.experts = experts
        """The model's experts that are read on demand; None if there are none."""
        self._tables = tables
        self.tables: Mapping[str, Table] = {} if tables is None else dict(tables.tables)
        """The model's embeddings that are read by rows, by the name of the weight. ``tables[name].stats()`` has the counters."""
        self._model, self._process = type(model).__name__, os.getpid()
        self._reader, slots_of = _on(device, store, prefetch)
        sizes = {name: self._reader.nbytes(name) for name in store.extents if name != UNBLOCKED_EXTENT}
        if is_automatic(memory_budget) and budget < min(sizes.values(), default=0):
            budget = 0
        budget = max(budget, least_budget)
        smallest = min(sizes.values(), default=0)
        if 0 < budget < smallest:
            left_out = "" if experts is None else " without the experts, which get memory only beyond that"
            raise ValueError(
                f"memory_budget must hold an extent, the smallest of which has {smallest} bytes (the largest has"
                f" {max(sizes.values())}, all {sum(sizes.values())}{left_out}), or be 0; got {budget}"
            )
        self._memory_budget = budget
        chosen = residents(sizes, budget)
        streamed = [nbytes for name, nbytes in sizes.items() if name not in chosen]
        self._slots = slots_of(min((prefetch + 1) * max(streamed, default=0), sum(streamed)))
        stored = {name: extent.nbytes for name, extent in store.extents.items()}
        self._cache = ExtentCache(self._reader.read, sizes, self._slots, chosen, stored)
        self._weights = ModuleWeights(model, store, self._reader.extents, device)
        self._forwards = StreamedForwards(store, self._cache, self._weights)
        self._ended = self._restored = False
        self.owns_store = owns_store
        own: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (among, dict(among)) for module in model.modules() for among in (module._parameters, module._buffers)
        ]
        try:
            _move_buffers(model, device)
            if UNBLOCKED_EXTENT in store.extents:
                self._weights.put(UNBLOCKED_EXTENT, self._read(UNBLOCKED_EXTENT))
            for extent in sizes:
                self._weights.remove(extent)
            self._forwards.wrap(model, self)
        except BaseException:  # leave the model as it was
            self._forwards.unwrap()
            for among, tensors in own:
                among.update(tensors)
            self._reader.close()
            raise
        own.clear()  # from here on, an interrupt leaves the stream open, for streaming_of to find
        if tables is not None:
            tables.keep()
        trim_heap()  # glibc keeps the holes that the weights leave when freed all at once (176 of 268 MB, measured)
        self._forwards.read_ahead()

    def __repr__(self) -> str:
        return representation(
            self,
            lambda: f"of {self._model} from {self._store!r}",
            lambda: f"memory_budget={size_for_people(self._memory_budget)}",
            lambda: state_text(self._ended, self._process),
        )

    def report(self) -> StreamReport:
        """Return the counters since the stream was made or last :meth:`reset`.

        Waits until a call of the model in another thread has ended.
        """
        return self._forwards.report()

    def reset(self) -> None:
        """Set the report's counters to zero. Waits until a call of the model in another thread has ended."""
        self._forwards.reset()

    def close(self, restore: bool = False) -> None:
        """End the stream: release its memory, and restore the modules' original forwards. Idempotent.

        Waits for a call of the model in another thread and for reads in flight. A store stays open,
        unless :func:`from_pretrained` or accelerate's offload opened it. Files of a checkpoint are closed.

        If an interrupt (Ctrl-C) or an error occurs while weights are read or a call is waited for, the model is still streamed.

        Args:
            restore: False leaves the weights of blocks as placeholders; weights in no block stay in memory. True reads all
                weights into newly allocated memory, which has to be large enough, and leaves the model as if it had never been
                streamed.

        Raises:
            RuntimeError: If called within a forward of the model; or with ``restore`` after a close without it, also one of the
                model's experts.
            OSError: If reading fails. The model is still streamed then.
        """
        self._forwards.check_not_in_forward("close()")
        with self._forwards.lock:
            if self._ended:
                if restore and not self._restored:
                    raise RuntimeError("the stream was closed without restore: load the model again")
                return
            if restore and self.experts is not None:
                self.experts.close(restore)
            self._cache.expect(())
            memories = {name: self._read(name) for name in self._store.extents if restore and name != UNBLOCKED_EXTENT}
            whole = self._tables.read_whole() if restore and self._tables is not None else None
            self._cache.drain()
            with defer_interrupts(), contextlib.ExitStack() as closing:
                if self.owns_store:
                    closing.callback(self._store.close)
                if self._tables is not None:
                    closing.callback(self._tables.close, whole)
                closing.callback(self._reader.close)
                closing.callback(self._cache.close)
                if self.experts is not None:
                    closing.callback(self.experts.close)
                self._ended, self._restored = True, restore
                self._forwards.unwrap()
                for name in self._store.extents:
                    if restore:
                        self._weights.restore(name, memories.get(name))
                    elif name != UNBLOCKED_EXTENT:
                        self._weights.remove(name)

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a model whose stream has ended has None in place of the stream. Raises RuntimeError while it is streamed."""
        if not self._ended:
            raise RuntimeError(f"a model whose weights are streamed cannot be copied or pickled: {FIRST}")
        return type(None), ()

    def _read(self, extent: str) -> torch.Tensor:
        """Read an extent into newly allocated memory. Blocks."""
        memory = self._slots.memory(self._reader.nbytes(extent))
        error = self._reader.read(extent, memory).exception()
        if error is not None:
            raise error
        return memory


def budget_on(device: torch.device, memory_budget: MemoryBudget) -> int:
    """Return the bytes of a budget for weights on a device. A share refers to the memory that is available there."""
    return budget_bytes(memory_budget, "memory_budget", functools.partial(_available_on, device))


def _available_on(device: torch.device) -> int:
    """Return the bytes of available memory on a device: free memory of a CUDA device, otherwise available host memory."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move the non-persistent buffers, which no store holds, to a device. Raises ValueError if one is on the meta device."""
    for name, module in model.named_modules():
        for key in module._non_persistent_buffers_set:
            buffer = module._buffers.get(key)
            if buffer is not None and buffer.is_meta:
                raise ValueError(
                    f"the buffer '{name}.{key}' is on the meta device, and no store has it, since it is not persistent:"
                    " compute it before the model is streamed"
                )
            if buffer is not None:
                module._buffers[key] = buffer.to(device)


def _on(device: torch.device, store: ExtentStore, prefetch: int) -> tuple[ExtentReader, Callable[[int], Slots]]:
    """Return the extent reader for a device, and a function that makes its slots. Raises ValueError unless it is CPU or CUDA."""
    if device.type == "cpu":
        return ExtentReader(store), PinnedSlots
    if device.type == "cuda":
        from .device_extents import DeviceExtentReader, DeviceSlots

        return DeviceExtentReader(store, device, prefetch + 1), functools.partial(DeviceSlots, device)
    raise ValueError(f"device must be a CPU or a CUDA device, got {device}")
