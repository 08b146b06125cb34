"""Weights of a few bits: the kernels do what the formulas say, bit for bit, and nothing is lost in silence."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import pytest
import torch

from deepnvme.model import quantization
from deepnvme.model.quantization import (
    GROUP,
    SCHEMES,
    QuantizedLayout,
    Scheme,
    dequantize,
    dequantize_with_torch,
    is_worth_quantizing,
    quantize,
)

from ..support.threads import others_run_during

TYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = {
    "whole groups": (6, 256),
    "a short group": (5, 200),
    "an odd width": (7, 333),
    "a group of one": (3, 129),
    "narrower than a vector": (300, 7),
    "one column": (40, 1),
    "one row": (1, 4099),
    "experts": (3, 10, 100),
    "a convolution": (10, 5, 3, 3),
    "no rows": (0, 64),
    "no columns": (4, 0),
}
GUARD = 37


def formula(scheme: Scheme, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and codes of [rows, columns], as the module's docstring has them; codes unpacked."""
    rows = rows.float()
    if scheme == "int8":
        scale = rows.abs().amax(1, keepdim=True) / 127
        codes = (rows / scale).clamp(-127, 127).round()
        return scale, torch.where(scale == 0, 0, codes).to(torch.int8)
    scales, codes = [], []
    for group in rows.split(GROUP, dim=1):
        least = group.amin(1, keepdim=True).bfloat16()
        scale = ((group.amax(1, keepdim=True) - group.amin(1, keepdim=True)) / 15).bfloat16()
        code = ((group - least.float()) / scale.float()).clamp(0, 15).round()
        scales += [scale, least]
        codes.append(torch.where(scale == 0, 0, code).to(torch.uint8))
    return torch.cat(scales, dim=1), torch.cat(codes, dim=1)


def with_torch_over(scheme: Scheme, source: torch.Tensor, out: torch.Tensor) -> None:
    dequantize_with_torch(QuantizedLayout.of(scheme, out.shape), source, out)


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Two values of 0 to 15 in a byte."""
    rows = []
    for group in codes.split(GROUP, dim=1):
        low, high = group.split(-(-group.shape[1] // 2), dim=1) if group.shape[1] > 1 else (group, group[:, :0])
        rows.append(low | (torch.nn.functional.pad(high, (0, low.shape[1] - high.shape[1])) << 4))
    return torch.cat(rows, dim=1)


def expected_bytes(scheme: Scheme, weight: torch.Tensor) -> torch.Tensor:
    layout = QuantizedLayout.of(scheme, weight.shape)
    whole = torch.zeros(layout.nbytes, dtype=torch.uint8)
    if weight.numel():
        scales, codes = formula(scheme, weight.reshape(layout.rows, layout.columns))
        codes = codes if scheme == "int8" else packed(codes)
        whole[: layout.scales_nbytes] = scales.contiguous().flatten().view(torch.uint8)
        whole[layout.codes_at :] = codes.contiguous().flatten().view(torch.uint8)
    return whole


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Which tells -0.0 from 0.0."""
    return tensor.flatten().view(torch.uint8)


def check(scheme: Scheme, weight: torch.Tensor) -> None:
    """There and back, into each type, is as the formulas say."""
    found = quantize(weight, scheme)
    assert torch.equal(found, expected_bytes(scheme, weight))
    for dtype in TYPES:
        out, expected = torch.empty(weight.shape, dtype=dtype), torch.empty(weight.shape, dtype=dtype)
        dequantize(scheme, found, out)
        dequantize_with_torch(QuantizedLayout.of(scheme, weight.shape), found, expected)
        assert torch.equal(bits(out), bits(expected))


