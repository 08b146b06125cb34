"""What transformers' implementations of experts do with packed weights gives the same bits with weights that are read then."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch

from deepnvme.model.weight_differences import WeightInfo
from deepnvme.streaming.experts.unread_experts import UnreadExperts

EXPERTS, ROWS, COLUMNS = 4, 8, 16
MODES = [torch.inference_mode, torch.no_grad, torch.enable_grad]


class Experts:
    """Weights in memory, the same to be read, and which were read."""

    def __init__(self) -> None:
        self.memory = torch.linspace(-1, 1, EXPERTS * ROWS * COLUMNS).sin().view(EXPERTS, ROWS, COLUMNS)
        self.read: list[int] = []
        self.in_memory: set[int] = set()
        info = WeightInfo(torch.float32, (EXPERTS, ROWS, COLUMNS))
        self.unread = UnreadExperts.make("layer.up", "layer", info, torch.device("cpu"), self._read, self.in_memory.__contains__)

    def _read(self, expert: int) -> torch.Tensor:
        self.read.append(expert)
        return self.memory.view(-1)[expert * ROWS * COLUMNS :][: ROWS * COLUMNS].view(ROWS, COLUMNS)


@pytest.fixture
def experts() -> Experts:
    return Experts()


@pytest.mark.parametrize("mode", MODES)
def test_one_expert(experts: Experts, mode: Callable[[], AbstractContextManager[None]]) -> None:
    with mode():
        assert torch.equal(experts.unread[torch.tensor(2)], experts.memory[2])
        assert torch.equal(experts.unread[-1], experts.memory[3])
        assert torch.equal(experts.unread.transpose(1, 2)[1], experts.memory[1].T)
    assert experts.read == [2, 3, 1]


@pytest.mark.parametrize("mode", MODES)
def test_several_experts_each_read_once(experts: Experts, mode: Callable[[], AbstractContextManager[None]]) -> None:
    numbers = torch.tensor([3, 1, 1, 3])
    with mode():
        assert torch.equal(experts.unread[numbers], experts.memory[numbers])
    assert experts.read == [1, 3]


@pytest.mark.parametrize("mode", MODES)
def test_groups_of_rows_and_experts_without_rows_are_not_read(
    experts: Experts, mode: Callable[[], AbstractContextManager[None]]
) -> None:
    rows, ends = torch.linspace(0, 1, 6 * COLUMNS).cos().view(6, COLUMNS), torch.tensor([2, 2, 5, 5], dtype=torch.int32)
    with mode():
        unread, memory = (
            torch.nn.functional.grouped_mm(rows, weight.transpose(-2, -1), offs=ends)[:5]
            for weight in (experts.unread, experts.memory)
        )
        assert torch.equal(unread, memory)
    assert experts.read == [0, 2]


def test_experts_in_memory_are_computed_before_those_that_are_being_read(experts: Experts) -> None:
    experts.in_memory.update((2, 3))
    rows, ends = torch.linspace(0, 1, 6 * COLUMNS).cos().view(6, COLUMNS), torch.tensor([2, 3, 5, 6], dtype=torch.int32)
    with torch.inference_mode():
        unread, memory = (
            torch.nn.functional.grouped_mm(rows, weight.transpose(-2, -1), offs=ends)
            for weight in (experts.unread, experts.memory)
        )
        assert torch.equal(unread, memory)
        assert experts.read == [2, 3, 0, 1]
        assert torch.equal(experts.unread[torch.tensor([1, 3])], experts.memory[torch.tensor([1, 3])])
        assert experts.read[4:] == [3, 1]


def test_an_expert_that_does_not_exist_is_refused(experts: Experts) -> None:
    for number in (EXPERTS, -EXPERTS - 1):
        with pytest.raises(IndexError, match=r"out of (range|bounds)"):
            experts.unread[number]
    with pytest.raises(IndexError):
        experts.unread[torch.tensor([0, EXPERTS])]


@pytest.mark.parametrize(
    "use",
    [
        lambda weight: weight * 2,
        lambda weight: weight[:2],
        lambda weight: weight[torch.tensor([True, False, True, False])],
        lambda weight: weight.select(1, 0),
        lambda weight: weight.transpose(0, 1),
        lambda weight: torch.bmm(weight, weight.transpose(1, 2)),
        lambda weight: weight.untyped_storage(),
        lambda weight: weight.numpy(),
    ],
)
def test_anything_else_is_refused_and_reads_nothing(experts: Experts, use: Callable[[torch.Tensor], object]) -> None:
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"'layer\.up' are read when they are chosen"):
        use(experts.unread)
    assert not experts.read
