"""The offloaded KV cache for transformers' ``generate``: keys and values on a drive."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import transformers
from packaging.version import Version
from transformers import PreTrainedConfig, PreTrainedModel, cache_utils

from deepnvme.memory.budget import MemoryBudget, budget_bytes
from deepnvme.store.volumes import Directory
from deepnvme.telemetry.descriptions import representation, size_for_people
from deepnvme.telemetry.report_figures import ReportFigures

from .drive import KVChunkStore
from .layer import OffloadedLayer
from .strip import Pair

if TYPE_CHECKING:
    from deepnvme.drives.aio_config import AioConfig

if Version(transformers.__version__).release < (5, 19):
    raise ImportError(
        f"an offloaded KV cache needs transformers 5.19 or later, and {transformers.__version__} is installed:"
        " pip install --upgrade transformers"
    )


@dataclass(frozen=True)
class CacheReport(ReportFigures):
    """Memory and drive space of an :class:`OffloadedCache` now, and its I/O so far. ``as_dict()`` returns the numbers."""

    bytes_in_memory: int
    """Host memory for positions that are not on the drive, including memory reserved for more."""
    bytes_on_drive: int
    """Bytes of keys and values on the drive now."""
    bytes_read: int
    """Bytes read from the drive since the cache was made."""
    bytes_written: int
    """Bytes written to the drive since the cache was made."""
    seconds_waited: float
    """Seconds spent waiting for reads that had not ended when they were needed."""


class OffloadedCache(cache_utils.DynamicCache, contextlib.AbstractContextManager["OffloadedCache"]):
    """A KV cache on a drive, for ``model.generate(..., cache=cache)``.

    >>> with OffloadedCache(model.config, "/mnt/nvme") as cache, torch.no_grad():
    ...     model.generate(**inputs, cache=cache)  # past_key_values=cache before transformers 5.24

    Replaces a DynamicCache, and gives the same tokens. Layers of full, sliding-window and chunked attention are offloaded. The
    states of linear attention do not grow, and stay where the model has them. Encoder-decoder models are refused.

    A step of generation reads the keys and values of each layer while the layers before it compute. It writes
    those of new positions a few MiB at a time; positions that do not fill a chunk of 2 MiB yet stay in memory. The files
    are removed by :meth:`close`, when the cache is garbage-collected, and at exit. Files of a killed process are removed
    when another cache is made in the same ``path``.

    Memory needed beside ``memory_budget``: ``prefetch + 1`` times the largest layer (on the drive or not), 16 MiB for
    writes, and up to 2 MiB of newest positions for each layer.

    Beam search, and selecting or repeating rows of the batch, rewrite nothing on the drive: rows are reordered when they are
    read. ``crop`` and assisted generation work. One cache serves one sequence of forwards; it is not thread-safe. After an
    error or interrupt inside the cache, or between the layers of a forward, the content is unusable: every use raises
    RuntimeError, with the error as its cause, until :meth:`reset`.

    Args:
        config: The model's configuration.
        path: The directory in which the cache creates its own subdirectory; created if it is missing.
        memory_budget: Bytes of host memory for whole layers that stay off the drive; 0 for none. Or "8GB", "25%", "auto", see
            :data:`deepnvme.memory.MemoryBudget`: a share of the memory available when the cache is made. As the cache grows,
            one layer after another moves to the drive, chosen so that layers on the drive are spread among those in memory. On a
            CPU, attention uses layers in memory in place, and a step copies nothing.
        prefetch: Number of layers that are read ahead, 0 or more.
        aio_config: Settings of the engine; None for the profile of the drive, see :func:`deepnvme.engine_for`.

    Raises:
        ValueError: If an argument is out of range, or the model has layers of another kind, or an encoder.
        TypeError: If ``aio_config`` is not an AioConfig.
        OSError: If the files cannot be created, or the kernel refuses the backend that ``aio_config`` names.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        path: Directory,
        *,
        memory_budget: MemoryBudget = 0,
        prefetch: int = 1,
        aio_config: AioConfig | None = None,
    ) -> None:
        self._path, self._budget = path, _check(config, memory_budget, prefetch)
        types, arguments = cache_utils.get_layer_types_and_kwargs(config.get_text_config(decoder=True))
        kinds = [cache_utils.DYNAMIC_LAYER_TYPE_MAPPING[name] for name in types]
        strange = {name for name, kind in zip(types, kinds, strict=True) if kind not in _OFFLOADED and kind not in _KEPT}
        if strange:
            raise ValueError(f"layers of {', '.join(sorted(strange))} cannot be offloaded: use a DynamicCache for this model")
        self._drive = KVChunkStore(path, len(kinds), prefetch, aio_config)
        layers: list[Any] = [
            kind(**given)
            if kind in _KEPT
            else OffloadedLayer(self._drive, index, given.get("sliding_window"), streamed=self._budget == 0)
            for index, (kind, given) in enumerate(zip(kinds, arguments, strict=True))
        ]
        self._begun: tuple[int, int] | None = None  # OffloadedLayer.state of all layers before the current forward
        self._updated: set[int] = set()  # indices of the layers that the current forward has updated
        cache_utils.Cache.__init__(self, layers=layers)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Pair:
        """Append positions to a layer, and return the keys and values for attention: see :meth:`OffloadedLayer.update`."""
        layer: Any = self.layers[layer_idx]
        if isinstance(layer, OffloadedLayer):
            if layer.state != self._begun or layer_idx in self._updated:
                self._begin_forward(layer)
            self._updated.add(layer_idx)
        if isinstance(layer, OffloadedLayer) and not layer.streamed:
            self._make_room(layer_idx, self._budget, key_states, value_states)
        states: Pair = layer.update(key_states, value_states, *args, **kwargs)
        return states

    def reset(self) -> None:
        """Remove all positions, and make the cache usable again after an error. If reset() is interrupted, call it again."""
        self._begun = None
        super().reset()  # type: ignore[no-untyped-call]
        self._drive.mend()

    def report(self) -> CacheReport:
        """Return the memory and space in use now, and the bytes and seconds of I/O since the cache was made."""
        cache = self._drive.cache
        return CacheReport(
            bytes_in_memory=sum(layer.resident_bytes for layer in self._offloaded().values()),
            bytes_on_drive=sum(chunk.nbytes for chunks in self._drive.chunks for chunk in chunks),
            bytes_read=cache.bytes_read,
            bytes_written=cache.bytes_written,
            seconds_waited=cache.seconds_waited,
        )

    def close(self) -> None:
        """Remove the files and free the memory. Waits for I/O in flight. Idempotent."""
        self._drive.close()
        for layer in self._offloaded().values():
            layer.drop()

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return representation(
            self,
            lambda: f"in '{self._path}'",
            lambda: f"{len(self.layers)} layers",
            lambda: f"{next((layer.state[0] for layer in self._offloaded().values()), 0)} positions",
            lambda: f"memory_budget={size_for_people(self._budget)}",
            lambda: self._drive.state(),
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError("an OffloadedCache cannot be copied or pickled: its positions are in files of its own")

    def _offloaded(self) -> dict[int, OffloadedLayer]:
        """Return the layers that are offloaded, by number."""
        return {index: layer for index, layer in enumerate(self.layers) if isinstance(layer, OffloadedLayer)}

    def _begin_forward(self, first: OffloadedLayer) -> None:
        """Record that a forward begins at layer ``first``. Raises RuntimeError if the layers' positions differ.

        They differ if an earlier forward was broken off between two layers.
        """
        self._drive.check()
        states = {index: layer.state for index, layer in self._offloaded().items() if layer.state[0]}
        other = next((index for index in states if states[index] != first.state), None)
        if other is not None:
            text = "a forward, or a change of all layers, was broken off between two of them: reset() the cache, or make another"
            counts = f"layer {other} has {states[other][0]} positions, another {first.state[0]}"
            self._drive.mark_broken(RuntimeError(f"{counts}: {text}"))
        self._begun, self._updated = first.state, set()

    def _make_room(self, index: int, budget: int, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Move layers to the drive until the layers in memory fit into the budget, with the new positions of layer ``index``."""
        layers = self._offloaded()
        layer = layers[index]
        wanted = layer.resident_bytes_with(key_states, value_states)
        if wanted == layer.resident_bytes:
            return
        while not layer.streamed:
            resident = {other: layers[other].resident_bytes for other in layers if not layers[other].streamed and other != index}
            if wanted + sum(resident.values()) <= budget:
                return
            candidates = [index, *(other for other, nbytes in resident.items() if nbytes)]
            streamed = [other for other in layers if layers[other].streamed]
            layers[max(candidates, key=lambda other: _distance(other, streamed, len(self.layers)))].stream()


def offload_kv(
    model: PreTrainedModel,
    path: Directory,
    *,
    memory_budget: MemoryBudget = 0,
    prefetch: int = 1,
    aio_config: AioConfig | None = None,
) -> None:
    """Make ``model.generate()`` use an offloaded KV cache, unless a call passes a cache or asks for another kind.

    Each call makes its own cache and closes it at the end. A cache that is returned (``return_dict_in_generate``) stays open
    until it is garbage-collected. A model without keys and values (such as Mamba) is left as it is: its states do not grow.
    Other arguments are those of :class:`OffloadedCache`.

    Args:
        model: A transformers model; its ``generate`` is replaced.

    Raises:
        ValueError: If an argument is out of range, or the model cannot generate. Raised at once; other errors of
            :class:`OffloadedCache` are raised by ``generate``.
    """
    _check(model.config, memory_budget, prefetch)
    if not model.can_generate():
        raise ValueError(f"a {type(model).__name__} does not generate: it has no keys and values to offload")
    argument = _cache_argument(model)
    if argument is None:
        return
    generate: Callable[..., Any] = model.generate  # type: ignore[assignment]  # nn.Module's attributes can be anything

    @functools.wraps(generate)
    def offloading(*args: Any, **kwargs: Any) -> Any:
        """Call the original ``generate``, with a new offloaded cache unless the call passes a cache or asks for another kind."""
        if any(kwargs.get(name) is not None for name in _CACHE_ARGUMENTS) or _asks_for_other_cache(model, *args, **kwargs):
            return generate(*args, **kwargs)
        cache = OffloadedCache(model.config, path, memory_budget=memory_budget, prefetch=prefetch, aio_config=aio_config)
        with contextlib.ExitStack() as ending:
            ending.callback(cache.close)
            result = generate(*args, **{**kwargs, argument: cache})
            if not isinstance(result, torch.Tensor):
                ending.pop_all()  # the result holds the cache, and keeps it open
            return result

    model.generate = offloading  # type: ignore[assignment]


def _cache_argument(model: PreTrainedModel) -> str | None:
    """Return the name of the forward's argument for a KV cache; None if the model has no states that grow with each token."""
    names = inspect.signature(model.forward).parameters
    if "past_key_values" in names:
        return "past_key_values"
    if "cache" not in names:
        return None
    # By this name transformers 5.24 and later give models without attention their states, too.
    config = model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return "cache" if getattr(config, "num_attention_heads", None) else None
    return "cache" if any("attention" in kind and kind != "linear_attention" for kind in kinds) else None


def _asks_for_other_cache(
    model: PreTrainedModel, inputs: object = None, generation_config: object = None, *args: object, **options: object
) -> bool:
    """Return whether a call of ``generate`` with these arguments uses no cache, or asks transformers for a kind of cache."""
    defaults = model.generation_config

    def chosen(name: str) -> object:
        """Return a setting from the call's options, else from its ``generation_config``, else from the model's."""
        said = (options.get(name), getattr(generation_config, name, None), getattr(defaults, name, None))
        return next((each for each in said if each is not None), None)

    # "hybrid" is in old checkpoints of models with sliding windows, and transformers treats it as not set.
    return chosen("use_cache") is False or chosen("cache_implementation") not in (None, "hybrid")


_CACHE_ARGUMENTS = ("cache", "past_key_values")
"""Names of the cache argument of ``generate``: "past_key_values" before transformers 5.24, then "cache"."""
_OFFLOADED = (cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer)
_KEPT = tuple(
    getattr(cache_utils, name)
    for name in ("DummyLayer", "LinearAttentionLayer")  # the first since 5.23
    if hasattr(cache_utils, name)
)


def _check(config: PreTrainedConfig, memory_budget: MemoryBudget, prefetch: int) -> int:
    """Check arguments, and return the memory budget in bytes. Raises ValueError or TypeError for a wrong argument."""
    if config.is_encoder_decoder:
        raise ValueError("the keys and values of an encoder-decoder model cannot be offloaded: use an EncoderDecoderCache")
    if prefetch < 0:
        raise ValueError(f"prefetch must be 0 or more layers, got {prefetch}")
    return budget_bytes(memory_budget, "memory_budget")


def _distance(layer: int, streamed: list[int], layers: int) -> int:
    """Return the number of layers from a layer to the nearest one on the drive. The first layer follows the last."""
    return min((min(abs(layer - other), layers - abs(layer - other)) for other in streamed), default=layers)
