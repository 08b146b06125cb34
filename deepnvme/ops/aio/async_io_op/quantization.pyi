"""Rows of weights in 8 or 4 bits; ``csrc/bindings/quantization_binding.cpp``. Runs without the GIL."""

def dequantize(matrices: list[tuple[str, str, int, int, int, int, int]], threads: int) -> None:
    """Work out matrices' values, one matrix after the other.

    Each is (scheme, dtype, rows, columns, and the addresses of values, scales and codes), as
    :mod:`deepnvme.quantization` has them. Nothing checks the addresses.
    """

def quantize(matrix: tuple[str, str, int, int, int, int, int], threads: int) -> int | None:
    """Work out one matrix's scales and codes, or say in which row is what cannot be: a value not finite, or above 2**126."""
