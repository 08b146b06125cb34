"""transformers' models whose weights stay on the drive.

transformers itself says where in the checkpoint each weight of the model lies: that is what it makes of a device map that sends
everything to the disk. Weights that it converts on the way (the experts of a mixture, say) it writes to a temporary directory.
"""

from __future__ import annotations

import contextlib
import copy
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

from deepnvme._progress import Wanted
from deepnvme.engine import Engine
from deepnvme.store.volumes import weights_of as directories_of

from .streaming import stream, streaming_of
from .weights.blocks import weights_of
from .weights.offload_index import OffloadIndex
from .weights.quantization import Scheme
from .weights.shared_build import opened_or_built
from .weights.weight_store import Directories, WeightStore

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_HUB: dict[str, Any] = {
    "cache_dir": None, "force_download": False, "local_files_only": False, "proxies": None, "revision": None, "subfolder": "",
    "token": None,
}  # fmt: skip
"""Options of where a checkpoint is to be had, as they are where nobody gives them."""
_CHOOSING = ("key_mapping", "subfolder", "use_safetensors", "variant")
"""Options by which one name gives other weights."""
_REFUSED = (
    "device_map", "device_mesh", "distributed_config", "gguf_file", "max_memory", "offload_buffers", "offload_folder",
    "quantization_config", "state_dict", "tp_plan", "tp_size",
    "adapter_kwargs", "adapter_name", "fusion_config", "kernel_config", "output_loading_info", "use_kernels",
)  # fmt: skip
"""Options that say where weights are to be, which is said here, and those that make another model of it, or more than one."""

as_accelerate_does: ContextVar[bool] = ContextVar("as_accelerate_does", default=False)
"""Set while a model is made only to see where accelerate would find its weights: integrations leave that one to accelerate."""


def from_pretrained(
    name_or_path: str | os.PathLike[str],
    *,
    offload_dir: Directories,
    memory_budget: int = 0,
    prefetch: int = 2,
    device: torch.device | str | None = None,
    quantize: Scheme | None = None,
    kv_offload: Literal["cpu", "nvme"] | None = None,
    model_class: Any = None,
    progress: Wanted = None,
    **options: Any,
) -> PreTrainedModel:
    """A model of transformers, ready for inference, whose weights are in a store on the drive; see :func:`stream`.

    The first call for a checkpoint builds the store in ``offload_dir``, which reads and writes each weight once and never holds
    more than a few blocks in memory; later ones open it, and those of other processes meanwhile wait for it. The model's
    ``streaming`` is what :func:`stream` returned: its ``report()`` says how it went, and its ``close()`` ends it, and closes the
    store.

    ``name_or_path``: as transformers' ``from_pretrained`` takes it; what is no directory is downloaded. ``offload_dir``: the
    store's directories, as of :class:`WeightStore`. ``memory_budget``, ``prefetch``, ``device``: as for :func:`stream`.
    ``quantize``: as for :meth:`WeightStore.build`. ``kv_offload``: where ``generate`` keeps keys and values, in host memory or in
    the first of the directories; None for where the model computes. ``model_class``: of transformers; by default the one that
    the checkpoint names. ``progress``: of building the store, as for :meth:`WeightStore.build`. ``options``: what else
    transformers' ``from_pretrained`` takes.

    Raises ImportError without transformers and accelerate; ValueError for a store of another checkpoint, naming what differs, and
    for a checkpoint that is quantised; and what transformers, :meth:`WeightStore.build` and :func:`stream` raise. Blocks.
    """
    if kv_offload not in (None, "cpu", "nvme"):
        raise ValueError(f"kv_offload must be None, 'cpu' or 'nvme', got {kv_offload!r}")
    for option in _REFUSED:
        if option in options:
            raise TypeError(f"from_pretrained places the weights itself, and streams them as they are: it does not take {option}")
    transformers = _transformers()
    name = os.fspath(name_or_path)
    config = _config(transformers, name, options)
    kind = _class_of(transformers, config, model_class)
    origin = _origin(transformers, name, config, options) | {"quantize": quantize}
    where = directories_of(offload_dir)
    store = opened_or_built(
        where, origin, lambda directory: _build(kind, name, options, where, origin, quantize, progress, directory)
    )
    model: PreTrainedModel | None = None
    try:
        model = _without_weights(kind, name, config, store, options)
        if kv_offload is not None:
            from .kv.cache import offload_kv

            offload_kv(model, kv_offload, path=next(iter(where)) if kv_offload == "nvme" else None)
        streaming = stream(model, store, prefetch=prefetch, memory_budget=memory_budget, device=device)
        streaming.owns_store = True
        model.streaming = streaming  # no module and no tensor
    except BaseException:
        with contextlib.closing(store):
            streamed = None if model is None else streaming_of(model)
            if streamed is not None:  # interrupted before anybody had it
                streamed.close()
        raise
    return model


