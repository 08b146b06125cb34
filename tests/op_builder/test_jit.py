"""Builds at first use: once, in a cache that survives what happens to it. A stand-in of ten lines is built for speed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deepnvme.ops.op_builder import cache as build_cache
from deepnvme.ops.op_builder import jit

from ..support.patience import PATIENCE
from .conftest import REPOSITORY, STANDIN, StandinBuilder

Elsewhere = Callable[..., "subprocess.Popen[str]"]
Command = Callable[[str, str], Path]


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    return out.strip() + err


def published(cache: Path) -> list[Path]:
    return sorted((cache / "standin_op").glob("*/*.so"))


@pytest.fixture
def logging_compiler(command: Command, compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Compiles, and writes one line for each source to the file returned. While "slow" lies beside it, takes a minute."""
    log = tmp_path / "compiled"
    script = command(
        "logging-c++",
        f"""
        case " $* " in *" -c "*)
            echo compiled >> {log}
            [ -e {tmp_path}/slow ] && sleep 60
        esac
        exec {compiler} "$@"
        """,
    )
    monkeypatch.setenv("CXX", str(script))
    return log


# Failures


def test_an_error_in_the_source_shows_the_command_and_the_compilers_words(standin: StandinBuilder) -> None:
    standin.files[0].write_text("int broken( {\n")
    with pytest.raises(RuntimeError, match=r"(?s)standin_op could not be compiled with .*-std=c\+\+20.*error:"):
        standin.load()


def test_a_failed_build_can_be_tried_again_in_the_same_process(standin: StandinBuilder) -> None:
    standin.files[0].write_text("int broken( {\n")
    with pytest.raises(RuntimeError):
        standin.load()
    standin.files[0].write_text(STANDIN)
    assert standin.load().value == 1


