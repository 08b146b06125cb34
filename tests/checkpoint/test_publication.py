"""What is under the name, whatever happens on the way."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import deepnvme
from deepnvme import Engine
from deepnvme.checkpoint import publication, saving
from deepnvme.checkpoint.publication import SUFFIX, Destination, Publication

from ..support.disks import MIB, Disk
from ..support.engines import transfers_are, transfers_through
from ..support.files import open_files
from ..support.interpreters import Interpreters
from ..support.patience import PATIENCE

OLD = {"old": torch.arange(100)}


@pytest.fixture
def path(drive: Path) -> Path:
    """A file that is there."""
    path = drive / "file.pt"
    deepnvme.save(OLD, path)
    return path


def failing_fsync_of_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = os.fsync

    def fail(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))  # as fsync(2) fails: without a name
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fail)


def assert_old(path: Path) -> None:
    """And nothing else in its directory."""
    assert torch.equal(torch.load(path)["old"], OLD["old"])
    assert os.listdir(path.parent) == [path.name]


class TestKills:
    KILLS = 200

    @pytest.mark.slow
    def test_at_any_moment_there_is_one_whole_file(self, drive: Path, interpreters: Interpreters) -> None:
        printed = interpreters.run(f"""
            import deepnvme, random, signal, time
            from deepnvme.checkpoint import saving
            from deepnvme.checkpoint.publication import SUFFIX
            torch.set_num_threads(1)  # those of OpenMP are not there in a child
            drive, path = {str(drive / "saved")!r}, {str(drive / "saved" / "file.pt")!r}

            def obj(value):  # through chunks and from where it is
                return {{"small": torch.full((1000,), value), "large": torch.full((70_000,), value)}}

            def values():
                found = torch.load(path)
                return {{int(bound) for tensor in found.values() for bound in tensor.aminmax()}}

            def kill(before, rng):
                ready, began = os.pipe()
                child = os.fork()
                if child == 0:
                    try:
                        deepnvme.save(obj(0), drive + "/../warm.pt", fsync=False)
                        for value in range(before + 1, before + 1000):
                            os.write(began, b"x")
                            deepnvme.save(obj(value), path, fsync=value % 2 == 0)
                    finally:
                        os._exit(1)
                os.read(ready, 1)
                time.sleep(rng.random() * 0.02)
                os.kill(child, signal.SIGKILL)
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
                os.close(ready); os.close(began)

            os.mkdir(drive)
            torch.save(obj(0), path)  # without an engine, which no child could use
            rng, seen, left = random.Random(0), 0, 0
            for _ in range({self.KILLS}):
                kill(seen, rng)
                found = values()
                assert len(found) == 1, f"torn: {{found}}"
                assert seen <= min(found)
                seen = found.pop()
                names = set(os.listdir(drive)) - {{"file.pt"}}
                assert len(names) <= 1 and all(name.endswith(SUFFIX) for name in names), names
                left += len(names)
            deepnvme.save(obj(-1), path)
            assert os.listdir(drive) == ["file.pt"]
            assert values() == {{-1}}
            print(seen, left)
        """)  # fmt: skip
        saved, left = map(int, printed.check().split())
        assert saved > 20, "hardly a child came to save anything"
        assert left > 20, "hardly a child was killed while it wrote"

    def test_what_is_being_written_is_not_taken_for_a_leftover(self, path: Path, engine: Engine) -> None:
        with Publication(Destination(path), 5, engine) as one:
            with Publication(Destination(path), 5, engine) as other:
                assert one.temporary.exists()
                engine.write(torch.full((5,), 1, dtype=torch.uint8), other.file).result()
                other.publish()
            assert one.temporary.exists()
            engine.write(torch.full((5,), 2, dtype=torch.uint8), one.file).result()
            one.publish()
        assert path.read_bytes() == bytes([2] * 5)
        assert os.listdir(path.parent) == [path.name]


class TestRefusals:
    """The old file stays, and nothing else."""

    @pytest.mark.parametrize(
        ("place", "error"),
        [
            (".", errno.EISDIR), ("gone/file.pt", errno.ENOENT), ("file.pt/file.pt", errno.ENOTDIR),
            ("n" * 256, errno.ENAMETOOLONG),
        ],
        ids=["directory", "no directory", "a file as directory", "too long"],
    )  # fmt: skip
    def test_a_place_that_no_file_can_have_is_named(self, path: Path, place: str, error: int) -> None:
        with pytest.raises(OSError, match=re.escape(str(path.parent / place))) as refused:
            deepnvme.save(OLD, path.parent / place)
        assert refused.value.errno == error
        assert_old(path)

    def test_a_device_is_refused(self, drive: Path) -> None:
        with pytest.raises(OSError, match="regular file") as refused:
            deepnvme.save(OLD, "/dev/null")
        assert refused.value.errno == errno.EINVAL
        assert Path("/dev/null").is_char_device()

    def test_a_read_only_directory_is_named(self, path: Path, interpreters: Interpreters) -> None:
        path.parent.chmod(0o555)
        program = f"""
            import deepnvme.checkpoint  # whose modules another user may not read
            if os.geteuid() == 0:
                os.setgid(65534); os.setuid(65534)
            try:
                deepnvme.save([1], {str(path)!r})
            except PermissionError as error:
                print(error.filename)
        """
        assert interpreters.run(program).check().strip() == str(path)
        assert_old(path)

    @pytest.mark.root
    def test_a_full_disk_is_told_before_a_byte_is_written(self, small_disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
        path = small_disk / "file.pt"
        deepnvme.save(OLD, path)
        (small_disk / "lost+found").rmdir()
        free = small_disk.bytes_free()
        monkeypatch.setattr(saving, "write", None)
        with pytest.raises(OSError, match="more bytes wanted") as full:
            deepnvme.save([torch.empty(100 * MIB, dtype=torch.uint8)], path)
        assert (full.value.errno, full.value.filename) == (errno.ENOSPC, str(path))
        assert small_disk.bytes_free() == free
        assert_old(path)


class TestFaults:
    """The old file stays, and nothing else."""

    def test_an_interrupt_of_the_flush_leaves_the_old_file(self, path: Path) -> None:
        def interrupt(*arguments: object) -> None:
            raise KeyboardInterrupt

        with transfers_are(lambda name, sound: interrupt if name == "fsync" else sound), pytest.raises(KeyboardInterrupt):
            deepnvme.save([torch.ones(3)], path)
        assert_old(path)

    @pytest.mark.parametrize("call", ["write", "fsync", "replace", "open", "flock", "preallocate"])
    def test_an_error_names_the_file_and_not_the_temporary_one(
        self, path: Path, faulty: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, call: str
    ) -> None:
        def fail(*names: Any, **_: Any) -> Any:
            named = [str(name) for name in names if isinstance(name, str | Path)]
            raise OSError(errno.EIO, "broken", *(named[:1] or [None]))

        engine = faulty("threads", error_every=1) if call == "write" else Engine()
        monkeypatch.setattr(publication, "shared_engine", lambda path, config: engine)
        if call == "fsync":
            failing = faulty("threads", error_every=1)
            monkeypatch.setattr(engine, "fsync", lambda file: failing.write(torch.ones(8), file))
        elif call == "open":
            monkeypatch.setattr(engine, "open", fail)
        elif call == "flock":
            monkeypatch.setattr(publication.fcntl, "flock", fail)
        elif call == "replace":
            monkeypatch.setattr(os, "replace", fail)
        elif call == "preallocate":
            monkeypatch.setattr(publication, "preallocate", fail)
        with pytest.raises(OSError, match=r"broken|Input") as failed:
            deepnvme.save([torch.ones(3)], path)
        monkeypatch.undo()
        assert (failed.value.errno, failed.value.filename) == (errno.EIO, str(path))
        assert SUFFIX not in str(failed.value)
        assert "in place" not in str(failed.value)
        assert_old(path)

    @pytest.mark.parametrize("save", ["save", "async_save", "manager", "group"])
    def test_a_directory_that_cannot_be_flushed_leaves_the_new_file_and_says_so(
        self, drive: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, save: str
    ) -> None:
        manager = deepnvme.CheckpointManager(drive)
        path = manager.path(1)
        deepnvme.save(OLD, path)
        if save == "group":
            request.getfixturevalue("process_group")
        failing_fsync_of_directories(monkeypatch)
        with pytest.raises(OSError, match="flushed: the new file is in place, but a power cut may undo that") as failed:  # noqa: PT012
            if save == "save":
                deepnvme.save({"new": 1}, path)
            elif save == "async_save":
                deepnvme.async_save({"new": 1}, path).result(PATIENCE)
            elif save == "manager":
                manager.save(1, {"new": 1})
            else:
                deepnvme.save({"new": 1}, path, group=torch.distributed.group.WORLD)
        monkeypatch.undo()
        assert (failed.value.errno, failed.value.filename) == (errno.EIO, str(path))
        assert deepnvme.load(path) == {"new": 1}
        assert os.listdir(drive) == [path.name]

    @pytest.mark.parametrize("call", ["write", "directory"])
    def test_no_descriptor_is_left_after_an_error(
        self, path: Path, faulty: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, call: str
    ) -> None:
        if call == "directory":
            failing_fsync_of_directories(monkeypatch)
        errors = []
        for _ in range(5):
            fails = transfers_through(faulty("threads", error_every=1))
            with fails, pytest.raises(OSError, match="Input/output") as failed:
                deepnvme.save([torch.ones(3)], path)
            errors.append(failed.value)  # as a notebook keeps it, with its traceback
        assert open_files(path.parent) == []


class TestNames:
    @pytest.mark.parametrize("name", ["n" * 255, "é" * 127, "a b", os.fsdecode(b"not utf-8 \xff\xfe"), ".hidden"], ids=ascii)
    def test_names_of_any_kind_are_taken(self, drive: Path, name: str) -> None:
        deepnvme.save(OLD, drive / name)
        assert os.listdir(drive) == [name]
        assert torch.equal(deepnvme.load(drive / name)["old"], OLD["old"])

    def test_a_symbolic_link_stays_a_link(self, path: Path, drive: Path) -> None:
        link = drive / "link"
        link.symlink_to("file.pt")
        deepnvme.save({"new": 1}, link)
        assert link.is_symlink()
        assert deepnvme.load(path) == {"new": 1}

    def test_the_mode_of_the_file_is_kept(self, path: Path) -> None:
        path.chmod(0o640 | stat.S_ISUID)  # which is not kept: the owner may be another now
        deepnvme.save({"new": 1}, path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_two_processes_may_save_to_one_path(drive: Path, interpreters: Interpreters) -> None:
    interpreters.run(f"""
        import deepnvme
        torch.set_num_threads(1)  # those of OpenMP are not there in a child
        path = {str(drive / "file.pt")!r}
        children = []
        for value in (1, 2):
            children.append(os.fork())
            if children[-1] == 0:
                for _ in range(20):
                    deepnvme.save([torch.full((200_000,), value)] * 2, path, fsync=False)
                    assert len(set(torch.load(path)[0].tolist())) == 1
                os._exit(0)
        for child in children:
            assert os.waitpid(child, 0)[1] == 0
        assert os.listdir({str(drive)!r}) == ["file.pt"]
    """).check()