def _transformers() -> Any:
    try:
        import accelerate  # noqa: F401
        import transformers
    except ImportError as error:
        raise ImportError(f"{error}; models of transformers need: pip install 'deepnvme[transformers]'") from error
    return transformers


def _config(transformers: Any, name: str, options: Mapping[str, Any]) -> PretrainedConfig:
    given = options.get("config")
    config: PretrainedConfig
    if isinstance(given, transformers.PretrainedConfig):
        config = copy.deepcopy(given)  # it comes to say what the model was made with
    else:
        others = {key: options[key] for key in options.keys() - {"config", "dtype", "generation_config", "torch_dtype"}}
        config, _ = transformers.AutoConfig.from_pretrained(given or name, return_unused_kwargs=True, **others)
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else getattr(quantised, "quant_method", None)
        raise ValueError(f"the checkpoint is quantised ({method}), which is not streamed: give one that is not")
    return config


def _class_of(transformers: Any, config: PretrainedConfig, chosen: Any) -> Any:
    """The one that the checkpoint was saved from: of transformers, or what stands for one that is beside the checkpoint."""
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
    """What is to be the same where a store is used again."""
    dtype = _wanted_dtype(config, options)
    facts: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch.")}
    facts |= {option: repr(options[option]) for option in _CHOOSING if options.get(option) not in (None, "")}
    if os.path.isdir(name):
        weights = [
            path for path in Path(name, options.get("subfolder") or "").iterdir() if path.suffix in (".safetensors", ".bin")
        ]
        status = {path.name: path.stat() for path in sorted(weights)}
        return facts | {file: [each.st_size, each.st_mtime_ns] for file, each in status.items()}
    return facts | {"checkpoint": name, "revision": _commit(transformers, name, options)}


def _commit(transformers: Any, name: str, options: Mapping[str, Any]) -> str | None:
    """The one that a name's revision, or its newest, is now: the cache has a directory of that name."""
    hub = {option: options.get(option, unless) for option, unless in _HUB.items() if option != "force_download"}
    with contextlib.suppress(OSError):  # a config of its own may not have one there
        parts = Path(transformers.utils.cached_file(name, "config.json", **hub)).parts
        if "snapshots" in parts:
            return parts[len(parts) - parts[::-1].index("snapshots")]
    return options.get("revision")


def _wanted_dtype(config: PretrainedConfig, options: Mapping[str, Any]) -> Any:
    dtype = options.get("dtype") or options.get("torch_dtype")
    return config.dtype if dtype in (None, "auto") else dtype


def _build(
    kind: Any,
    name: str,
    options: Mapping[str, Any],
    where: Mapping[Any, float],
    origin: Mapping[str, Any],
    quantize: Scheme | None,
    progress: Wanted,
    directory: Path,
) -> WeightStore:
    import safetensors

    with _empty(directory / "converted") as converted, Engine() as engine:

        def offloaded() -> Any:
            as_accelerate_does.set(True)
            return kind.from_pretrained(name, device_map={"": "disk"}, offload_folder=converted, **options)

        logger = logging.getLogger("accelerate.big_modeling")
        before = logger.disabled
        try:
            logger.disabled = True  # it says that weights are on the meta device, and that is not for long
            model = copy_context().run(offloaded)  # what is set in there is gone afterwards, whatever interrupts it
        except safetensors.SafetensorError as error:
            raise _of_writing(error, converted) from error
        finally:
            logger.disabled = before
        index, folder = offload_index_of(model)
        index = with_dtypes_kept(model, index)
        model.tie_weights()
        weights = weights_of(model)
        here = {each: weight for each, weight in weights.items() if not weight.is_meta}  # buffers, as they are loaded
        on_disk = [each for each in weights if each in index and each not in here]
        source = OffloadIndex(index, folder, on_disk, engine, here)
        try:
            return WeightStore.build(
                source, where, model=model, quantize=quantize, progress=progress, origin=json.dumps(origin)
            )
        finally:
            source.close()


