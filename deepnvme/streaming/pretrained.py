"""transformers' models whose weights stay on the drive.

transformers itself says where in the checkpoint each weight of the model lies: that is what it makes of a device map that sends
everything to the disk. Weights that it converts on the way (the experts of a mixture, say) it writes to a temporary directory.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from deepnvme._progress import Wanted
from deepnvme.engine import Engine
from deepnvme.swap.directories import weights_of as directories_of

from .comparing import described
from .offload_index import OffloadIndex
from .quantization import Scheme
from .streaming import stream
from .weight_store import Directories, WeightStore

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_HUB = ("cache_dir", "code_revision", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
"""Options of where a checkpoint is to be had."""
_PLACING = ("device_map", "gguf_file", "max_memory", "offload_buffers", "offload_folder", "quantization_config", "state_dict")
"""Options that say where weights are to be, which is said here."""


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
    more than a few blocks in memory; later ones open it. The model's ``streaming`` is what :func:`stream` returned: its
    ``report()`` says how it went, and its ``close()`` ends it.

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
    for option in _PLACING:
        if option in options:
            raise TypeError(f"from_pretrained places the weights itself: it does not take {option}")
    transformers = _transformers()
    name = os.fspath(name_or_path)
    config = _config(transformers, name, options)
    kind = _class_of(transformers, config, model_class)
    origin = _origin(name, config, options) | {"quantize": quantize}
    where: dict[Any, float] = {**directories_of(offload_dir)}
    store = opened(where, origin) or _build(kind, name, options, where, origin, quantize, progress)
    try:
        model: PreTrainedModel = _without_weights(transformers, kind, name, config, store, options)
        streaming = stream(model, store, prefetch=prefetch, memory_budget=memory_budget, device=device)
    except BaseException:
        store.close()
        raise
    model.streaming = streaming  # type: ignore[assignment]  # no module and no tensor
    if kv_offload is not None:
        from .kv_cache import offload_kv

        offload_kv(model, kv_offload, path=next(iter(where)) if kv_offload == "nvme" else None)
    return model


def _transformers() -> Any:
    try:
        import accelerate  # noqa: F401
        import transformers
    except ImportError as error:
        raise ImportError(f"{error}; models of transformers need: pip install 'deepnvme[transformers]'") from error
    return transformers


def _config(transformers: Any, name: str, options: Mapping[str, Any]) -> PretrainedConfig:
    if options.get("config") is not None:
        config: PretrainedConfig = options["config"]
    else:
        others = {key: value for key, value in options.items() if key not in ("config", "dtype", "torch_dtype")}
        config, _ = transformers.AutoConfig.from_pretrained(name, return_unused_kwargs=True, **others)
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else getattr(quantised, "quant_method", None)
        raise ValueError(f"the checkpoint is quantised ({method}), which is not streamed: give one that is not")
    return config


def _class_of(transformers: Any, config: PretrainedConfig, chosen: Any) -> Any:
    """The one that the checkpoint was saved from, if transformers has it."""
    if chosen is not None:
        return chosen
    named = (getattr(transformers, name, None) for name in config.architectures or ())
    return next((kind for kind in named if kind is not None), transformers.AutoModelForCausalLM)


def _origin(name: str, config: PretrainedConfig, options: Mapping[str, Any]) -> dict[str, Any]:
    """What is to be the same where a store is used again."""
    dtype = options.get("dtype", options.get("torch_dtype"))
    facts = {"dtype": str(config.dtype if dtype in (None, "auto") else dtype).removeprefix("torch.")}
    if os.path.isdir(name):
        weights = [path for path in Path(name).iterdir() if path.suffix in (".safetensors", ".bin")]
        status = {path.name: path.stat() for path in sorted(weights)}
        return facts | {file: [each.st_size, each.st_mtime_ns] for file, each in status.items()}
    return facts | {"checkpoint": name, "revision": getattr(config, "_commit_hash", None) or options.get("revision")}


def opened(where: Mapping[Any, float], origin: Mapping[str, Any]) -> WeightStore | None:
    """The store that is there, if there is one."""
    try:
        store = WeightStore.open(where)
    except FileNotFoundError:
        return None
    try:
        found = json.loads(store.origin or "{}")
        wrong = [
            f"{key}: expected {origin.get(key)!r}, found {found.get(key)!r}"
            for key in {**origin, **found}
            if origin.get(key) != found.get(key)
        ]
        if wrong:
            text = f"'{next(iter(where))}' has the store of another checkpoint, or version of it: {'; '.join(wrong)}"
            raise ValueError(f"{text}; choose another offload_dir, or remove what is in this one")
    except BaseException:
        store.close()
        raise
    return store


def _build(
    kind: Any,
    name: str,
    options: Mapping[str, Any],
    where: Mapping[Any, float],
    origin: Mapping[str, Any],
    quantize: Scheme | None,
    progress: Wanted,
) -> WeightStore:
    first = Path(next(iter(where)))
    first.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{first.name}-", dir=first.parent) as converted, Engine() as engine:
        with _quiet("accelerate.big_modeling"):  # which says that weights are on the meta device, and that is not for long
            model = kind.from_pretrained(name, device_map={"": "disk"}, offload_folder=converted, **options)
        index, folder = offload_index_of(model)
        wanted, _ = described(model)
        model.tie_weights()
        source = OffloadIndex(index, folder, [each for each in wanted if each in index], engine)
        try:
            return WeightStore.build(
                source, where, model=model, quantize=quantize, progress=progress, origin=json.dumps(origin)
            )
        finally:
            source.close()


@contextlib.contextmanager
def _quiet(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


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
    transformers: Any, kind: Any, name: str, config: PretrainedConfig, store: WeightStore, options: Mapping[str, Any]
) -> Any:
    """The module, its parameters on the meta device and of the store's dtypes, its buffers as they begin."""
    from accelerate import init_empty_weights

    how = {key: options[key] for key in ("attn_implementation", "trust_remote_code") if key in options}
    with init_empty_weights(include_buffers=False):
        make = kind.from_config if hasattr(kind, "from_config") else kind._from_config
        model = make(config, dtype=_dtype_of(store, config, options), **how)
    model.tie_weights()
    for parameter_name, parameter in model.named_parameters():
        weight = store.weights.get(store.ties.get(parameter_name, parameter_name))
        if weight is not None:
            parameter.data = parameter.data.to(weight[1].info.dtype)
    if model.can_generate():
        hub = {key: options[key] for key in _HUB if key in options}
        with contextlib.suppress(OSError):  # it is the config's, then
            model.generation_config = transformers.GenerationConfig.from_pretrained(name, **hub)
    return model.eval()


def _dtype_of(store: WeightStore, config: PretrainedConfig, options: Mapping[str, Any]) -> torch.dtype:
    dtype = options.get("dtype", options.get("torch_dtype"))
    dtype = config.dtype if dtype in (None, "auto") else dtype
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    if isinstance(dtype, torch.dtype):
        return dtype
    floating = (weight.info.dtype for _, weight in store.weights.values() if weight.info.dtype.is_floating_point)
    return next(floating, torch.get_default_dtype())
