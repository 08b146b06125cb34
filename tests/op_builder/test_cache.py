"""Where compiled ops are kept: only where nobody else can have put one, and where they can be executed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deepnvme.ops.op_builder import cache as build_cache

from ..support.disks import MIB, memory_disk
from ..support.patience import PATIENCE
from .conftest import REPOSITORY, STANDIN, STANDIN_PROGRAM, StandinBuilder

ATTACKER, VICTIM = 65534, 54321

As = Callable[..., tuple[str, str]]


@pytest.fixture
def shared(drive: Path) -> Path:
    """A directory like /tmp, in which everybody can make entries."""
    place = drive / "shared"
    place.mkdir()
    place.chmod(0o1777)
    return place


@pytest.fixture
def run_as(drive: Path) -> As:
    """Loads the stand-in as another user, in an environment of its own: what it prints, and its warnings."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv, to become other users")
    source = drive / "standin.cpp"
    source.write_text(STANDIN)
    program = STANDIN_PROGRAM.format(repository=str(REPOSITORY), sources=[str(source)])

    def run(user: int, **environment: str) -> tuple[str, str]:
        home = drive / f"home-{user}"
        if not home.exists():
            home.mkdir()
            os.chown(home, user, user)
        # Able to read everything, so that the interpreter and the checkout may lie where they like.
        become = [f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        become += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"] if user else []
        done = subprocess.run(
            ["setpriv", *become, sys.executable, "-c", program],
            env={**os.environ, "HOME": str(home), **environment}, capture_output=True, text=True, timeout=PATIENCE,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.strip(), done.stderr

    return run


@pytest.fixture
def hostile(drive: Path, compiler: str) -> Path:
    """A compiled stand-in with another value than the source has."""
    import sysconfig

    source, library = drive / "hostile.cpp", drive / "hostile.so"
    source.write_text(STANDIN)
    facts = ["-DSTANDIN_VALUE=666", "-DDEEPNVME_EXTENSION_NAME=standin_op", '-DDEEPNVME_SOURCE_HASH="0"']
    include = f"-I{sysconfig.get_path('include')}"
    subprocess.run([compiler, "-std=c++20", "-shared", "-fPIC", include, *facts, str(source), "-o", str(library)], check=True)
    return library


def plant(hostile: Path, root: Path, owner: int | None = ATTACKER) -> Path:
    """Put it in the place of every build in the cache, with its digest; returns the last."""
    import hashlib
    import json

    (library,) = (root / "deepnvme" / "standin_op").glob("*/*.so")
    record = library.with_name("build.json")
    library.unlink()
    shutil.copy(hostile, library)
    facts = json.loads(record.read_text())
    facts["sha256"] = hashlib.sha256(library.read_bytes()).hexdigest()
    record.write_text(json.dumps(facts))
    if owner is not None:
        os.chown(library, owner, owner)
    return library


@pytest.mark.slow
@pytest.mark.parametrize("victim", [VICTIM, 0])
def test_a_library_that_another_user_put_into_a_shared_directory_is_not_loaded(
    run_as: As, shared: Path, hostile: Path, victim: int
) -> None:
    run_as(ATTACKER, TORCH_EXTENSIONS_DIR=str(shared))
    plant(hostile, shared)
    assert run_as(ATTACKER, TORCH_EXTENSIONS_DIR=str(shared))[0] == "666"  # it would do
    value, warned = run_as(victim, TORCH_EXTENSIONS_DIR=str(shared))
    assert value == "1"
    assert f"belongs to another user ({ATTACKER})" in warned
    assert "TORCH_EXTENSIONS_DIR" in warned
    own = next((shared.parent / f"home-{victim}" / ".cache/deepnvme/standin_op").glob("*/*.so"))
    made = own.stat().st_mtime_ns
    assert run_as(victim, TORCH_EXTENSIONS_DIR=str(shared))[0] == "1"
    assert own.stat().st_mtime_ns == made  # and is built no second time


Damage = Callable[[Path, Path], object]


def _linked(library: Path, drive: Path) -> None:
    """A second name of a file of the attacker's."""
    theirs = drive / "theirs.so"
    shutil.copy(library, theirs)
    os.chown(theirs, ATTACKER, ATTACKER)
    library.unlink()
    os.link(theirs, library)


def _linked_softly(library: Path, drive: Path) -> None:
    theirs = drive / "theirs.so"
    shutil.move(library, theirs)
    library.symlink_to(theirs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda library, _: os.chown(library, ATTACKER, ATTACKER), f"belongs to another user ({ATTACKER})"),
        (lambda library, _: library.chmod(0o775), "can be written to by its group"),
        (lambda library, _: library.chmod(0o646), "can be written to by everybody"),
        (lambda library, _: library.parent.chmod(0o775), "can be written to by its group"),
        (lambda library, _: library.parent.chmod(0o1777), "can be written to by everybody"),
        (_linked, f"belongs to another user ({ATTACKER})"),
        (_linked_softly, "is a symbolic link"),
    ],
)  # fmt: skip
def test_a_library_that_others_could_have_written_is_built_again(
    run_as: As, drive: Path, hostile: Path, damage: Damage, reason: str
) -> None:
    place = {"TORCH_EXTENSIONS_DIR": str(drive / "mine")}
    (drive / "mine").mkdir()
    os.chown(drive / "mine", VICTIM, VICTIM)
    run_as(VICTIM, **place)
    library = plant(hostile, drive / "mine", owner=VICTIM)
    assert run_as(VICTIM, **place)[0] == "666"
    damage(library, drive)
    value, warned = run_as(VICTIM, **place)
    assert value == "1"
    assert "is built again" in warned
    assert reason in warned
    assert run_as(VICTIM, **place) == ("1", "")


