"""DeepSpeed's names replaced all together or not at all, on a stand-in for DeepSpeed. With the real one: tests/compat."""

from __future__ import annotations

import errno
import gc
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepnvme.checkpoint import NVMeCheckpointEngine
from deepnvme.integrations import _running
from deepnvme.integrations import deepspeed as integration
from deepnvme.integrations.deepspeed import launching, rank_failures
from deepnvme.integrations.deepspeed import swap_tensor as zero
from deepnvme.integrations.deepspeed.ops import PinHandle
from deepnvme.integrations.deepspeed.rank_failures import RankFailures
from deepnvme.ops.op_builder import GDSBuilder

from ...support.interpreters import Interpreters
from ...support.patience import PATIENCE
from . import stand_in as deepspeed_stand_in
from .stand_in import contents

Modules = dict[str, ModuleType]


@pytest.fixture
def deepspeed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Modules]:
    """The stand-in's modules, imported."""
    modules = deepspeed_stand_in.modules()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield modules
    integration.disable()


# What fails


def test_without_deepspeed_there_is_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install deepspeed==0\.19\.8"):
        integration.enable()


@pytest.mark.parametrize("version", ["0.18.9", "0.19.9", "0.20.0+abc", "unknown"])
def test_a_version_that_was_not_tested_is_refused(deepspeed: Modules, version: str) -> None:
    deepspeed["deepspeed"].__version__ = version
    before = contents(deepspeed)
    with pytest.raises(RuntimeError, match=rf"0\.19\.\d to 0\.19\.8, this is {version.replace('+', '.')}"):
        integration.enable()
    assert contents(deepspeed) == before


PLACES = [
    ("ops.op_builder", "AsyncIOBuilder"),
    ("ops.op_builder", "PinMemoryBuilder"),
    ("runtime.zero.stage3", "PartitionedOptimizerSwapper"),
    ("runtime.zero.stage3", "PipelinedOptimizerSwapper"),
    ("runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3"),
    ("runtime.zero.partition_parameters", "AsyncPartitionedParameterSwapper"),
    ("runtime.zero.partition_parameters", "Init"),
    ("runtime.engine", "DeepSpeedEngine"),
    ("runtime.engine", "create_checkpoint_engine"),
    ("runtime.checkpoint_engine.utils", "create_checkpoint_engine"),
]


@pytest.mark.parametrize(("path", "name"), PLACES)
def test_nothing_is_half_replaced_where_a_name_is_missing(deepspeed: Modules, path: str, name: str) -> None:
    delattr(deepspeed[f"deepspeed.{path}"], name)
    before = contents(deepspeed)
    with pytest.raises(RuntimeError, match=f"{name}.*nothing was changed"):
        integration.enable(swappers=True, checkpoint=True)
    assert contents(deepspeed) == before


def test_nothing_is_half_replaced_where_parameters_are_others(deepspeed: Modules) -> None:
    def create_checkpoint_engine(config: Any) -> None: ...

    deepspeed["deepspeed.runtime.checkpoint_engine"].create_checkpoint_engine = create_checkpoint_engine  # type: ignore[attr-defined]
    before = contents(deepspeed)
    with pytest.raises(RuntimeError, match=r"create_checkpoint_engine takes \(config\) rather than \(config_params, groups"):
        integration.enable(checkpoint=True)
    assert contents(deepspeed) == before


def test_what_was_enabled_stays_where_more_is_refused(deepspeed: Modules) -> None:
    integration.enable(swappers=True)
    before = contents(deepspeed)
    del deepspeed["deepspeed.runtime.engine"].create_checkpoint_engine
    with pytest.raises(RuntimeError, match="create_checkpoint_engine"):
        integration.enable(swappers=True, checkpoint=True)
    before.pop("deepspeed.runtime.engine.create_checkpoint_engine")
    after = contents(deepspeed)
    assert after.keys() == before.keys()
    assert issubclass(after["deepspeed.runtime.zero.stage3.PipelinedOptimizerSwapper"], zero.PipelinedOptimizerSwapper)
    integration.disable()
    assert not issubclass(
        contents(deepspeed)["deepspeed.runtime.zero.stage3.PipelinedOptimizerSwapper"], zero.PipelinedOptimizerSwapper
    )


