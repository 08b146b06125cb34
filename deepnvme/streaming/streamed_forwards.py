"""The forwards of a streamed model's blocks: each waits until its weights are in memory, computes, and releases them."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from deepnvme.memory.pool import OutOfBuffers
from deepnvme.streaming.extent_memory import ViewsKept

from .access_predictor import AccessPredictor
from .extent_cache import ExtentCache
from .module_weights import ModuleWeights
from .placeholder import Placeholder
from .replaced_forward import ReplacedForward, check_process
from .stream_report import StreamReport
from .weights.extent_store import ExtentStore


class StreamedForwards:
    """Replaces the forwards of a model and of its blocks, so that a block's weights are in memory while its forward runs.

    Calls of the model and of its blocks from several threads run one after the other. After an interrupt (Ctrl-C) anywhere, the
    next call repairs the state first.

    Args:
        store: The store of the weights.
        cache: Keeps extents in memory while blocks use them.
        weights: Assigns weights to the modules.
    """

    def __init__(self, store: ExtentStore, cache: ExtentCache, weights: ModuleWeights) -> None:
        self._store, self._cache, self._weights = store, cache, weights
        self._order = AccessPredictor([extent for extents in store.blocks.values() for extent in extents])
        self.lock = threading.Lock()
        """Held during a call of the model or of a block."""
        self._process = os.getpid()
        self._owner = 0  # identifier of the thread that holds the lock for a call; 0 if none does
        self._stack: list[tuple[str, ...]] = []  # the extents of each block whose forward is running, innermost last
        self._in_use: dict[str, bool] = {}  # extents whose blocks are running -> whether ExtentCache.acquire was called for that
        self._there: set[str] = set()  # resident extents whose weights are assigned to the model's modules
        self._wrapped: list[tuple[nn.Module, Any]] = []
        self._ended = False
        self.reset()

    def wrap(self, model: nn.Module, streaming: Any) -> None:
        """Replace the forwards of the model and of its blocks.

        Args:
            model: The model.
            streaming: The object that :func:`streaming_of` returns for the model.
        """
        calls: list[tuple[str, Callable[..., Any]]] = [
            (name, functools.partial(self._block, name, extents)) for name, extents in self._store.blocks.items()
        ]
        model.__dict__["_apply"] = functools.partial(_apply_to_all, model)
        for name, call in [*calls, ("", self._root)]:
            module = model.get_submodule(name)
            self._wrapped.append((module, module.__dict__.get("forward")))
            module.forward = StreamedForward(self, module.forward, call, streaming)

    def unwrap(self) -> None:
        """Restore the original forwards of all modules. Replaced forwards kept by callers raise RuntimeError. Idempotent."""
        self._ended = True
        for module, own in self._wrapped:
            module.__dict__.pop("_apply", None)
            if own is not None:
                module.forward = own
            elif "forward" in module.__dict__:
                del module.forward

    def read_ahead(self) -> None:
        """Start reading the extents that will probably be used next, as far as there is memory. Never blocks."""
        self._cache.expect(self._order.predict())

    # Counters.

    def report(self) -> StreamReport:
        """Return the counters since the last :meth:`reset`: see :meth:`Streaming.report`."""
        with self._between_calls():
            return StreamReport(
                passes=self._passes,
                seconds=self._seconds,
                bytes_read=self._cache.bytes_read - self._read_before,
                stalled=self._cache.seconds_waited - self._waited_before,
                resident_bytes=self._cache.resident_bytes,
                peak_bytes=self._cache.leased.most,
            )

    def reset(self) -> None:
        """Set the counters to zero: see :meth:`Streaming.reset`."""
        with self._between_calls():
            self._passes, self._seconds, self._reset = 0, 0.0, time.perf_counter()
            self._cache.leased.restart()
            self._read_before, self._waited_before = self._cache.bytes_read, self._cache.seconds_waited

    # One call at a time.

    def check_not_in_forward(self, what: str) -> None:
        """Raise RuntimeError if this thread is inside a call of the model."""
        if self._owner == threading.get_ident():
            raise RuntimeError(f"{what} within a forward of the model: its weights are in use")

    def _between_calls(self) -> contextlib.AbstractContextManager[object]:
        """Return a context manager that waits for the model's calls in other threads, and excludes new ones.

        It does nothing in a thread that is itself inside a call.
        """
        return contextlib.nullcontext() if self._owner == threading.get_ident() else self.lock

    def called(self, call: Callable[[], Any]) -> Any:
        """Run a forward with the lock held, after any repair that an interrupt made necessary, and count its time.

        A forward inside another one of the same thread has the lock already. Raises RuntimeError if the stream is closed, or in
        a forked child.
        """
        check_process(self._process)  # before the lock, which another thread of the parent may have held
        if self._owner == threading.get_ident():
            return call()
        with self.lock:
            begun = time.perf_counter()
            try:
                self._owner = threading.get_ident()
                if self._ended:
                    raise RuntimeError("the stream of this model's weights was closed")
                self._recover()
                return call()
            except BaseException:
                self._order.forget_last()
                raise
            finally:
                self._owner = 0
                self._seconds += time.perf_counter() - max(begun, self._reset)

    # Calls of the model and its blocks.

    def _root(self, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the whole model's forward, and count a pass."""
        self._passes += 1
        return forward(*args, **kwargs)

    def _block(
        self, name: str, extents: tuple[str, ...], forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run a block's forward with its weights in memory. Raises RuntimeError if the forward changed one of them."""
        depth = len(self._stack)
        try:
            self._stack.append(extents)
            with torch._C._DisableFuncTorch():  # the tensors made here must not belong to a transform such as jacrev
                self._bind_weights(name, extents)
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

    def _bind_weights(self, block: str, extents: tuple[str, ...]) -> None:
        """Wait until a block's extents are in memory, and put their weights into the modules.

        Raises RuntimeError if views keep all memory, or if other code has changed, moved or cast the weights since their last
        use; OutOfBuffers if the system has too little memory.
        """
        wanted = [extent for extent in extents if extent not in self._in_use]
        if not wanted:
            return
        for extent in wanted:
            self._order.note(extent)
        acquired = self._acquire(block, [extent for extent in wanted if extent not in self._there])
        for extent in wanted:
            self._in_use[extent] = extent in acquired
            changed = self._weights.replaced(extent) if extent in acquired else self._weights.changed(extent)
            if changed:
                raise RuntimeError(
                    f"{', '.join(map(repr, changed))} of {block!r} had been changed, moved or cast: that cannot be done to a"
                    " model whose weights are streamed, and later calls see what is on the drive"
                )
            if extent in acquired:
                self._weights.put(extent, acquired[extent])
                if self._cache.is_resident(extent):
                    self._there.add(extent)

    def _acquire(self, block: str, extents: list[str]) -> dict[str, torch.Tensor]:
        """Wait until extents are in memory, and start reading the predicted next ones. Return the memory by extent name."""
        if not extents:  # weights that stay in the modules need no memory, so that what is expected remains the same
            self._cache.poll()
            return {}
        try:
            memories = self._cache.acquire(extents, self._order.predict())
        except ViewsKept as error:
            raise RuntimeError(f"no memory for the weights of {block!r}: {_remedy()}") from error
        except OutOfBuffers as error:
            raise OutOfBuffers(f"no memory for the weights of {block!r}: {error}; a smaller prefetch needs less, too") from error
        return dict(zip(extents, memories, strict=True))

    def _leave(self, depth: int) -> list[str]:
        """Release the extents of blocks whose forwards have ended: all but those of the ``depth`` outermost running blocks.

        Returns the names of weights that were changed while they were in use.
        """
        del self._stack[depth:]
        needed = {extent for extents in self._stack for extent in extents}
        changed: list[str] = []
        with torch._C._DisableFuncTorch():
            for extent in [extent for extent in self._in_use if extent not in needed]:
                found = self._weights.changed(extent)
                if found or extent not in self._there:
                    # Discarded before the removal: if Ctrl-C comes between the two, removed weights would count as changed.
                    self._there.discard(extent)
                    self._weights.remove(extent)
                if found or self._in_use[extent]:
                    self._cache.release([extent], changed=bool(found))
                del self._in_use[extent]
                changed += found
        return changed

    def _recover(self) -> None:
        """Repair the state after an interrupt in an earlier call: release all extents, and remove weights that may be changed."""
        if self._stack or self._in_use:
            self._leave(0)
        for extent in self._cache.recover():
            self._there.discard(extent)
            self._weights.remove(extent)


class StreamedForward(ReplacedForward):
    """Replaces a module's forward while its model is streamed. ``streaming`` is what :func:`streaming_of` returns."""

    def __init__(self, forwards: StreamedForwards, forward: Callable[..., Any], call: Callable[..., Any], streaming: Any) -> None:
        super().__init__(forwards.called, forward, call)
        self.streaming = streaming


def _apply_to_all(model: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """Take the place of the model's ``_apply``, which converts weights one by one, for ``model.to`` and others.

    Raises RuntimeError before any weight is converted, if the data of weights that are not in memory would be needed.
    """
    for weight in model.parameters(recurse):
        if isinstance(weight, Placeholder):
            function(weight)
    return type(model)._apply(model, function, recurse)  # type: ignore[no-any-return, no-untyped-call]


def _remedy() -> str:
    """Return text for an error: who probably keeps the memory of weights, and what to do about it."""
    if torch.is_grad_enabled():
        return "autograd keeps those of the blocks before for a backward; call the model in torch.no_grad() or inference_mode()"
    return "somebody keeps tensors over those of blocks before, such as outputs that are views of weights: clone or drop these"
