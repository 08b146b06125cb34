"""Weight streaming: a model's weights are read from the drive shortly before the forward of the block that uses them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import nn
from torch._guards import detect_fake_mode

from deepnvme.memory.host import give_back_heap
from deepnvme.memory.pool import OutOfBuffers

from .arriving import ExtentReads
from .fetching import Fetcher
from .module_weights import ModuleWeights
from .order import AccessPredictor
from .residence import residents, saved_bytes
from .slots import PinnedSlots, Slots
from .stream_report import StreamReport, Tally
from .weights.blocks import REST
from .weights.weight_store import WeightStore

_WORTH_IT = 1.1
"""Other resident extents are chosen only if they save this many times the bytes: each new resident has to be read once."""


def stream(
    model: nn.Module,
    store: WeightStore,
    *,
    prefetch: int = 2,
    memory_budget: int = 0,
    device: torch.device | str | None = None,
) -> Streaming:
    """Read a model's weights from ``store`` while it runs, and keep them in memory only while its blocks use them.

    >>> with deepnvme.streaming.stream(model, store, memory_budget=4 << 30) as streaming, torch.inference_mode():
    ...     model(input_ids)
    ...     print(streaming.report())

    The model's results stay bit-identical to those with all weights in memory, in its own forward, in ``generate`` and wherever
    its blocks are called. The blocks are the modules for which the store was built. Outside the forward of its block a weight is
    a placeholder with a shape and a dtype but no data; an operation that needs the data raises RuntimeError. Weights in no block
    are read before this function returns, and stay in memory.

    Gradients flow to the inputs; weights get none. Calls from several threads run one after the other. A forward that makes
    other threads call the model's blocks, and waits for them, deadlocks.

    Args:
        model: A module on the CPU or the meta device. Its own weight tensors are released.
        store: Holds the weights of this model.
        prefetch: Number of extents (units of reading) that are read ahead, 0 or more. Memory is allocated for ``prefetch + 1``
            of the largest extent; more of smaller extents are read ahead into it.
        memory_budget: Bytes of weights, beside the memory for reading ahead, that stay in memory once they have been read. They
            are chosen so that a pass reads as little as possible.
        device: Where the model computes; the CPU if None. Inputs have to be there. The model's buffers are moved there.

    Returns:
        The stream: a context manager that ends it, see :meth:`Streaming.close`.

    Raises:
        StoreMismatch: If model and store differ; the message names the differences.
        ValueError: If ``prefetch`` or ``memory_budget`` is negative, ``memory_budget`` is not 0 and smaller than the smallest
            extent, ``device`` is neither a CPU nor a CUDA device, or a buffer that no store holds (a non-persistent one) is on
            the meta device.
        RuntimeError: If the model is streamed already.
        OSError: If reading fails.
    """
    return Streaming(model, store, prefetch, memory_budget, torch.device("cpu" if device is None else device))


def streaming_of(model: nn.Module) -> Streaming | None:
    """Return the :class:`Streaming` that :func:`stream` made of a model or of one of its submodules; None if there is none."""
    forwards = (module.__dict__.get("forward") for module in model.modules())
    return next((forward.streaming for forward in forwards if isinstance(forward, _Forward)), None)


def check_not_streamed(model: nn.Module) -> None:
    """Raise RuntimeError if the model is streamed already."""
    if streaming_of(model) is not None:
        kind = type(model).__name__
        raise RuntimeError(f"this {kind} is streamed already: close() that stream, deepnvme.streaming.streaming_of(model), first")


class Streaming:
    """A model's active weight stream: reports on it, measures it and ends it. Made by :func:`stream`.

    As a context manager it calls :meth:`close` on exit. Thread-safe.
    """

    def __init__(self, model: nn.Module, store: WeightStore, prefetch: int, memory_budget: int, device: torch.device) -> None:
        if prefetch < 0:
            raise ValueError(f"prefetch must not be negative, got {prefetch}")
        check_not_streamed(model)
        store.check(model)
        self._model, self._store, self._budget = model, store, memory_budget
        self._arrivals, slots_of = _on(device, store, prefetch)
        self._sizes = {name: self._arrivals.nbytes(name) for name in store.extents if name != REST}
        self._check_budget()
        self._uses: Counter[str] = Counter()
        chosen = residents(self._sizes, {}, memory_budget)
        streamed = [nbytes for name, nbytes in self._sizes.items() if name not in chosen]
        self._slot_size = max(streamed, default=0)
        self._slots: Slots = slots_of(min((prefetch + 1) * self._slot_size, sum(streamed)))
        stored = {name: extent.nbytes for name, extent in store.extents.items()}
        self._fetcher = Fetcher(self._arrivals.read, self._sizes, self._slots, chosen, stored)
        self._order = AccessPredictor([extent for extents in store.blocks.values() for extent in extents])
        self._weights = ModuleWeights(model, store, self._arrivals.extents, device)
        self._turn = threading.Lock()
        self._owner = 0  # identifier of the thread that holds _turn; 0 if none does
        self._stack: list[tuple[str, ...]] = []  # the extents of each block whose forward is running, innermost last
        self._in_use: dict[str, None] = {}  # extents between Fetcher.take and give_back, in the order of taking
        self._there: set[str] = set()  # resident extents whose weights are assigned to the model's modules
        self._restored: _Restored | None = None  # None until close()
        self._ended = False
        self.owns_store = False
        """Whether :meth:`close` also closes the store. For functions that open the store themselves and return only the model."""
        self._limit: float | None = None
        self._tally = Tally()
        self._wrapped: list[tuple[nn.Module, Any]] = []
        before = _not_persistent(model)
        try:
            self._read_rest(device)
            for extent in self._sizes:
                self._weights.remove(extent)
            for name, extents in store.blocks.items():
                self._wrap(model.get_submodule(name), functools.partial(self._block, name, extents))
            self._wrap(model, self._root)
        except BaseException:  # leave the model as it was
            self._unwrap()
            self._weights.undo()
            for buffers, key, buffer in before:
                buffers[key] = buffer
            self._arrivals.close()
            raise
        self._weights.forget_own()
        give_back_heap()  # glibc keeps the holes that the weights leave when freed all at once (176 of 268 MB, measured)
        self._fetcher.expect(self._order.predict())

    # Public methods.

    def report(self) -> StreamReport:
        """Return the counters since the stream was made or last :meth:`reset`.

        Waits until a call of the model in another thread has ended.
        """
        with self._between_calls():
            tally = self._tally
            return StreamReport(
                passes=tally.passes,
                seconds=tally.seconds,
                bytes_read=self._fetcher.bytes_read - tally.bytes_before,
                stalls=dict(tally.stalls),
                tokens=tally.tokens,
                resident_bytes=sum(nbytes for name, nbytes in self._sizes.items() if self._fetcher.is_resident(name)),
                limit=self._limit,
            )

    def reset(self) -> None:
        """Set the report's counters to zero. Waits until a call of the model in another thread has ended."""
        with self._between_calls():
            self._tally = Tally(bytes_before=self._fetcher.bytes_read, begun=time.perf_counter())

    def measure_limit(self, nbytes: int = 256 << 20) -> float | None:
        """Measure how fast extents can be read if nothing is computed. Later reports give their speed as a share of it.

        Reads the extents that are not resident, in the order in which a pass first needs them. Blocks, and waits until a call of
        the model in another thread has ended.

        Args:
            nbytes: Least number of bytes to read, 1 or more. Less than one extent more is read.

        Returns:
            Bytes per second. None if a pass reads nothing: all extents are resident, or fit into the memory for reading ahead.

        Raises:
            ValueError: If ``nbytes`` is less than 1.
            RuntimeError: If called within a forward of the model, or after :meth:`close`.
            OSError: If reading fails (CorruptExtent for a wrong checksum). Reports keep the limit that was measured before.
        """
        if nbytes < 1:
            raise ValueError(f"nbytes must be at least 1, got {nbytes}")
        self._check_outside("measure_limit()")
        limit: float | None = self._in_turn(self._measured, nbytes)
        return limit

    def close(self, restore: bool | Collection[str] = False) -> None:
        """End the stream: release its memory and give the modules their own forward back. Idempotent.

        Waits for a call of the model in another thread and for reads in flight. The store stays open,
        unless :func:`from_pretrained` opened it (``owns_store``).

        Args:
            restore: False leaves the weights of blocks as placeholders; weights in no block stay in memory. True reads all
                weights into newly allocated memory, which has to be large enough, and leaves the model as if it had never been
                streamed. A collection of names (for tied weights, the first name) reads only these weights; all others become
                placeholders, those in no block too. Names that the store does not have are ignored.

        Raises:
            TypeError: If ``restore`` is a str: put a single name into a list.
            RuntimeError: If called within a forward of the model.
            OSError: If reading fails. The model is still streamed then.
        """
        if isinstance(restore, str):
            raise TypeError(f"restore must be a bool or a collection of names, got a str: write [{restore!r}] for one weight")
        self._check_outside("close()")
        with self._turn:
            if self._ended:
                return
            if self._restored is None:
                names = frozenset(restore) if isinstance(restore, Collection) else None
                self._restored = self._read_all(names) if restore else _Restored()
            # If an interrupt comes below, the next close() continues from here: each step may be repeated.
            self._unwrap()
            for name in self._sizes:
                if name not in self._restored.memories:
                    self._weights.remove(name)
            for name, memory in self._restored.memories.items():
                self._weights.restore(name, memory, self._restored.names)
            self._fetcher.close()
            self._arrivals.close()
            if self.owns_store:
                self._store.close()
            self._restored = _Restored()
            self._ended = True

    def __enter__(self) -> Streaming:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _check_outside(self, what: str) -> None:
        """Raise RuntimeError if this thread is inside a call of the model."""
        if self._owner == threading.get_ident():
            raise RuntimeError(f"{what} within a forward of the model: its weights are in use")

    def _between_calls(self) -> contextlib.AbstractContextManager[object]:
        """Return a context that excludes calls of the model by other threads. It does not block a thread that is in a call."""
        return contextlib.nullcontext() if self._owner == threading.get_ident() else self._turn

    # Construction.

    def _check_budget(self) -> None:
        """Raise ValueError for a negative memory budget, or one that holds no extent."""
        if self._budget < 0:
            raise ValueError(f"memory_budget must not be negative, got {self._budget}")
        smallest = min(self._sizes.values(), default=0)
        if 0 < self._budget < smallest:
            raise ValueError(
                f"memory_budget must hold an extent, the smallest of which has {smallest} bytes (the largest has"
                f" {max(self._sizes.values())}, all {sum(self._sizes.values())}), or be 0; got {self._budget}"
            )

    def _read_rest(self, device: torch.device) -> None:
        """Read the weights in no block, and move the non-persistent buffers, which no store holds, to the device."""
        for name, module in self._model.named_modules():
            for key in module._non_persistent_buffers_set:
                buffer = module._buffers.get(key)
                if buffer is not None and buffer.is_meta:
                    raise ValueError(
                        f"the buffer '{name}.{key}' is on the meta device, and no store has it, since it is not persistent:"
                        " compute it before the model is streamed"
                    )
        if REST in self._store.extents:
            memory = self._slots.memory(self._arrivals.nbytes(REST))
            error = self._arrivals.read(REST, memory).exception()
            if error is not None:
                raise error
            self._weights.put(REST, memory)
        for buffers, key, buffer in _not_persistent(self._model):
            buffers[key] = buffer.to(device)

    def _wrap(self, module: nn.Module, call: Callable[..., Any]) -> None:
        """Replace a module's forward by one that goes through ``call(own_forward, args, kwargs)``."""
        self._wrapped.append((module, module.__dict__.get("forward")))
        module.forward = _Forward(self, module.forward, call)

    def _unwrap(self) -> None:
        """Give all modules their own forward back. May be repeated."""
        for module, own in self._wrapped:
            if own is not None:
                module.forward = own
            elif "forward" in module.__dict__:
                del module.forward

    # Calls of the model and its blocks.

    def _called(self, call: Callable[..., Any], forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a wrapped forward, waiting for the lock unless this thread has it."""
        if self._owner == threading.get_ident():
            return call(forward, args, kwargs)
        return self._in_turn(self._outermost, call, forward, args, kwargs)

    def _in_turn(self, call: Callable[..., Any], *args: Any) -> Any:
        """Run ``call`` with the lock held, after repairing what an interrupt may have left. Raises RuntimeError once closed."""
        with self._turn:  # the lock itself, so that no interrupt can come between acquiring it and the code that releases it
            try:
                self._owner = threading.get_ident()
                if self._restored is not None:
                    raise RuntimeError("the stream of this model's weights was closed")
                self._recover()
                return call(*args)
            finally:
                self._owner = 0

    def _outermost(self, call: Callable[..., Any], forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a call that is not inside another one, and count its time."""
        self._tally.enter()
        try:
            return call(forward, args, kwargs)
        except BaseException:
            self._order.forget_last()
            raise
        finally:
            self._tally.leave()

    def _measured(self, nbytes: int) -> float | None:
        """Read extents for :meth:`measure_limit`, with the lock held."""
        streamed = [key for key, size in self._sizes.items() if size and not self._fetcher.is_resident(key)]
        if sum(self._sizes[key] for key in streamed) <= self._slots.nbytes:  # they all fit, and are read only once
            return None
        keys, ahead, total = itertools.cycle(streamed), deque[str](), 0
        while total < nbytes:
            ahead.append(next(keys))
            total += self._store.extents[ahead[-1]].nbytes
        before = self._fetcher.bytes_read
        try:
            self._fetcher.drain()
            begun = time.perf_counter()
            while ahead:
                key = ahead.popleft()
                self._fetcher.take([key], ahead)
                self._fetcher.give_back([key])
            self._limit = total / (time.perf_counter() - begun)
        finally:
            self._fetcher.expect(self._order.predict())
            self._tally.bytes_before += self._fetcher.bytes_read - before
        return self._limit

    def _root(self, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the whole model's forward: count a pass, and perhaps choose other resident extents after it."""
        self._tally.called(args, kwargs)
        result = forward(*args, **kwargs)
        if self._budget:
            self._reconsider()
        return result

    def _block(
        self, name: str, extents: tuple[str, ...], forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run a block's forward with its weights in memory. Raises RuntimeError if the forward changed one of them."""
        depth = len(self._stack)
        try:
            self._stack.append(extents)
            with torch._C._DisableFuncTorch():  # the tensors made here must not belong to a transform such as jacrev
                self._bring(name, extents)
            result = forward(*args, **kwargs)
        except BaseException:
            self._leave(depth)
            raise
        changed = self._leave(depth)
        if changed:
            raise RuntimeError(
                f"the forward of {name!r} changed {', '.join(map(repr, changed))}: streamed weights cannot be changed, and later"
                " calls see what is on the drive"
            )
        return result

    def _bring(self, block: str, extents: tuple[str, ...]) -> None:
        """Wait until a block's extents are in memory, and assign their weights to the modules.

        Raises RuntimeError if there is no memory for them, or if somebody has changed, moved or cast the weights since.
        """
        wanted = [extent for extent in extents if extent not in self._in_use]
        if not wanted:
            return
        for extent in wanted:
            self._order.note(extent)
            self._uses[extent] += 1
        before = self._fetcher.waited
        try:
            memories = self._fetcher.take(wanted, self._order.predict())
        except OutOfBuffers as error:
            raise RuntimeError(f"no memory for the weights of {block!r}: {_remedy()}") from error
        if self._fetcher.waited != before:
            self._tally.stalls[block] += self._fetcher.waited - before
        for extent, memory in zip(wanted, memories, strict=True):
            self._in_use[extent] = None
            there = extent in self._there
            changed = self._weights.changed(extent) if there else self._weights.replaced(extent)
            if changed:
                raise RuntimeError(
                    f"{', '.join(map(repr, changed))} of {block!r} had been changed, moved or cast: that cannot be done to a"
                    " model whose weights are streamed, and later calls see what is on the drive"
                )
            if not there:
                self._weights.put(extent, memory)
                if self._fetcher.is_resident(extent):
                    self._there.add(extent)

    def _leave(self, depth: int) -> list[str]:
        """Give back the extents that the ``depth`` outermost running blocks do not need.

        Returns the names of weights that were changed while they were in use.
        """
        del self._stack[depth:]
        needed = {extent for extents in self._stack for extent in extents}
        changed: list[str] = []
        with torch._C._DisableFuncTorch():
            for extent in [extent for extent in self._in_use if extent not in needed]:
                found = self._weights.changed(extent)
                if found or extent not in self._there:
                    # Discarded before the removal: if interrupted between the two, removed weights would count as changed.
                    self._there.discard(extent)
                    self._weights.remove(extent)
                del self._in_use[extent]
                self._fetcher.give_back([extent], changed=bool(found))
                changed += found
        return changed

    def _recover(self) -> None:
        """Repair the state that an interrupt in the middle of an earlier call has left."""
        if self._stack or self._in_use:
            self._leave(0)
        for extent in self._fetcher.recover():
            self._there.discard(extent)
            self._weights.remove(extent)

    def _reconsider(self) -> None:
        """Choose the resident extents anew by how often each was used so far; after 1, 2, 4, 8, ... passes."""
        passes = self._tally.passes
        if self._stack or passes & (passes - 1) or len(set(self._uses.values())) == 1:
            return
        uses = {extent: self._uses[extent] for extent in self._sizes}
        before = {extent for extent in self._sizes if self._fetcher.is_resident(extent)}
        better = {extent for extent in before if self._sizes[extent] > self._slot_size}  # must stay: too large for a slot
        rest = {extent: nbytes for extent, nbytes in self._sizes.items() if extent not in better}
        better |= residents(rest, uses, self._budget - sum(self._sizes[extent] for extent in better))
        if saved_bytes(better, self._sizes, uses) > _WORTH_IT * saved_bytes(before, self._sizes, uses):
            for extent in self._there - better:
                self._there.discard(extent)
                self._weights.remove(extent)
            self._fetcher.keep(better)

    def _read_all(self, names: frozenset[str] | None) -> _Restored:
        """Read all extents, or only those that contain the named weights, each into memory of its own."""
        memories: dict[str, torch.Tensor | None] = {}
        self._fetcher.expect(())
        for extent, nbytes in self._sizes.items():
            if names is not None and names.isdisjoint(weight.name for weight in self._store.extents[extent].weights):
                continue
            memory = memories[extent] = self._slots.memory(nbytes)
            error = self._arrivals.read(extent, memory).exception()
            if error is not None:
                raise error
        if REST in self._store.extents:
            memories[REST] = None
        return _Restored(memories, names)


@dataclass
class _Restored:
    """The weights that a model keeps in memory when its stream ends."""

    memories: dict[str, torch.Tensor | None] = field(default_factory=dict)
    """The bytes of each extent that is kept, by name; None for one whose weights are assigned to the modules already."""
    names: frozenset[str] | None = None
    """Names of the weights in these extents that are kept; None for all."""


_FIRST = "close(restore=True) its stream first"


class _Forward:
    """Stands for a module's forward while its model is streamed."""

    def __init__(self, streaming: Streaming, forward: Callable[..., Any], call: Callable[..., Any]) -> None:
        functools.update_wrapper(self, forward)  # transformers and others inspect a forward's signature
        self.streaming, self._forward, self._call = streaming, forward, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch._C._is_tracing():  # a trace keeps the tensors that it has recorded, even if it fails
            raise RuntimeError(f"a model whose weights are streamed cannot be traced by torch.jit: {_FIRST}")
        if torch._C._len_torch_dispatch_stack() and detect_fake_mode() is not None:
            raise RuntimeError(f"a model whose weights are streamed does not compute with fake tensors: {_FIRST}")
        return self.streaming._called(self._call, self._forward, args, kwargs)

    def __getattr__(self, name: str) -> NoReturn:
        """Raise AttributeError with a text for torch.jit.script and torch.export, which look for a function's code."""
        raise AttributeError(f"the forward of a model whose weights are streamed has no {name}, for it is no function: {_FIRST}")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise RuntimeError(f"a model whose weights are streamed cannot be copied or pickled: {_FIRST}")


def _not_persistent(model: nn.Module) -> list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor]]:
    """Return the non-persistent buffers, which no store holds: the module's dictionary, the key in it, and the tensor."""
    return [
        (module._buffers, key, buffer)
        for module in model.modules()
        for key in module._non_persistent_buffers_set
        if (buffer := module._buffers.get(key)) is not None
    ]


def _on(device: torch.device, store: WeightStore, prefetch: int) -> tuple[ExtentReads, Callable[[int], Slots]]:
    """Return the reader of extents and the kind of slots for a device. Raises ValueError for an unsupported one."""
    if device.type == "cpu":
        return ExtentReads(store), PinnedSlots
    if device.type == "cuda":
        from .device_ring import DeviceArrivals, DeviceSlots

        return DeviceArrivals(store, device, prefetch + 1), functools.partial(DeviceSlots, device)
    raise ValueError(f"device must be a CPU or a CUDA device, got {device}")


def _remedy() -> str:
    """Return who probably keeps the memory of weights, and what to do about it."""
    if torch.is_grad_enabled():
        return "autograd keeps those of the blocks before for a backward; call the model in torch.no_grad() or inference_mode()"
    return "somebody keeps tensors over those of blocks before, such as outputs that are views of weights: clone or drop these"
