"""The forwards of a streamed model's blocks: each waits until its weights are in memory, computes, and gives them back."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn
from torch._guards import detect_fake_mode

from deepnvme.memory.pool import OutOfBuffers

from .access_predictor import AccessPredictor
from .extent_cache import ExtentCache
from .module_weights import ModuleWeights
from .resident_weights import residents, saved_bytes
from .stream_report import StreamReport
from .weights.weight_store import WeightStore

T = TypeVar("T")

_WORTH_IT = 1.1
"""Other resident extents are chosen only if they save this many times the bytes: each new resident has to be read once."""
_FIRST = "close(restore=True) its stream first"


@dataclass
class Tally:
    """The running counters from which a :class:`StreamReport` is made. Not thread-safe."""

    passes: int = 0
    """As in :class:`StreamReport`."""
    seconds: float = 0.0
    """As in :class:`StreamReport`; without the current call."""
    tokens: int = 0
    """As in :class:`StreamReport`."""
    prompt_tokens: int = 0
    """As in :class:`StreamReport`."""
    bytes_before: int = 0
    """Bytes that the stream had read before these counters began."""
    stalls: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """As in :class:`StreamReport`."""
    begun: float = field(default_factory=time.perf_counter)
    """When the counting began."""
    _last: tuple[int, int] | None = None
    """Sequences and positions of the last call with token ids."""
    _first_tokens: int = 0
    """Tokens that the last call has generated if what follows it shows that it was of a prompt."""

    def ended(self, begun: float) -> None:
        """Add the time of a call that began at ``begun``, or since the counting began if that was later."""
        self.seconds += time.perf_counter() - max(begun, self.begun)

    def called(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Record one forward call of the model with these arguments, and count its tokens.

        A call generates a token of each sequence if it has one position, which is the token generated before; or, without a KV
        cache, one position more than the call before. The call before the first of these, of a prompt, has generated one too.
        """
        self.passes += 1
        ids = kwargs.get("input_ids")
        ids = kwargs.get("decoder_input_ids") if ids is None else ids
        ids = args[0] if ids is None and args else ids
        if isinstance(ids, torch.Tensor) and ids.dtype in (torch.int64, torch.int32):
            positions = ids.shape[-1] if ids.dim() else 1
            sequences = ids.numel() // max(positions, 1)
            if positions == 1 or self._last == (sequences, positions - 1):
                self.tokens += sequences + self._first_tokens
                self._first_tokens = 0
            else:
                self.prompt_tokens += ids.numel()
                self._first_tokens = sequences
            self._last = sequences, positions


