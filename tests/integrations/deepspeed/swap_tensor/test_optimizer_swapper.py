"""The optimizer swappers, driven as ZeRO stage 3 drives them, against the same optimizer in memory."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from deepnvme.swap import BufferPool, OutOfBuffers

from ....support.interpreters import Interpreters
from .stage3 import GROUPS, NUMEL, FlakyEngine, Training, adamw

PADDED = -(-NUMEL * 4 // 1024) * 1024


def sgd(parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


class Factored(torch.optim.Optimizer):
    """Has states of many kinds: none of the parameter's shape."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.tensor(0, dtype=torch.int64)
                state["rows"] = torch.zeros(600, 1000, dtype=torch.bfloat16)
                state["seen"] = torch.zeros(2_000_000, dtype=torch.bool)
                state["wide"] = torch.zeros(3, 1, 400_000, dtype=torch.float64)
                state["turned"] = torch.zeros(700, 900).t()
                state["small"] = torch.zeros(7)
                state["name"] = "factored"
                state["rate"] = 0.5
            state["step"] += 1
            state["rows"] += parameter.grad[:1000].to(torch.bfloat16)
            state["seen"][: parameter.numel()] |= parameter.grad > 1
            state["wide"] += parameter.grad[0].double() / 3
            state["turned"][3] += parameter.grad[:700]
            state["small"] += parameter.grad[:7]
            state["rate"] *= 0.9
            parameter.sub_(parameter.grad * state["rate"] + state["rows"][0, 0] * 1e-3 + state["turned"].sum() * 1e-6)