def test_where_the_op_cannot_be_built_all_stays_and_one_warning_says_so(interpreters: Interpreters) -> None:
    interpreters.run("""
        import sys, warnings
        from deepnvme.integrations import deepspeed as integration
        from deepnvme.ops.op_builder import AsyncIOBuilder
        from tests.integrations.deepspeed import stand_in

        modules = stand_in.modules()
        sys.modules.update(modules)
        def load(self, verbose=False):
            raise RuntimeError("async_io cannot be built: no C++20 compiler")
        AsyncIOBuilder.load = load
        before = stand_in.contents(modules)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            integration.enable()
            integration.enable(swappers=True)
        assert [each.category for each in said] == [RuntimeWarning], said
        text = str(said[0].message)
        assert text.startswith("DeepSpeed stays as it is: ") and "no C++20 compiler" in text, text
        assert stand_in.contents(modules) == before
    """).check()


def test_where_our_gds_does_not_load_deepspeeds_own_does(deepspeed: Modules, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GDSBuilder, "lacking", lambda self: ["needs a CUDA device"])
    linked: list[str] = []

    def load(self: Any, verbose: bool = False) -> None:
        linked.append(self.NAME)

    monkeypatch.setattr(deepspeed["deepspeed.ops.op_builder"].PinMemoryBuilder, "load", load)
    integration.enable()
    theirs = deepspeed["deepspeed.ops.op_builder"].GDSBuilder
    with pytest.warns(RuntimeWarning, match="DeepSpeed's own gds op stays: .*needs a CUDA device") as said:
        loaded = [theirs().load(), theirs().jit_load()]
    assert loaded == ["DeepSpeed's gds"] * 2
    assert len(said) == 1
    assert linked[0] == "pin_memory"  # DeepSpeed's, which its op is linked with
    assert not theirs().is_compatible()


# What works


@pytest.mark.parametrize("version", ["0.19.8", "0.19.8+abc", "0.19.7"])
def test_the_builders_give_our_op_until_disabled(deepspeed: Modules, version: str, op: ModuleType) -> None:
    deepspeed["deepspeed"].__version__ = version
    theirs = deepspeed["deepspeed.ops.op_builder"].AsyncIOBuilder  # as a program may have imported it
    before = contents(deepspeed)
    integration.enable()
    integration.enable()
    assert theirs().load() is op
    assert theirs().load(verbose=False) is theirs().jit_load() is op
    assert theirs().is_compatible(verbose=False)
    assert deepspeed["deepspeed.ops"].__compatible_ops__ == {"async_io": True, "cpu_adam": True}
    integration.disable()
    integration.disable()
    assert theirs().load() == "DeepSpeed's async_io"
    assert contents(deepspeed) == before


def test_a_report_names_our_op(deepspeed: Modules, capsys: pytest.CaptureFixture[str]) -> None:
    integration.enable()
    deepspeed["deepspeed.ops.op_builder"].AsyncIOBuilder().is_compatible(verbose=True)
    assert "async_io is that of deepnvme" in capsys.readouterr().out


def test_an_accelerator_without_gds_keeps_what_it_has(deepspeed: Modules, op: ModuleType) -> None:
    class NotImplementedBuilder(deepspeed_stand_in.OpBuilder):
        NAME = "deepspeed_not_implemented"

    builders = deepspeed["deepspeed.ops.op_builder"]
    builders.GDSBuilder = NotImplementedBuilder  # type: ignore[attr-defined]
    before = dict(vars(NotImplementedBuilder))
    integration.enable()
    assert builders.AsyncIOBuilder().load() is op
    assert dict(vars(NotImplementedBuilder)) == before


def test_other_options_count_when_called_again(deepspeed: Modules) -> None:
    stage3 = deepspeed["deepspeed.runtime.zero.stage3"]
    names = ("PartitionedOptimizerSwapper", "PipelinedOptimizerSwapper")
    theirs = [getattr(stage3, name) for name in names]
    for swappers in (False, True, False, True):
        integration.enable(swappers=swappers)
        for name, own in zip(names, theirs, strict=True):
            assert issubclass(getattr(stage3, name), getattr(zero, name) if swappers else own)
    integration.disable()
    assert [getattr(stage3, name) for name in names] == theirs


def test_what_somebody_else_has_put_there_since_stays(deepspeed: Modules) -> None:
    integration.enable(checkpoint=True)
    engine = deepspeed["deepspeed.runtime.engine"]
    engine.create_checkpoint_engine = somebodys = object()  # type: ignore[attr-defined]
    integration.disable()
    assert engine.create_checkpoint_engine is somebodys


