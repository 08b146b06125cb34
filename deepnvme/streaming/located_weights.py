"""Finds where the weights of a transformers model lie in the files of its checkpoint. Reads only headers.

transformers itself finds the files, makes the model and renames the weights. It is only kept from reading the weights: the
model's class gets a subclass whose method that loads weights notes the files and what transformers would do with them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from deepnvme.checkpoint.file_io import Version, file_version
from deepnvme.checkpoint.weight_locations import weights_in
from deepnvme.model.structure import find_ties, weights_by_name
from deepnvme.telemetry.descriptions import shorten

from .merged_weights import merged
from .weights.places import Place
from .weights.scales import with_scales

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def locate_weights(
    kind: Any, name: str, options: Mapping[str, Any], quantization: object = None
) -> tuple[PreTrainedModel, dict[str, Place], dict[str, Version]]:
    """Return a checkpoint's model, where the weights of the model lie, and the versions of the files. Blocks.

    Args:
        kind: Class of the model; not an auto class.
        name: Name or path of the checkpoint.
        options: Options of transformers' ``from_pretrained``.
        quantization: The ``quantization_config`` of a checkpoint in FP8; None for a checkpoint that is not quantised.

    Returns:
        (model, weights, versions): the model, whose parameters and persistent buffers are on the meta device; the locations of
        its weights by name; and the version of each file, by path, from before its header was read.

    Raises:
        ValueError: If transformers rearranges weights while it loads them, other than by merging whole tensors; or if the
            checkpoint lacks weights; or if it is said to be quantised, and has no FP8 weights.
        CorruptCheckpoint: If a file is damaged, or an FP8 weight has no scales that fit.
        Exception: Whatever transformers raises.
    """
    weights: dict[str, Place] = {}
    versions: dict[str, Version] = {}

    def note_files(
        model: Any, state_dict: object, checkpoint_files: Sequence[str] | None, load_config: Any, *_: Any, **__: Any
    ) -> Any:
        """Take the place of ``_load_pretrained_model``: locate the weights, and load none."""
        if versions:  # transformers has found an adapter_config.json
            raise ValueError(
                f"{name!r} also has an adapter, which is not streamed: load it into the streamed model, from a folder of its own"
            )
        # The current directory may change while the model is streamed.
        paths = [os.path.abspath(file) for file in checkpoint_files or ()]
        versions.update((path, file_version(path)) for path in paths)
        found = {weight: each for path in paths for weight, each in weights_in(path).items()}
        scaled = with_scales(found, quantization, own=model.state_dict(), needed=quantization is not None)
        named, unexpected = renamed(model, scaled, load_config.weight_mapping or ())
        _check_none_missing(model, named)
        weights.update(named)
        return _loading_info(model.state_dict().keys() - named.keys(), unexpected), None

    located = type(kind.__name__, (kind,), {"_load_pretrained_model": staticmethod(note_files), "__module__": kind.__module__})
    model: Any = located.from_pretrained(name, **options)  # type: ignore[attr-defined]
    if not versions:
        raise RuntimeError("this version of transformers loads weights in another way: give path=, where a store is built")
    model.__class__ = kind
    with_dtypes_kept(model, {weight: {"safetensors_file": name} for weight in weights})
    return model, weights, versions


def renamed(
    model: Any,
    found: Mapping[str, Place],
    transforms: Sequence[Any],
    only: Container[str] | None = None,
) -> tuple[dict[str, Place], set[str]]:
    """Return the weights by their names in the model, and the names in the files that the model has no weight for.

    Args:
        model: The model.
        found: The weights by their names in the files.
        transforms: transformers' renamings and converters for this model.
        only: Names in the model; others are left out. None for all.

    Raises:
        ValueError: If a converter would rearrange weights.
    """
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    converter_of = {pattern: each for each in converters for pattern in each.source_patterns}
    wanted = model.state_dict()
    weights: dict[str, Place] = {}
    unexpected = set()
    parts: dict[str, dict[str, list[tuple[str, Place]]]] = {}  # by name in the model, and the pattern
    for key in sorted(found, key=dot_natural_key):  # the order in which transformers merges them
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, wanted)
        if name not in wanted and key in wanted:
            name, pattern = rename_source_key(key, [], [], model.base_model_prefix, wanted)
        if name not in wanted:
            unexpected.add(name)
        elif only is not None and name not in only:
            continue
        elif pattern is not None:
            parts.setdefault(name, {}).setdefault(pattern, []).append((key, found[key]))
        else:
            weights[name] = found[key]
    for name, by_pattern in parts.items():
        converter = converter_of[next(iter(by_pattern))]
        try:
            weight = merged(converter, {pattern: [each for _, each in several] for pattern, several in by_pattern.items()})
        except ValueError as error:
            raise ValueError(f"the tensors of {name!r} of this {type(model).__name__} do not fit together: {error}") from error
        if weight is None:
            keys = [repr(key) for several in by_pattern.values() for key, _ in several]
            raise ValueError(
                f"transformers rearranges {name!r} of this {type(model).__name__} while it loads it: it applies"
                f" {converter.operations} to {shorten(keys, 2)}. So it cannot be streamed from the checkpoint's files: give"
                " path=, where a store of the weights is built"
            )
        weights[name] = weight
    return weights, unexpected


def _check_none_missing(model: Any, found: Mapping[str, object]) -> None:
    """Raise ValueError if there are weights of which no name is in ``found``; tied weights have several names."""
    own = weights_by_name(model)
    for ties in (find_ties(own), model.all_tied_weights_keys):
        there = {ties.get(name, name) for name in found}
        own = {name: weight for name, weight in own.items() if ties.get(name, name) not in there}
    if own:
        raise ValueError(
            f"the checkpoint lacks weights of this {type(model).__name__}: {shorten(map(repr, own))}; only with path=, where a"
            " store is built, they begin with the values that transformers gives them"
        )


def _loading_info(missing: set[str], unexpected: set[str]) -> Any:
    """Return what transformers' method that loads weights says about names that are missing or unexpected."""
    from transformers.utils.loading_report import LoadStateDictInfo

    return LoadStateDictInfo(
        missing_keys=missing,
        unexpected_keys=unexpected,
        mismatched_keys=set(),
        error_msgs=[],
        conversion_errors={},
        skipped_pp_keys=set(),
    )


def with_dtypes_kept(model: Any, index: Mapping[str, Any]) -> dict[str, Any]:
    """Return accelerate's offload index with the dtypes that transformers gives the weights.

    Also casts the weights of ``model`` to these dtypes. Some models keep certain weights in float32, which accelerate
    would cast too. Weights stored in raw files keep the dtype that the index gives.

    Args:
        model: The transformers model, its weights on the meta device. Changed in place.
        index: As accelerate has it. Not changed.
    """
    found = {name: dict(entry) for name, entry in index.items()}
    weights = weights_by_name(model)
    for pattern, dtype in model._get_dtype_plan(model.config.dtype).items():
        looked_for = re.compile(pattern.replace("*", ".*"))
        for name in filter(looked_for.search, found):
            if "safetensors_file" in found[name]:  # others are raw bytes, of the dtype in the index
                found[name]["dtype"] = str(dtype).removeprefix("torch.")
                if name in weights:
                    weights[name].data = weights[name].data.to(dtype)
    return found
