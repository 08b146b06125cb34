"""Partitions that are put together, where one of them cannot be read."""

from __future__ import annotations

import errno
from typing import Any

import pytest
import torch

from deepnvme.integrations.deepspeed.swap_tensor.optimizer_swapper import read_partitions

from ....support.engines import FailedTransfer


class Slow:
    """An engine whose transfers go on until they are asked for; those of "bad" fail, that of "refused" is not begun."""

    def __init__(self) -> None:
        self.under_way: set[str] = set()

    def read(self, tensor: torch.Tensor, source: str, offset: int = 0) -> Any:
        if source == "refused":
            raise FileNotFoundError(errno.ENOENT, "injected", source)
        if source == "bad":
            return FailedTransfer(OSError(errno.EIO, "injected", source))
        self.under_way.add(source)
        return _Slow(self, source)

    def write(self, tensor: torch.Tensor, target: str, offset: int = 0) -> Any:
        raise AssertionError("nothing is to be written")


class _Slow:
    def __init__(self, engine: Slow, source: str) -> None:
        self._engine, self._source = engine, source

    def done(self) -> bool:
        return self._source not in self._engine.under_way

    def exception(self, timeout: float | None = None) -> None:
        self._engine.under_way.discard(self._source)

    def result(self, timeout: float | None = None) -> int:
        self.exception()
        return 0


@pytest.mark.parametrize("paths", [["bad", "a", "b"], ["a", "bad", "b"], ["a", "b", "refused"]])
def test_the_memory_is_the_callers_again_when_it_raises(paths: list[str]) -> None:
    engine = Slow()
    partitions = [(torch.empty(0, dtype=torch.bfloat16), 10, path) for path in paths]
    with pytest.raises(OSError, match="injected"):
        read_partitions(engine, partitions, [], torch.zeros(30))
    assert not engine.under_way


def test_lengths_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(ValueError, match="the partitions have 10 elements in all, the parameter 11"):
        read_partitions(Slow(), [(torch.zeros(10), 10, None)], [], torch.zeros(11))