def test_pinned_memory_of_ours_counts_for_the_accelerator(deepspeed: Modules, handle: Any) -> None:
    accelerator = deepspeed["deepspeed.accelerator"].get_accelerator()
    pinned = handle.new_cpu_locked_tensor(1024, torch.empty(0))
    assert not accelerator.is_pinned(pinned)
    integration.enable()
    assert accelerator.is_pinned(pinned)
    assert accelerator.is_pinned(pinned[7:])
    assert not accelerator.is_pinned(torch.empty(1024))
    assert not accelerator.is_pinned(torch.empty(1024, device="meta"))


def test_deepspeeds_native_pinning_is_in_our_record(deepspeed: Modules, handle: Any) -> None:
    integration.enable()
    pins = deepspeed["deepspeed.ops.op_builder"].PinMemoryBuilder().load().pin_handle()
    assert isinstance(pins, PinHandle)
    pinned = pins.new_cpu_locked_tensor(1024, torch.empty(0, dtype=torch.bfloat16))
    assert (pinned.numel(), pinned.dtype) == (1024, torch.bfloat16)
    assert pins.is_pinned(pinned)
    assert handle.is_pinned(pinned)
    assert pins.free_cpu_locked_tensor_by_ptr(pinned.data_ptr())
    assert not handle.is_pinned(pinned)
    assert not pins.free_cpu_locked_tensor(pinned)


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("kind", ["FAST", "PYTHON", None])
def test_the_fast_writer_alone_has_our_checkpoint_engine(deepspeed: Modules, kind: str | None, decoupled: bool) -> None:
    integration.enable(checkpoint=True)
    writer = None if kind is None else {"type": kind, "decoupled": decoupled}
    config = types.SimpleNamespace(checkpoint_config={"writer": writer})
    for path in ("engine", "checkpoint_engine", "checkpoint_engine.utils"):
        made = deepspeed[f"deepspeed.runtime.{path}"].create_checkpoint_engine(
            config_params=config, groups=None, zero_stage=3, has_moe_layers=False, optimize_dp_state=False
        )
        assert isinstance(made, NVMeCheckpointEngine) == (kind == "FAST" and not decoupled)


# Jobs on one nvme_path


@pytest.fixture
def swap(deepspeed: Modules) -> Callable[[Path], Any]:
    """Makes an optimizer swapper on an nvme_path, as DeepSpeed does."""
    integration.enable()

    def make(nvme_path: Path) -> Any:
        kind = deepspeed["deepspeed.runtime.zero.stage3"].PipelinedOptimizerSwapper
        rest = dict.fromkeys(("optimizer", "largest_numel", "device", "dtype", "timers"))
        return kind(swap_config=None, aio_config=None, base_folder=str(nvme_path / "zero_stage_3"), **rest)

    return make


def test_each_of_two_jobs_has_a_folder_of_its_own(swap: Callable[[Path], Any], tmp_path: Path) -> None:
    first, second, third = (swap(tmp_path) for _ in range(3))
    assert [Path(each.base_folder) for each in (first, second, third)] == [
        tmp_path / "zero_stage_3",
        tmp_path / "job-2" / "zero_stage_3",
        tmp_path / "job-3" / "zero_stage_3",
    ]
    del second
    gc.collect()
    assert Path(swap(tmp_path).base_folder) == tmp_path / "job-2" / "zero_stage_3"


def test_a_folder_belongs_to_a_job_until_its_process_has_ended(interpreters: Interpreters, tmp_path: Path) -> None:
    """Functions that run at the interpreter's exit, and threads, may still write there."""
    program = f"""
    import atexit, sys

    def another():
        swappers.append(kind(base_folder={str(tmp_path)!r} + "/zero_stage_3", **rest))
        print(swappers[-1].base_folder)

    atexit.register(another)  # before anybody else's, so it runs after theirs
    from deepnvme.integrations import deepspeed as integration
    from tests.integrations.deepspeed import stand_in

    modules = stand_in.modules()
    sys.modules.update(modules)
    integration.enable()
    kind = modules["deepspeed.runtime.zero.stage3"].PipelinedOptimizerSwapper
    names = ("swap_config", "aio_config", "optimizer", "largest_numel", "device", "dtype", "timers")
    rest, swappers = dict.fromkeys(names), []
    another()
    """
    folders = interpreters.run(program).check().split()
    assert folders == [str(tmp_path / "zero_stage_3"), str(tmp_path / "job-2" / "zero_stage_3")]


