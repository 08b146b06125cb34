"""Stream the weights of SGLang's decoder layers from a drive, through the interface of SGLang's own offloaders."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from deepnvme._former_names import former_names
from deepnvme.files.preallocation import preallocate
from deepnvme.memory.budget import MemoryBudget, budget_bytes
from deepnvme.streaming import Streaming, StreamReport, WeightStore, stream, streaming_of

if TYPE_CHECKING:
    from deepnvme.drives.aio_config import AioConfig

try:
    from sglang.srt.utils import offloader  # type: ignore[import-not-found]
except ImportError as error:
    raise ImportError(f"deepnvme.integrations.sglang needs SGLang 0.5 (pip install sglang): {error}") from error

__all__ = ["StreamingOffloader", "enable"]


class StreamingOffloader(offloader.BaseOffloader):  # type: ignore[misc]  # whatever SGLang is
    """An SGLang offloader that streams the weights of a model's decoder layers from a drive.

    Pass it to SGLang's ``set_offloader`` before SGLang creates a model, or use :func:`enable`.

    While the model is created and loaded, the layers' weights are in unnamed files in ``path``, mapped into memory, so that the
    kernel needs memory only for weights that are being written. When all weights are loaded, :meth:`post_init` builds a store
    from them in ``path``/weights and streams from it.

    Start SGLang with ``--disable-cuda-graph``: a replayed graph uses recorded addresses and would not read any weights.

    Args:
        path: A directory on a drive with room for twice the weights; a different one for each rank. Created if missing.
        prefetch: Number of extents to read ahead: see :func:`deepnvme.streaming.stream`.
        memory_budget: Weights to keep in memory: see :func:`deepnvme.streaming.stream`.
        reuse: Stream from the store that an earlier run built in ``path``. The weights that SGLang loads are ignored, so
            ``--load-format dummy`` saves loading them. Only shapes and dtypes are compared with the model's.
        aio_config: Settings of the engine; None for the profile of the drive, see :func:`deepnvme.engine_for`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        prefetch: int = 2,
        memory_budget: MemoryBudget = 0,
        reuse: bool = False,
        aio_config: AioConfig | None = None,
    ) -> None:
        budget_bytes(memory_budget, "memory_budget")  # checked now; a share is of what is available when weights are loaded
        self._path = Path(path)
        self._prefetch, self._budget, self._reuse, self._config = prefetch, memory_budget, reuse, aio_config
        self._layers = nn.ModuleList()
        self._device = torch.device("cpu")
        self._store: WeightStore | None = None
        self._streaming: Streaming | None = None
        self._path.mkdir(parents=True, exist_ok=True)

    # Called by SGLang: the interface of sglang.srt.utils.offloader.BaseOffloader, SGLang 0.5

    def wrap_modules(
        self,
        all_modules_generator: Iterable[nn.Module],
        submodule_accessor: Callable[[nn.Module], nn.Module] | None = None,
        whitelist_param_names_creator: Callable[[nn.Module], list[str]] | None = None,
    ) -> list[nn.Module]:
        """Move each layer's weights to files as the layer is created. Called by SGLang when it creates a model.

        All weights are streamed. The arguments that select weights are ignored: they are for offloaders that keep the other
        weights on the device.

        Args:
            all_modules_generator: Creates the layers, one at a time.
            submodule_accessor: Ignored.
            whitelist_param_names_creator: Ignored.

        Returns:
            The layers.

        Raises:
            RuntimeError: For a second list of layers, such as a draft model's.
            OSError: If there is no room for the weights (ENOSPC).
        """
        if len(self._layers):
            raise RuntimeError("an offloader serves one list of layers, and has one: give each model its own")
        for layer in all_modules_generator:
            self._move_to_mapped_file(layer)
            self._layers.append(layer)
        return list(self._layers)

    def post_init(self) -> None:
        """Build the store from the loaded weights, or open it, and start streaming. Called by SGLang after loading. Blocks.

        After any exception the offloader is closed.

        Raises:
            ValueError: For weights that are not contiguous, since the store would not keep their strides.
            FileExistsError: If there is a store in ``path`` and ``reuse`` is False.
            OSError: If the drive cannot be read or written.
            Exception: Any other exception of :func:`deepnvme.streaming.stream`.
        """
        strided = [name for name, weight in self._layers.named_parameters() if not weight.is_contiguous()]
        if strided:
            raise ValueError(f"weights must be contiguous to be streamed, and these are not: {', '.join(strided[:4])}")
        where = self._path / "weights"
        self._layers.requires_grad_(False).to("cpu")  # for tensors that were created after wrap_modules
        try:
            if self._reuse:
                self._store = WeightStore.open(where, aio_config=self._config)
            else:
                self._store = WeightStore.build(self._layers, where, aio_config=self._config)
            self._streaming = stream(
                self._layers, self._store, prefetch=self._prefetch, memory_budget=self._budget, device=self._device
            )
            if self._device.type == "cuda":
                for layer in self._layers:
                    layer.register_forward_pre_hook(_refuse_graphs)
        except BaseException:
            self.close()
            raise

    @property
    def forbid_copy_engine_usage(self) -> bool:
        """Whether SGLang's kernels must leave the device's copy engine to this offloader. Read by SGLang; True on CUDA."""
        return self._device.type == "cuda"

    # Called by users

    def report(self) -> StreamReport:
        """Return timings and bytes of the streaming so far. Raises RuntimeError before :meth:`post_init`."""
        if self._streaming is None:
            raise RuntimeError("nothing is streamed yet: SGLang calls post_init() when the weights are loaded")
        return self._streaming.report()

    def close(self) -> None:
        """Stop streaming. The layers have no weights afterwards; the store's files are kept. Idempotent."""
        streaming = self._streaming or streaming_of(self._layers)  # the latter if post_init() was interrupted
        if streaming is not None:
            streaming.close()
        if self._store is not None:
            self._store.close()

    def _move_to_mapped_file(self, layer: nn.Module) -> None:
        """Move a layer's weights to mapped files, so that the kernel can write them to the drive when it needs the memory."""
        for weight in layer.parameters():
            if weight.is_meta or weight.numel() == 0:
                continue
            self._device = weight.device
            with tempfile.NamedTemporaryFile(prefix="deepnvme-loading-", dir=self._path) as file:
                # On a full drive, writing to the mapping would end the process with SIGBUS, so reserve the space here.
                preallocate(file.fileno(), 0, weight.nbytes, str(self._path), "make room, or choose another path")
                mapped = torch.from_file(file.name, shared=True, size=weight.nbytes, dtype=torch.uint8)
            parked = mapped.view(weight.dtype).view(weight.shape)
            parked.copy_(weight.data)
            weight.data = parked


