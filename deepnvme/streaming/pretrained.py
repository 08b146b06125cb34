"""Weight streaming for Hugging Face transformers: from the checkpoint's own files, or from a store that is built once.

To build a store, transformers is asked to load the model with a device map that offloads everything to disk: so it says where
each weight lies in the checkpoint. It writes the weights that it converts while loading to a temporary directory.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import functools
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextvars import ContextVar, copy_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from deepnvme._former_names import former_names, option_names, refuse_options
from deepnvme.checkpoint.file_io import Version
from deepnvme.checkpoint.weight_locations import Location, weights_in_index
from deepnvme.memory.budget import MemoryBudget, budget_bytes, is_automatic
from deepnvme.model.quantization import Scheme
from deepnvme.model.structure import weights_by_name
from deepnvme.store.volumes import as_directories
from deepnvme.telemetry.progress import ProgressOption
from deepnvme.telemetry.sizes import ByteCount

from .experts.expert_layers import expert_weights
from .experts.offloaded_experts import OffloadedExperts
from .extent_reader import memory_of_blocks
from .located_source import LocatedSource
from .located_weights import locate_weights, with_dtypes_kept
from .streamed_model import Streaming, budget_on, check_no_table_bytes, end_stream_of, streaming_of
from .table_weights import MIN_TABLE_BYTES, OffloadedTables
from .weights.build_once import opened_or_built
from .weights.checkpoint_weights import CheckpointWeights
from .weights.places import Place
from .weights.weight_store import Directories, WeightStore

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from deepnvme.drives.aio_config import AioConfig

_HUB: dict[str, Any] = {
    "cache_dir": None, "force_download": False, "local_files_only": False, "proxies": None, "revision": None, "subfolder": "",
    "token": None,
}  # fmt: skip
"""Options of ``from_pretrained`` that say where to find a checkpoint, with their defaults."""
_CHOOSING = ("key_mapping", "subfolder", "use_safetensors", "variant")
"""Options of ``from_pretrained`` that select different weights of the same checkpoint."""
_REFUSED = (
    "device_map", "device_mesh", "distributed_config", "gguf_file", "max_memory", "offload_buffers", "offload_folder",
    "quantization_config", "state_dict", "tp_plan", "tp_size",
    "adapter_kwargs", "adapter_name", "fusion_config", "kernel_config", "output_loading_info", "use_kernels",
)  # fmt: skip
"""Options that raise TypeError: they place the weights (the stream does that), change the model, or change what is returned."""

_LOADING = (
    "allow_all_kernels", "attn_implementation", "code_revision", "config", "disable_mmap", "dtype", "experts_implementation",
    "from_flax", "from_tf", "generation_config", "ignore_mismatched_sizes", "low_cpu_mem_usage", "mirror", "offload_state_dict",
    "torch_dtype", "tqdm_class", "trust_remote_code", "weights_only",
)  # fmt: skip
"""Further options that transformers' ``from_pretrained`` accepts. All others must be attributes of the configuration."""

_FP8_METHODS = ("compressed-tensors", "fbgemm_fp8", "fp8")
"""Methods of quantisation by which weights may be FP8 with scales. They are dequantised as they are read."""

locating_weights: ContextVar[bool] = ContextVar("locating_weights", default=False)
"""True while a model is loaded only to find where accelerate would read its weights. Integrations leave that model alone."""