def test_parameters_have_one_too_and_the_configuration_stays(deepspeed: Modules, tmp_path: Path) -> None:
    from pydantic import BaseModel

    class Offload(BaseModel):
        nvme_path: Path
        buffer_count: int = 5

    integration.enable()
    kind = deepspeed["deepspeed.runtime.zero.partition_parameters"].AsyncPartitionedParameterSwapper
    offload = Offload(nvme_path=tmp_path)
    config = types.SimpleNamespace(zero_config=types.SimpleNamespace(offload_param=offload), aio_config={})
    made = [kind(config, torch.bfloat16) for _ in range(2)]
    assert [each.nvme_path for each in made] == [str(tmp_path), str(tmp_path / "job-2")]
    assert offload.nvme_path == tmp_path


def test_a_path_that_cannot_be_made_is_named(swap: Callable[[Path], Any], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError) as raised:
        swap(tmp_path / "file" / "nvme")
    assert raised.value.filename == str(tmp_path / "file" / "nvme")


# Ranks


def test_a_rank_tells_the_others_what_failed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_failures, "_HEARD_WITHIN", 2 * PATIENCE)
    store = dist.HashStore()
    ranks = [RankFailures(store, rank, 3) for rank in range(3)]
    assert ranks[0].failure() is None
    error = OSError(errno.ENOSPC, "No space left on device", "/mnt/nvme/0.swp")
    reporting = threading.Thread(target=ranks[1].report, args=(error,))
    reporting.start()
    reporting.join(timeout=PATIENCE)  # before it stops waiting
    assert not reporting.is_alive()
    for number in (0, 2):
        failure = ranks[number].failure()
        assert failure is not None
        assert (failure.errno, failure.filename) == (errno.ENOSPC, "/mnt/nvme/0.swp")
        assert "on rank 1" in str(failure)
    assert ranks[1].failure() is None  # which has raised its own
    ranks[0].report(error)  # of no use any more, and at once


def test_ranks_leave_without_a_failure_and_the_others_look_no_longer() -> None:
    store = dist.HashStore()
    ranks = [RankFailures(store, rank, 2) for rank in range(2)]
    ranks[0].leave()
    assert [rank.failure() for rank in ranks] == [None, None]
    assert not any(thread.name == "deepnvme-failures" and thread.is_alive() for thread in threading.enumerate())
    ranks[1].leave()


def test_ranks_that_fail_together_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_failures, "_HEARD_WITHIN", 2 * PATIENCE)
    store = dist.HashStore()
    ranks = [RankFailures(store, rank, 2) for rank in range(2)]
    errors = [OSError(errno.ENOSPC, "No space left on device", f"/mnt/nvme/{rank}.swp") for rank in range(2)]
    reporting = [threading.Thread(target=rank.report, args=(error,)) for rank, error in zip(ranks, errors, strict=True)]
    for thread in reporting:
        thread.start()
    for thread in reporting:
        thread.join(timeout=PATIENCE)  # before they stop waiting
        assert not thread.is_alive()
    assert [rank.failure() for rank in ranks] == [None, None]  # each raises its own


# The launcher


@pytest.mark.parametrize(
    ("value", "enabled"),
    [
        (None, {"swappers": False, "checkpoint": False}),
        ("1", {"swappers": False, "checkpoint": False}),
        ("swappers", {"swappers": True, "checkpoint": False}),
        ("1,checkpoint", {"swappers": False, "checkpoint": True}),
        ("swappers, checkpoint", {"swappers": True, "checkpoint": True}),
        ("0", None),
    ],
)
def test_the_environment_says_what_to_enable(value: str | None, enabled: dict[str, bool] | None) -> None:
    environment = {} if value is None else {launching.VARIABLE: value}
    assert launching.parse(["train.py", "--lr", "1"], environment) == (enabled, False, ["train.py", "--lr", "1"])


def test_a_comparison_needs_no_other_command() -> None:
    assert launching.parse(["--swappers", "--checkpoint", "train.py"], {launching.VARIABLE: "0"}).enable is None


