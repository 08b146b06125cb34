"""ZeRO stage 3's parameter swapper, with reads and writes that fail: partitions are the last ones written, or still in memory."""

from __future__ import annotations

import errno
import gc
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import torch

from deepnvme.integrations.deepspeed.swap_tensor import AIO_DEFAULT_DICT, AsyncPartitionedParameterSwapper, PartitionedParamStatus
from deepnvme.swap import buffer_pool

from .. import Leaked, Wrong

SHORT = 4
SECONDS = 60

_SIZE = 300_000  # elements of a buffer
_MOST_REPEATS = 20
_AVAILABLE, _NOT_AVAILABLE, _ = PartitionedParamStatus


def attack(random: Random, directory: Path) -> None:
    torch.manual_seed(random.randrange(1 << 31))
    in_use = buffer_pool().in_use
    _Attack(random, directory).run()
    gc.collect()
    if buffer_pool().in_use > in_use:
        raise Leaked(f"{buffer_pool().in_use - in_use} bytes of the pool")


class _FailingHandle:
    """A handle some of whose transfers cannot be submitted, or fail the next wait() and leave half of what they should."""

    def __init__(self, handle: Any, random: Random) -> None:
        self._handle, self._random = handle, random
        self._failed: OSError | None = None
        self.chance = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    def async_pread(self, buffer: torch.Tensor, path: str, offset: int = 0) -> Any:
        if not self._fails(path):
            return self._handle.async_pread(buffer, path, offset)
        buffer[: buffer.numel() // 2].zero_()

    def async_pwrite(self, buffer: torch.Tensor, path: str, offset: int = 0) -> Any:
        if not self._fails(path):
            return self._handle.async_pwrite(buffer, path, offset)
        self._handle.async_pwrite(torch.zeros_like(buffer), path, offset)

    def wait(self) -> int:
        count: int = self._handle.wait()
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed
        return count

    def _fails(self, path: str) -> bool:
        if self._random.random() >= self.chance:
            return False
        error = OSError(errno.EIO, "injected", path)
        if self._random.random() < 0.3:
            raise error
        self._failed = error
        return True


class _Attack:
    """One swapper, and what stage 3 does with it in a forward, a backward and a step."""

    def __init__(self, random: Random, directory: Path) -> None:
        self._random, self._directory = random, directory
        offload = SimpleNamespace(nvme_path=directory, buffer_count=random.choice((1, 2, 4, 8)), buffer_size=_SIZE)
        config = SimpleNamespace(zero_config=SimpleNamespace(offload_param=offload), aio_config=AIO_DEFAULT_DICT)
        self._swapper = AsyncPartitionedParameterSwapper(config, random.choice((torch.bfloat16, torch.float32)))
        handles = (self._swapper.aio_read_handle, self._swapper.aio_write_handle)
        self._handles = [_FailingHandle(handle, random) for handle in handles]
        self._swapper.aio_read_handle, self._swapper.aio_write_handle = self._handles
        numels = [random.choice((_SIZE, random.randrange(1, _SIZE))) for _ in range(random.choice((3, 6)))]
        self._swapper.reserve_partitioned_swap_space([_SIZE] * random.choice((1, len(numels))))
        self._chance = random.choice((0.05, 0.2, 0.5))
        self._fail(self._chance)
        self._values = [torch.randn(numel).to(self._swapper.dtype) for numel in numels]
        self._params = [self._made(number) for number in range(len(numels))]

    def run(self) -> None:
        for _ in range(40):
            self._random.choice((self._fetch, self._fetch, self._change, self._drop, self._copy, self._step))()
        self._fail(0.0)
        self._swapper.remove_partition_and_release_buffers(self._params)
        if self._swapper.available_swap_in_buffers() != self._swapper.param_buffer_count:
            raise Leaked("buffers of the swapper, with no partition in memory")
        self._swapper.swap_in(self._params, async_op=False)
        self._check(self._params)

    def _fail(self, chance: float) -> None:
        for handle in self._handles:
            handle.chance = chance

    def _made(self, number: int) -> Any:
        """A parameter whose partition is written, as ``zero.Init`` makes it."""
        param = torch.nn.Parameter(torch.empty(0, dtype=self._swapper.dtype))
        value = self._values[number]
        param.ds_id = number  # type: ignore[attr-defined]
        buffers: list[torch.Tensor] = []
        self._insist(lambda: buffers.append(self._swapper.get_buffer(param, value.numel())))
        param.ds_tensor = torch.empty(0, dtype=value.dtype)  # type: ignore[attr-defined]
        param.ds_tensor.data = buffers[0].data  # type: ignore[attr-defined]
        param.ds_tensor.ds_numel, param.ds_tensor.status = value.numel(), _AVAILABLE  # type: ignore[attr-defined]
        param.ds_tensor.copy_(value)  # type: ignore[attr-defined]
        self._insist(lambda: self._swapper.swap_out_and_release([param]))
        return param

    def _insist(self, call: Callable[[], object]) -> None:
        """Repeat a call until it ends without an error: at the latest when the drive has been well for a while."""
        for tries in range(_MOST_REPEATS):
            self._fail(self._chance if tries < _MOST_REPEATS // 2 else 0.0)
            try:
                call()
                self._fail(self._chance)
                return
            except OSError as error:
                if error.errno != errno.EIO or not str(error.filename).startswith(str(self._directory)):
                    raise Wrong(f"an error that does not say what failed: {error!r}, {error.filename!r}") from error
        raise Wrong(f"{call} did not succeed in {_MOST_REPEATS} tries")

    def _some(self, status: Any) -> list[Any]:
        found = [param for param in self._params if param.ds_tensor.status == status]
        return self._random.sample(found, self._random.randrange(len(found) + 1))

    def _check(self, params: list[Any]) -> None:
        for param in params:
            if param.ds_tensor.status != _AVAILABLE or not torch.equal(param.ds_tensor, self._values[param.ds_id]):
                raise Wrong(f"partition {param.ds_id} has another content than was written last")

    def _fetch(self) -> None:
        chosen = self._some(_NOT_AVAILABLE)

        def fetch() -> None:
            try:
                self._swapper.swap_in(chosen, async_op=self._random.random() < 0.5)
                self._swapper.synchronize_reads()
            except OSError:
                if any(param.ds_tensor.status != _NOT_AVAILABLE for param in chosen):
                    raise Wrong("after a read that failed a partition is available") from None
                raise

        self._insist(fetch)
        self._check(chosen)

    def _change(self) -> None:
        """And write it, as after a gathering that changes something."""
        chosen = self._some(_AVAILABLE)
        for param in chosen:
            self._values[param.ds_id] = self._values[param.ds_id] * 3 + 1
            param.ds_tensor.copy_(self._values[param.ds_id])
        self._insist(lambda: self._swapper.swap_out_and_release(chosen))
        if any(param.ds_tensor.status != _NOT_AVAILABLE for param in chosen):
            raise Wrong("a partition that was written and released is available")

    def _drop(self) -> None:
        chosen = self._some(_AVAILABLE)
        self._insist(lambda: self._swapper.remove_partition_and_release_buffers(chosen))

    def _copy(self) -> None:
        for param in self._some(_NOT_AVAILABLE):
            target = torch.empty_like(self._values[param.ds_id])
            self._insist(lambda: self._swapper.swap_into_buffer(param, target))  # noqa: B023
            if not torch.equal(target, self._values[param.ds_id]):
                raise Wrong(f"partition {param.ds_id} is copied with another content than was written last")

    def _step(self) -> None:
        """New values for some, in fp32, also while others are being read ahead."""
        chosen = self._random.sample(self._params, self._random.randrange(1, len(self._params) + 1))
        new = [torch.randn(self._values[param.ds_id].numel()) for param in chosen]
        self._insist(lambda: self._swapper.swap_out_partitioned_params(chosen, new))
        for param, value in zip(chosen, new, strict=True):
            self._values[param.ds_id] = value.to(self._swapper.dtype)