@former_names(config="aio_config")
def enable(
    path: str | os.PathLike[str],
    *,
    prefetch: int = 2,
    memory_budget: MemoryBudget = 0,
    reuse: bool = False,
    aio_config: AioConfig | None = None,
) -> None:
    """Make SGLang use a :class:`StreamingOffloader`, in ``path``/rank-N, for each model that it creates in this process.

    Call it in the process that runs the model, before SGLang's ``ModelRunner`` is created: that is when SGLang chooses an
    offloader.

    Args:
        path: A directory on a drive, with room for twice the weights of all ranks.
        prefetch: See :class:`StreamingOffloader`.
        memory_budget: See :class:`StreamingOffloader`.
        reuse: See :class:`StreamingOffloader`.
        aio_config: See :class:`StreamingOffloader`.
    """

    budget_bytes(memory_budget, "memory_budget")

    def create_offloader() -> StreamingOffloader:
        """Return an offloader whose directory is this rank's own."""
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        where = Path(path) / f"rank-{rank}"
        return StreamingOffloader(where, prefetch=prefetch, memory_budget=memory_budget, reuse=reuse, aio_config=aio_config)

    offloader.create_offloader = create_offloader
    runner = sys.modules.get("sglang.srt.model_executor.model_runner")
    if runner is not None:  # it was imported already, and has its own reference to create_offloader
        runner.create_offloader = create_offloader  # type: ignore[attr-defined]


def _refuse_graphs(module: nn.Module, arguments: Any) -> None:
    """Raise RuntimeError if a CUDA graph is being captured. Used as a forward pre-hook of each layer."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("streamed weights cannot be captured in a CUDA graph: start SGLang with --disable-cuda-graph")
