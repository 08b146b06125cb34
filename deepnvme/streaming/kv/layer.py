"""One layer of the offloaded KV cache, with the interface of transformers' cache layers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from deepnvme.memory.host import empty_aligned

from .drive import CHUNK_BYTES, KVChunk, KVChunkStore
from .strip import KVShape, Pair, Strip, in_one_thread, slice_positions


class OffloadedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """The keys and values of one layer: older positions in chunks on the drive, the newest in memory.

    A layer that is not ``streamed`` has all positions in memory; if the model computes on the CPU, attention uses them in
    place. In all other cases, each forward of the layer gathers the positions into one piece of memory. Not thread-safe.

    Args:
        drive: The cache's drive, shared by all layers.
        index: Number of the layer.
        window: Number of positions that attention sees; None for all.
        streamed: Whether positions go to the drive from the beginning.
    """

    is_croppable = True
    """Whether :meth:`crop` is supported; asked by transformers."""

    def __init__(self, drive: KVChunkStore, index: int, window: int | None = None, streamed: bool = False) -> None:
        self._drive = drive
        self._index = index
        self._always_streamed = self.streamed = streamed
        self._device = torch.device("cpu")
        self._strip: Strip | None = None  # the newest positions, in memory; None until the first
        self._first = 0
        self._length = 0
        self._changes = 0
        self.is_sliding = window is not None
        self.record_past = False
        if window is not None:
            self.sliding_window = window

    # What transformers asks.

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        """Whether shape, dtype and device of the keys and values are known."""
        return self._strip is not None

    @property
    def keys(self) -> torch.Tensor | None:  # type: ignore[override]
        """Keys of all positions kept, [batch, heads, positions, dim]; None if the layer is empty.

        Reads positions that are on the drive. Blocks. The tensor is valid only until another layer is used.
        """
        return None if self._strip is None else self._all()[0]

    @property
    def values(self) -> torch.Tensor | None:  # type: ignore[override]
        """Values of all positions kept, in the same form as :attr:`keys`."""
        return None if self._strip is None else self._all()[1]

    def get_seq_length(self) -> int:
        """Return the number of positions seen so far, those that have left the window included."""
        return self._length

    def get_max_length(self) -> int:
        """Return the size of the sliding window, or -1 if there is none."""
        return self.sliding_window if self.is_sliding else -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many positions ``query_length`` new ones attend to, including themselves, and the first of these."""
        seen = self._seen_from()
        return self._length - seen + query_length, seen

    def activate_past_recording(self) -> None:
        """From now on, keep positions that leave the sliding window until the next :meth:`crop`."""
        self.record_past = True

    @property
    def state(self) -> tuple[int, int]:
        """Number of positions, and number of changes so far that removed or reordered positions or rows of the batch.

        Between two forwards, the state is equal for all layers that are not empty; the cache uses this to detect a broken-off
        forward.
        """
        return self._length, self._changes

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Set batch size, heads, dims, dtype and device to those of these keys and values. Copies nothing.

        Raises:
            ValueError: If these are not keys and values of one layer.
        """
        form = KVShape.of(key_states, value_states)
        self._device = key_states.device
        self._strip = Strip(form, self._memory, self._length)

    # Changing the content.

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Pair:
        """Append new positions, and return all keys and values that attention sees.

        Reads earlier positions from the drive, and starts writing new ones. Blocks until the reads have ended.

        Args:
            key_states: Keys of the new positions, [batch, heads, positions, dim].
            value_states: Values of the new positions, likewise.
            args: Ignored.
            kwargs: Ignored.

        Returns:
            Keys and values, the new positions last. They are valid only until another layer is used.

        Raises:
            ValueError: If shape, dtype or device differ from those of earlier positions.
            RuntimeError: If the states require grad, or the cache is unusable after an error.
            OSError: If reading or writing fails.
        """
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise RuntimeError("an offloaded cache keeps nothing that autograd needs: call the model under torch.no_grad()")
        if self._length == 0:
            self.lazy_initialization(key_states, value_states)
        self._check_fit(key_states, value_states)
        newest = self._newest
        with self._drive.changing():
            seen, new = self._seen_from(), key_states.shape[2]
            end = self._length + new
            keep_from = self._first if self.record_past or not self.is_sliding else max(end - self.sliding_window + 1, 0)
            if self.streamed or not key_states.is_cpu:
                states = self._with(seen, key_states, value_states)
            else:
                newest.append(key_states, value_states)
                states = newest.view(seen, end)
            if self.streamed:
                self._store(seen, states, max(keep_from, newest.start))
            elif not key_states.is_cpu:
                newest.append(key_states, value_states)
            self._length = end
            self._keep(keep_from, end)
        return states

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest positions, and then those that have left the sliding window.

        Args:
            tokens_to_remove: Negative number of positions to remove, as in transformers: -3 removes three. Or 0.

        Raises:
            ValueError: If the number is positive.
            RuntimeError: If the sliding window would go back to positions that were removed already.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes the number of positions to remove as a negative number, got {tokens_to_remove}")
        end = max(self._length + tokens_to_remove, 0)
        first = max(end - self.sliding_window + 1, 0) if self.is_sliding else 0
        if first < self._first and end < self._length:
            raise RuntimeError(
                f"position {first} left the sliding window of {self.sliding_window} before position {self._length - 1} came: "
                "call activate_past_recording() before what is to be cropped"
            )
        with self._drive.changing():
            self._keep(max(first, self._first), end)
            self._changes += 1

    def reset(self) -> None:
        """Drop the keys and values of all token positions, in memory and on the drive."""
        while self._chunks:
            self._drive.delete(self._index, -1)
        self._drive.release_whole()
        self.drop()
        self.streamed = self._always_streamed

    def drop(self) -> None:
        """Release the layer's memory; it holds no positions afterwards. Does not touch the drive."""
        self._strip = None
        self._first = self._length = self._changes = 0

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorder the rows of the batch for beam search: see :meth:`batch_select_indices`."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch ``repeats`` times: see :meth:`batch_select_indices`."""
        if self._strip is not None:
            self.batch_select_indices(torch.arange(self._strip.form.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Select and reorder rows of the batch; a row may be selected several times.

        Nothing is rewritten on the drive: chunks are reordered when they are read.

        Args:
            indices: Numbers of the rows, on any device.
        """
        if self._length == 0:
            return
        present = torch.arange(self._newest.form.batch)
        rows = present[indices.cpu()]
        if torch.equal(rows, present):
            return
        with self._drive.changing():
            self._newest.select(rows)
            for chunk in self._chunks:
                chunk.select_rows(rows)
            self._changes += 1

    # Memory.

    @property
    def resident_bytes(self) -> int:
        """Bytes of memory for positions that are not on the drive, including memory reserved for more."""
        return 0 if self._strip is None else self._strip.nbytes

    def resident_bytes_with(self, key_states: torch.Tensor, value_states: torch.Tensor) -> int:
        """Return what :attr:`resident_bytes` would be after appending these states in memory, writing none to the drive."""
        strip = self._strip or Strip(KVShape.of(key_states, value_states), self._memory, 0)
        return strip.nbytes_with(key_states.shape[2])

    def stream(self) -> None:
        """Move the layer to the drive for good: positions that fill chunks are written, now and in later updates."""
        self.streamed = True
        if self._strip is not None:
            with self._drive.changing():
                self._store_newest()

    @property
    def _chunks(self) -> list[KVChunk]:
        """The layer's chunks on the drive, in the order of their positions."""
        return self._drive.chunks[self._index]

    def _seen_from(self) -> int:
        """Return the first position that the next new position attends to."""
        return max(self._length - self.sliding_window + 1, 0) if self.is_sliding else 0

    @property
    def _newest(self) -> Strip:
        """The strip of newest positions, in memory. The layer must be initialized."""
        assert self._strip is not None
        return self._strip

    def _check_fit(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Raise ValueError if shape, dtype or device of new positions differ from those of earlier positions."""
        form = self._newest.form
        if KVShape.of(keys, values) != form or keys.device != self._device:
            got = f"{KVShape.of(keys, values)} on {keys.device}"
            held = f"{form} on {self._device}"
            raise ValueError(f"layer {self._index} holds {held}, got {got}: reset() the cache, or use another")

    def _memory(self, nbytes: int) -> torch.Tensor:
        """Return host memory for keys and values that are not on the drive yet: pinned if the model is on a GPU."""
        return empty_aligned(nbytes) if self._device.type == "cpu" else self._drive.engine.empty_pinned(nbytes, torch.uint8)

    def _replace_newest(self, start: int, states: Pair) -> None:
        """Replace the strip of newest positions by a copy of ``states``, which begin at position ``start``."""
        strip = Strip(self._newest.form, self._memory, start)
        strip.append(*states)
        self._strip = strip

    def _all(self) -> Pair:
        """Return the keys and values of all positions kept: in place in host memory if possible, else gathered."""
        if not self.streamed and self._device.type == "cpu":
            return self._newest.view(self._first, self._length)
        with self._drive.changing():
            return self._gathered(self._first, self._length)

    def _with(self, seen: int, key_states: torch.Tensor, value_states: torch.Tensor) -> Pair:
        """Return the keys and values from position ``seen`` on, followed by the new ones."""
        if seen == self._length:
            return key_states, value_states
        states = self._gathered(seen, self._length + key_states.shape[2])
        for mine, theirs in zip(states, (key_states, value_states), strict=True):
            mine[:, :, self._length - seen :].copy_(theirs)
        return states

    def _gathered(self, begin: int, end: int) -> Pair:
        """Return memory for positions ``begin`` to ``end``, filled with the positions that the layer has. Blocks.

        Earlier positions are read from the drive, and the newest are copied from memory. Later positions stay undefined.
        """
        states = self._drive.whole(self._newest.form, end - begin, self._device)
        self._drive.expect(self._index)

        def bring() -> None:
            """Read the chunks from the drive, and copy each to its positions in ``states``."""
            for chunk in self._chunks:
                if chunk.end > begin:  # earlier chunks have left the window; they are kept in case of a crop
                    self._drive.read(chunk, self._device, functools.partial(_place, chunk, states, begin))

        in_one_thread(bring)
        start = max(self._newest.start, begin)
        for mine, theirs in zip(states, self._newest.view(start, self._length), strict=True):
            mine[:, :, start - begin : self._length - begin].copy_(theirs)
        return states

    # The drive.

    def _store(self, seen: int, states: Pair, begin: int) -> None:
        """Write the positions from ``begin`` on, as far as they fill chunks, and keep the rest as the newest in memory.

        ``states`` are the positions from ``seen`` on, the new ones at their end. If they include all positions that are
        not on the drive, chunks are written from ``states`` directly, without a copy to the strip.
        """
        end = seen + states[0].shape[2]
        if begin < seen or end - begin < self._per_chunk:
            self._newest.append(*slice_positions(states, self._length - seen, end - seen))
            self._store_newest()
        else:
            self._store_chunks(lambda first, last: slice_positions(states, first - seen, last - seen), begin, end)

    def _store_newest(self) -> None:
        """Write the newest positions as far as they fill chunks, and keep the rest in memory."""
        newest = self._newest
        if newest.end - newest.start >= self._per_chunk:
            self._store_chunks(newest.view, newest.start, newest.end)

    def _store_chunks(self, states: Callable[[int, int], Pair], begin: int, end: int) -> None:
        """Write the positions from ``begin`` to ``end``, as far as they fill chunks, and keep the rest in memory.

        ``states(first, last)`` returns the keys and values of positions ``first`` to ``last``.
        """
        while end - begin >= self._per_chunk:
            self._drive.write(self._index, begin, *states(begin, begin + self._per_chunk))
            begin += self._per_chunk
        self._replace_newest(begin, states(begin, end))

    @property
    def _per_chunk(self) -> int:
        """Number of positions that fill a chunk of ``CHUNK_BYTES``; at least 1."""
        return max(CHUNK_BYTES // self._newest.form.position_bytes, 1)

    def _keep(self, first: int, end: int) -> None:
        """Remove all positions before ``first`` and from ``end`` on.

        A chunk at the front stays on the drive until all its positions are removed. A partly removed chunk at the end is
        read back into memory.
        """
        if self._strip is None:
            return
        while self._chunks and self._chunks[-1].end > end:
            chunk = self._chunks[-1]
            if chunk.start < end:  # the rest of the chunk is read back, to be among the newest positions
                self._replace_newest(chunk.start, self._gathered_chunk(chunk))
            self._drive.delete(self._index, -1)
        while self._chunks and self._chunks[0].end <= first:
            self._drive.delete(self._index, 0)
        if self._newest.start > end:
            self._strip = Strip(self._newest.form, self._memory, end)
        self._newest.keep(first, end)
        self._first, self._length = first, end

    def _gathered_chunk(self, chunk: KVChunk) -> Pair:
        """Read one chunk into newly allocated memory, and return its keys and values."""
        form, positions = self._newest.form, chunk.end - chunk.start
        states = form.pair(self._memory(positions * form.position_bytes), positions)
        self._drive.read(chunk, states[0].device, functools.partial(_place, chunk, states, chunk.start))
        return states


def _place(chunk: KVChunk, states: Pair, begin: int, stored: Pair) -> None:
    """Copy the keys and values of a chunk, ``stored``, to its positions in ``states``, which begin at position ``begin``."""
    start = max(chunk.start, begin)
    for mine, theirs in zip(states, stored, strict=True):
        rows = theirs if chunk.rows is None else theirs.index_select(0, chunk.rows)
        mine[:, :, start - begin : chunk.end - begin].copy_(rows[:, :, start - chunk.start :], non_blocking=True)
