"""The utils op: bytes and flat views that share memory, and refusals where they could not."""

from __future__ import annotations

import pytest
import torch

from deepnvme.ops.op_builder import UtilsBuilder
from deepnvme.ops.utils_op import cast_to_byte_tensor, flatten, unflatten

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64]


def test_a_tensor_that_is_not_contiguous_is_refused_with_its_strides() -> None:
    with pytest.raises(ValueError, match=r"shape \(3, 2\) with strides \(1, 3\); call .contiguous\(\) first"):
        cast_to_byte_tensor(torch.zeros(2, 3).t())


@pytest.mark.parametrize("wrong", [torch.zeros(2, 2).to_sparse(), [1, 2]])
def test_what_has_no_bytes_in_a_row_is_refused(wrong: object) -> None:
    with pytest.raises(TypeError, match="needs strided tensors"):
        cast_to_byte_tensor(wrong)  # type: ignore[call-overload]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_share_the_tensors_memory(dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, 5, dtype=dtype)
    seen = cast_to_byte_tensor(tensor)
    assert seen.dtype == torch.uint8
    assert seen.shape == (tensor.nbytes,)
    assert seen.data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("tensor", [torch.zeros(0), torch.tensor(True), torch.zeros(1, 1, dtype=torch.int8)], ids=repr)
def test_one_byte_or_none_comes_back_as_it_is(tensor: torch.Tensor) -> None:
    assert cast_to_byte_tensor(tensor) is tensor


def test_flattening_nothing_or_unlike_tensors_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one tensor"):
        flatten([])
    with pytest.raises(ValueError, match=r"one dtype on one device, got .*float16.*float32"):
        flatten([torch.zeros(2), torch.zeros(2, dtype=torch.float16)])


@pytest.mark.parametrize("flat", [torch.zeros(5), torch.zeros(7), torch.zeros(2, 3)], ids=lambda flat: str(tuple(flat.shape)))
def test_unflattening_the_wrong_size_is_refused(flat: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="needs a 1-D tensor of 6 elements, got shape"):
        unflatten(flat, [torch.zeros(2), torch.zeros(2, 2)])


def test_flatten_then_unflatten_gives_views_with_the_same_values() -> None:
    tensors = [torch.randn(2, 3), torch.randn(()), torch.randn(0, 4), torch.randn(4, 2).t()]
    flat = flatten(tensors)
    views = unflatten(flat, tensors)
    assert flat.shape == (15,)
    assert all(torch.equal(view, tensor) for view, tensor in zip(views, tensors, strict=True))
    views[0].zero_()
    assert not flat[:6].any()


def test_the_builder_loads_it_without_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    builder = UtilsBuilder()
    assert builder.is_compatible()
    op = builder.load()
    assert (op.cast_to_byte_tensor, op.flatten, op.unflatten) == (cast_to_byte_tensor, flatten, unflatten)
