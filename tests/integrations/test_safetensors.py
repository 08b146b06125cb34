"""With the integration, safetensors returns what it returns without, and raises what it raises without."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import accelerate
import pytest
import safetensors
import safetensors.torch
import torch
import transformers

from deepnvme.integrations import safetensors as integration

from . import models

ORIGINAL = safetensors.safe_open
STATE = {
    "large": torch.arange(3 << 20).to(torch.bfloat16).reshape(3, -1),
    "other": torch.randn(700, 1000),
    "bytes": torch.arange(200, dtype=torch.uint8),
    "scalar": torch.tensor(3.5, dtype=torch.float64),
    "empty": torch.zeros(0, 4),
    "flags": torch.tensor([True, False]),
}


@pytest.fixture
def path(drive: Path) -> Path:
    safetensors.torch.save_file(STATE, drive / "file.safetensors", {"format": "pt", "who": "me"})
    return drive / "file.safetensors"


@pytest.fixture
def read_by_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Enables the integration. Has the names of the tensors that the engine has read, in order."""
    names: list[str] = []
    load = integration.load_elements

    def load_and_note(path: str, group: dict[str, Any], *arguments: Any) -> Any:
        loaded = load(path, group, *arguments)
        names.extend(group)
        return loaded

    monkeypatch.setattr(integration, "load_elements", load_and_note)
    with integration.enabled():
        yield names


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


class TestFailures:
    @pytest.mark.parametrize(
        "fail",
        [
            lambda path: safetensors.safe_open(path, "pt").get_tensor("none"),
            lambda path: safetensors.safe_open(path, "pt").get_slice("none"),
            lambda path: safetensors.safe_open(path, "pt").get_slice("large")[9:, 0, 0],
            lambda path: safetensors.safe_open(path, "unknown"),
            lambda path: safetensors.safe_open(path, "pt", device="unknown"),
            lambda path: safetensors.safe_open(path, "pt", backend="unknown"),
            lambda path: safetensors.safe_open(path.parent / "none", "pt"),
            lambda path: safetensors.safe_open(__file__, "pt"),
            lambda path: safetensors.safe_open(3, "pt"),
            lambda path: safetensors.safe_open(path),
            lambda path: safetensors.safe_open(path, "pt").none,
            lambda path: after_closing(path).get_tensor("large"),
            lambda path: after_closing(path).get_slice("large"),
        ],
    )
    def test_errors_are_those_of_the_library(self, path: Path, fail: Callable[[Path], Any]) -> None:
        with pytest.raises(Exception) as known:  # noqa: PT011, the library's, whatever it is
            fail(path)
        with integration.enabled(), pytest.raises(known.type) as found:
            fail(path)
        assert found.type is known.type
        assert str(found.value).replace("OpenedFile", "safe_open") == str(known.value) or known.type in (
            TypeError,
            AttributeError,
        )

    def test_an_error_of_the_drive_names_the_file_and_the_next_read_works(
        self, path: Path, read_by_engine: list[str], monkeypatch: pytest.MonkeyPatch, faulty: Callable[..., Any]
    ) -> None:
        broken = faulty("threads", error_every=1)
        with safetensors.safe_open(path, "pt") as file:
            engine = file._reader._engine
            monkeypatch.setattr(file._reader, "_engine", broken)
            with pytest.raises(OSError, match=r"file\.safetensors") as failed:
                file.get_tensor("large")
            assert failed.value.errno == errno.EIO
            monkeypatch.setattr(file._reader, "_engine", engine)
            assert torch.equal(file.get_tensor("large"), STATE["large"])

    def test_a_tensor_that_was_cut_off_is_an_error_and_those_before_it_are_read(
        self, path: Path, read_by_engine: list[str]
    ) -> None:
        with safetensors.safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.offset_keys()}
            last = list(slices)[-1]
            os.truncate(path, path.stat().st_size - 1)
            with pytest.raises(OSError, match=r"file\.safetensors"):
                slices[last][...]
            assert torch.equal(slices["large"][...], STATE["large"])


def after_closing(path: Path) -> Any:
    with safetensors.safe_open(path, "pt") as file:
        return file


def test_load_file_returns_the_same(path: Path, read_by_engine: list[str]) -> None:
    found = safetensors.torch.load_file(path)
    assert read_by_engine == list(found)
    integration.disable()
    assert safetensors.safe_open is safetensors.torch.safe_open is ORIGINAL
    assert_same(found, safetensors.torch.load_file(path))
    assert_same(dict(sorted(found.items())), dict(sorted(STATE.items())))