def made(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(params=SCHEMES)
def scheme(request: pytest.FixtureRequest) -> Scheme:
    found: Scheme = request.param
    return found


# -- what is refused


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 5, 15, 16, 130, 199])
def test_what_is_not_finite_is_refused_by_name_and_place(scheme: Scheme, dtype: torch.dtype, value: float, place: int) -> None:
    weight = made(2, 3, 200, dtype=dtype)
    weight[1, 2, place] = value
    with pytest.raises(ValueError, match=rf"'model.up.weight' holds -?(nan|inf) at \[1, 2, {place}\]\, .*finite"):
        quantize(weight, scheme, name="model.up.weight")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_could_overflow_is_refused_and_the_largest_value_is_not(scheme: Scheme, dtype: torch.dtype) -> None:
    weight = made(4, 64, dtype=dtype)
    weight[2, :2] = torch.tensor([2.0**126, -(2.0**126)])
    check(scheme, weight)
    weight[2, 1] *= 1.01
    with pytest.raises(ValueError, match=r"'weight' holds -8\..*e\+37 at \[2, 1\]"):
        quantize(weight, scheme)


def test_what_is_no_weight_is_refused(scheme: Scheme) -> None:
    with pytest.raises(ValueError, match=r"at least 2 dimensions can be quantised, got the shape \(64,\)"):
        quantize(made(64), scheme)
    with pytest.raises(TypeError, match=r"'x' is torch\.float64: float32"):
        quantize(made(2, 64).double(), scheme, name="x")
    with pytest.raises(ValueError, match="quantize must be one of int8, int4, got 'int3'"):
        quantize(made(2, 64), "int3")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="threads must be at least 1, got 0"):
        quantize(made(2, 64), scheme, threads=0)


def test_bytes_and_weights_that_do_not_fit_each_other_are_refused(scheme: Scheme) -> None:
    weight = made(2, 64)
    found = quantize(weight, scheme)
    for wrong, error, text in (
        ((found[:-1], weight), ValueError, rf"take {found.nbytes} bytes, got {found.nbytes - 1}"),
        ((found.view(torch.int8), weight), TypeError, "uint8 of one dimension, got torch.int8"),
        ((found, weight.t()), ValueError, "contiguous"),
        ((found, weight.to("meta")), ValueError, "on cpu, got .* on meta"),
        ((found, weight.double()), TypeError, "out is torch.float64"),
    ):
        with pytest.raises(error, match=text):
            dequantize(scheme, *wrong)
    with pytest.raises(ValueError, match=rf"take {found.nbytes} bytes, got 3"):
        quantize(weight, scheme, found[:3])
    with pytest.raises(ValueError, match="quantised in host memory, got meta"):
        quantize(weight, scheme, found.to("meta"))


