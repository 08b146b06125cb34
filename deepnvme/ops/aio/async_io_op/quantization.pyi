"""Rows of weights in 8 or 4 bits; ``csrc/bindings/quantization_binding.cpp``. Runs without the GIL."""

from collections.abc import Sequence

def dequantize(matrices: Sequence[tuple[str | int, ...]], threads: int) -> None:
    """Compute the values of matrices, one matrix after the other.

    A matrix is (scheme, dtype, rows, columns, address of the values, of the scales, of the codes), as in
    :mod:`deepnvme.quantization`; for "fp8" also the rows and columns of a block. Addresses are not checked.
    """

def quantize(matrix: tuple[str | int, ...], threads: int) -> int | None:
    """Compute the scales and codes of a matrix.

    Returns the number of a row with a value that cannot be quantised (not finite, or beyond 2**126); None if there is none.
    """
