"""A tier of KV blocks on drives for vLLM's tiered offloading, on a :class:`deepnvme.kvstore.BlockStore`.

vLLM copies blocks from the GPU to memory of the host, and from there to secondary tiers. A job of vLLM becomes one ``put_many``
from that memory, or one ``get_many`` into it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from deepnvme.kvstore import BlocksFuture, BlockStore, BlockStoreStats

from ._serving import aio_config_of, folders_in, require_version

if TYPE_CHECKING:
    from deepnvme.telemetry.sizes import ByteCount

    from ._serving import AioSettings, Paths

TESTED = ("0.32.0",)
"""Versions of vLLM that the tests ran with."""

try:
    import vllm  # type: ignore[import-not-found]
    from vllm.v1.kv_offload.base import (  # type: ignore[import-not-found]
        Locality,
        LookupResult,
        Medium,
        OffloadingCounterMetadata,
        OffloadingEvent,
        OffloadingGaugeMetadata,
        RequestOffloadingContext,
    )
    from vllm.v1.kv_offload.file_mapper import FileMapper  # type: ignore[import-not-found]
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager  # type: ignore[import-not-found]
except ImportError as error:
    raise ImportError(f"deepnvme.integrations.vllm needs vLLM {TESTED[-1]} (pip install vllm=={TESTED[-1]}): {error}") from error
require_version("vLLM", vllm.__version__, TESTED)

__all__ = ["NVMeTier"]

_log = logging.getLogger(__name__)
_METRIC = "vllm:deepnvme_{}"
_COUNTERS = {
    "hits": "KV blocks that loads from the drive have returned.",
    "misses": "KV blocks that loads from the drive did not return.",
    "corrupt": "Misses because a KV block on the drive did not match its checksum.",
    "read_errors": "Misses because the drive could not read the KV block.",
    "write_errors": "KV blocks that the drive could not write.",
    "evictions": "KV blocks evicted from the drive for others.",
}
_GAUGES = {
    "used": "Slots on the drive with a KV block.",
    "slots": "KV blocks that the files on the drive have room for.",
    "set_aside": "Slots on the drive that are not used any more, because the drive failed there.",
}


class NVMeTier(SecondaryTierManager):  # type: ignore[misc]  # whatever vLLM is
    """A secondary tier of vLLM's tiered KV offloading: blocks in a bounded, checked store on one drive or several.

    vLLM makes it for an entry of ``secondary_tiers`` that has ``"type": "NVMeTier"`` and
    ``"module_path": "deepnvme.integrations.vllm"``. The entry's other fields are arguments of this class. The first three
    arguments are vLLM's own.

    No method waits for a drive but :meth:`drain_jobs` and :meth:`shutdown`. A job in which a block is damaged, missing or cannot
    be written has failed, and its result names the blocks that succeeded: vLLM uses those, and computes the others again.

    Args:
        offloading_spec: vLLM's configuration. The store refuses blocks of another model, dtype, layout or parallelism.
        primary_kv_view: vLLM's memory of blocks: two dimensions, one row for each block.
        tier_type: The type in the entry.
        path: A directory, or several on different drives. Each engine of data parallelism has a folder ``dp-N`` in it.
        capacity: Most bytes of the files of one engine, or a size such as "200GB". Reserved at once.
        enable_kv_events: Whether to report stored blocks, and blocks that a load has missed, to vLLM, if its events of KV blocks
            are enabled. Evictions are not reported.
        locality: "LOCAL" or "REMOTE", for these events; None for neither.
        aio_config: Settings of the engine, as an ``aio`` block; None for the profile of the drive.
        backpressure_detector: vLLM's.

    Raises:
        StoreLocked: If another process, which the message names, uses a directory.
        ValueError: If the files are of another model, layout or capacity, or an argument is wrong.
        OSError: With ENOSPC if a drive has too little space. Names the file.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        path: Paths,
        capacity: ByteCount,
        enable_kv_events: bool = False,
        locality: str | None = None,
        aio_config: AioSettings = None,
        backpressure_detector: Any = None,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = None if locality is None else Locality(locality)
        self._events: list[OffloadingEvent] | None = None
        if enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events:
            self._events = []
        elif enable_kv_events:
            _log.warning("enable_kv_events has no effect: vLLM's kv_events_config does not enable events of KV blocks")
        self._jobs: dict[int, tuple[Any, BlocksFuture | None]] = {}
        parallel = offloading_spec.config.parallel
        self._store = BlockStore(
            folders_in(path, f"dp-{parallel.data_parallel_index}" if parallel.data_parallel_size > 1 else ""),
            capacity,
            primary_kv_view.nbytes // len(primary_kv_view),
            fingerprint=_fingerprint(offloading_spec),
            aio_config=aio_config_of(aio_config),
        )
        self._reported = self._store.stats()

    # Called by vLLM's scheduler, in one thread: the interface of SecondaryTierManager, vLLM 0.32

    def on_new_request(self, req_context: Any) -> Any:
        """Return vLLM's default: blocks are stored as they are computed."""
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """Return HIT if a block is stored, MISS otherwise. Does not read the drive."""
        return LookupResult.HIT if self._store.contains_many([key])[0] else LookupResult.MISS

    def submit_store(self, job_metadata: Any) -> None:
        """Start storing the blocks of a job; return at once. Blocks that are stored already are not written again."""
        self._submit(job_metadata, self._store.put_many)

    def submit_load(self, job_metadata: Any) -> None:
        """Start loading the blocks of a job; return at once."""
        self._submit(job_metadata, self._store.get_many)

    def _submit(self, job: Any, start: Any) -> None:
        """Start a job. A job that cannot be started, because vLLM's memory has no such row, is one that has failed."""
        future = None
        try:
            future = start(list(job.keys), self._primary_kv_view, job.chunk_ids)
        except (IndexError, ValueError) as error:
            _log.error("job %s of the tier %s cannot be started: %s", job.job_id, self.tier_type, error)
        self._jobs[job.job_id] = job, future

    def get_finished_jobs(self) -> Iterable[Any]:
        """Return the results of the jobs that have ended since the last call. Never blocks."""
        ended = [number for number, (_, future) in self._jobs.items() if future is None or future.done()]
        return [self._result(*self._jobs.pop(number)) for number in ended]

    def _result(self, job: Any, future: BlocksFuture | None) -> Any:
        """Return the result of a job that has ended, and note its events."""
        keys = list(job.keys)
        flags = [False] * len(keys) if future is None else future.result()
        done = [key for key, flag in zip(keys, flags, strict=True) if flag]
        success = future is not None and len(done) == len(keys)
        if self._events is not None and not job.is_promotion and done:
            self._note(done, removed=False)
        elif job.is_promotion and not success:
            failed = [key for key, flag in zip(keys, flags, strict=True) if not flag]
            if future is not None:
                self._store.delete(failed)  # also where memory was short: a hit that cannot be loaded would be asked for for ever
            if self._events is not None:
                self._note(failed, removed=True)
        return JobResult(
            job_id=job.job_id,
            success=success,
            successful_keys=tuple(done) if job.is_promotion and done and not success else None,
            transfer_time=time.monotonic() - job.submit_time,
            transfer_bytes=len(done) * self._store.block_bytes,
        )

    def _note(self, keys: list[bytes], removed: bool) -> None:
        assert self._events is not None
        self._events.append(OffloadingEvent(keys=keys, medium=self.medium, removed=removed, locality=self.locality))

    def has_pending_work(self) -> bool:
        """Return whether a job is under way, so that vLLM goes on asking for results."""
        return bool(self._jobs)

    def take_events(self) -> Iterable[Any]:
        """Return the events since the last call."""
        if self._events is None:
            return ()
        taken, self._events = self._events, []
        return taken

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """Count blocks as used now, so that they are evicted later."""
        self._store.touch(list(keys))

    def drain_jobs(self) -> None:
        """Wait until no job is under way. The results stay for :meth:`get_finished_jobs`."""
        for _, future in self._jobs.values():
            if future is not None:
                future.result()

    def shutdown(self) -> None:
        """Wait for the jobs under way, and close the store. Idempotent."""
        try:
            self._store.close()
        finally:
            self._jobs.clear()

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Return the metrics of the tier, beside vLLM's own."""
        counters = {_METRIC.format(name): OffloadingCounterMetadata(documentation=text) for name, text in _COUNTERS.items()}
        gauges = {_METRIC.format(name): OffloadingGaugeMetadata(documentation=text) for name, text in _GAUGES.items()}
        return {**super().build_metric_definitions(extra_config), **counters, **gauges}

    def get_stats(self) -> Any:
        """Return what the counters have grown by since the last call, and the gauges."""
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (  # type: ignore[import-not-found]
            OffloadingConnectorStats,
        )

        stats = super().get_stats() or OffloadingConnectorStats()
        now, before = self._store.stats(), self._reported
        for name in _COUNTERS:
            stats.increase_counter(_METRIC.format(name), getattr(now, name) - getattr(before, name))
        for name in _GAUGES:
            stats.set_gauge(_METRIC.format(name), getattr(now, name))
        self._reported = now
        return stats

    # Called by users

    def stats(self) -> BlockStoreStats:
        """Return the counters of the store since it was opened. Never blocks on a drive."""
        return self._store.stats()


def _fingerprint(offloading_spec: Any) -> str:
    """Return what vLLM's own file tier names its folder of blocks after: model, dtype, groups of layers, and parallelism."""
    names = FileMapper.from_offloading_spec(
        root_dir="vLLM", offloading_spec=offloading_spec, blocks_per_file=offloading_spec.blocks_per_chunk, parallel_agnostic=True
    )
    return f"{names.base_path}_r{names.rank}"
