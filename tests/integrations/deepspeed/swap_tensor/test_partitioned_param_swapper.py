"""Partitions of parameters, swapped as ZeRO stage 3 does it."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepnvme.integrations.deepspeed.swap_tensor import AIO_DEFAULT_DICT, AsyncPartitionedParameterSwapper, PartitionedParamStatus
from deepnvme.swap import OutOfBuffers

NUMEL = 10_001
AVAILABLE, NOT_AVAILABLE, INFLIGHT = PartitionedParamStatus


@pytest.fixture
def make(drive: Path) -> Callable[..., AsyncPartitionedParameterSwapper]:
    def swapper(count: int = 3, size: int = 20_000, dtype: torch.dtype = torch.bfloat16) -> AsyncPartitionedParameterSwapper:
        offload = SimpleNamespace(nvme_path=drive, buffer_count=count, buffer_size=size)
        config = SimpleNamespace(zero_config=SimpleNamespace(offload_param=offload), aio_config=AIO_DEFAULT_DICT)
        return AsyncPartitionedParameterSwapper(config, dtype)

    return swapper


class Parameters:
    """Parameters whose partitions were written when they were made, as ``_partition_param`` does."""

    def __init__(self, swapper: AsyncPartitionedParameterSwapper, count: int, numel: int = NUMEL) -> None:
        self.swapper = swapper
        self.values = [torch.randn(numel).to(swapper.dtype) for _ in range(count)]
        self.params = [self._made(number, value) for number, value in enumerate(self.values)]

    def _made(self, number: int, value: torch.Tensor) -> Any:
        param = torch.nn.Parameter(torch.empty(0, dtype=self.swapper.dtype))
        param.ds_id = number
        buffer = self.swapper.get_buffer(param, value.numel())
        param.ds_tensor = torch.empty(0, dtype=value.dtype)
        param.ds_tensor.data = buffer.data
        param.ds_tensor.ds_numel = value.numel()
        param.ds_tensor.status = AVAILABLE
        param.ds_tensor.copy_(value)
        self.swapper.swap_out_and_release([param])
        return param

    def assert_not_available(self) -> None:
        for param in self.params:
            assert param.ds_tensor.status == NOT_AVAILABLE
            assert param.ds_tensor.dim() == 0

    def assert_available(self, *numbers: int) -> None:
        for number in numbers:
            assert self.params[number].ds_tensor.status == AVAILABLE
            assert torch.equal(self.params[number].ds_tensor, self.values[number])


def test_partitions_come_back_from_their_files(make: Any, drive: Path) -> None:
    swapper = make()
    parameters = Parameters(swapper, 5)
    parameters.assert_not_available()
    folder = drive / "zero_stage_3" / "bfloat16params" / "rank0"
    assert swapper.get_path(parameters.params[2]) == str(folder / "2_param.tensor.swp")
    assert swapper.available_swap_in_buffers() == 3
    for numbers in ((0, 1, 2), (4, 3)):
        chosen = [parameters.params[number] for number in numbers]
        swapper.swap_in(chosen)
        assert {param.ds_tensor.status for param in chosen} == {INFLIGHT}
        assert swapper.available_swap_in_buffers() == 3 - len(numbers)
        swapper.synchronize_reads()
        parameters.assert_available(*numbers)
        swapper.remove_partition_and_release_buffers(chosen)
        parameters.assert_not_available()
        assert swapper.available_swap_in_buffers() == 3


def test_a_changed_partition_is_written(make: Any) -> None:
    swapper = make()
    parameters = Parameters(swapper, 2)
    swapper.swap_in(parameters.params, async_op=False)
    for param, value in zip(parameters.params, parameters.values, strict=True):
        param.ds_tensor.mul_(2)
        value.mul_(2)
    swapper.swap_out_and_release(parameters.params)
    parameters.assert_not_available()
    swapper.swap_in(parameters.params, async_op=False)
    parameters.assert_available(0, 1)


def test_a_partition_that_is_larger_than_the_room_to_convert_it_is_refused(make: Any) -> None:
    swapper = make()
    parameters = Parameters(swapper, 1)
    swapper.reserve_partitioned_swap_space([1000])
    with pytest.raises(ValueError, match=r"10001 elements does not fit into the 1024 reserved"):
        swapper.swap_out_partitioned_params(parameters.params, [torch.zeros(NUMEL)])
    swapper.swap_in(parameters.params, async_op=False)
    parameters.assert_available(0)


def test_partitions_out_of_a_step_are_converted_and_written(make: Any) -> None:
    swapper = make()
    parameters = Parameters(swapper, 4)
    swapper.reserve_partitioned_swap_space([NUMEL, NUMEL])  # fewer than are written at once
    swapper.swap_in(parameters.params[:2], async_op=True)  # read ahead of the step, which makes that outdated
    new = [torch.randn(NUMEL) for _ in parameters.params]
    swapper.swap_out_partitioned_params(parameters.params, new)
    parameters.assert_not_available()
    assert swapper.available_swap_in_buffers() == 3
    parameters.values = [value.to(swapper.dtype) for value in new]
    for number, param in enumerate(parameters.params):
        swapper.swap_in([param], async_op=False)
        parameters.assert_available(number)
        swapper.remove_partition_and_release_buffers([param])


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("numel", [NUMEL, 10_240])
def test_a_partition_is_read_into_a_tensor_of_the_callers(make: Any, handle: Any, pinned: bool, numel: int) -> None:
    swapper = make()
    parameters = Parameters(swapper, 1, numel)
    target = torch.empty(numel, dtype=swapper.dtype)
    if pinned:
        target = handle.new_cpu_locked_tensor(numel, target)
    swapper.swap_into_buffer(parameters.params[0], target)
    assert torch.equal(target, parameters.values[0])
    assert swapper.available_swap_in_buffers() == 3


def test_what_to_set_is_said_where_there_is_no_buffer(make: Any) -> None:
    swapper = make(count=2)
    parameters = Parameters(swapper, 4)
    with pytest.raises(OutOfBuffers, match=r"none of the 2 of 20000 is free .* set offload_param.buffer_count or buffer_size"):
        swapper.swap_in(parameters.params)
    parameters.assert_not_available()
    assert swapper.available_swap_in_buffers() == 2
    swapper.swap_in(parameters.params[:2], async_op=False)
    parameters.assert_available(0, 1)


def test_a_partition_given_twice_is_read_once(make: Any) -> None:
    swapper = make()
    parameters = Parameters(swapper, 2)
    swapper.swap_in([*parameters.params, parameters.params[0]], async_op=False)
    parameters.assert_available(0, 1)
    assert swapper.available_swap_in_buffers() == 1


def test_a_read_that_fails_leaves_partitions_not_available_and_can_be_repeated(make: Any) -> None:
    swapper = make()
    parameters = Parameters(swapper, 3)
    path = Path(swapper.get_path(parameters.params[1]))
    path.rename(path.with_suffix(".away"))
    with pytest.raises(FileNotFoundError) as caught:
        swapper.swap_in(parameters.params, async_op=False)
    assert caught.value.filename == str(path)
    parameters.assert_not_available()
    assert swapper.available_swap_in_buffers() == 3
    path.with_suffix(".away").rename(path)
    swapper.swap_in(parameters.params, async_op=False)
    parameters.assert_available(0, 1, 2)


def test_a_write_that_fails_keeps_the_partition_and_can_be_repeated(make: Any) -> None:
    swapper = make()
    parameters = Parameters(swapper, 2)
    swapper.swap_in(parameters.params, async_op=False)
    parameters.params[0].ds_tensor.fill_(7)
    parameters.values[0].fill_(7)
    folder = Path(swapper.swap_folder)
    folder.rename(folder.with_name("away"))
    with pytest.raises(FileNotFoundError):
        swapper.swap_out_and_release([parameters.params[0]])
    parameters.assert_available(0, 1)
    folder.with_name("away").rename(folder)
    swapper.swap_out_and_release([parameters.params[0]])
    assert parameters.params[0].ds_tensor.status == NOT_AVAILABLE
    swapper.swap_in([parameters.params[0]], async_op=False)
    parameters.assert_available(0, 1)


def test_a_buffer_is_free_once_an_interrupted_write_has_left_it(make: Any) -> None:
    swapper = make()
    parameters = Parameters(swapper, 1)
    swapper.swap_in(parameters.params, async_op=False)
    handle = swapper.aio_write_handle

    def interrupted() -> int:
        raise KeyboardInterrupt

    waits = iter([handle.wait, interrupted])
    swapper.aio_write_handle = SimpleNamespace(async_pwrite=handle.async_pwrite, wait=lambda: next(waits, handle.wait)())
    with pytest.raises(KeyboardInterrupt):
        swapper.swap_out_and_release(parameters.params)
    parameters.assert_available(0)
    swapper.remove_partition_and_release_buffers(parameters.params)
    assert handle.wait() == 0  # the buffer is free: nothing writes from it any more
    parameters.assert_not_available()


def test_reserved_buffers_are_nobody_elses(make: Any) -> None:
    swapper = make()
    buffers = swapper.reserve_available_buffers()
    assert [buffer.numel() for buffer in buffers] == [swapper.aligned_elements_per_buffer] * 3
    assert swapper.available_swap_in_buffers() == 0
    swapper.release_reserved_buffers()
    assert swapper.available_swap_in_buffers() == 3


def test_wrong_calls_say_what_to_do(make: Any) -> None:
    swapper = make()
    parameters = Parameters(swapper, 1)
    with pytest.raises(ValueError, match=r"set offload_param.buffer_size to at least 20001"):
        swapper.get_buffer(parameters.params[0], 20_001)
    with pytest.raises(ValueError, match="have no swap buffer"):
        swapper.swap_out_and_release(parameters.params)
    with pytest.raises(ValueError, match="reserve_partitioned_swap_space"):
        swapper.swap_out_partitioned_params(parameters.params, [torch.zeros(NUMEL)])
    swapper.swap_in(parameters.params, async_op=False)
    with pytest.raises(ValueError, match=r"\[0\] are available or being read"):
        swapper.swap_in(parameters.params)
    stranger = SimpleNamespace(ds_id=99)
    with pytest.raises(ValueError, match="99 has no swap file"):
        swapper.get_path(stranger, must_exist=True)
    with pytest.raises(ValueError, match="and not both"):
        swapper.swappable_tensor()


def test_the_folder_is_emptied_at_the_start(make: Any, drive: Path) -> None:
    folder = drive / "zero_stage_3" / "bfloat16params" / "rank0"
    folder.mkdir(parents=True)
    (folder / "old").touch()
    make()
    assert list(folder.iterdir()) == []


def test_a_status_is_equal_to_deepspeeds_of_the_same_name() -> None:
    theirs: Any = Enum("PartitionedParamStatus", {"AVAILABLE": 1, "NOT_AVAILABLE": 2, "INFLIGHT": 3})  # type: ignore[misc]
    for ours in PartitionedParamStatus:
        for other in theirs:
            assert (ours == other) == (other == ours) == (ours.name == other.name)
            assert (ours != other) == (other != ours) == (ours.name != other.name)
    assert {AVAILABLE: 1}[theirs.AVAILABLE] == 1
    assert AVAILABLE != 1
    assert AVAILABLE != Enum("Other", {"AVAILABLE": 1}).AVAILABLE