class StreamedForwards:
    """Replaces the forwards of a model and of its blocks, so that a block's weights are in memory while its forward runs.

    Calls of the model and of its blocks from several threads run one after the other. After an interrupt (Ctrl-C) anywhere, the
    next call repairs what it has left.

    Args:
        store: Holds the weights.
        cache: Has extents in memory while they are used.
        weights: The places in the modules where weights are put.
        sizes: Bytes of memory that each extent takes, by name; without REST.
        budget: Bytes of weights that may stay in memory beside that.
    """

    def __init__(
        self, store: WeightStore, cache: ExtentCache, weights: ModuleWeights, sizes: Mapping[str, int], budget: int
    ) -> None:
        self._store, self._cache, self._weights = store, cache, weights
        self._sizes, self._budget = sizes, budget
        self._slot_size = max((nbytes for name, nbytes in sizes.items() if not cache.is_resident(name)), default=0)
        self._order = AccessPredictor([extent for extents in store.blocks.values() for extent in extents])
        self._uses: Counter[str] = Counter()
        self.lock = threading.Lock()
        """Held during a call of the model or of a block."""
        self._owner = 0  # identifier of the thread that holds the lock for a call; 0 if none does
        self._stack: list[tuple[str, ...]] = []  # the extents of each block whose forward is running, innermost last
        self._in_use: dict[str, bool] = {}  # extents whose blocks are running -> whether ExtentCache.acquire was called for that
        self._there: set[str] = set()  # resident extents whose weights are assigned to the model's modules
        self._wrapped: list[tuple[nn.Module, Any]] = []
        self._ended = False
        self._tally = Tally()

    def wrap(self, model: nn.Module, streaming: Any) -> None:
        """Replace the forwards, and begin to read ahead.

        Args:
            model: The model.
            streaming: What :func:`streaming_of` is to return for the model.
        """
        calls: list[tuple[str, Callable[..., Any]]] = [
            (name, functools.partial(self._block, name, extents)) for name, extents in self._store.blocks.items()
        ]
        for name, call in [*calls, ("", self._root)]:
            module = model.get_submodule(name)
            self._wrapped.append((module, module.__dict__.get("forward")))
            module.forward = StreamedForward(self, module.forward, call, streaming)

    def unwrap(self) -> None:
        """Give all modules their own forward back. Calls of a forward that somebody has kept fail. May be repeated."""
        self._ended = True
        for module, own in self._wrapped:
            if own is not None:
                module.forward = own
            elif "forward" in module.__dict__:
                del module.forward

    def read_ahead(self) -> None:
        """Begin to read what will probably be used next, as far as there is memory for it."""
        self._cache.expect(self._order.predict())

    # Counters.

    def report(self) -> StreamReport:
        """Return the counters since the last :meth:`reset`: see :meth:`Streaming.report`."""
        with self._between_calls():
            tally = self._tally
            return StreamReport(
                passes=tally.passes,
                seconds=tally.seconds,
                bytes_read=self._cache.bytes_read - tally.bytes_before,
                stalls=dict(tally.stalls),
                tokens=tally.tokens,
                prompt_tokens=tally.prompt_tokens,
                resident_bytes=sum(nbytes for name, nbytes in self._sizes.items() if self._cache.is_resident(name)),
            )

    def reset(self) -> None:
        """Set the counters to zero: see :meth:`Streaming.reset`."""
        with self._between_calls():
            self._tally = Tally(bytes_before=self._cache.bytes_read)

    # One call at a time.

    def check_outside(self, what: str) -> None:
        """Raise RuntimeError if this thread is inside a call of the model."""
        if self._owner == threading.get_ident():
            raise RuntimeError(f"{what} within a forward of the model: its weights are in use")

    def _between_calls(self) -> contextlib.AbstractContextManager[object]:
        """Return a context that excludes calls of the model by other threads. It does not block a thread that is in a call."""
        return contextlib.nullcontext() if self._owner == threading.get_ident() else self.lock

    def run_locked(self, call: Callable[[], T]) -> T:
        """Run ``call`` with the lock held, after repairing what an interrupt may have left. Raises RuntimeError once ended."""
        with self.lock:
            try:
                self._owner = threading.get_ident()
                if self._ended:
                    raise RuntimeError("the stream of this model's weights was closed")
                self._recover()
                return call()
            finally:
                self._owner = 0

    def called(self, call: Callable[[], Any]) -> Any:
        """Run a forward, waiting for the lock unless this thread has it."""
        if self._owner == threading.get_ident():
            return call()
        return self.run_locked(functools.partial(self._outermost, call))

    def _outermost(self, call: Callable[[], Any]) -> Any:
        """Run a forward that is not inside another one, and count its time."""
        begun = time.perf_counter()
        try:
            return call()
        except BaseException:
            self._order.forget_last()
            raise
        finally:
            self._tally.ended(begun)

    # Calls of the model and its blocks.

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
        """Return the memory of these extents when they have been read, and begin to read what will follow."""
        if not extents:  # weights that stay in the modules need no memory, so that what is expected remains the same
            self._cache.poll()
            return {}
        before = self._cache.seconds_waited
        try:
            memories = self._cache.acquire(extents, self._order.predict())
        except OutOfBuffers as error:
            raise RuntimeError(f"no memory for the weights of {block!r}: {_remedy()}") from error
        if self._cache.seconds_waited != before:
            self._tally.stalls[block] += self._cache.seconds_waited - before
        return dict(zip(extents, memories, strict=True))

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
                    # Discarded before the removal: if Ctrl-C comes between the two, removed weights would count as changed.
                    self._there.discard(extent)
                    self._weights.remove(extent)
                if found or self._in_use[extent]:
                    self._cache.release([extent], changed=bool(found))
                del self._in_use[extent]
                changed += found
        return changed

    def _recover(self) -> None:
        """Repair the state that an interrupt in the middle of an earlier call has left."""
        if self._stack or self._in_use:
            self._leave(0)
        for extent in self._cache.recover():
            self._there.discard(extent)
            self._weights.remove(extent)

    def _reconsider(self) -> None:
        """Choose the resident extents anew by how often each was used so far; after 1, 2, 4, 8, ... passes."""
        passes = self._tally.passes
        if self._stack or passes & (passes - 1) or len(set(self._uses.values())) == 1:
            return
        uses = {extent: self._uses[extent] for extent in self._sizes}
        before = {extent for extent in self._sizes if self._cache.is_resident(extent)}
        better = {extent for extent in before if self._sizes[extent] > self._slot_size}  # must stay: too large for a slot
        rest = {extent: nbytes for extent, nbytes in self._sizes.items() if extent not in better}
        better |= residents(rest, uses, self._budget - sum(self._sizes[extent] for extent in better))
        if saved_bytes(better, self._sizes, uses) > _WORTH_IT * saved_bytes(before, self._sizes, uses):
            for extent in self._there - better:
                self._there.discard(extent)
                self._weights.remove(extent)
            self._cache.keep(better)