@former_names(offload_dir="path")
def from_pretrained(
    name_or_path: str | os.PathLike[str],
    *,
    path: Directories | None = None,
    memory_budget: MemoryBudget = 0,
    min_table_bytes: ByteCount | None = MIN_TABLE_BYTES,
    prefetch: int = 2,
    device: torch.device | str | None = None,
    quantize: Scheme | None = None,
    kv_offload: Literal["nvme"] | None = None,
    experts: Literal["on-demand", "streamed"] | None = None,
    model_class: Any = None,
    progress: ProgressOption = None,
    aio_config: AioConfig | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Return a transformers model, ready for inference, whose weights are streamed from the drive. Blocks.

    Without ``path``, the weights are streamed from the checkpoint's own files, safetensors or torch's. Nothing is written. The
    files must not change as long as the model is streamed.

    With ``path``, the first call for a checkpoint builds a store there: each weight is read and written once, and only a few
    blocks are in memory at a time. Later calls open the store; calls in other processes wait while it is being built.

    Args:
        name_or_path: As for transformers' ``from_pretrained``. A name that is not a local directory is downloaded.
        path: One or several directories of the store, as for :class:`WeightStore`; None for no store. Needed for
            ``quantize``, and for weights that transformers rearranges while loading them, other than by stacking and
            concatenating whole tensors, as it does with the experts of most mixtures.
        memory_budget: Bytes of weights that stay in memory, or "8GB", "50%", "auto", as for :func:`stream`.
        min_table_bytes: Without ``path``: least bytes of an embedding that is read by rows, or a size such as "1GB", as for
            :func:`stream`. With ``path``, any other value than None and the default raises ValueError.
        prefetch: Number of extents that are read ahead, as for :func:`stream`.
        device: Where the model computes, as for :func:`stream`.
        quantize: "int8", "int4" or None, as for :meth:`WeightStore.build`.
        kv_offload: Where ``generate`` keeps the KV cache: "nvme" for the first of the directories of ``path``, None for the
            device on which the model computes.
        experts: For a mixture without ``path``: "on-demand" reads the experts that the router has chosen, as
            :func:`offload_experts` does; "streamed" reads all experts with their layer. None reads them on demand if the
            model's weights, as they are in the files, are more than ``memory_budget``. Other weights come first in the budget,
            experts get what is left of it. Experts stay in host memory, also if ``device`` is a CUDA device; then a share counts
            that device's memory, and experts take at most the same share of host memory.
        model_class: A class of transformers; None for the one that the checkpoint names.
        progress: Progress display while the store is built, as for :meth:`WeightStore.build`.
        aio_config: Settings of the engine that reads the weights, builds a store, and serves a KV cache on the drive; None for
            the profile of the drive, see :func:`deepnvme.engine_for`.
        options: Further options of transformers' ``from_pretrained``, except those that place the weights or change the model.

    Returns:
        The model. Its attribute ``streaming`` is the :class:`Streaming`: ``streaming.report()`` gives the counters, and
        ``streaming.close()`` ends the stream and closes the store. ``streaming.experts`` has the report of experts on demand,
        ``streaming.tables`` the embeddings that are read by rows, by the name of the weight.

    Raises:
        FileNotFoundError: If ``name_or_path`` is a path that does not exist, or a folder without config.json. PathLikes, names
            that begin with "/", "." or "~", and names with several "/" are paths.
        NotADirectoryError: If ``name_or_path`` is a file.
        ImportError: If transformers or accelerate is not installed.
        TypeError: For an option that is refused, such as ``device_map``, or unknown, such as a misspelt one; or if
            ``model_class`` is no class.
        ValueError: If the store in ``path`` is of another checkpoint (the message names the differences), if the
            checkpoint is quantised other than to FP8, or if ``kv_offload`` is none of the above. Without ``path``: if something
            needs a store, or the checkpoint lacks a weight of the model; the message names the weights. If the routers of the
            model convert their own weights to another dtype, as those of Switch and NLLB-MoE do. Or if ``experts`` is
            "on-demand", and the model has no experts that can be read on demand.
        CorruptCheckpoint: If a file of the checkpoint is damaged, or an FP8 weight has no scales that fit. Later, from the model:
            if a file was changed.
        Exception: Whatever transformers, :meth:`WeightStore.build` and :func:`stream` raise.
    """
    budget_bytes(memory_budget, "memory_budget")  # checked before any work; what it is, the stream finds out
    _check_arguments(path, min_table_bytes, quantize, kv_offload, experts, model_class, options)
    transformers = _transformers()
    name = _checked_name(name_or_path, options)
    config = _config(transformers, name, options)
    _check_routers(config, options)
    kind = _class_of(transformers, config, model_class)
    quantization = _without_quantization(config)
    if quantization is not None:  # otherwise transformers makes modules of its own for it
        options = {key: options[key] for key in options if key in (*_HUB, *_CHOOSING, *_LOADING)} | {"config": config}
    if path is None or quantization is not None:
        kind = _concrete(kind, config, options)
    if path is None:
        located = locate_weights(kind, name, options, quantization)
        return _streamed_in_place(*located, prefetch, memory_budget, min_table_bytes, device, experts, aio_config)
    origin = _origin(transformers, name, config, options) | {"quantize": quantize}
    where = as_directories(path)

    def build(directory: Path) -> WeightStore:
        """Build the store of the checkpoint, and open it."""
        how: dict[str, Any] = {"quantize": quantize, "progress": progress, "aio_config": aio_config, "origin": json.dumps(origin)}
        if quantization is not None:
            model, weights, versions = locate_weights(kind, name, options, quantization)
            with LocatedSource(CheckpointWeights(weights, versions, model, aio_config=aio_config)) as located:
                return WeightStore.build(located, where, model=model, **how)
        with _empty(directory / "converted") as converted:
            model, source = _offloaded(kind, name, options, converted)
            return WeightStore.build(source, where, model=model, **how)

    store = opened_or_built(where, origin, build, aio_config)
    model: PreTrainedModel | None = None
    try:
        model = _without_weights(kind, name, config, store, options)
        if kv_offload is not None:
            from .kv.cache import offload_kv

            offload_kv(model, where[0], aio_config=aio_config)
        # An ordinary attribute: it is neither a module nor a tensor.
        model.streaming = Streaming(model, store, prefetch, memory_budget, device, owns_store=True)
    except BaseException:
        with contextlib.closing(store):
            streamed = None if model is None else streaming_of(model)
            if streamed is not None:  # interrupted after the stream was made
                streamed.close()
        raise
    return model


def _check_arguments(
    path: object, min_table_bytes: ByteCount | None, quantize: str | None, kv_offload: str | None, experts: str | None,
    model_class: object, options: Mapping[str, Any],
) -> None:  # fmt: skip
    """Raise ValueError or TypeError if arguments of :func:`from_pretrained` are wrong or exclude one another."""
    if kv_offload not in (None, "nvme"):
        raise ValueError(f"kv_offload must be None or 'nvme', got {kv_offload!r}")
    if path is None and (quantize or kv_offload):
        what = "quantize" if quantize else "kv_offload"
        raise ValueError(f"{what} needs path, a directory to write to: without it, weights are streamed as they are in the files")
    if path is not None:
        check_no_table_bytes(min_table_bytes)
    if experts not in (None, "on-demand", "streamed") or (path is not None and experts == "on-demand"):
        raise ValueError(f"experts must be 'on-demand' (without path), 'streamed' or None, got {experts!r}")
    for option in _REFUSED:
        if option in options:
            why = f"places the weights itself, and streams them as they are: it does not take {option}"
            raise TypeError(f"from_pretrained {why}; see memory_budget= and device=")
    if model_class is not None and not isinstance(model_class, type):
        raise TypeError(f"model_class must be a class, such as transformers.LlamaForCausalLM, got {model_class!r}")


def _transformers() -> Any:
    """Import transformers. Raises ImportError, which says what to install, if it or accelerate is missing."""
    try:
        import accelerate  # noqa: F401
        import transformers
    except ImportError as error:
        raise ImportError(f"{error}; models of transformers need: pip install 'deepnvme[transformers]'") from error
    return transformers


def _checked_name(name_or_path: str | os.PathLike[str], options: Mapping[str, Any]) -> str:
    """Return the name or path of the checkpoint.

    Raises:
        FileNotFoundError: For a path that does not exist, and for a folder without config.json unless ``options`` have a config.
        NotADirectoryError: For a file.
    """
    name = os.fspath(name_or_path)
    no_name_of_the_hub = isinstance(name_or_path, os.PathLike) or name.startswith(("/", ".", "~")) or name.count("/") > 1
    if no_name_of_the_hub and not os.path.exists(name):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
    if os.path.isfile(name):
        why = "from_pretrained takes the folder of a checkpoint; to stream a module from a file, use stream(model, file)"
        raise NotADirectoryError(errno.ENOTDIR, why, name)
    folder = Path(name, options.get("subfolder") or "")
    if os.path.isdir(name) and options.get("config") is None and not (folder / "config.json").exists():
        raise FileNotFoundError(errno.ENOENT, "no checkpoint of transformers: it has no config.json", str(folder))
    return name


def _config(transformers: Any, name: str, options: Mapping[str, Any]) -> PretrainedConfig:
    """Return the model's configuration: the one in ``options``, or else that of the checkpoint.

    Raises:
        TypeError: For an option that is neither one of ``from_pretrained`` nor an attribute of the configuration.
        ValueError: For a checkpoint that is quantised by another method than those for FP8.
    """
    given = options.get("config")
    config: PretrainedConfig
    if isinstance(given, transformers.PretrainedConfig):
        config, unused = copy.deepcopy(given), options  # making the model writes to its configuration
    else:
        others = {key: options[key] for key in options.keys() - {"config", "dtype", "generation_config", "torch_dtype"}}
        config, unused = transformers.AutoConfig.from_pretrained(given or name, return_unused_kwargs=True, **others)
    known = {name: name for name in (*_HUB, *_CHOOSING, *_LOADING)}
    because = "neither it nor transformers has such an option, and"
    because += f" {type(config).__name__} has no such attribute that could be set here"
    refuse_options("from_pretrained", set(unused).difference(known), {**known, **option_names(from_pretrained)}, because)
    quantization = _quantization(config)
    method = None if quantization is None else quantization.get("quant_method")
    if quantization is not None and str(method) not in _FP8_METHODS:
        raise ValueError(f"the checkpoint is quantised ({method}), which is not streamed: give one in FP8, or not quantised")
    return config


def _check_routers(config: PretrainedConfig, options: Mapping[str, Any]) -> None:
    """Raise ValueError if a forward would convert weights of the model: routers of Switch and NLLB-MoE do, to their own dtype."""
    wanted, dtype = getattr(config, "router_dtype", None), _wanted_dtype(config, options)
    if wanted is not None and dtype is not None and str(dtype).removeprefix("torch.") != wanted:
        kind = type(config).__name__.removesuffix("Config")
        raise ValueError(
            f"the routers of {kind} convert their own weights to {wanted}, but streamed ones stay: give dtype={wanted!r}"
        )


def _quantization(config: PretrainedConfig) -> dict[str, Any] | None:
    """Return the ``quantization_config`` of a configuration, or of the text model in it; None if there is none."""
    for each in (config, config.get_text_config(decoder=True)):
        found = getattr(each, "quantization_config", None)
        if found is not None:
            return found if isinstance(found, dict) else dict(found.to_dict())
    return None


def _without_quantization(config: PretrainedConfig) -> dict[str, Any] | None:
    """Remove the ``quantization_config`` from a configuration, and return it; None if there is none."""
    quantization = _quantization(config)
    for each in (config, config.get_text_config(decoder=True)):
        if hasattr(each, "quantization_config"):
            del each.quantization_config
    return quantization


def _class_of(transformers: Any, config: PretrainedConfig, chosen: Any) -> Any:
    """Return the model class: the chosen one, else the one that the checkpoint names, else the auto class for its remote code."""
    if chosen is not None:
        return chosen
    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
        for automatic, remote in (getattr(config, "auto_map", None) or {}).items():
            if str(remote).rpartition(".")[2] == name and hasattr(transformers, automatic):
                return getattr(transformers, automatic)
    return transformers.AutoModelForCausalLM


def _origin(transformers: Any, name: str, config: PretrainedConfig, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return facts that identify the weights of a store: dtype, options, and the checkpoint's files or commit."""
    dtype = _wanted_dtype(config, options)
    facts: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch.")}
    facts |= {option: repr(options[option]) for option in _CHOOSING if options.get(option) not in (None, "")}
    if os.path.isdir(name):
        folder = Path(name, options.get("subfolder") or "")
        status = {path.name: path.stat() for path in sorted(folder.iterdir()) if path.suffix in (".safetensors", ".bin")}
        return facts | {file: [each.st_size, each.st_mtime_ns] for file, each in status.items()}
    return facts | {"checkpoint": name, "revision": _commit(transformers, name, options)}


def _commit(transformers: Any, name: str, options: Mapping[str, Any]) -> str | None:
    """Return the hub commit of the checkpoint's wanted revision, or that revision itself if no commit is found."""
    hub = {option: options.get(option, unless) for option, unless in _HUB.items() if option != "force_download"}
    with contextlib.suppress(OSError):  # with a config= of its own, a checkpoint may have no config.json
        parts = Path(transformers.utils.cached_file(name, "config.json", **hub)).parts
        if "snapshots" in parts:
            return parts[len(parts) - parts[::-1].index("snapshots")]
    return options.get("revision")


def _wanted_dtype(config: PretrainedConfig, options: Mapping[str, Any]) -> Any:
    """Return the dtype that the options give, else the configuration's (a dtype, a name, or None)."""
    dtype = options.get("dtype") or options.get("torch_dtype")
    return config.dtype if dtype in (None, "auto") else dtype


def _offloaded(kind: Any, name: str, options: Mapping[str, Any], folder: Path) -> tuple[Any, dict[str, torch.Tensor | Location]]:
    """Return the checkpoint's model, on the meta device, and where each weight lies.

    ``folder``: directory in which transformers writes the weights that it converts.
    """

    def offloaded() -> Any:
        """Load the model with accelerate's disk offload: on the meta device, with an index of its weights."""
        locating_weights.set(True)
        return kind.from_pretrained(name, device_map={"": "disk"}, offload_folder=folder, **options)

    logger = logging.getLogger("accelerate.big_modeling")
    before = logger.disabled
    try:
        logger.disabled = True  # its warning that weights are on the meta device would mislead: that is only for now
        model = copy_context().run(offloaded)  # in a copy, so that the variable set in there is unset
    except Exception as error:
        # safetensors has an error class of its own, and tells of a full disk in its text.
        failed = re.search(r"^Error while serializing: .*\(os error (\d+)\)$", str(error))
        if failed is None:
            raise
        code = int(failed[1])
        raise OSError(code, f"{os.strerror(code)}: writing what transformers converts", str(folder)) from error
    finally:
        logger.disabled = before
    index, raw = offload_index_of(model)
    index = with_dtypes_kept(model, index)
    model.tie_weights()
    weights = weights_by_name(model)
    here = {each: weight for each, weight in weights.items() if not weight.is_meta}  # buffers, which are loaded into memory
    on_disk = {each: entry for each, entry in index.items() if each in weights and each not in here}
    return model, {**weights_in_index(on_disk, raw), **here}


@contextlib.contextmanager
def _empty(directory: Path) -> Iterator[Path]:
    """Yield an empty directory, which is removed at the end. Files left there by a killed process are removed first."""
    shutil.rmtree(directory, ignore_errors=True)  # if that fails, mkdir raises
    directory.mkdir()
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def offload_index_of(model: torch.nn.Module) -> tuple[Mapping[str, Any], str | None]:
    """Return accelerate's offload index of a model, and the folder of its raw files (None if there are none).

    Raises:
        ValueError: If accelerate has offloaded nothing of the model.
    """
    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        for each in getattr(hook, "hooks", (hook,)):
            weights: Any = getattr(each, "weights_map", None)
            while hasattr(weights, "dataset"):
                weights = weights.dataset  # a hook of a submodule has a view, by prefix, of the whole model's map
            if weights is not None:
                return weights.index, weights.save_folder
    raise ValueError(f"accelerate has offloaded nothing of this {type(model).__name__}")


def _concrete(kind: Any, config: PretrainedConfig, options: Mapping[str, Any]) -> Any:
    """Return the class of the models that ``kind`` makes, which may be an auto class."""
    return type(_made_on_meta(kind, copy.deepcopy(config), options, None)) if hasattr(kind, "from_config") else kind


def _streamed_in_place(
    model: PreTrainedModel, located: Mapping[str, Place], versions: Mapping[str, Version], prefetch: int,
    memory_budget: MemoryBudget, min_table_bytes: ByteCount | None, device: torch.device | str | None,
    experts: Literal["on-demand", "streamed"] | None, aio_config: AioConfig | None,
) -> PreTrainedModel:  # fmt: skip
    """Return a model, streamed from the checkpoint's own files.

    The first three arguments are what :func:`locate_weights` returns, the others as for :func:`from_pretrained`.
    """
    with contextlib.ExitStack() as undo:
        tables = undo.enter_context(OffloadedTables(model, located, versions, min_table_bytes, device, aio_config))
        weights = {weight: place for weight, place in located.items() if weight not in tables.names}
        on_demand = set() if experts == "streamed" else expert_weights(model)
        if experts == "on-demand" and not on_demand:
            text = "has no experts that can be read on demand: leave experts= out, and its layers are streamed"
            raise ValueError(f"{type(model).__name__} {text}")
        budget = budget_on(torch.device(device or "cpu"), memory_budget)
        opened = functools.partial(CheckpointWeights, versions=versions, model=model, device=device, aio_config=aio_config)
        if on_demand and experts is None and budget:
            with opened(weights) as store:
                on_demand = on_demand if memory_of_blocks(store) > budget else set()
        offloaded = None
        if on_demand:
            offloaded = undo.enter_context(OffloadedExperts(model, weights, 0, None, device, aio_config, versions))
        others = {weight: place for weight, place in weights.items() if weight not in on_demand}
        store = undo.enter_context(contextlib.closing(opened(others)))
        if offloaded is not None:
            first = min(budget, memory_of_blocks(store))
            on_host = budget_bytes(memory_budget, "memory_budget")
            offloaded.set_memory_budget(min(budget - first, on_host))
            if first < budget or not is_automatic(memory_budget):  # all of "auto" may hold no extent, which the stream knows
                memory_budget = first
        undo.callback(end_stream_of, model)
        stream = Streaming(model, store, prefetch, memory_budget, device, owns_store=True, experts=offloaded, tables=tables)
        model.streaming = stream  # type: ignore[assignment]  # it is neither a module nor a tensor
        undo.pop_all()
    return model


def _made_on_meta(kind: Any, config: PretrainedConfig, options: Mapping[str, Any], dtype: Any) -> Any:
    """Return a new model with parameters on the meta device and initialised buffers."""
    from accelerate import init_empty_weights

    how = {key: options[key] for key in ("attn_implementation", "experts_implementation") if key in options}
    with init_empty_weights(include_buffers=False):
        if hasattr(kind, "from_config"):
            return kind.from_config(config, dtype=dtype, **how, **_remote(config, options))
        return kind._from_config(config, dtype=dtype, **how)


def _without_weights(kind: Any, name: str, config: PretrainedConfig, store: WeightStore, options: Mapping[str, Any]) -> Any:
    """Return the model with parameters on the meta device and initialised buffers, all with the store's dtypes."""
    model = _made_on_meta(kind, config, options, _dtype_of(store, config, options))
    model.tie_weights()
    for weight_name, weight in weights_by_name(model).items():
        found = store.weights.get(store.ties.get(weight_name, weight_name))
        if found is not None:
            weight.data = weight.data.to(found[1].info.dtype)
    if model.can_generate():
        model.adjust_generation_fn(
            options.get("generation_config"),
            from_auto_class=False,
            from_pipeline=None,
            pretrained_model_name_or_path=name,
            trust_remote_code=options.get("trust_remote_code"),
            **{option: options.get(option, unless) for option, unless in _HUB.items()},
        )
    return model.eval()


def _remote(config: PretrainedConfig, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of ``from_config`` that choose between the checkpoint's own code and that of transformers."""
    if not options.get("trust_remote_code") or not getattr(config, "auto_map", None):
        return {key: options[key] for key in ("trust_remote_code",) if key in options}
    return {"trust_remote_code": True, "code_revision": options.get("code_revision") or options.get("revision")}


def _dtype_of(store: WeightStore, config: PretrainedConfig, options: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype to make the model with: the wanted dtype, else that of the store's first floating-point weight."""
    dtype = _wanted_dtype(config, options)
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    if isinstance(dtype, torch.dtype):
        return dtype
    floating = (weight.info.dtype for _, weight in store.weights.values() if weight.info.dtype.is_floating_point)
    return next(floating, torch.get_default_dtype())
