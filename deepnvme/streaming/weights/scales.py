"""Finds the scales of FP8 weights among the tensors of a checkpoint. Reads only headers and the configuration."""

from __future__ import annotations

import json
import os
from collections.abc import Container, Mapping

import torch

from deepnvme.checkpoint.formats.pt_records import CorruptCheckpoint
from deepnvme.checkpoint.weight_locations import Location
from deepnvme.model.fp8 import FP8_BLOCK, ScaledMatrices

from .places import Place, ScaledPart, ScaledWeight

_FP8 = torch.float8_e4m3fn
_OTHER_FP8 = torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz
_SCALES_OF_ACTIVATIONS = "input_scale", "activation_scale"


def with_scales(
    found: Mapping[str, torch.Tensor | Location], quantization: object, *, own: Container[str], needed: bool = False
) -> dict[str, Place]:
    """Return the weights of a checkpoint, the FP8 weights with their scales, without the tensors that are scales.

    The scales of ``x.weight`` are called ``x.weight_scale_inv`` (DeepSeek-V3, Qwen3), ``x.weight_scale`` (compressed-tensors),
    ``x.scale`` (DeepSeek-V4) or ``x.qscale_weight`` (Mistral). Scales of activations are left out, too: activations are not
    quantised here.

    Args:
        found: The tensors by name, as :func:`deepnvme.checkpoint.weight_locations.weights_in` returns them.
        quantization: The ``quantization_config`` of the checkpoint, which says how many rows and columns share a scale; None if
            there is none.
        own: Names of the weights of the model. A tensor that the model itself calls a weight stays what it is.
        needed: Whether the checkpoint is said to be in FP8. If True, it must have FP8 weights, and each of them must have
            scales. If False, it may have none; and if no FP8 weight has scales, FP8 is a dtype like others.

    Raises:
        CorruptCheckpoint: If an FP8 weight has scales that do not fit, or has none although ``needed`` is True or another FP8
            weight has scales. The message says where the weight is.
        ValueError: If there is no FP8 weight, and there has to be one.
    """
    block = _block_of(quantization)
    scales = {name: _name_of_scales(name, found, own) for name, weight in found.items() if _is_fp8(weight)}
    result: dict[str, Place] = dict(found)
    if needed and not scales:
        raise ValueError("the checkpoint is quantised, and has no FP8 weights (float8_e4m3fn): give one that is not quantised")
    if not needed and not any(scales.values()):
        return result
    for name, scale in scales.items():
        weight = found[name]
        assert isinstance(weight, Location)
        result[name] = _scaled(name, weight, scale, found, block)
        base = name.removesuffix("weight")
        for other in (scale, *(base + activation for activation in _SCALES_OF_ACTIVATIONS)):
            result.pop(str(other), None)
    return result


def _is_fp8(weight: torch.Tensor | Location) -> bool:
    """Return whether a tensor of a file is in FP8."""
    return isinstance(weight, Location) and weight.info.dtype in (_FP8, *_OTHER_FP8) and weight.info.nbytes > 0


def _name_of_scales(name: str, found: Container[str], own: Container[str]) -> str | None:
    """Return the name of the tensor that has a weight's scales; None if there is none."""
    base = name.removesuffix("weight")
    names = [name + "_scale_inv", name + "_scale", *([base + "scale", base + "qscale_weight"] if base != name else [])]
    return next((each for each in names if each in found and each not in own), None)


def _scaled(
    name: str, weight: Location, scale: str | None, found: Mapping[str, torch.Tensor | Location], block: tuple[int, int]
) -> ScaledWeight:
    """Return an FP8 weight with its scales. Raises CorruptCheckpoint if the scales are missing, or do not fit."""

    def wrong(why: str) -> CorruptCheckpoint:
        return CorruptCheckpoint(weight.path, f"{name!r} at offset {weight.offset} is in FP8 ({weight.info.dtype}), {why}")

    if weight.info.dtype != _FP8:
        raise wrong("and of the FP8 dtypes only float8_e4m3fn is dequantised")
    if scale is None:
        raise wrong(f"and the checkpoint has no {name + '_scale_inv'!r} or {name + '_scale'!r}")
    if f"{name}_zero_point" in found:
        raise wrong(f"with zero points ({name + '_zero_point'!r}), which are not known here")
    place = found[scale]
    if not isinstance(place, Location) or place.elements is not None or weight.elements is not None:
        raise wrong(f"and it or its scales {scale!r} are not one range of bytes in a file: save them contiguously")
    if not place.info.dtype.is_floating_point and place.info.dtype != torch.uint8:
        raise wrong(f"and its scales {scale!r} are {place.info.dtype}")
    try:
        matrices = ScaledMatrices.of(weight.info.shape, place.info.shape, block)
    except ValueError as error:
        raise wrong(f"and its scales {scale!r} at offset {place.offset} of '{place.path}' do not fit: {error}") from None
    return ScaledWeight(weight, (ScaledPart(matrices, place),))


def quantization_beside(checkpoint: str | os.PathLike[str]) -> object:
    """Return the ``quantization_config`` of the ``config.json`` beside the files of a checkpoint; None if there is none."""
    folder = checkpoint if os.path.isdir(checkpoint) else os.path.dirname(checkpoint)
    try:
        with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
            return quantization_in(json.load(file))
    except (OSError, ValueError, RecursionError):
        return None


def quantization_in(config: object) -> object:
    """Return the ``quantization_config`` of a configuration, or of the text model in it; None if there is none."""
    if not isinstance(config, Mapping):
        return None
    return config.get("quantization_config") or quantization_in(config.get("text_config"))


def _block_of(quantization: object) -> tuple[int, int]:
    """Return the rows and columns that share a scale by a ``quantization_config``; 128 x 128 if it does not say."""
    value = quantization.get("weight_block_size") if isinstance(quantization, Mapping) else None
    if value is None and isinstance(quantization, Mapping):  # compressed-tensors has it for groups of layers
        groups = quantization.get("config_groups")
        for group in groups.values() if isinstance(groups, Mapping) else ():
            weights = group.get("weights") if isinstance(group, Mapping) else None
            value = weights.get("block_structure") if isinstance(weights, Mapping) else value
    if isinstance(value, list | tuple) and len(value) == 2 and all(type(size) is int and size > 0 for size in value):
        return value[0], value[1]
    return FP8_BLOCK
