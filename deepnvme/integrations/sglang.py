"""SGLang: the layers' weights streamed from a drive, through the interface that its own offloaders have."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepnvme._preallocation import preallocate
from deepnvme.streaming import Streaming, StreamReport, WeightStore, stream, streaming_of

try:
    from sglang.srt.utils import offloader  # type: ignore[import-not-found]
except ImportError as error:
    raise ImportError(f"deepnvme.integrations.sglang needs SGLang 0.5 (pip install sglang): {error}") from error


class StreamingOffloader(offloader.BaseOffloader):  # type: ignore[misc]  # whatever SGLang is
    """For ``set_offloader``, before SGLang makes a model: its decoder layers have their weights on the drive.

    While the model is made and loaded, a layer's weights are in files without a name in ``path``, mapped into memory, so that the
    kernel needs memory only for those that are being written. When they are loaded, :meth:`post_init` builds a store from them in
    ``path``/weights, and streams that.

    ``path``: a directory on a drive, another for each rank, with room for the weights twice. ``prefetch``, ``memory_budget``: see
    :func:`deepnvme.streaming.stream`. ``reuse``: stream the store that an earlier run has built there; what SGLang has loaded is
    dropped then, so that ``--load-format dummy`` will do. Only shapes and dtypes are compared.

    Needs ``--disable-cuda-graph``: a graph would replay addresses, and read nothing.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, prefetch: int = 2, memory_budget: int = 0, reuse: bool = False
    ) -> None:
        self._path = Path(path)
        self._prefetch, self._budget, self._reuse = prefetch, memory_budget, reuse
        self._layers = nn.ModuleList()
        self._device = torch.device("cpu")
        self._store: WeightStore | None = None
        self._streaming: Streaming | None = None
        self._path.mkdir(parents=True, exist_ok=True)

    # SGLang's interface.

    def wrap_modules(
        self,
        all_modules_generator: Iterable[nn.Module],
        submodule_accessor: Callable[[nn.Module], nn.Module] | None = None,
        whitelist_param_names_creator: Callable[[nn.Module], list[str]] | None = None,
    ) -> list[nn.Module]:
        """Take the layers, one after the other as they are made. All of their weights are streamed, whatever the other arguments
        choose: those are for offloaders that keep a part on the device.

        Raises RuntimeError for a second list of layers, as of a draft model; OSError (ENOSPC) where there is no room for them.
        """
        if len(self._layers):
            raise RuntimeError("an offloader serves one list of layers, and has one: give each model its own")
        for layer in all_modules_generator:
            self._park(layer)
            self._layers.append(layer)
        return list(self._layers)

    def post_init(self) -> None:
        """Stream the weights, which are loaded by now. Blocks while the store is built.

        Raises ValueError for weights that the store would not give back as they are, FileExistsError where there is a store and
        ``reuse`` was not asked for, OSError, and what :func:`deepnvme.streaming.stream` raises.
        """
        strided = [name for name, weight in self._layers.named_parameters() if not weight.is_contiguous()]
        if strided:
            raise ValueError(f"weights must be contiguous to be streamed, and these are not: {', '.join(strided[:4])}")
        where = self._path / "weights"
        self._layers.requires_grad_(False).to("cpu")  # what was made after the layers were taken
        try:
            self._store = WeightStore.open(where) if self._reuse else WeightStore.build(self._layers, where)
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
        """Whether SGLang's kernels are to leave the device's copy engine to the offloader: it is what brings the weights."""
        return self._device.type == "cuda"

    # For users.

    def report(self) -> StreamReport:
        """Of what was streamed. Raises RuntimeError before :meth:`post_init`."""
        if self._streaming is None:
            raise RuntimeError("nothing is streamed yet: SGLang calls post_init() when the weights are loaded")
        return self._streaming.report()

    def close(self) -> None:
        """End the stream; the layers have no weights then. The store stays where it is. Idempotent."""
        streaming = self._streaming or streaming_of(self._layers)  # that of a post_init() which was interrupted
        if streaming is not None:
            streaming.close()
        if self._store is not None:
            self._store.close()

    def _park(self, layer: nn.Module) -> None:
        """Have its weights in memory that the kernel can write to the drive, and does where it needs the room."""
        for weight in layer.parameters():
            if weight.is_meta or weight.numel() == 0:
                continue
            self._device = weight.device
            with tempfile.NamedTemporaryFile(prefix="deepnvme-loading-", dir=self._path) as file:
                # Without room, what is written to the mapping would end the process.
                preallocate(file.fileno(), 0, weight.nbytes, str(self._path), "make room, or choose another path")
                mapped = torch.from_file(file.name, shared=True, size=weight.nbytes, dtype=torch.uint8)
            parked = mapped.view(weight.dtype).view(weight.shape)
            parked.copy_(weight.data)
            weight.data = parked


def enable(path: str | os.PathLike[str], *, prefetch: int = 2, memory_budget: int = 0, reuse: bool = False) -> None:
    """Have SGLang use a :class:`StreamingOffloader` for each model that it makes in this process, in ``path``/rank-N.

    In the process that runs the model, before it does: SGLang chooses an offloader when its ModelRunner begins.
    """

    def create_offloader() -> StreamingOffloader:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        return StreamingOffloader(Path(path) / f"rank-{rank}", prefetch=prefetch, memory_budget=memory_budget, reuse=reuse)

    offloader.create_offloader = create_offloader
    runner = sys.modules.get("sglang.srt.model_executor.model_runner")
    if runner is not None:  # it has its own name for it
        runner.create_offloader = create_offloader  # type: ignore[attr-defined]


def _refuse_graphs(module: nn.Module, arguments: Any) -> None:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("streamed weights cannot be captured in a CUDA graph: start SGLang with --disable-cuda-graph")
