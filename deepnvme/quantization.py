"""Weights in int8 or int4: public names of ``deepnvme.model.quantization``, whose docstring has the formulas."""

from .model.quantization import SCHEMES, QuantizedLayout, Scheme, dequantize, is_worth_quantizing, quantize

__all__ = ["SCHEMES", "QuantizedLayout", "Scheme", "dequantize", "is_worth_quantizing", "quantize"]