@pytest.mark.parametrize("place", ["/proc/deepnvme", "a-file"])
def test_a_cache_that_cannot_be_written_says_which_variable_to_set(
    standin: StandinBuilder, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a-file").write_text("")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / place))
    with pytest.raises(RuntimeError, match=r"cannot be built in the cache .*Set TORCH_EXTENSIONS_DIR"):
        standin.load()


@pytest.mark.root
def test_a_full_disk_is_named_as_the_reason(standin: StandinBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small filesystem")
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12k", "tmpfs", small], capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"needs to mount a tmpfs: {mounted.stderr.strip()}")
    try:
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(small))
        with pytest.raises(RuntimeError, match=r"(?s)(No space left|bytes are free).*TORCH_EXTENSIONS_DIR"):
            standin.load()
    finally:
        subprocess.run(["umount", small], check=True)


def test_without_ninja_the_error_says_how_to_install_it(standin: StandinBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ninja", None)
    monkeypatch.setattr("shutil.which", lambda name, path=None: None if name == "ninja" else f"/usr/bin/{name}")
    assert standin.is_compatible()  # pip's isolated environment compiles ahead of time without ninja
    with pytest.raises(RuntimeError, match="pip install ninja"):
        standin.load()


@pytest.mark.slow
@pytest.mark.parametrize("damage", [b"", b"not a library", None])
def test_a_damaged_module_in_the_cache_is_reported_and_built_again(
    standin: StandinBuilder, elsewhere: Elsewhere, cache: Path, damage: bytes | None
) -> None:
    finish(elsewhere())
    (library,) = published(cache)
    library.write_bytes(library.read_bytes()[:5000] if damage is None else damage)
    with pytest.warns(UserWarning, match="is damaged or .*; it is built again"):
        assert standin.load().value == 1
    assert "Warning" not in finish(elsewhere())


def test_a_module_that_does_not_import_is_built_once_more_and_then_the_error_is_raised(standin: StandinBuilder) -> None:
    standin.files[0].write_text('extern "C" int no_module() { return 0; }\n')
    with pytest.raises(ImportError, match="PyInit_standin_op"):
        standin.load()
    with pytest.warns(UserWarning, match="PyInit_standin_op"), pytest.raises(ImportError):
        standin.load()


@pytest.mark.slow
def test_a_build_killed_halfway_leaves_nothing_that_the_next_one_mistakes_or_keeps(
    elsewhere: Elsewhere, logging_compiler: Path, tmp_path: Path, cache: Path
) -> None:
    (tmp_path / "slow").touch()
    victim = elsewhere()
    while not logging_compiler.exists():
        assert victim.poll() is None, victim.communicate()
        time.sleep(0.02)
    victim.kill()
    victim.wait()
    try:
        assert published(cache) == []
        assert len(list((cache / "standin_op").glob("building-*"))) == 1
        (tmp_path / "slow").unlink()
        assert finish(elsewhere()) == "1"
        assert len(published(cache)) == 1
        assert list((cache / "standin_op").glob("building-*")) == []
    finally:
        os.killpg(victim.pid, signal.SIGKILL)  # ninja and the sleeping compiler outlive their builder
        victim.communicate()


def test_waiting_for_another_build_ends_with_the_name_of_who_holds_the_lock(
    standin: StandinBuilder, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPNVME_BUILD_TIMEOUT", "0.2")
    (cache / "standin_op").mkdir(parents=True)
    with (
        build_cache.exclusive(cache / "standin_op" / "lock", timeout=0),
        pytest.raises(TimeoutError, match=rf"process {os.getpid()} on {socket.gethostname()}.*DEEPNVME_BUILD_TIMEOUT"),
    ):
        standin.load()
    assert standin.load().value == 1


# One build


@pytest.mark.slow
def test_processes_that_start_together_build_once(elsewhere: Elsewhere, logging_compiler: Path) -> None:
    assert [finish(process) for process in [elsewhere() for _ in range(4)]] == ["1"] * 4
    assert logging_compiler.read_text().splitlines() == ["compiled"]


def test_a_child_forked_during_a_build_can_load() -> None:
    program = f"""
import os, signal, sys, threading
sys.path.insert(0, {str(REPOSITORY)!r})
from op_builder import OpBuilder

class SlowBuilder(OpBuilder):
    NAME, BUILD_VAR = "slow", "DS_BUILD_SLOW"
    begun, parent, build = threading.Event(), os.getpid(), threading.Event()
    def absolute_name(self): return "slow_op"
    def sources(self): return []
    def _load_prebuilt(self):
        self.begun.set()
        if os.getpid() == self.parent:
            self.build.wait()
        return sys

building = threading.Thread(target=SlowBuilder().load)
building.start()
SlowBuilder.begun.wait()
child = os.fork()
if child == 0:
    signal.alarm(30)
    SlowBuilder().load()
    print("loaded", flush=True)
    os._exit(0)
os.waitpid(child, 0)
SlowBuilder.build.set()
building.join()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE)
    assert (done.stdout, done.returncode) == ("loaded\n", 0), done.stderr


def test_a_module_in_a_cache_that_became_read_only_is_still_loaded(elsewhere: Elsewhere, cache: Path) -> None:
    finish(elsewhere())
    lock = cache / "standin_op" / "lock"
    lock.unlink()
    lock.mkdir()  # cannot be opened for writing, even by root
    assert finish(elsewhere()) == "1"


# Where nothing can be compiled any more


@pytest.mark.slow
def test_without_a_compiler_the_newest_build_of_these_sources_is_loaded(elsewhere: Elsewhere, standin: StandinBuilder) -> None:
    finish(elsewhere())
    time.sleep(0.02)  # more than a clock tick, by which files' times differ
    finish(elsewhere(CFLAGS="-DSTANDIN_VALUE=2"))
    assert finish(elsewhere(PATH="/nowhere")) == "2"


@pytest.mark.slow
@pytest.mark.parametrize("obstacle", ["other sources", "damage", "made for one processor"])
def test_without_a_compiler_a_build_that_may_not_do_is_not_loaded(
    elsewhere: Elsewhere, standin: StandinBuilder, cache: Path, obstacle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish(elsewhere(CFLAGS="-march=native" if obstacle == "made for one processor" else ""))
    if obstacle == "other sources":
        standin.files[0].write_text(STANDIN + "\n")
    elif obstacle == "damage":
        published(cache)[0].write_bytes(b"damaged")
    monkeypatch.setenv("PATH", "/nowhere")
    assert standin.existing_build() is None
    with pytest.raises(RuntimeError, match=r"no C\+\+20 compiler"):
        standin.load()


# What a build depends on


@pytest.mark.slow
def test_a_changed_source_is_built_again(standin: StandinBuilder, elsewhere: Elsewhere, cache: Path) -> None:
    assert finish(elsewhere()) == "1"
    standin.files[0].write_text(STANDIN.replace("STANDIN_VALUE 1", "STANDIN_VALUE 2"))
    assert finish(elsewhere()) == "2"
    assert len(published(cache)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("variable", ["CFLAGS", "CXXFLAGS", "CPPFLAGS"])
def test_compiler_flags_of_the_environment_reach_the_compiler_and_make_another_build(
    elsewhere: Elsewhere, cache: Path, variable: str
) -> None:
    assert finish(elsewhere(**{variable: "-DSTANDIN_VALUE=7 '-DA_STRING=\"with a space and a $dollar\"'"})) == "7"
    assert finish(elsewhere()) == "1"
    assert len(published(cache)) == 2


def test_paths_with_spaces_dollars_and_colons_are_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "a $strange: place"
    directory.mkdir()
    (directory / "stand in.cpp").write_text(STANDIN)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(directory))
    assert StandinBuilder(directory / "stand in.cpp").load().value == 1


def test_small_directories_are_compiled_together_and_foreign_sources_by_themselves(tmp_path: Path) -> None:
    sizes = {"large": 1000, "half": 500, "small": 499, "tiny": 1}
    for name, size in sizes.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "source.cpp").write_text("/" * size)
    foreign = tmp_path / "foreign.cpp"
    units = jit.write_units(tuple(tmp_path / name / "source.cpp" for name in sizes), (foreign,), tmp_path)
    included = {unit.name: [line.split('"')[1] for line in unit.read_text().splitlines()] for unit in units}
    assert included == {
        "0-large.cpp": [str(tmp_path / "large" / "source.cpp")],
        "1-half.cpp": [str(tmp_path / "half" / "source.cpp")],
        "2-others.cpp": [str(tmp_path / "small" / "source.cpp"), str(tmp_path / "tiny" / "source.cpp")],
        "3-foreign.cpp": [str(foreign)],
    }


def test_the_cache_is_in_the_users_cache_directory_unless_told_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert build_cache.root() == tmp_path / "extensions" / "deepnvme"
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert build_cache.root() == tmp_path / "xdg" / "deepnvme"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert build_cache.root() == tmp_path / ".cache" / "deepnvme"
