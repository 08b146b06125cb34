"""What ZeRO stage 3 does with an optimizer swapper, without DeepSpeed: sub-groups, a step over them, and the same in memory."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import deepnvme
from deepnvme.integrations.deepspeed.swap_tensor import AIO_DEFAULT_DICT, PartitionedOptimizerSwapper, PipelinedOptimizerSwapper
from deepnvme.swap import BufferPool

from ....support.engines import FailedTransfer

NUMEL = 300_001  # 1.2 MB in fp32, and no multiple of anything: large enough to be swapped
GROUPS = 5


class FlakyEngine:
    """An engine some of whose transfers fail, as often as it is told to."""

    def __init__(self) -> None:
        self._engine = deepnvme.Engine(queue_depth=32)
        self._failures: list[tuple[str, str, bool]] = []
        self.read_paths: list[str] = []
        self.written_paths: list[str] = []

    def fail(self, kind: str, part: str = "", times: int = 1, at_once: bool = False) -> None:
        """Have the next ``kind`` ("read" or "write") of a path that contains ``part`` end with EIO; ``at_once``: when it is
        submitted."""
        self._failures += [(kind, part, at_once)] * times

    def heal(self) -> bool:
        """Have nothing fail any more; whether there was something left to."""
        left = bool(self._failures)
        self._failures.clear()
        return left

    def read(self, tensor: torch.Tensor, source: str, offset: int = 0) -> Any:
        self.read_paths.append(os.path.basename(source))
        return self._fails("read", source) or self._engine.read(tensor, source, offset)

    def write(self, tensor: torch.Tensor, target: str, offset: int = 0) -> Any:
        self.written_paths.append(os.path.basename(target))
        return self._fails("write", target) or self._engine.write(tensor, target, offset)

    def _fails(self, kind: str, path: str) -> Any:
        for failure in self._failures:
            if failure[0] == kind and failure[1] in os.path.basename(path):
                self._failures.remove(failure)
                error = OSError(errno.EIO, "injected", path)
                if failure[2]:
                    raise error
                return FailedTransfer(error)
        return None


def adamw(parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


class Training:
    """Sub-groups that are stepped through a swapper, and a copy of each that never leaves memory."""

    def __init__(
        self,
        folder: Path,
        *,
        buffer_count: int = 12,
        pipelined: bool = True,
        numels: Sequence[int] = (NUMEL,) * GROUPS,
        dtype: torch.dtype = torch.float32,
        make_optimizer: Callable[[Sequence[torch.Tensor]], torch.optim.Optimizer] = adamw,
        engine: Any = None,
        pool: BufferPool | None = None,
        initialize: bool = True,
    ) -> None:
        self.numels = list(numels)
        self._generator = torch.Generator().manual_seed(1)
        values = [self.random(numel, dtype) for numel in numels]
        self.parameters = [torch.nn.Parameter(torch.empty(0, dtype=dtype)) for _ in numels]
        for number, parameter in enumerate(self.parameters):
            parameter.ds_id = f"{2 * number}_{2 * number + 1}"
        self.copies = [torch.nn.Parameter(value.clone()) for value in values]
        self.optimizer = make_optimizer([torch.empty(1, requires_grad=True)])
        self.in_memory = make_optimizer([torch.empty(1, requires_grad=True)])
        settings = SimpleNamespace(buffer_count=buffer_count, pipeline_read=pipelined, pipeline_write=pipelined)
        kind = PipelinedOptimizerSwapper if pipelined else PartitionedOptimizerSwapper
        self.swapper = kind(
            settings, AIO_DEFAULT_DICT, folder, self.optimizer, max(numels), "cpu", dtype, None, engine=engine, pool=pool
        )
        if initialize:
            self.swapper.initialize_parameters(self.parameters, values)

    def random(self, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(numel, generator=self._generator).to(dtype)

    def backward(self) -> None:
        """Gradients, the last sub-group's first, each in two parts of odd lengths."""
        for number in reversed(range(len(self.parameters))):
            gradient = self.random(self.numels[number], self.copies[number].dtype)
            self.copies[number].grad = gradient.clone()
            cut = self.numels[number] // 3
            self.swapper.swap_out_gradients(self.parameters[number], [cut], [gradient[cut:]])
            self.swapper.swap_out_gradients(self.parameters[number], [0], [gradient[:cut]])
            gradient.fill_(float("nan"))  # it was to be copied

    def step(self, retry: bool = False) -> list[OSError]:
        """All sub-groups, in memory as well. ``retry``: repeat what raises OSError; those are returned."""
        errors: list[OSError] = []
        for number, parameter in enumerate(self.parameters):
            following = self.parameters[number + 1] if number + 1 < len(self.parameters) else None
            self._call(errors, retry, self.swapper.swap_in_optimizer_state, parameter, async_parameter=following)
            self.step_one(number)
            self._call(errors, retry, self.swapper.swap_out_optimizer_state, parameter, async_swap=following is not None)
            assert parameter.numel() == 0
            assert parameter.grad is None
        return errors

    def step_one(self, number: int) -> None:
        """A sub-group that is swapped in, and its copy."""
        for optimizer, stepped in ((self.optimizer, self.parameters[number]), (self.in_memory, self.copies[number])):
            optimizer.param_groups[0]["params"] = [stepped]
            optimizer.step()
            optimizer.param_groups[0]["params"] = []

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.backward()
            self.step()

    @staticmethod
    def _call(errors: list[OSError], retry: bool, function: Callable[..., None], *args: Any, **more: Any) -> None:
        for _ in range(5):
            try:
                return function(*args, **more)
            except OSError as error:
                if not retry:
                    raise
                errors.append(error)
        raise AssertionError(f"{function.__name__} failed five times, last with {errors[-1]}")

    def assert_same_as_in_memory(self) -> None:
        """Weights and all states, bit for bit."""
        for parameter, copy in zip(self.parameters, self.copies, strict=True):
            self.swapper.swap_in_optimizer_state(parameter)
            assert torch.equal(parameter, copy)
            swapped, kept = self.optimizer.state.get(parameter, {}), self.in_memory.state.get(copy, {})
            assert list(swapped) == list(kept)
            for name, value in kept.items():
                if torch.is_tensor(value):
                    assert swapped[name].dtype == value.dtype
                    assert swapped[name].stride() == value.stride()
                    assert torch.equal(swapped[name], value), name
                else:
                    assert swapped[name] == value
            self.swapper.release_swap_buffers(parameter)
            assert parameter.numel() == 0
