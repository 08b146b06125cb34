"""Weights in int8, int4 or FP8: names of ``deepnvme.model.quantization`` and ``fp8``, whose docstrings have the formulas."""

from .model.fp8 import dequantize_fp8
from .model.quantization import SCHEMES, QuantizedLayout, Scheme, dequantize, is_worth_quantizing, quantize

__all__ = ["SCHEMES", "QuantizedLayout", "Scheme", "dequantize", "dequantize_fp8", "is_worth_quantizing", "quantize"]
