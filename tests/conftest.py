"""The worlds that tests happen in: a drive, backends, engines sound and faulty, disks of their own, other interpreters."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import settings

import deepnvme
from deepnvme.ops.op_builder import AsyncIOBuilder
from deepnvme.tools.tune import folder

from .native import EngineTestingBuilder
from .support.compiled import compile_first
from .support.disks import MIB, Disk, loop_disk, memory_disk
from .support.faulty_filesystem import FaultyFilesystem, Mode, faulty_filesystem, obstacle
from .support.interpreters import Interpreters
from .support.machine import machine

BACKENDS = ("io_uring", "libaio", "threads")


# A deadline for each example would be a guess about how busy the machine is.
settings.register_profile("patient", deadline=None)
settings.register_profile("quick", deadline=None, max_examples=25)  # a quarter of the default, and so of what examples() gives


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("quick" if config.getoption("--quick") else "patient")
    # A shell's background jobs ignore Ctrl-C and hand that on, to the programs that tests interrupt as well.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # below nohup
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--io-dir", help="directory on the drive to test; default: a temporary one that is not in memory")
    parser.addoption("--quick", action="store_true", help="a quarter of the examples; no C++ cleanup of torch at exits")
    parser.addoption("--deepspeed-python", help="an interpreter that has DeepSpeed, for tests/compat")
    parser.addoption("--serving-packages", help="a folder with vLLM, SGLang, LMCache, TorchRec and diffusers, for tests/compat")


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before pytest-timeout's clock starts
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    compile_first(AsyncIOBuilder)  # also for the sake of programs, which would say on stderr that they compile it
    if {"testing", "interpreters"} & set(getattr(item, "fixturenames", ())):
        compile_first(EngineTestingBuilder)
    with machine(alone=item.get_closest_marker("alone") is not None):
        return (yield)


@pytest.hookimpl(tryfirst=True)  # before file systems are unmounted in which the program has files open
def pytest_runtest_teardown(item: pytest.Item) -> None:
    interpreters = getattr(item, "funcargs", {}).get("interpreters")
    if interpreters is not None:
        interpreters.close_if_running()


@pytest.fixture(scope="session", autouse=True)
def no_profiles_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Drive profiles are looked for in an empty directory, not in the user's own; programs that tests run do so too."""
    with pytest.MonkeyPatch.context() as patch:
        place = tmp_path_factory.mktemp("configuration")
        patch.setenv("XDG_CONFIG_HOME", str(place))
        yield place


@pytest.fixture
def configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's configuration directory, without any drive profile."""
    place = tmp_path / "configuration"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(place))
    return place


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(scope="module", autouse=True)
def nothing_old_is_collected() -> None:
    """What is there by now stays: torch, the tests, what others have imported. Looking through it takes a tenth of a second each
    time, and every test of what is let go of collects garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Of torch: on tensors as small as those of tests, several wait for one another, most of all where tests run side by side."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_a_quiet_drive() -> Iterator[None]:
    """Before a measurement, up to two seconds each time: other tests keep the drive busy, and no figure is looked at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder.settle, "__defaults__", (0.0,))
        yield


@pytest.fixture(scope="session")
def io_dir(request: pytest.FixtureRequest) -> Iterator[Path]:
    """On a real drive, empty, removed at the end."""
    chosen = request.config.getoption("--io-dir")
    places = [Path(chosen)] if chosen else [Path(tempfile.gettempdir()), Path("/var/tmp"), request.config.rootpath]
    place = next((place for place in places if chosen or (os.access(place, os.W_OK) and not _in_memory(place))), None)
    if place is None:
        pytest.skip("needs a directory that is not in memory: use --io-dir")
    path = Path(tempfile.mkdtemp(prefix="deepnvme-test-", dir=place))
    path.chmod(0o755)  # for tests that give up their privileges
    yield path
    shutil.rmtree(path)


def _in_memory(path: Path) -> bool:
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == wanted:
            return rest.split()[0] in ("tmpfs", "ramfs")
    return False


@pytest.fixture
def drive(io_dir: Path) -> Iterator[Path]:
    """The test's own directory on the drive."""
    path = Path(tempfile.mkdtemp(dir=io_dir))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def made_disk(drive: Path, mode: Mode) -> Iterator[FaultyFilesystem]:
    """A file system that fails on command; the test is skipped where there is none."""
    missing = obstacle()
    if missing is not None:
        pytest.skip(missing)
    with faulty_filesystem(drive, mode) as disk:
        yield disk


@pytest.fixture
def direct_disk(drive: Path) -> Iterator[FaultyFilesystem]:
    """Sees each read and write as it is made."""
    yield from made_disk(drive, "direct")


@pytest.fixture(scope="session")
def op() -> ModuleType:
    """The compiled async_io op."""
    return AsyncIOBuilder().load()


@pytest.fixture(scope="session")
def testing() -> ModuleType:
    """The engine with backends that the op does not have."""
    return EngineTestingBuilder().load()


@pytest.fixture(scope="session")
def backends(op: ModuleType) -> list[str]:
    """Those that work here."""
    return [name for name, obstacle in op.backends().items() if obstacle is None]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, op: ModuleType) -> str:
    """Each backend in turn."""
    name: str = request.param
    obstacle = op.backends()[name]
    if obstacle is not None:
        pytest.skip(f"needs the {name} backend: {obstacle}")
    return name


@pytest.fixture
def engine() -> Iterator[deepnvme.Engine]:
    """As a user makes it, without a word."""
    with deepnvme.Engine() as engine:
        yield engine


@pytest.fixture
def handle(op: ModuleType) -> Any:
    """DeepSpeed's handle, as DeepSpeed makes it."""
    return op.aio_handle()


@pytest.fixture
def faulty(testing: ModuleType) -> Iterator[Callable[..., Any]]:
    """Makes an engine on the backend named; keyword arguments are its settings, a gate, a journal, drive_by_folder,
    or fields of Faults."""
    made = []

    def make(backend: str, *, block_size: int = 4096, queue_depth: int = 32, num_threads: int = 1, **more: Any) -> Any:
        gate, journal = more.pop("gate", None), more.pop("journal", None)
        by_folder, single_submit = (more.pop(name, False) for name in ("drive_by_folder", "single_submit"))
        in_flight_bytes = more.pop("in_flight_bytes", None)
        faults = testing.Faults()
        for name, value in more.items():
            setattr(faults, name, value)
        settings = (backend, block_size, queue_depth, num_threads, single_submit)
        made.append(testing.faulty_engine(*settings, faults, gate, journal, by_folder, in_flight_bytes))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def gate(testing: ModuleType) -> Iterator[Any]:
    """Holds back the completions of an engine that was given it, from the start. Open at the end of the test."""
    gate = testing.Gate()
    gate.hold()
    yield gate
    gate.release()


@pytest.fixture
def small_disk(drive: Path) -> Iterator[Disk]:
    """32 MiB of ext4."""
    with loop_disk(drive, "ext4", 32 * MIB) as disk:
        yield disk


@pytest.fixture
def tmpfs(drive: Path) -> Iterator[Disk]:
    """32 MiB in memory, without direct I/O."""
    with memory_disk(drive, 32 * MIB) as disk:
        yield disk


@pytest.fixture(scope="session")
def interpreters(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interpreters]:
    """Runs programs in interpreters of their own."""
    directory = tmp_path_factory.mktemp("interpreters")
    served = Interpreters(directory, whole_exit=not request.config.getoption("--quick"))
    yield served
    served.close()