def test_an_open_file_answers_as_the_library_does(path: Path, read_by_engine: list[str]) -> None:
    with safetensors.safe_open(path, "pt") as file, ORIGINAL(path, "pt") as known:
        assert (file.keys(), file.offset_keys(), file.metadata()) == (known.keys(), known.offset_keys(), known.metadata())
        for name in known.keys():  # noqa: SIM118, it is no mapping
            part, known_part = file.get_slice(name), known.get_slice(name)
            assert (part.get_shape(), part.get_dtype()) == (known_part.get_shape(), known_part.get_dtype())
            assert torch.equal(part[...], known_part[...])
            assert torch.equal(file.get_tensor(name), STATE[name])
        assert sorted(read_by_engine) == sorted([*STATE, *STATE])
        assert torch.equal(file.get_slice("large")[1:, ::2], STATE["large"][1:, ::2])
        assert torch.equal(file.get_slice("large")[:], STATE["large"])
    with safetensors.safe_open(path, "np") as file:
        assert (file.get_tensor("other") == STATE["other"].numpy()).all()


def test_slices_are_read_ahead_together_and_not_after_a_part_was_read(path: Path, read_by_engine: list[str]) -> None:
    with safetensors.safe_open(path, "pt") as file:
        slices = {name: file.get_slice(name) for name in STATE}
        slices["other"][...]
        assert sorted(read_by_engine) == sorted(STATE)
    read_by_engine.clear()
    with safetensors.safe_open(path, "pt") as file:
        slices = {name: file.get_slice(name) for name in STATE}
        slices["large"][1:]
        slices["other"][...]
    assert read_by_engine == ["other"]


def test_memory_is_read_ahead_in_bounded_groups(path: Path, read_by_engine: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"{number}": torch.full((1 << 18,), float(number)) for number in range(8)}
    safetensors.torch.save_file(state, path)
    monkeypatch.setattr(integration, "_AHEAD", 2 << 20)
    with safetensors.safe_open(path, "pt") as file:
        slices = {name: file.get_slice(name) for name in state}
        assert torch.equal(slices["0"][...], state["0"])
    assert read_by_engine in (["0", "1"], ["0", "1", "2", "3"])
    read_by_engine.clear()
    with safetensors.safe_open(path, "pt") as file, ThreadPoolExecutor(4) as threads:
        slices = {name: file.get_slice(name) for name in state}
        found = dict(zip(state, threads.map(lambda part: part[...], slices.values()), strict=True))
    assert_same(found, state)
    assert sorted(read_by_engine) == sorted(state)


@pytest.mark.parametrize("removed", [False, True])
def test_a_file_that_is_replaced_or_removed_stays_what_was_opened(path: Path, read_by_engine: list[str], removed: bool) -> None:
    with safetensors.safe_open(path, "pt") as file:
        if removed:
            path.unlink()
        else:
            safetensors.torch.save_file({name: tensor * 0 for name, tensor in STATE.items()}, path.with_name("new"))
            path.with_name("new").rename(path)
        assert_same({name: file.get_slice(name)[...] for name in STATE}, STATE)


def test_a_forked_child_reads_a_file_that_its_parent_opened(path: Path, read_by_engine: list[str]) -> None:
    with safetensors.safe_open(path, "pt") as file:
        assert torch.equal(file.get_tensor("bytes"), STATE["bytes"])
        child = os.fork()
        if not child:
            os._exit(0 if torch.equal(file.get_tensor("other"), STATE["other"]) else 1)
        assert os.waitpid(child, 0)[1] == 0


def test_transformers_and_accelerate_load_through_the_engine(drive: Path, read_by_engine: list[str]) -> None:
    known = models.checkpoint("llama", drive / "checkpoint")
    model = transformers.AutoModelForCausalLM.from_pretrained(drive / "checkpoint")
    assert_same(dict(model.state_dict()), dict(known.state_dict()))
    assert set(read_by_engine) >= {name for name, _ in known.named_parameters()} - {"lm_head.weight"}
    read_by_engine.clear()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerate.load_checkpoint_in_model(model, str(drive / "checkpoint"))
    assert_same(dict(model.state_dict()), dict(known.state_dict()))
    assert read_by_engine
    integration.disable()
    holders = [module for module in list(sys.modules.values()) if vars(module).get("safe_open") is integration.OpenedFile]
    assert holders == []
