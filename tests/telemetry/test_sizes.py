"""Sizes and budgets of memory as people write them, and that every public function that takes bytes takes them so."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import deepnvme
from deepnvme.memory import BufferPool
from deepnvme.memory.budget import budget_bytes
from deepnvme.offload import OffloadedOptimizer
from deepnvme.tables import Table
from deepnvme.telemetry.sizes import byte_count, parse_size

GB, GIB = 10**9, 1 << 30


# What is a size


@pytest.mark.parametrize(("text", "size"), [
    ("0", 0), ("1024", 1024), (" 007 ", 7), ("8B", 8), ("8 b", 8),
    ("8GB", 8 * GB), ("8gb", 8 * GB), ("8 GB", 8 * GB), ("1.5GB", 1_500_000_000), ("64KB", 64_000), ("2TB", 2000 * GB),
    ("1PB", 10**15),
    ("512MiB", 512 << 20), ("512mib", 512 << 20), ("8 GiB", 8 * GIB), ("0.5KiB", 512), ("1Gi", GIB), ("1PiB", 1 << 50),
    ("64K", 64 << 10), ("400M", 400 << 20), ("1G", GIB), ("2t", 2 << 40), ("0.3KB", 300), ("0.0001KB", 0),
])  # fmt: skip
def test_units_with_a_b_are_decimal_and_others_binary(text: str, size: int) -> None:
    assert parse_size(text) == byte_count(text, "size") == budget_bytes(text, "size") == size


@pytest.mark.parametrize("text", [
    "", " ", "GB", "8 parsecs", "8GBs", "8XB", "8iB", "1.5", "1.5B", ".5GB", "1.GB", "1,5GB", "1e9", "1_000", "-8GB", "+8GB",
    "0x10", "8GB 2MB", "8G B", "٣GB", "1\u212a", "inf", "nan", "8%%", "%", "-5%", "half", "9" * 30,
])  # fmt: skip
def test_what_is_no_size_is_refused_with_name_and_value(text: str) -> None:
    for check in (byte_count, budget_bytes):
        with pytest.raises(ValueError, match="capacity must be a number of bytes, or a size such as") as caught:
            check(text, "capacity")
        assert repr(text) in str(caught.value)


@pytest.mark.parametrize("value", [1.0, 8e9, float("nan"), np.float64(1), None, b"8GB", True, False, [1], (1,), 1j])
def test_what_is_neither_a_whole_number_nor_a_text_is_refused(value: Any) -> None:
    for check in (byte_count, budget_bytes):
        with pytest.raises(TypeError, match="capacity must be a whole number of bytes, or a size such as"):
            check(value, "capacity")


def test_who_gives_a_float_learns_what_to_write() -> None:
    with pytest.raises(TypeError, match=re.escape("got 8000000000.0 (write int(8000000000.0))")):
        byte_count(8e9, "capacity")  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [7, np.int64(7), np.uint8(7), torch.tensor(7)])
def test_integers_of_any_type_are_bytes(value: Any) -> None:
    assert (byte_count(value, "capacity"), type(byte_count(value, "capacity"))) == (7, int)


def test_a_number_below_the_least_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity must not be negative, got -1"):
        byte_count(-1, "capacity")
    with pytest.raises(ValueError, match="capacity must be at least 1, got '0GB'"):
        byte_count("0GB", "capacity", least=1)


UNITS = {"": 1, "B": 1} | {
    letter + ending: (1000 if ending == "B" else 1024) ** power
    for power, letter in enumerate("KMGTP", 1)
    for ending in ("", "B", "i", "iB")
}


@given(st.integers(0, 10**9), st.sampled_from(sorted(UNITS)), st.text(" \t", max_size=3), st.booleans())
def test_a_whole_number_of_a_unit_is_exact(number: int, unit: str, space: str, lower: bool) -> None:
    text = f"{number}{space}{unit}"
    assert parse_size(text.lower() if lower else text) == number * UNITS[unit]


@given(st.integers(0, 10**6), st.integers(0, 999), st.sampled_from(sorted(set(UNITS) - {"", "B"})))
def test_a_fraction_of_a_unit_is_exact_but_for_what_it_leaves_of_a_byte(whole: int, thousandths: int, unit: str) -> None:
    assert parse_size(f"{whole}.{thousandths:03}{unit}") == (whole * 1000 + thousandths) * UNITS[unit] // 1000


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_none(text: str) -> None:
    size = parse_size(text)
    assert size is None or (size >= 0 and re.match(r"\s*[0-9]", text))


# Budgets


@pytest.mark.parametrize(("text", "budget"), [
    ("50%", 5000), ("50 %", 5000), (" 12.5% ", 1250), ("0%", 0), ("100%", 10_000), ("0.01%", 1), ("auto", 5000), ("AUTO", 5000),
])  # fmt: skip
def test_a_share_is_of_the_available_memory_and_auto_is_half_of_it(
    text: str, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert budget_bytes(text, "memory_budget", lambda: 10_000) == budget


def test_processes_that_torchrun_has_started_share_what_is_automatic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert budget_bytes("auto", "memory_budget", lambda: 10_000) == 1250
    assert budget_bytes("50%", "memory_budget", lambda: 10_000) == 5000


def test_more_than_all_of_the_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="memory_budget must be at most 100% of the available memory, got '101%'"):
        budget_bytes("101%", "memory_budget")


def test_the_message_about_a_budget_names_all_that_is_accepted() -> None:
    with pytest.raises(ValueError, match='"8GB" or "512MiB", or a share of the available memory such as "50%", or "auto", got'):
        budget_bytes("10 parsecs", "memory_budget")


@pytest.mark.parametrize(("text", "hint"), [("50%", "only memory budgets can be a share"), ("auto", "it has no automatic value")])
def test_a_size_that_is_no_budget_says_so(text: str, hint: str) -> None:
    with pytest.raises(ValueError, match=hint):
        byte_count(text, "min_bytes")


# All public functions


NOT_HERE = {
    "engine.Engine.gather(record_size)": "the distance of records in a file, not an amount of memory",
    "engine.Engine.scatter(record_size)": "as for gather",
    "drives.aio_config.AioConfig(block_size)": "checked by pydantic, with an error of its own: see test_config.py",
    "streaming.streamed_model.Streaming(memory_budget)": "made by stream; the device is needed for a share",
    "streaming.streamed_model.Streaming(least_budget)": "made by stream",
}
"""Public parameters that sound like bytes and are not tested here, each with the reason."""
_SOUNDS_LIKE_BYTES = re.compile(r"(^|_)(bytes|nbytes|budget|shard_size|block_size|chunk_size|record_size|buffer_size)$")
_ELSEWHERE = ("__main__", "ops", "tune", "report", "swap.zero", "io", "integrations.deepspeed", "integrations.tensornvme")
"""Modules that are programs, or whose functions are DeepSpeed's or TensorNVMe's, or command lines, whose sizes are
tested with them."""


def public_modules() -> Iterator[ModuleType]:
    """The modules that users import, as far as the projects that they are for are installed."""
    yield deepnvme
    for found in pkgutil.walk_packages(deepnvme.__path__, "deepnvme.", onerror=lambda name: None):
        name = found.name.removeprefix("deepnvme.")
        if any(name == each or name.startswith(f"{each}.") for each in _ELSEWHERE) or "._" in found.name:
            continue
        if found.ispkg or name.startswith("integrations.") or "." not in name:
            with contextlib.suppress(ImportError):
                yield importlib.import_module(found.name)


def public_functions() -> dict[str, Callable[..., Any]]:
    """What users call, by name: functions, and of classes the methods. Those of an instance are bound to an empty one."""
    found: dict[str, Callable[..., Any]] = {}
    for module in public_modules():
        names = getattr(module, "__all__", None) or [name for name, value in vars(module).items() if _is_own(value, module)]
        for name in names:
            value = getattr(module, name)
            if inspect.isfunction(value):
                found[f"{value.__module__}.{name}".removeprefix("deepnvme.")] = value
            elif inspect.isclass(value) and not (dataclasses.is_dataclass(value) or issubclass(value, BaseException | tuple)):
                path = f"{value.__module__}.{name}".removeprefix("deepnvme.")
                found[path] = value
                for method, function in inspect.getmembers(value, inspect.isroutine):
                    if not method.startswith("_") and getattr(function, "__module__", "").startswith("deepnvme"):
                        bound = inspect.ismethod(function)
                        found[f"{path}.{method}"] = function if bound else functools.partial(function, object.__new__(value))
    return found


def _is_own(value: object, module: ModuleType) -> bool:
    return getattr(value, "__module__", "") == module.__name__ and not getattr(value, "__name__", "_").startswith("_")


def amounts() -> dict[str, tuple[Callable[..., Any], str, str]]:
    """Each public parameter that is an amount of bytes: the function, the parameter, and its annotation."""
    found = {}
    for name, function in public_functions().items():
        for parameter in inspect.signature(function).parameters.values():
            annotation = str(parameter.annotation)
            if re.search("ByteCount|MemoryBudget", annotation) or _SOUNDS_LIKE_BYTES.search(parameter.name):
                found[f"{name}({parameter.name})"] = function, parameter.name, annotation
    return found


def error_of(function: Callable[..., Any], parameter: str, value: object) -> Exception | None:
    """What a function raises for an argument when all others that it needs are mere objects: so the check must come first."""
    positional, named = [], {parameter: value}
    for each in inspect.signature(function).parameters.values():
        if each.default is each.empty and each.name != parameter:
            if each.kind is each.POSITIONAL_ONLY:
                positional.append(object())
            elif each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
                named[each.name] = object()
    try:
        function(*positional, **named)
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize(("value", "kind", "message"), [
    ("10 parsecs", ValueError, "{} must be a number of bytes, or a size such as .*'10 parsecs'"),
    ("", ValueError, "{} must be a number of bytes, or a size such as"),
    (1.5, TypeError, "{} must be a whole number of bytes, or a size such as .*1.5"),
    (b"1GB", TypeError, "{} must be a whole number of bytes, or a size such as .*b'1GB'"),
    ("101%", ValueError, "{} must be"),
])  # fmt: skip
def test_every_public_function_that_takes_bytes_refuses_what_is_no_size_before_any_work(
    value: object, kind: type[Exception], message: str
) -> None:
    found = amounts()
    assert len(found) > 30
    wrong = {}
    for name, (function, parameter, annotation) in found.items():
        if name in NOT_HERE:
            continue
        wanted = message.format(parameter)
        if value == "101%":
            sizes_only = " a number of bytes.*only memory budgets can be a share"
            wanted += " at most 100%" if "MemoryBudget" in annotation else sizes_only
        error = error_of(function, parameter, value)
        if not (isinstance(error, kind) and re.match(wanted, str(error))):
            wrong[name] = repr(error)
    assert wrong == {}
    assert set(NOT_HERE) <= set(found)


# What some of them do with it


def test_a_pool_has_the_budget_that_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepnvme.memory.pool.available_memory", lambda: 10**10)
    pool = BufferPool("1.5GB")
    assert pool.budget == 1_500_000_000
    pool.set_budget("64 MiB")
    assert pool.budget == 64 << 20
    with pool.lease("1MiB") as lease:
        assert lease.nbytes == 1 << 20
        pool.set_budget("50%")  # what the pool has pinned itself is available to it
        assert pool.budget == (10**10 + (1 << 20)) // 2
    assert BufferPool("50%").budget > 0


def test_an_engine_takes_sizes() -> None:
    with deepnvme.Engine(block_size="256K", in_flight_bytes="1MiB", backend="threads") as engine:
        assert (engine.block_size, engine.in_flight_bytes) == (256 << 10, 1 << 20)


@pytest.mark.parametrize("budget", ["1GB", "1%", "auto"])
def test_a_table_takes_sizes(budget: str, tmp_path: Path) -> None:
    rows = torch.arange(64.0).view(16, 4)
    with Table.from_tensor(tmp_path / "table", rows, memory_budget=budget, staging_bytes="1MiB") as table:
        assert table.memory_budget > 0
        assert table.staging_bytes == 1 << 20
        assert torch.equal(table.read(torch.arange(16)), rows)


@pytest.mark.parametrize("budget", ["1GB", "auto", "1%"])
def test_an_optimizer_takes_sizes(budget: str, tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(1000))
    reference = torch.nn.Parameter(torch.ones(1000))
    optimizer = OffloadedOptimizer([weight], torch.optim.AdamW, nvme_path=tmp_path, dram_budget=budget)
    expected = torch.optim.AdamW([reference])
    try:
        for _ in range(2):
            weight.grad = reference.grad = torch.full((1000,), 0.5)
            optimizer.step()
            expected.step()
        assert optimizer.report().resident_bytes > 0
    finally:
        optimizer.close()
    assert torch.equal(weight, reference)


def test_what_is_automatic_leaves_room_for_the_sub_groups_in_flight(tmp_path: Path) -> None:
    pool = BufferPool("4MiB")
    weight = torch.nn.Parameter(torch.ones(1 << 20))  # 8 MiB of states: not all can stay in memory
    optimizer = OffloadedOptimizer(
        [weight], torch.optim.AdamW, nvme_path=tmp_path, dram_budget="auto", sub_group_size=1 << 16, pool=pool
    )
    try:
        weight.grad = torch.ones(1 << 20)
        for _ in range(2):  # the first leaves all on the drive
            optimizer.step()
        assert 0 < optimizer.report().resident_bytes < 4 << 20
    finally:
        optimizer.close()


def test_objects_that_save_activations_share_their_files_also_with_an_automatic_budget(tmp_path: Path) -> None:
    for budget in ("auto", "25%", "1GB"):
        options: dict[str, Any] = {"memory_budget": budget, "min_bytes": "1KB"}
        one, other = (deepnvme.save_on_disk(tmp_path / "activations", **options) for _ in range(2))
        weight = torch.ones(1000, requires_grad=True)
        with one:
            loss = (weight * weight).exp().sum()
        loss.backward()
        assert other.report() == one.report()
        assert other.report().saved_bytes > 0
        one.close()
