"""FP8 weights with scales: the kernel does what torch does, bit for bit, and refuses scales that are not of the weight."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import pytest
import torch

from deepnvme.model import fp8
from deepnvme.model.fp8 import ScaledMatrices, dequantize_fp8, dequantize_matrices, distance_fp8, float32_scales

from ..support.threads import others_run_during

TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
SHAPES = {
    "whole blocks": ((256, 384), (128, 128)),
    "small last blocks": ((200, 333), (128, 128)),
    "less than a block": ((5, 7), (128, 128)),
    "narrow blocks": ((9, 100), (1, 32)),
    "other blocks": ((50, 90), (16, 24)),
    "one column": ((300, 1), (128, 128)),
    "experts": ((3, 130, 140), (128, 128)),
    "experts of experts": ((2, 2, 20, 40), (16, 16)),
    "no rows": ((0, 64), (128, 128)),
}
GUARD = 37
EVERY_CODE = torch.arange(256, dtype=torch.uint8)


def grid_of(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


def made(*shape: int, seed: int = 0) -> torch.Tensor:
    """Codes of all kinds, NaN among them."""
    return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)).view(torch.float8_e4m3fn)


def some_scales(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.01


def formula(weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """What the module's docstring says, in torch."""
    *_, rows, columns = weight.shape
    wide = scales.float().repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)[..., :rows, :columns]
    return (weight.float() * wide).to(dtype)


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """The same bits, which tell -0.0 from 0.0; but any NaN for a NaN, of which torch has several."""
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(nan=7).view(torch.uint8), expected.nan_to_num(nan=7).view(torch.uint8))


def dequantized(weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, **how: Any) -> torch.Tensor:
    out = torch.empty(weight.shape, dtype=dtype)
    dequantize_fp8(weight, scales, out, **how)
    return out


# -- what is refused


@pytest.mark.parametrize(
    ("shape", "scales"),
    [
        ((256, 256), (2, 3)),
        ((256, 200), (3, 2)),
        ((300, 200), (2, 3)),
        ((256, 256), (4,)),
        ((256, 256), (1, 2, 2)),
        ((3, 256, 256), (2, 2)),
        ((3, 256, 256), (3,)),
        ((256, 256), (0, 2)),
    ],
)
def test_scales_of_another_shape_are_refused(shape: tuple[int, ...], scales: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"of shape .* has scales of shape .* for blocks of 128 x 128.* got the shape"):
        dequantized(made(*shape), torch.ones(scales), torch.bfloat16)


def test_what_is_no_weight_is_refused() -> None:
    weight, scales = made(4, 8), torch.ones(1, 1)
    for wrong, error, text in (
        ((weight.view(torch.float8_e5m2), scales, torch.empty(4, 8)), TypeError, "must be float8_e4m3fn, got torch.float8_e5m2"),
        ((weight, scales, torch.empty(8, 4)), ValueError, r"shape of out, \(8, 4\), got \(4, 8\)"),
        ((weight.t(), scales, torch.empty(8, 4)), ValueError, "must be contiguous"),
        ((weight, scales, torch.empty(8, 4).t()), ValueError, "out must be contiguous"),
        ((weight, scales, torch.empty(4, 8, dtype=torch.int8)), TypeError, "out is torch.int8"),
        ((weight, scales, torch.empty(4, 8, device="meta")), ValueError, "on cpu, got .* on meta"),
    ):
        with pytest.raises(error, match=text):
            dequantize_fp8(*wrong)
    part = ScaledMatrices(1, 4, 8, (128, 128))
    with pytest.raises(ValueError, match="16 codes with scales for 32 are no 32 values"):
        dequantize_matrices(weight.view(torch.uint8).flatten()[:16], [(part, scales)], torch.empty(32))
    with pytest.raises(ValueError, match="has 1 scales, got 2"):
        dequantize_matrices(weight.view(torch.uint8).flatten(), [(part, torch.ones(2))], torch.empty(32))
    with pytest.raises(ValueError, match="threads must be at least 1, got 0"):
        dequantized(weight, scales, torch.bfloat16, threads=0)
    with pytest.raises(ValueError, match="33 values from 0 on are no whole matrices"):
        part.narrow(0, 33)