@pytest.mark.parametrize("options", [[], ["--swappers"]])
@pytest.mark.parametrize("value", ["", "yes", "swapper", "swappers,2", "0,swappers"])
def test_a_value_that_means_nothing_is_refused(value: str, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        launching.parse([*options, "train.py"], {launching.VARIABLE: value})
    assert f"got {value!r}" in capsys.readouterr().err


def test_options_before_the_program_count_and_those_after_it_are_its_own() -> None:
    assert launching.parse(["--swappers", "--", "train.py", "--", "x"], {}).program == ["train.py", "--", "x"]
    arguments = ["--swappers", "train.py", "--checkpoint", "-m", "--", "x"]
    program = ["train.py", "--checkpoint", "-m", "--", "x"]
    given = {launching.VARIABLE: "checkpoint"}
    assert launching.parse(arguments, given) == ({"swappers": True, "checkpoint": False}, False, program)
    assert launching.parse(["--checkpoint", "-m", "package.train"], {}).is_module


def test_deepspeeds_launcher_may_put_a_rank_before_the_program() -> None:
    assert launching.parse(["--local_rank=1", "train.py", "--lr", "1"], {}).program == ["train.py", "--local_rank=1", "--lr", "1"]


@pytest.mark.parametrize("arguments", [[], ["--swappers"], ["--swapper", "train.py"]])
def test_what_makes_no_sense_ends_with_the_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        launching.parse(arguments, {})
    assert ended.value.code == 2
    assert "usage: python -m deepnvme.integrations.deepspeed" in capsys.readouterr().err


PROGRAM = """
import sys
from deepspeed.ops.op_builder import AsyncIOBuilder
import beside
result = (__name__, list(sys.argv), sys.path[0], AsyncIOBuilder().load(), sys.modules["__main__"].__dict__ is globals())
beside.results.append(result)
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A script, and a module beside it that it imports."""
    (tmp_path / "train_by_itself.py").write_text(PROGRAM)
    (tmp_path / "beside.py").write_text("results = []")
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    yield tmp_path / "train_by_itself.py"
    sys.modules.pop("beside", None)


@pytest.mark.parametrize("value", ["1", "0"])
def test_a_script_runs_as_if_by_itself(
    deepspeed: Modules, program: Path, monkeypatch: pytest.MonkeyPatch, op: ModuleType, value: str
) -> None:
    monkeypatch.setenv(launching.VARIABLE, value)
    monkeypatch.setattr(sys, "argv", ["-m", str(program), "--lr", "1"])
    launching.main()
    expected = op if value == "1" else "DeepSpeed's async_io"
    assert sys.modules["beside"].results == [("__main__", [str(program), "--lr", "1"], str(program.parent), expected, True)]


def test_a_script_behind_a_link_finds_what_is_beside_it(
    deepspeed: Modules, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = program.parent / "elsewhere" / "link.py"
    link.parent.mkdir()
    link.symlink_to(program)
    monkeypatch.setenv(launching.VARIABLE, "0")
    monkeypatch.setattr(sys, "argv", ["-m", str(link)])
    launching.main()
    ((_, argv, path, *_),) = sys.modules["beside"].results
    assert (argv, path) == ([str(link)], str(program.parent.resolve()))


def test_a_safe_path_stays_as_it_is(deepspeed: Modules, program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(program.parent), *sys.path[1:]])
    before = list(sys.path)
    elsewhere = program.parent / "elsewhere" / program.name
    elsewhere.parent.mkdir()
    program.rename(elsewhere)
    safe = types.SimpleNamespace(safe_path=True)
    monkeypatch.setattr(_running, "sys", types.SimpleNamespace(path=sys.path, flags=safe))
    monkeypatch.setattr(sys, "argv", ["launcher", str(elsewhere)])
    monkeypatch.setenv(launching.VARIABLE, "0")
    launching.main()
    assert sys.path == before
    assert sys.modules["beside"].results[0][2] == str(program.parent)


def test_a_module_runs_as_if_by_itself(
    deepspeed: Modules, program: Path, monkeypatch: pytest.MonkeyPatch, op: ModuleType
) -> None:
    monkeypatch.delenv(launching.VARIABLE, raising=False)
    monkeypatch.setattr(sys, "path", [str(program.parent), *sys.path[1:]])
    monkeypatch.setattr(sys, "argv", ["-m", "-m", "train_by_itself", "--lr", "1"])
    launching.main()
    assert sys.modules["beside"].results == [("__main__", [str(program), "--lr", "1"], str(program.parent), op, True)]