@contextlib.contextmanager
def _empty(directory: Path) -> Iterator[Path]:
    """A directory, gone afterwards. What a process that was killed has left in it is removed."""
    shutil.rmtree(directory, ignore_errors=True)  # what cannot be removed cannot be made either
    directory.mkdir()
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def _of_writing(error: Exception, directory: Path) -> Exception:
    """The OSError that safetensors had when it wrote there, of which it keeps the text only; else its own."""
    found = re.search(r"^Error while serializing: .*\(os error (\d+)\)$", str(error))
    if found is None:
        return error
    code = int(found[1])
    return OSError(code, f"{os.strerror(code)}: writing what transformers converts", str(directory))


def with_dtypes_kept(model: Any, index: Mapping[str, Any]) -> dict[str, Any]:
    """The index, with the dtypes that weights have in memory, which the model's come to have too: accelerate casts those as well
    that a model of transformers keeps in float32. They are on the meta device."""
    found = {name: dict(entry) for name, entry in index.items()}
    weights = weights_of(model)
    for pattern, dtype in model._get_dtype_plan(model.config.dtype).items():
        looked_for = re.compile(pattern.replace("*", ".*"))
        for name in filter(looked_for.search, found):
            if "safetensors_file" in found[name]:  # others are raw, and the index says what their bytes are
                found[name]["dtype"] = str(dtype).removeprefix("torch.")
                if name in weights:
                    weights[name].data = weights[name].data.to(dtype)
    return found


def offload_index_of(model: torch.nn.Module) -> tuple[Mapping[str, Any], str | None]:
    """Where accelerate's hooks find the weights of a model that they read from the disk: index and folder."""
    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        for each in getattr(hook, "hooks", (hook,)):
            weights: Any = getattr(each, "weights_map", None)
            while hasattr(weights, "dataset"):
                weights = weights.dataset  # of a part of the model
            if weights is not None:
                return weights.index, weights.save_folder
    raise ValueError(f"accelerate has offloaded nothing of this {type(model).__name__}")


def _without_weights(
    kind: Any, name: str, config: PretrainedConfig, store: WeightStore, options: Mapping[str, Any]
) -> Any:
    """The module, its parameters on the meta device, its buffers as they begin, both of the store's dtypes."""
    from accelerate import init_empty_weights

    how = {key: options[key] for key in ("attn_implementation", "experts_implementation") if key in options}
    with init_empty_weights(include_buffers=False):
        dtype = _dtype_of(store, config, options)
        if hasattr(kind, "from_config"):
            model = kind.from_config(config, dtype=dtype, **how, **_remote(config, options))
        else:
            model = kind._from_config(config, dtype=dtype, **how)
    model.tie_weights()
    for weight_name, weight in weights_of(model).items():
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
    """Whose code makes the model: transformers takes this where there is a choice."""
    if not options.get("trust_remote_code") or not getattr(config, "auto_map", None):
        return {key: options[key] for key in ("trust_remote_code",) if key in options}
    return {"trust_remote_code": True, "code_revision": options.get("code_revision") or options.get("revision")}


def _dtype_of(store: WeightStore, config: PretrainedConfig, options: Mapping[str, Any]) -> torch.dtype:
    dtype = _wanted_dtype(config, options)
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    if isinstance(dtype, torch.dtype):
        return dtype
    floating = (weight.info.dtype for _, weight in store.weights.values() if weight.info.dtype.is_floating_point)
    return next(floating, torch.get_default_dtype())