class Restless(torch.optim.Optimizer):
    """Has its states, and the parameter's values, elsewhere after each step."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["last"], state["first"] = torch.zeros_like(parameter), torch.ones_like(parameter)
                state["rest"] = torch.arange(parameter.numel(), dtype=parameter.dtype)
            state["last"], state["first"] = state["first"], state["last"]  # each in the other one's memory
            state["last"] += parameter.grad
            state["rest"] = state["rest"][1:]  # which overlaps what it was
            state["again"] = state["first"]
            parameter.data = parameter - 1e-3 * state["last"] + 1e-6 * state["rest"].sum()


@pytest.mark.parametrize(
    ("make_optimizer", "buffer_count", "pipelined"),
    [
        *((adamw, count, True) for count in (1, 10, 64)),
        (adamw, 5, False),
        (sgd, 7, True),
        (Factored, 1, True),
        (Restless, 7, True),
        (Restless, 64, False),
    ],
)
def test_weights_and_states_are_those_of_the_optimizer_in_memory(
    drive: Path, make_optimizer: Any, buffer_count: int, pipelined: bool
) -> None:
    training = Training(drive, buffer_count=buffer_count, pipelined=pipelined, make_optimizer=make_optimizer)
    training.train(2)
    training.assert_same_as_in_memory()
    training.train(1)
    training.assert_same_as_in_memory()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_master_weights_of_any_dtype(drive: Path, dtype: torch.dtype) -> None:
    training = Training(drive, dtype=dtype, numels=(700_003, 600_000, 550_001), buffer_count=5)
    training.train(3)
    training.assert_same_as_in_memory()


def test_a_fixed_set_stays_in_memory_and_the_gradients_needed_first(drive: Path) -> None:
    engine = FlakyEngine()
    training = Training(drive, buffer_count=12, engine=engine)
    training.train(3)
    engine.read_paths.clear()
    engine.written_paths.clear()
    training.train(3)
    resident = {"0_1.tensor.swp", "exp_avg-0_1.tensor.swp", "exp_avg_sq-0_1.tensor.swp", "2_3.tensor.swp"}  # 12 less two times 4
    passing = {path.name for path in drive.rglob("*.swp") if "gradient" not in path.name} - resident
    assert sorted(engine.written_paths) == sorted(list(passing) * 3)
    assert set(engine.read_paths) == passing


def test_memory_stays_within_buffer_count(drive: Path) -> None:
    pool = BufferPool(1 << 30)
    training = Training(drive, buffer_count=7, pool=pool)
    most = 0
    for _ in range(3):
        training.backward()
        for parameter in training.parameters:
            training.swapper.swap_in_optimizer_state(parameter, training.parameters[-1])
            most = max(most, pool.in_use)
            training.optimizer.param_groups[0]["params"] = [parameter]
            training.optimizer.step()
            training.swapper.swap_out_optimizer_state(parameter, True)
            most = max(most, pool.in_use)
    assert most <= 7 * (PADDED + 4096)
    assert most > 5 * PADDED


def test_a_sub_group_that_does_not_fit_takes_more_from_the_pool(drive: Path) -> None:
    pool = BufferPool(6 * PADDED)
    training = Training(drive, buffer_count=2, pool=pool)
    training.train(2)
    training.assert_same_as_in_memory()


def test_what_to_set_is_said_where_the_pool_has_no_more(drive: Path) -> None:
    training = Training(drive, buffer_count=2, pool=BufferPool(3 * PADDED))
    training.backward()
    with pytest.raises(OutOfBuffers, match=rf"{PADDED} more; buffer_count allows {2 * PADDED}, set it larger; .*set a budget of"):
        training.step()


def test_all_memory_goes_back_when_the_swapper_goes(drive: Path) -> None:
    pool = BufferPool(1 << 30)
    training = Training(drive, pool=pool)
    training.train(2)
    assert pool.in_use > 0
    del training
    gc.collect()
    assert pool.in_use == 0


def test_files_have_every_value_once_the_folder_is_asked_for(drive: Path) -> None:
    training = Training(drive, buffer_count=64)
    training.train(2)
    folder = Path(training.swapper.swap_folder)
    assert folder == drive / "optimizer" / "rank0"
    for number, copy in enumerate(training.copies):
        name = f"{2 * number}_{2 * number + 1}"
        state = training.in_memory.state[copy]
        for file, wanted in ((name, copy), (f"exp_avg-{name}", state["exp_avg"]), (f"exp_avg_sq-{name}", state["exp_avg_sq"])):
            path = folder / f"{file}.tensor.swp"
            assert path.stat().st_size == PADDED  # as DeepSpeed has it, so that it can read it
            assert torch.equal(torch.from_file(str(path), size=NUMEL), wanted.detach())
    training.train(1)
    training.assert_same_as_in_memory()


@pytest.mark.slow
@pytest.mark.parametrize("make_optimizer", [adamw, Factored])
def test_a_copy_of_the_folder_is_a_checkpoint_also_for_a_swapper_that_has_no_states_yet(drive: Path, make_optimizer: Any) -> None:
    training = Training(drive / "one", make_optimizer=make_optimizer)
    training.train(2)
    shutil.copytree(training.swapper.swap_folder, drive / "saved", ignore=shutil.ignore_patterns("*gradient*"))
    anew = Training(drive / "two", make_optimizer=make_optimizer)
    anew.train(0)
    shutil.copytree(drive / "saved", anew.swapper.swap_folder, dirs_exist_ok=True)
    for parameter in anew.parameters:  # as reset_swap_buffers does
        anew.swapper.swap_in_optimizer_state(parameter, None)
        anew.swapper.swap_out_optimizer_state(parameter)
    anew.copies, anew.in_memory = training.copies, training.in_memory
    anew.train(2)
    anew.assert_same_as_in_memory()


def test_a_state_that_no_checkpoint_can_have_stays_as_it_is(drive: Path) -> None:
    training = Training(drive)
    training.train(1)
    for parameter, copy in zip(training.parameters, training.copies, strict=True):
        training.optimizer.state[parameter]["range"] = training.in_memory.state[copy]["range"] = (1, 2.5)
    training.train(1)
    assert Path(training.swapper.swap_folder).is_dir()
    training.train(1)
    training.assert_same_as_in_memory()


def test_a_checkpoint_is_gone_back_to(drive: Path) -> None:
    training = Training(drive, buffer_count=64)
    shutil.copytree(training.swapper.swap_folder, drive / "before")
    before = [copy.detach().clone() for copy in training.copies]
    training.train(2)
    shutil.copytree(drive / "before", training.swapper.swap_folder, dirs_exist_ok=True)
    for parameter, wanted in zip(training.parameters, before, strict=True):
        training.swapper.swap_in_optimizer_state(parameter, None)
        assert torch.equal(parameter, wanted)
        assert training.optimizer.state[parameter] == {}  # there were none
        training.swapper.swap_out_optimizer_state(parameter)


def test_a_state_that_was_replaced_or_dropped_is_not_the_old_one(drive: Path) -> None:
    training = Training(drive)
    training.train(2)
    parameter = training.parameters[1]
    replaced = training.random(NUMEL)
    training.swapper.swap_in_optimizer_state(parameter)
    training.optimizer.state[parameter]["exp_avg"] = replaced.clone()
    training.optimizer.state[parameter]["exp_avg_sq"].data = replaced.clone()
    training.optimizer.state[parameter]["more"] = replaced.clone()
    training.swapper.swap_out_optimizer_state(parameter)
    for name in ("exp_avg", "exp_avg_sq", "more"):
        assert training.optimizer.state[parameter][name].numel() == 0
    training.swapper.flush()
    training.swapper.swap_in_optimizer_state(parameter)
    for name in ("exp_avg", "exp_avg_sq", "more"):
        assert torch.equal(training.optimizer.state[parameter][name], replaced)
    del training.optimizer.state[parameter]["more"]
    training.swapper.swap_out_optimizer_state(parameter)
    training.swapper.swap_in_optimizer_state(parameter)
    assert "more" not in training.optimizer.state[parameter]


def test_purging_forgets_states_that_were_loaded_anew_and_keeps_those_that_are_nowhere_else(drive: Path) -> None:
    training = Training(drive)
    training.train(2)
    loaded = training.random(NUMEL)
    first, second = training.parameters[:2]
    training.optimizer.state[first]["exp_avg"] = loaded.clone()
    kept = training.in_memory.state[training.copies[1]]["exp_avg"]
    training.swapper.purge_state()
    for parameter, wanted in ((first, loaded), (second, kept)):
        for _ in range(2):
            training.swapper.swap_in_optimizer_state(parameter)
            assert torch.equal(training.optimizer.state[parameter]["exp_avg"], wanted)
            training.swapper.swap_out_optimizer_state(parameter)


def test_a_state_marked_as_not_swappable_stays_where_it_is(drive: Path) -> None:
    training = Training(drive)
    parameter = training.parameters[0]
    state = torch.ones(NUMEL)
    state.swappable = False
    training.swapper.swap_in_optimizer_state(parameter)
    training.optimizer.state[parameter]["momentum_buffer"] = state
    training.swapper.swap_out_optimizer_state(parameter)
    assert training.optimizer.state[parameter]["momentum_buffer"] is state
    assert state.numel() == NUMEL


# Gradients


@pytest.mark.parametrize("buffer_count", [4, 64])
def test_a_gradient_can_be_looked_at_and_changed_before_the_step(drive: Path, buffer_count: int) -> None:
    training = Training(drive, buffer_count=buffer_count)
    training.train(1)
    training.backward()
    for parameter, copy in zip(training.parameters, training.copies, strict=True):
        training.swapper.swap_in_optimizer_state(parameter)
        assert torch.equal(parameter.grad, copy.grad)
        seen = parameter.grad.narrow(0, 5, 10)
        training.swapper.release_swap_buffers(parameter)
        assert torch.equal(seen, copy.grad[5:15])  # stage 3 goes on reading it
        parameter.grad = None
        training.swapper.swap_in_optimizer_state(parameter)
        parameter.grad.mul_(2)
        copy.grad.mul_(2)
        training.swapper.writeback_optimizer_state_and_gradients(parameter, write_opt_state=False, write_gradients=True)
        training.swapper.swap_in_optimizer_state(parameter)
        parameter.grad = parameter.grad + 1  # another tensor
        copy.grad.add_(1)
        training.swapper.writeback_optimizer_state_and_gradients(parameter, write_opt_state=True, write_gradients=True)
    training.step()
    training.assert_same_as_in_memory()


@pytest.mark.parametrize("pipelined", [True, False])
@pytest.mark.parametrize("buffer_count", [1, 4, 64])
def test_values_set_between_backward_and_step_leave_the_gradient(drive: Path, buffer_count: int, pipelined: bool) -> None:
    training = Training(drive, buffer_count=buffer_count, pipelined=pipelined)
    training.train(1)
    training.backward()
    for _ in range(2):
        for number, parameter in enumerate(training.parameters):
            copy = training.copies[number]
            training.swapper.swap_in_optimizer_state(parameter)
            assert torch.equal(parameter.grad, copy.grad)
            kept, swapped = training.in_memory.state[copy]["exp_avg"], training.optimizer.state[parameter]["exp_avg"]
            for mine, theirs in ((copy, parameter), (kept, swapped)):
                value = training.random(1000)
                mine.data[77:1077] = value
                theirs.data[77:1077] = value
            training.swapper.swap_out_optimizer_state(parameter, async_swap=number + 1 < GROUPS)
            assert parameter.grad is None
    training.step()
    training.assert_same_as_in_memory()
    training.train(1)
    training.assert_same_as_in_memory()


@pytest.mark.parametrize("buffer_count", [4, 64])
def test_a_gradient_can_be_set_where_none_had_come(drive: Path, buffer_count: int) -> None:
    training = Training(drive, buffer_count=buffer_count)
    training.train(1)
    for number, parameter in enumerate(training.parameters):
        wanted = torch.zeros(NUMEL)
        if number % 2:
            wanted[500:1500] = training.random(1000)
            training.swapper.swap_out_gradients(parameter, [500], [wanted[500:1500]])
        training.swapper.swap_in_optimizer_state(parameter)
        parameter.grad[7:107] = wanted[7:107] = 3
        training.swapper.writeback_optimizer_state_and_gradients(parameter, write_opt_state=False, write_gradients=True)
        training.copies[number].grad = wanted
    training.step()
    training.assert_same_as_in_memory()


@pytest.mark.parametrize("buffer_count", [4, 64])
def test_what_has_not_come_is_the_gradient_before_where_there_is_one(drive: Path, buffer_count: int) -> None:
    training = Training(drive, buffer_count=buffer_count)
    training.train(1)
    cut = NUMEL // 3
    before = {id(parameter): training.random(NUMEL) for parameter in training.parameters}
    training.swapper.last_gradients = lambda parameter: [
        (0, before[id(parameter)][:cut]),
        (cut, before[id(parameter)][cut : 2 * cut]),
    ]
    for number, (parameter, copy) in enumerate(zip(training.parameters, training.copies, strict=True)):
        copy.grad = torch.cat([before[id(parameter)][: 2 * cut], torch.zeros(NUMEL - 2 * cut)])
        if number % 2:
            part = training.random(cut)
            copy.grad[:cut] = part
            training.swapper.swap_out_gradients(parameter, [0], [part])
    training.step()
    training.train(1)
    training.assert_same_as_in_memory()


@pytest.mark.parametrize("buffer_count", [4, 64])
def test_the_gradient_before_can_be_kept_before_it_changes(drive: Path, buffer_count: int) -> None:
    training = Training(drive, buffer_count=buffer_count)
    training.train(1)
    cut = NUMEL // 3
    before = {id(parameter): training.random(NUMEL) for parameter in training.parameters}
    training.swapper.last_gradients = lambda parameter: [(0, before[id(parameter)][:cut]), (cut, before[id(parameter)][cut:])]
    for number, (parameter, copy) in enumerate(zip(training.parameters, training.copies, strict=True)):
        copy.grad = before[id(parameter)].clone()
        training.swapper.keep_last_gradients(parameter)
        before[id(parameter)].zero_()
        training.swapper.keep_last_gradients(parameter)
        if number % 2:
            copy.grad[:cut] = training.random(cut)
            training.swapper.swap_out_gradients(parameter, [0], [copy.grad[:cut]])
    training.step()
    training.train(1)
    training.assert_same_as_in_memory()


@pytest.mark.parametrize("buffer_count", [4, 64])
def test_gradients_of_a_step_that_is_skipped_are_forgotten(drive: Path, buffer_count: int) -> None:
    training = Training(drive, buffer_count=buffer_count)
    training.train(1)
    for parameter in training.parameters:
        training.swapper.swap_out_gradients(parameter, [0], [torch.full((NUMEL,), float("inf"))])
    training.swapper.log_timers()  # as stage 3 does at the end of a step, and where gradients have overflowed
    for number, parameter in enumerate(training.parameters):
        part = training.random(1000)
        training.swapper.swap_out_gradients(parameter, [500], [part])
        training.copies[number].grad = torch.zeros(NUMEL)
        training.copies[number].grad[500:1500] = part
    training.step()
    training.assert_same_as_in_memory()


def test_parts_of_a_gradient_that_is_in_its_file_already_go_there(drive: Path) -> None:
    training = Training(drive, buffer_count=4)
    training.train(1)
    parameter = training.parameters[-1]
    first, second = training.random(NUMEL), training.random(1001)
    training.swapper.swap_out_gradients(parameter, [0], [first])
    for other in training.parameters[:-1]:  # which need its memory
        training.swapper.swap_out_gradients(other, [0], [training.random(NUMEL)])
    training.swapper.swap_out_gradients(parameter, [333], [second.double()])
    first[333 : 333 + 1001] = second
    training.swapper.swap_in_optimizer_state(parameter)
    assert torch.equal(parameter.grad, first)


@pytest.mark.parametrize("steps", [0, 1])
def test_the_gradient_is_zero_before_any_has_come_and_after_a_step_has_used_it(drive: Path, steps: int) -> None:
    training = Training(drive, buffer_count=64)
    training.train(steps)
    for _ in range(2):
        for parameter, copy in zip(training.parameters, training.copies, strict=True):
            training.swapper.swap_in_optimizer_state(parameter, None)
            assert torch.equal(parameter.grad, torch.zeros_like(copy))
            assert torch.equal(parameter, copy)
            training.swapper.swap_out_optimizer_state(parameter)


# Starting


@pytest.mark.parametrize("buffer_numels", [[10_000], [2_000_000], [350_000, 5, 350_000], []])
def test_parameters_begin_with_low_precision_partitions_wherever_they_are(drive: Path, buffer_numels: list[int]) -> None:
    training = Training(drive, numels=(300_000, 400_000), initialize=False)
    placeholder = torch.tensor(1).half() if buffer_numels else torch.tensor(1).bfloat16()  # DeepSpeed's is half for all dtypes
    partitions, wanted = [], []
    for number, numels in enumerate([(100_000, 150_000, 50_000), (1, 399_999)]):
        parts = [training.random(numel, torch.bfloat16) for numel in numels]
        wanted.append(torch.cat(parts).float())
        infos: list[Any] = []
        for index, part in enumerate(parts):
            path = drive / f"{number}-{index}"
            if index % 2:
                infos.append((part, part.numel(), None))
            else:
                path.write_bytes(bytes(part.view(torch.uint8).tolist()))
                infos.append((placeholder, part.numel(), str(path)))
        partitions.append(infos)
    buffers = [torch.empty(numel, dtype=torch.bfloat16) for numel in buffer_numels]
    training.swapper.initialize_from_swapped_fp16_params(partitions, [300_000, 400_000], buffers, training.parameters)
    for parameter, value in zip(training.parameters, wanted, strict=True):
        training.swapper.swap_in_optimizer_state(parameter)
        assert torch.equal(parameter, value)


def test_wrong_calls_are_refused_with_what_to_do(drive: Path) -> None:
    training = Training(drive)
    with pytest.raises(RuntimeError, match=r"'0_1' is not swapped in: call swap_in_optimizer_state"):
        training.swapper.swap_out_optimizer_state(training.parameters[0])
    with pytest.raises(ValueError, match="'0_1' was initialized before"):
        training.swapper.initialize_parameters(training.parameters[:1], [torch.zeros(NUMEL)])
    with pytest.raises(ValueError, match="got neither"):
        training.swapper.is_swappable_tensor()
    stranger = torch.nn.Parameter(torch.zeros(5))
    stranger.ds_id = "9_9"
    training.swapper.swap_in_optimizer_state(stranger, None)
    training.swapper.swap_out_optimizer_state(stranger, False)
    training.swapper.swap_out_gradients(stranger, [0], [torch.zeros(5)])
    assert stranger.numel() == 5


def test_each_of_two_jobs_has_a_folder_of_its_own(drive: Path) -> None:
    first, second, third = (Training(drive) for _ in range(3))
    ranks = drive / "optimizer"
    assert [Path(each.swapper.swap_folder).name for each in (first, second, third)] == ["rank0", "rank0-job-2", "rank0-job-3"]
    first.train(1)
    third.train(2)
    first.assert_same_as_in_memory()
    del second
    gc.collect()
    assert Path(Training(drive).swapper.swap_folder) == ranks / "rank0-job-2"
    (drive / "file").touch()
    with pytest.raises(NotADirectoryError, match=r"file/optimizer/rank0'|file"):
        Training(drive / "file")


@pytest.mark.slow
def test_files_have_every_value_when_the_program_ends(drive: Path, interpreters: Interpreters) -> None:
    program = f"""
    from pathlib import Path
    from tests.integrations.deepspeed.swap_tensor.stage3 import Training
    training = Training(Path({str(drive)!r}), buffer_count=64)
    training.train(2)
    torch.save([copy.detach() for copy in training.copies], {str(drive / "wanted")!r})
    """
    interpreters.run(program).check()
    for number, wanted in enumerate(torch.load(drive / "wanted")):
        path = drive / "optimizer" / "rank0" / f"{2 * number}_{2 * number + 1}.tensor.swp"
        assert torch.equal(torch.from_file(str(path), size=NUMEL), wanted)


@pytest.mark.slow
def test_a_program_ends_in_silence_when_its_folder_is_gone(drive: Path, interpreters: Interpreters) -> None:
    program = f"""
    import shutil
    from pathlib import Path
    from tests.integrations.deepspeed.swap_tensor.stage3 import Training
    training = Training(Path({str(drive)!r}), buffer_count=64)
    training.train(1)
    shutil.rmtree(Path({str(drive)!r}) / "optimizer")
    """
    ended = interpreters.run(program)
    ended.check()
    assert ended.stderr == ""