# -- what comes back


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("shape", "block"), SHAPES.values(), ids=SHAPES)
def test_values_are_those_of_torch(shape: tuple[int, ...], block: tuple[int, int], dtype: torch.dtype) -> None:
    weight, scales = made(*shape), some_scales(*grid_of(shape, block))
    assert_same(dequantized(weight, scales, dtype, block=block), formula(weight, scales, block, dtype))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    "scale", [1.0, 0.0, -0.0, -1.5, 1e-42, 2.0**-126, 2.0**-20, 1 / 3, 150.0, 1e36, 3e38, math.inf, -math.inf, math.nan]
)
def test_every_code_times_any_scale_is_that_of_torch(scale: float, dtype: torch.dtype) -> None:
    weight = EVERY_CODE.view(torch.float8_e4m3fn).view(16, 16)
    scales = torch.full((1, 1), scale)
    assert_same(dequantized(weight, scales, dtype), formula(weight, scales, (128, 128), dtype))


@pytest.mark.parametrize("dtype", TYPES)
def test_a_nan_of_any_bits_stays_a_nan(dtype: torch.dtype) -> None:
    """Rounding the NaN of these bits to the nearest would carry into its sign, and give -0.0."""
    scales = torch.tensor([0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32).view(torch.float32).view(3, 1)
    assert dequantized(made(3, 40), scales, dtype, block=(1, 128)).isnan().all()


def test_subnormal_codes_are_right_where_a_thread_flushes_subnormal_numbers() -> None:
    weight, scales = EVERY_CODE.view(torch.float8_e4m3fn).view(1, 256), torch.ones(1, 2)
    expected = formula(weight, scales, (128, 128), torch.float32)
    assert torch.set_flush_denormal(True)
    try:
        assert_same(dequantized(weight, scales, torch.float32, threads=1), expected)
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize(
    ("scales", "block"),
    [((), (200, 300)), ((1,), (200, 300)), ((1, 1), (200, 300)), ((200,), (1, 300)), ((200, 1), (1, 300)), ((2, 1), (128, 300))],
)
def test_a_scale_may_be_that_of_a_row_or_of_the_whole(scales: tuple[int, ...], block: tuple[int, int]) -> None:
    weight, found = made(200, 300), some_scales(*scales)
    expected = formula(weight, found.view(grid_of((200, 300), block)), block, torch.bfloat16)
    assert_same(dequantized(weight, found, torch.bfloat16), expected)


def test_a_vector_has_one_scale() -> None:
    weight = made(300)
    assert_same(dequantized(weight, torch.tensor(0.3), torch.bfloat16, block=(128, 512)), (weight.float() * 0.3).bfloat16())


def test_scales_may_have_another_dtype() -> None:
    weight, scales = made(256, 256), some_scales(2, 2)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        expected = formula(weight, scales.to(dtype), (128, 128), torch.bfloat16)
        assert_same(dequantized(weight, scales.to(dtype), torch.bfloat16), expected)
    exponents = torch.tensor([[0, 1], [127, 254]], dtype=torch.uint8)
    powers = torch.tensor([[2.0**-127, 2.0**-126], [1, 2.0**127]])
    assert torch.equal(float32_scales(exponents), powers)
    assert torch.equal(float32_scales(exponents.view(torch.float8_e8m0fnu)), powers)
    assert float32_scales(powers).data_ptr() != powers.data_ptr()  # a block's memory is overwritten by values
    strided = some_scales(4, 4)[::2, ::2]
    assert_same(dequantized(weight, strided, torch.float32), formula(weight, strided, (128, 128), torch.float32))


# -- memory


@pytest.mark.parametrize("dtype", TYPES[:3])
@pytest.mark.parametrize(("shape", "block"), SHAPES.values(), ids=SHAPES)
def test_no_byte_beyond_is_touched_at_any_address(shape: tuple[int, ...], block: tuple[int, int], dtype: torch.dtype) -> None:
    numel = math.prod(shape)
    codes = made(numel + 2 * GUARD).view(torch.uint8)[GUARD : GUARD + numel]
    scales = some_scales(*grid_of(shape, block))
    values = torch.full((numel + 2 * GUARD,), 7.0, dtype=dtype)
    weight = codes.view(torch.float8_e4m3fn).view(shape)
    dequantize_fp8(weight, scales, values[GUARD : GUARD + numel].view(shape), block=block)
    assert (values[:GUARD] == 7).all()
    assert (values[GUARD + numel :] == 7).all()
    assert_same(values[GUARD : GUARD + numel].view(shape), formula(weight, scales, block, dtype))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("shape", "block"), SHAPES.values(), ids=SHAPES)