class StreamedForward:
    """Stands for a module's forward while its model is streamed: calls ``call(forward, args, kwargs)``, one thread at a time."""

    def __init__(self, forwards: StreamedForwards, forward: Callable[..., Any], call: Callable[..., Any], streaming: Any) -> None:
        functools.update_wrapper(self, forward)  # transformers and others inspect a forward's signature
        self._forwards, self._forward, self._call, self.streaming = forwards, forward, call, streaming

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            _refuse_to_compile()
        if torch._C._is_tracing():  # a trace keeps the tensors that it has recorded, even if it fails
            raise RuntimeError(f"a model whose weights are streamed cannot be traced by torch.jit: {_FIRST}")
        if torch._C._len_torch_dispatch_stack() and detect_fake_mode() is not None:
            raise RuntimeError(f"a model whose weights are streamed does not compute with fake tensors: {_FIRST}")
        return self._forwards.called(functools.partial(self._call, self._forward, args, kwargs))

    def __getattr__(self, name: str) -> NoReturn:
        """Raise AttributeError with a text for torch.jit.script and torch.export, which look for a function's code."""
        raise AttributeError(f"the forward of a model whose weights are streamed has no {name}, for it is no function: {_FIRST}")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise RuntimeError(f"a model whose weights are streamed cannot be copied or pickled: {_FIRST}")


def _refuse_to_compile() -> NoReturn:
    from torch._dynamo.exc import TorchRuntimeError  # which it does not take for a bug of its own; a RuntimeError

    raise TorchRuntimeError(f"a model whose weights are streamed cannot be compiled by torch.compile: {_FIRST}")


# As torch._dynamo.assume_constant_result does, whose import takes a second: what is so marked runs when torch.compile comes to
# it, which ends the compiling with the error. An exception that it only traces would have it go on without compiling here, and
# read weights into graphs elsewhere.
_refuse_to_compile._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _remedy() -> str:
    """Return who probably keeps the memory of weights, and what to do about it."""
    if torch.is_grad_enabled():
        return "autograd keeps those of the blocks before for a backward; call the model in torch.no_grad() or inference_mode()"
    return "somebody keeps tensors over those of blocks before, such as outputs that are views of weights: clone or drop these"