@pytest.mark.slow
@pytest.mark.parametrize("part", ["extensions", "extensions/deepnvme", "extensions/deepnvme/standin_op"])
@pytest.mark.parametrize("mode", [0o775, 0o777])
def test_nothing_is_kept_below_a_directory_that_others_can_write_to(
    standin: StandinBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, mode: int
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    (tmp_path / "extensions/deepnvme/standin_op").mkdir(parents=True)
    (tmp_path / part).chmod(mode)
    with pytest.warns(UserWarning, match=rf"can be written to by .*\(mode {mode:o}\).*own.*TORCH_EXTENSIONS_DIR"):
        assert standin.load().value == 1
    assert list((tmp_path / "own/deepnvme/standin_op").glob("*/*.so"))
    assert not list((tmp_path / "extensions").rglob("*.so"))
    assert standin.existing_build() is not None


def test_a_link_that_another_user_put_there_is_not_followed(run_as: As, shared: Path, drive: Path) -> None:
    """It would have the victim's files removed and written where the other user says."""
    documents = drive / f"home-{VICTIM}" / "documents"
    documents.mkdir(parents=True)
    (documents / "standin_op" / "building-a-house").mkdir(parents=True)
    for path in (documents.parent, documents, documents / "standin_op", documents / "standin_op" / "building-a-house"):
        os.chown(path, VICTIM, VICTIM)
    (shared / "deepnvme").symlink_to(documents)
    os.lchown(shared / "deepnvme", ATTACKER, ATTACKER)
    assert run_as(VICTIM, TORCH_EXTENSIONS_DIR=str(shared))[0] == "1"
    assert (documents / "standin_op" / "building-a-house").exists()
    assert not list(documents.rglob("*.so"))


@pytest.mark.slow
@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_whatever_the_umask_others_can_write_nothing_of_a_build(standin: StandinBuilder, cache: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        assert standin.load().value == 1
    finally:
        os.umask(before)
    made = [cache, *cache.rglob("*")]
    assert len(made) > 4
    assert [path for path in made if path.stat().st_mode & 0o022 and path.parent.name != "probes"] == []


def test_where_no_place_will_do_the_error_says_what_is_wrong_with_the_chosen_one(
    standin: StandinBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_cache, "private_places", lambda: iter([tmp_path / "extensions" / "x", tmp_path / "a-file" / "x"]))
    (tmp_path / "extensions").mkdir()
    (tmp_path / "extensions").chmod(0o777)
    (tmp_path / "a-file").touch()
    assert standin.is_compatible()
    assert standin.existing_build() is None
    with pytest.raises(RuntimeError, match=r"extensions' can be written to by everybody.*Set TORCH_EXTENSIONS_DIR"):
        standin.load()


# Homes that are none


@pytest.mark.parametrize("home", ["does not exist", "is read-only", "has a cache that is read-only"])
def test_without_a_home_to_write_to_a_private_directory_among_the_temporary_ones_serves(
    run_as: As, drive: Path, home: str
) -> None:
    place = drive / f"home-{VICTIM}"
    if home != "does not exist":
        (place / ".cache" / "deepnvme" / "standin_op").mkdir(parents=True)
        for part in (place, place / ".cache", place / ".cache" / "deepnvme", place / ".cache" / "deepnvme" / "standin_op"):
            os.chown(part, VICTIM, VICTIM)
            part.chmod(0o555)
        if home == "is read-only":
            shutil.rmtree(place / ".cache")
    else:
        place = drive / "nobody"
    private = Path("/var/tmp", f"deepnvme-{VICTIM}")
    shutil.rmtree(private, ignore_errors=True)  # of an earlier test: no real user has this number
    environment = {"TORCH_EXTENSIONS_DIR": "", "XDG_CACHE_HOME": "", "HOME": str(place)}
    try:
        for _ in range(2):
            value, said = run_as(VICTIM, **environment)
            assert value == "1"
            assert said.count("UserWarning") == 1
            assert str(place) in said
            assert str(private) in said
        status = private.stat()
        assert (status.st_mode & 0o7777, status.st_uid) == (0o700, VICTIM)
        assert len(list((private / "standin_op").glob("*/*.so"))) == 1  # built once
        assert not place.exists() or not list(place.rglob("*.so"))
    finally:
        shutil.rmtree(private, ignore_errors=True)


def test_a_private_directory_that_another_user_has_made_there_is_not_used(run_as: As, drive: Path) -> None:
    victim = VICTIM + 1  # the directories among the temporary ones are not this test's alone
    private = Path("/var/tmp", f"deepnvme-{victim}")
    shutil.rmtree(private, ignore_errors=True)
    private.mkdir(mode=0o777)
    os.chown(private, ATTACKER, ATTACKER)
    own = Path(tempfile.gettempdir(), f"deepnvme-{victim}")
    shutil.rmtree(own, ignore_errors=True)
    try:
        value, said = run_as(victim, TORCH_EXTENSIONS_DIR="", XDG_CACHE_HOME="", HOME=str(drive / "nobody"))
        assert value == "1"
        assert str(own) in said
        assert not list(private.iterdir())
        assert own.stat().st_mode & 0o7777 == 0o700
    finally:
        shutil.rmtree(private, ignore_errors=True)
        shutil.rmtree(own, ignore_errors=True)


# Mounted noexec


@pytest.fixture
def noexec(drive: Path) -> Iterator[Path]:
    with memory_disk(drive, 32 * MIB) as disk:
        done = subprocess.run(["mount", "-o", "remount,noexec", str(disk.path)], capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"mount was refused: {done.stderr}")
        disk.path.chmod(0o755)
        yield disk.path


@pytest.mark.root
def test_on_a_noexec_file_system_another_place_is_found_before_anything_is_compiled(
    noexec: Path, tmp_path: Path, standin: StandinBuilder, monkeypatch: pytest.MonkeyPatch,
    elsewhere: Callable[..., subprocess.Popen[str]], command: Callable[[str, str], Path], compiler: str,
) -> None:  # fmt: skip
    log = tmp_path / "compiled"
    script = f'case " $* " in *" -c "*) echo compiled >> {log};; esac; exec {compiler} "$@"'
    environment = {
        "CXX": str(command("logging-c++", script)),
        "TORCH_EXTENSIONS_DIR": str(noexec / "not" / "yet" / "there"),
        "XDG_CACHE_HOME": str(tmp_path / "own"),
    }
    for _ in range(2):
        out, err = elsewhere(**environment).communicate(timeout=PATIENCE)
        assert out == "1\n", err
        assert err.count("UserWarning") == 1
        assert f"{str(noexec)!r} is on a file system that is mounted noexec" in err
        assert str(tmp_path / "own") in err
        assert "TORCH_EXTENSIONS_DIR" in err
    assert log.read_text().splitlines() == ["compiled"]
    assert not list(noexec.iterdir())
