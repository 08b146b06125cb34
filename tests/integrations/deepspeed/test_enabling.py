"""DeepSpeed's names replaced all together or not at all, on a stand-in for DeepSpeed. With the real one: tests/compat."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from deepnvme.checkpoint import NVMeCheckpointEngine
from deepnvme.integrations import deepspeed as integration
from deepnvme.integrations.deepspeed import launching
from deepnvme.integrations.deepspeed import swap_tensor as zero
from deepnvme.integrations.deepspeed.ops import PinHandle
from deepnvme.ops.op_builder import GDSBuilder

from ...support.interpreters import Interpreters
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
    ("runtime.engine", "create_checkpoint_engine"),
    ("runtime.checkpoint_engine.utils", "create_checkpoint_engine"),
]


@pytest.mark.parametrize(("path", "name"), PLACES)
def test_nothing_is_half_replaced_where_a_name_is_missing(deepspeed: Modules, path: str, name: str) -> None:
    delattr(deepspeed[f"deepspeed.{path}"], name)
    before = contents(deepspeed)
    with pytest.raises(RuntimeError, match=f"{name}.*nothing is replaced"):
        integration.enable(swappers=True, checkpoint=True)
    assert contents(deepspeed) == before


def test_nothing_is_half_replaced_where_parameters_are_others(deepspeed: Modules) -> None:
    def create_checkpoint_engine(config: Any) -> None: ...

    deepspeed["deepspeed.runtime.checkpoint_engine"].create_checkpoint_engine = create_checkpoint_engine  # type: ignore[attr-defined]
    before = contents(deepspeed)
    with pytest.raises(RuntimeError, match=r"create_checkpoint_engine takes \(config\) rather than \(config_params, groups"):
        integration.enable(checkpoint=True)
    assert contents(deepspeed) == before


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
    integration.disable()
    integration.disable()
    assert theirs().load() == "DeepSpeed's async_io"
    assert contents(deepspeed) == before


def test_a_report_names_our_op(deepspeed: Modules, capsys: pytest.CaptureFixture[str]) -> None:
    integration.enable()
    deepspeed["deepspeed.ops.op_builder"].AsyncIOBuilder().is_compatible(verbose=True)
    assert "async_io is that of deepnvme" in capsys.readouterr().out


def test_an_accelerator_without_gds_keeps_what_it_has(deepspeed: Modules, op: ModuleType) -> None:
    builders = deepspeed["deepspeed.ops.op_builder"]
    builders.GDSBuilder = type("NotImplementedBuilder", (deepspeed_stand_in.OpBuilder,), {"NAME": "not_implemented"})  # type: ignore[attr-defined]
    before = dict(vars(builders.GDSBuilder))
    integration.enable()
    assert builders.AsyncIOBuilder().load() is op
    assert dict(vars(builders.GDSBuilder)) == before


def test_other_options_count_when_called_again(deepspeed: Modules) -> None:
    stage3 = deepspeed["deepspeed.runtime.zero.stage3"]
    names = ("PartitionedOptimizerSwapper", "PipelinedOptimizerSwapper")
    theirs = [getattr(stage3, name) for name in names]
    for swappers in (False, True, False, True):
        integration.enable(swappers=swappers)
        for name, own in zip(names, theirs, strict=True):
            assert getattr(stage3, name) is (getattr(zero, name) if swappers else own)
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


# The launcher


def test_options_before_the_program_count_and_those_after_it_are_its_own() -> None:
    assert launching.parse(["--swappers", "--", "train.py", "--", "x"]).program == ["train.py", "--", "x"]
    program = ["train.py", "--checkpoint", "-m", "--", "x"]
    assert launching.parse(["--swappers", *program]) == ({"swappers": True, "checkpoint": False}, False, program)
    assert launching.parse(["--checkpoint", "-m", "package.train"]).is_module


def test_deepspeeds_launcher_may_put_a_rank_before_the_program() -> None:
    assert launching.parse(["--local_rank=1", "train.py", "--lr", "1"]).program == ["train.py", "--local_rank=1", "--lr", "1"]


@pytest.mark.parametrize("arguments", [[], ["--swappers"], ["--swapper", "train.py"]])
def test_what_makes_no_sense_ends_with_the_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        launching.parse(arguments)
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


@pytest.mark.parametrize("way", ["script", "link", "module"])
def test_a_program_runs_as_if_by_itself(
    deepspeed: Modules, program: Path, monkeypatch: pytest.MonkeyPatch, op: ModuleType, way: str
) -> None:
    started = [str(program)]
    if way == "link":
        started = [str(program.parent / "elsewhere" / "link.py")]
        Path(started[0]).parent.mkdir()
        Path(started[0]).symlink_to(program)
    elif way == "module":
        started = ["-m", "train_by_itself"]
        monkeypatch.setattr(sys, "path", [str(program.parent), *sys.path[1:]])
    monkeypatch.setattr(sys, "argv", ["-m", *started, "--lr", "1"])
    launching.main()
    expected = [str(program) if way == "module" else started[0], "--lr", "1"]
    assert sys.modules["beside"].results == [("__main__", expected, str(program.parent.resolve()), op, True)]


def test_a_safe_path_stays_as_it_is(deepspeed: Modules, program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(program.parent), *sys.path[1:]])
    before = list(sys.path)
    elsewhere = program.parent / "elsewhere" / program.name
    elsewhere.parent.mkdir()
    program.rename(elsewhere)
    safe = types.SimpleNamespace(safe_path=True)
    monkeypatch.setattr(launching, "sys", types.SimpleNamespace(path=sys.path, flags=safe, argv=["launcher", str(elsewhere)]))
    launching.main()
    assert sys.path == before
    assert sys.modules["beside"].results[0][2] == str(program.parent)