# -- what comes back


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_all_is_as_the_formulas_say(scheme: Scheme, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check(scheme, made(*shape, dtype=dtype))


@pytest.mark.parametrize("exponent", [-149, -145, -140, -133, -126, -100, -30, -24, -20, -14, 14, 16, 100])
def test_scales_of_any_magnitude_are_as_the_formulas_say(scheme: Scheme, exponent: int) -> None:
    """Subnormal ones, and values that in float16 are subnormal, nothing or infinite."""
    check(scheme, made(4, 300, dtype=torch.float64).mul(2.0**exponent).float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_number_is_understood(scheme: Scheme, dtype: torch.dtype) -> None:
    """Those of 16 bits, neighbours with neighbours and far apart."""
    numbers = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    numbers = numbers[numbers.float().abs() <= 2.0**126]
    numbers = numbers[: len(numbers) // 64 * 64]
    check(scheme, numbers.view(-1, 64))
    check(scheme, numbers.view(64, -1).t().contiguous())


def test_values_between_two_codes_go_to_the_even_one() -> None:
    halves = torch.arange(-126.5, 127).repeat(1, 1)
    check("int8", torch.cat((halves, torch.tensor([[127.0]])), dim=1))
    check("int4", torch.cat((torch.arange(0.5, 15), torch.tensor([0.0, 15]))).view(1, -1))


# -- memory


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_no_byte_beyond_is_touched_at_any_address(scheme: Scheme, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    weight = made(*shape, dtype=dtype)
    nbytes = QuantizedLayout.of(scheme, shape).nbytes
    around = torch.full((nbytes + 2 * GUARD,), 0xA5, dtype=torch.uint8)
    quantize(weight, scheme, around[GUARD : GUARD + nbytes])
    assert (around[:GUARD] == 0xA5).all()
    assert (around[GUARD + nbytes :] == 0xA5).all()
    values = torch.full((weight.numel() + 2 * GUARD,), 7.0, dtype=dtype)
    dequantize(scheme, around[GUARD : GUARD + nbytes], values[GUARD : GUARD + weight.numel()].view(shape))
    assert (values[:GUARD] == 7).all()
    assert (values[GUARD + weight.numel() :] == 7).all()
    assert torch.equal(around[GUARD : GUARD + nbytes], quantize(weight, scheme))


@pytest.mark.parametrize("by", [dequantize, with_torch_over])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_values_may_overwrite_the_bytes_that_they_are_of(
    scheme: Scheme, shape: tuple[int, ...], dtype: torch.dtype, by: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantization, "VALUES_AT_A_TIME", 500)  # values: several pieces of most
    expected = torch.empty(shape, dtype=dtype)
    source = quantize(made(*shape), scheme)
    dequantize(scheme, source, expected)
    distance = -(-QuantizedLayout.of(scheme, shape).distance(dtype.itemsize) // 8) * 8
    memory = torch.empty(max(distance + source.nbytes, expected.nbytes) // 8 * 8 + 8, dtype=torch.uint8)
    memory[distance : distance + source.nbytes] = source
    found = memory[: expected.nbytes].view(dtype).view(shape)
    by(scheme, memory[distance : distance + source.nbytes], found)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("threads", [1, 2, 5, None])
def test_many_weights_of_many_threads_are_those_of_one(scheme: Scheme, threads: int | None) -> None:
    weights = [made(*shape, seed=seed) for seed, shape in enumerate([(700, 999), (3, 64), (5, 100_000), (0, 64), (64, 4096)])]
    found = [quantize(weight, scheme, threads=threads) for weight in weights]
    outs = [torch.empty_like(weight, dtype=torch.bfloat16) for weight in weights]
    for each, out in zip(found, outs, strict=True):
        dequantize(scheme, each, out, threads=threads)
    for weight, each, out in zip(weights, found, outs, strict=True):
        alone = torch.empty_like(out)
        dequantize(scheme, quantize(weight, scheme, threads=1), alone, threads=1)
        assert torch.equal(quantize(weight, scheme, threads=1), each)
        assert torch.equal(out, alone)


def test_other_threads_run_meanwhile(scheme: Scheme) -> None:
    out = torch.zeros(16384, 4096, dtype=torch.bfloat16)
    found = quantize(out, scheme)
    assert others_run_during(lambda: dequantize(scheme, found, out, threads=1))


# -- which weights


@pytest.mark.parametrize(
    ("shape", "dtype", "worth"),
    [
        ((64, 64), torch.bfloat16, True),
        ((64, 64), torch.float16, True),
        ((4, 16, 64), torch.float32, True),
        ((63, 65), torch.bfloat16, False),
        ((4096,), torch.bfloat16, False),
        ((4096, 1), torch.bfloat16, False),
        ((64, 64), torch.int8, False),
        ((64, 64), torch.float64, False),
        ((64, 64), torch.float8_e4m3fn, False),
    ],
)
def test_large_matrices_of_floats_are_worth_it(scheme: Scheme, shape: tuple[int, ...], dtype: torch.dtype, worth: bool) -> None:
    assert is_worth_quantizing(scheme, shape, dtype) is worth


def test_a_row_is_what_one_output_is_made_of() -> None:
    for shape, rows, columns in (
        ((10, 100), 10, 100),
        ((10, 3), 10, 3),
        ((8, 10, 100), 80, 100),
        ((64, 3, 7, 7), 64, 147),
        ((64, 32, 3, 3), 64, 288),
        ((64, 32, 5), 64, 160),
    ):
        assert QuantizedLayout.of("int8", shape) == QuantizedLayout("int8", rows, columns)


# -- processors


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_processor_of_which_nothing_is_known_does_the_same(
    scheme: Scheme, shape: tuple[int, ...], dtype: torch.dtype, testing: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantization, "load_async_io", lambda: testing)
    check(scheme, made(*shape, dtype=dtype))
    check(scheme, made(*shape, dtype=dtype) * 2.0**-20)