def test_values_may_overwrite_the_codes_that_they_are_of(
    shape: tuple[int, ...], block: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two parts, each with scales of its own, dequantised in several ranges."""
    monkeypatch.setattr(fp8, "VALUES_AT_A_TIME", 500)
    weights = [made(*shape, seed=seed) for seed in range(2)]
    scales = [some_scales(*grid_of(shape, block)), some_scales(*grid_of(shape, block)) * 2]
    numel = math.prod(shape)
    first = ScaledMatrices.of(shape, scales[0].shape, block)
    parts = [first, ScaledMatrices(first.count, first.rows, first.columns, first.block, begin=numel)]
    distance = -(-distance_fp8(parts, dtype.itemsize) // 8) * 8
    memory = torch.zeros(max(distance + 2 * numel, 2 * numel * dtype.itemsize), dtype=torch.uint8)
    codes = memory[distance : distance + 2 * numel]
    codes.copy_(torch.cat([weight.view(torch.uint8).flatten() for weight in weights]))
    found = memory[: 2 * numel * dtype.itemsize].view(dtype)
    dequantize_matrices(codes, list(zip(parts, map(float32_scales, scales), strict=True)), found)
    expected = [formula(weight, each, block, dtype).flatten() for weight, each in zip(weights, scales, strict=True)]
    assert_same(found, torch.cat(expected))


def test_a_part_of_packed_matrices_is_dequantised_alone() -> None:
    weight, scales = made(4, 30, 40), some_scales(4, 2, 3)
    whole = ScaledMatrices.of(weight.shape, scales.shape, (16, 16))
    part = whole.narrow(2 * 30 * 40, 2 * 30 * 40)
    out = torch.empty(2, 30, 40)
    dequantize_matrices(weight[2:].view(torch.uint8).flatten(), [(part, scales[2:].contiguous())], out)
    assert_same(out, formula(weight[2:], scales[2:], (16, 16), torch.float32))


@pytest.mark.parametrize("threads", [1, 2, 5, None])
def test_many_threads_compute_what_one_does(threads: int | None) -> None:
    weight, scales = made(5000, 999), some_scales(40, 8)
    expected = formula(weight, scales, (128, 128), torch.bfloat16)
    assert_same(dequantized(weight, scales, torch.bfloat16, threads=threads), expected)


def test_other_threads_run_meanwhile() -> None:
    weight, out = torch.zeros(16384, 4096).to(torch.float8_e4m3fn), torch.empty(16384, 4096, dtype=torch.bfloat16)
    assert others_run_during(lambda: dequantize_fp8(weight, torch.ones(128, 32), out, threads=1))


# -- processors


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPES[:3])
def test_a_processor_of_which_nothing_is_known_does_the_same(
    dtype: torch.dtype, testing: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8, "load_async_io", lambda: testing)
    for shape, block in SHAPES.values():
        weight, scales = made(*shape), some_scales(*grid_of(shape, block))
        assert_same(dequantized(weight, scales, dtype, block=block), formula(weight, scales, block, dtype))
