"""What can go wrong with a store, and what it says and leaves then."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import io
import os
import random
import re
import shutil
import signal
import stat
import threading
import time
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deepnvme.files.directory_lock import LOCK_NAME, StoreLocked
from deepnvme.memory.alignment import ALIGNMENT, padded
from deepnvme.store import data_file, manifest
from deepnvme.store.allocator import StoreAllocator
from deepnvme.store.data_file import DATA_NAME
from deepnvme.store.tensor_store import CorruptTensor, TensorStore
from deepnvme.swap import CorruptManifest

from ..support.engines import FailedTransfer
from ..support.files import flip
from ..support.memory import bytes_of, numbered
from ..support.patience import PATIENCE

MIB = 1 << 20


@pytest.fixture
def store(drive, engine):
    with TensorStore(drive / "store", engine=engine) as store:
        yield store


class TestArguments:
    @pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
    @pytest.mark.parametrize(
        ("make", "match"),
        [
            (lambda: [1, 2], "must be a tensor, got list"),
            (lambda: torch.ones(3).to_sparse(), "dense tensor, got torch.sparse_coo"),
            (lambda: torch.empty(3, device="meta"), "meta device"),
            (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantized"),
        ],
        ids=["no tensor", "sparse", "meta", "a scale that would be lost"],
    )
    def test_what_has_no_bytes_to_store(self, store, make, match):
        tensor = make()
        store.put("there", torch.ones(3)).result()
        for put in (lambda: store.put("name", tensor), lambda: store.put_many({"there": torch.zeros(3), "name": tensor})):
            with pytest.raises(TypeError, match=match):
                put()
        assert store.names() == ["there"]
        assert torch.equal(store.get("there").result(), torch.ones(3))

    @pytest.mark.parametrize("name", [1, None, b"bytes"])
    def test_a_name_that_is_no_string(self, store, name):
        with pytest.raises(TypeError, match=re.escape(repr(name))):
            store.put(name, torch.ones(3))

    @pytest.mark.parametrize(
        "call",
        [
            lambda store, name: store.get(name),
            lambda store, name: store.get(name, out=torch.empty(3)),
            lambda store, name: store.get_many(["there", name]),
            lambda store, name: store.delete(name),
            lambda store, name: store.map(name),
            lambda store, name: store.info(name),
        ],
    )
    def test_a_name_that_is_not_there(self, store, call):
        store.put_many({"there": torch.ones(3), "layer.10": torch.ones(3)}).result()
        with pytest.raises(KeyError, match=r"no tensor 'layer.1', but there, layer.10"):
            call(store, "layer.1")

    def test_get_many_of_one_string(self, store):
        with pytest.raises(TypeError, match="use get"):
            store.get_many("name")

    @pytest.mark.parametrize(
        ("out", "error", "match"),
        [
            (torch.empty(2), ValueError, "of 12 bytes, got 8"),
            (torch.empty(3, 2)[:, 0], ValueError, r"contiguous.*strides \(2,\)"),
            (torch.empty(13, dtype=torch.uint8)[1:], ValueError, "multiple of 4 bytes"),
            (bytearray(12), TypeError, "bytearray"),
        ],
        ids=["size", "strides", "address", "type"],
    )
    def test_an_out_that_cannot_be_read_into(self, store, out, error, match):
        store.put("name", torch.ones(3)).result()
        with pytest.raises(error, match=match):
            store.get("name", out=out)

    @pytest.mark.parametrize(
        ("directories", "match"),
        [([], "at least one"), ({"a": 1}, "equal shares"), (["a", "./a"], "twice")],
    )
    def test_directories_that_make_no_store(self, drive, monkeypatch, directories, match):
        monkeypatch.chdir(drive)
        with pytest.raises((ValueError, TypeError), match=match):
            TensorStore(directories)
        assert list(drive.iterdir()) == []

    def test_a_closed_store(self, store):
        store.close()
        for call in (store.names, store.commit, lambda: store.get("a"), lambda: store.put("a", torch.ones(3))):
            with pytest.raises(ValueError, match=r"closed|persist"):
                call()


PROGRAM = """
import os, sys, time, random
import torch
import deepnvme
from deepnvme.store.tensor_store import TensorStore
directory = {directory!r}
{body}
"""


def program(directory: Path, body: str) -> str:
    return PROGRAM.format(directory=str(directory), body=body)


class TestOwners:
    def test_a_second_store_is_refused_and_the_first_goes_on(self, store, drive):
        store.put("name", torch.ones(3)).result()
        for persist in (False, True):
            with pytest.raises(StoreLocked, match=r"the TensorStore of this process .*: call its close\(\)"):
                TensorStore([drive / "other", drive / "store"], persist=persist)
        assert torch.equal(store.get("name").result(), torch.ones(3))
        assert sorted(os.listdir(drive)) == ["store"]  # and what the refused one took before is given back

    def test_a_killed_owner_s_files_are_reclaimed(self, drive, interpreters):
        body = 's = TensorStore(directory)\ns.put("a", torch.ones(1 << 20)).result()\nprint("put", flush=True)\ntime.sleep(60)'
        child = interpreters.start(program(drive / "store", body))
        try:
            interpreters.wait_for("put")
            with pytest.raises(StoreLocked, match=f"process {child} on"):
                TensorStore(drive / "store")
        finally:
            os.kill(child, signal.SIGKILL)
            interpreters.wait(child)
        assert sorted(os.listdir(drive / "store")) == [DATA_NAME, LOCK_NAME]
        with TensorStore(drive / "store") as store:
            assert (store.names(), store.allocated_bytes) == ([], 0)
        assert os.listdir(drive / "store") == []

    def test_a_persisted_store_is_not_opened_as_another(self, drive):
        with TensorStore(drive / "store", persist=True) as store:
            store.put("name", torch.ones(3))
            store.commit()
        with pytest.raises(FileExistsError, match=r"persisted store of 1 tensors.*persist=True"):
            TensorStore(drive / "store")
        with TensorStore(drive / "store", persist=True) as store:
            assert torch.equal(store.get("name").result(), torch.ones(3))


class TestEndings:
    def test_exit_without_close_removes_the_files(self, drive, interpreters):
        body = 's = TensorStore(directory)\nf = s.put("a", torch.ones(1 << 22))\nt = s.get("a")'
        interpreters.run(program(drive / "store", body)).check()
        assert list(drive.iterdir()) == []

    def test_an_interrupt_while_closing_leaves_it_to_be_closed_again(self, drive, faulty, gate):
        store = TensorStore(drive / "store", engine=faulty("threads", gate=gate))
        store.put("name", numbered(MIB))
        timer = threading.Timer(0.2, lambda: signal.raise_signal(signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            store.close()
        timer.join()
        assert os.listdir(drive) == ["store"]
        gate.release()
        store.close()
        assert list(drive.iterdir()) == []

    def test_a_forked_child_is_told_and_harms_nothing(self, drive, interpreters):
        body = """
store = TensorStore(directory)
store.put("a", torch.ones(1000)).result()
future = store.put("b", torch.ones(1000))
said = []
child = os.fork()
if child == 0:
    for call in (store.names, store.commit, store.close, lambda: store.put("a", torch.ones(3)), lambda: store.get("a"),
                 lambda: store.get_many(["a"]), lambda: store.delete("a"), lambda: store.map("a"), lambda: store.info("a"),
                 lambda: store.reserve(1), lambda: store.nbytes, lambda: store.allocated_bytes, store.__enter__):
        try:
            call()
            said.append("nothing")
        except RuntimeError as error:
            said.append("parent" in str(error))
        except ValueError:
            said.append("commit")
    print(said, flush=True)
    del store, future
    sys.exit(0)
os.waitpid(child, 0)
future.result()
assert torch.equal(store.get("a").result(), torch.ones(1000))
try:
    TensorStore(directory)
except OSError as error:
    print(type(error).__name__)
print(sorted(os.listdir(directory)))
"""
        printed = interpreters.run(program(drive / "store", body)).check().splitlines()
        assert printed == [
            "[True, 'commit', True, True, True, True, True, True, True, True, True, True, True]",
            "StoreLocked",
            "['deepnvme-store.data', 'deepnvme-store.lock']",
        ]
        assert list(drive.iterdir()) == []


class TestErrors:
    """Of transfers; the engine's backend fails on command."""

    def test_a_put_that_fails_damages_the_name_until_it_is_put_again(self, drive, faulty):
        with TensorStore(drive / "store", engine=faulty("threads", error_every=1, error_limit=1)) as store:
            with pytest.raises(OSError, match="write") as failed:
                store.put("name", numbered(MIB)).result()
            assert (failed.value.errno, failed.value.filename) == (errno.EIO, str(drive / "store" / DATA_NAME))
            for call in (store.get, lambda name: store.get_many([name]), store.map):
                with pytest.raises(OSError, match="'name' is damaged") as damaged:
                    call("name")
                assert damaged.value.errno == errno.EIO
            store.put("name", numbered(MIB)).result()
            assert torch.equal(store.get("name").result(), numbered(MIB))

    def test_of_several_only_those_that_failed_are_damaged(self, drive, faulty):
        tensors = {str(index): numbered(MIB, index) for index in range(8)}
        with TensorStore(drive / "store", engine=faulty("threads", block_size=MIB, error_every=5)) as store:
            assert store.put_many(tensors).exception().errno == errno.EIO
            damaged = [name for name in tensors if self.is_damaged(store, name)]
            assert len(damaged) == 1
            for name in set(tensors) - set(damaged):
                while (future := store.get(name)).exception() is not None:
                    pass  # gets fail now and then as well
                assert torch.equal(future.result(), tensors[name])

    def is_damaged(self, store, name):
        try:
            store.map(name)  # reads nothing
        except OSError as error:
            return "is damaged" in str(error)
        return False

    def test_a_failed_put_leaves_a_persisted_store_what_it_had(self, drive, faulty, engine):
        with TensorStore(drive / "store", persist=True, engine=engine) as store:
            store.put("name", numbered(MIB))
            store.commit()
        failing = faulty("threads", block_size=MIB, error_every=1, error_limit=2)
        with TensorStore(drive / "store", persist=True, engine=failing) as store:
            assert store.put("name", numbered(MIB, 1)).exception().errno == errno.EIO
            assert store.put("new", numbered(MIB, 1)).exception().errno == errno.EIO
            assert store.names() == ["name"]
            assert torch.equal(store.get("name").result(), numbered(MIB))
            assert store.used_bytes == (MIB,)
            store.commit()

    def test_a_get_that_fails_can_be_repeated(self, drive, faulty):
        with TensorStore(drive / "store", engine=faulty("threads", error_every=2, error_limit=1)) as store:
            store.put("name", numbered(3000)).result()
            with pytest.raises(OSError, match="read") as failed:
                store.get("name").result()
            assert failed.value.errno == errno.EIO
            assert torch.equal(store.get("name").result(), numbered(3000))

    @pytest.mark.parametrize("ending", ["close", "commit"])
    def test_an_error_that_nobody_was_told_of_is_raised_in_the_end(self, drive, faulty, ending):
        store = TensorStore(drive / "store", persist=True, engine=faulty("threads", error_every=1, error_limit=1))
        store.put("name", numbered(MIB))
        store.put("other", numbered(MIB)).result()
        with pytest.raises(OSError, match="write"):
            getattr(store, ending)()
        store.close()  # raises none again that somebody was told of
        assert list(drive.iterdir()) == []

    def test_an_interrupted_put_is_no_put(self, drive, engine, monkeypatch):
        with TensorStore(drive / "store", engine=engine) as store:
            store.put_many({"a": numbered(MIB), "b": numbered(MIB)}).result()
            write = engine.write
            calls = []

            def interrupted(*arguments):
                calls.append(arguments)
                if len(calls) == 2:
                    raise KeyboardInterrupt
                return write(*arguments)

            monkeypatch.setattr(engine, "write", interrupted)
            with pytest.raises(KeyboardInterrupt):
                store.put_many({"a": numbered(MIB, 1), "b": numbered(MIB, 1)})
            monkeypatch.undo()
            with pytest.raises(OSError, match="interrupted by KeyboardInterrupt"):
                store.get("a")
            store.put_many({"a": numbered(MIB, 2), "b": numbered(MIB, 2)}).result()
            assert torch.equal(store.get("b").result(), numbered(MIB, 2))


def file_and_offset(drive, tensor):
    """Where the bytes of this tensor lie: a page on which they begin."""
    for path in sorted(drive.glob(f"*/{DATA_NAME}")):
        data, wanted = path.read_bytes(), bytes_of(tensor)
        for at in range(0, len(data), ALIGNMENT):
            if data.startswith(wanted, at):
                return path, at
    raise AssertionError("no file has these bytes")


class DriveThatLosesWrites:
    """An engine whose fsync fails on command, once, as a kernel's does: what was to be flushed is lost, and the next succeeds."""

    def __init__(self, engine):
        self.engine, self._losing = engine, set()
        self.gate, self.awaited = threading.Event(), threading.Event()
        self.gate.set()

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def lose(self, directory):
        """Have the next fsync of the file in the directory of this name fail."""
        self._losing = {directory}

    def fsync(self, file):
        path = Path(file.path)
        if path.parent.name not in self._losing:
            return self.engine.fsync(file)
        self._losing.discard(path.parent.name)
        return FailedFlush(OSError(errno.EIO, "Input/output error", str(path)), self)


class FailedFlush(FailedTransfer):
    def __init__(self, error, drive):
        super().__init__(error)
        self._drive = drive

    def done(self):
        return self._drive.gate.is_set()

    def exception(self, timeout=None):
        self._drive.awaited.set()
        self._drive.gate.wait(timeout)
        return super().exception()


class TestFlushes:
    """After an fsync that failed nobody knows what is on the drive: the kernel lets go of what it could not write, says so once,
    and the next fsync succeeds."""

    @pytest.fixture
    def losing(self, engine):
        return DriveThatLosesWrites(engine)

    @pytest.fixture
    def store(self, drive, losing):
        with TensorStore(drive / "store", persist=True, engine=losing) as store:
            store.put_many({"kept": numbered(5000), "replaced": numbered(5000, 1), "deleted": numbered(5000, 2)})
            store.commit()
            yield store

    def fail(self, store, losing):
        store.put_many({"replaced": numbered(7000, 3), "new": numbered(7000, 4)}).result()
        store.delete("deleted").result()
        losing.lose("store")
        with pytest.raises(OSError, match="Input/output") as failed:
            store.commit()
        assert (failed.value.errno, Path(failed.value.filename).name) == (errno.EIO, DATA_NAME)

    def test_what_was_put_since_the_last_commit_is_damaged_and_no_commit_publishes_it(self, store, losing, drive):
        self.fail(store, losing)
        for name in ("replaced", "new"):
            for call in (store.get, lambda name: store.get_many(["kept", name]), store.map):
                with pytest.raises(OSError, match=f"'{name}' is damaged") as damaged:
                    call(name)
                assert (damaged.value.errno, damaged.value.filename) == (errno.EIO, str(drive / "store" / DATA_NAME))
        assert torch.equal(store.get("kept").result(), numbered(5000))
        for _ in range(2):
            with pytest.raises(OSError, match=r": replaced, new; put them again, or delete them") as refused:
                store.commit()
            assert (refused.value.errno, refused.value.filename) == (errno.EIO, str(drive / "store" / DATA_NAME))
        store.close()
        with TensorStore(drive / "store", persist=True) as store:
            assert sorted(store.names()) == ["deleted", "kept", "replaced"]
            assert torch.equal(store.get("replaced").result(), numbered(5000, 1))
            assert torch.equal(store.get("deleted").result(), numbered(5000, 2))

    def test_it_is_put_again_or_deleted_and_committed(self, store, losing, drive):
        self.fail(store, losing)
        store.put("replaced", numbered(9000, 5)).result()
        assert torch.equal(store.get("replaced").result(), numbered(9000, 5))
        store.delete("new").result()
        store.commit()
        assert store.used_bytes == (padded(5000) + padded(9000),)
        store.close()
        with TensorStore(drive / "store", persist=True) as store:
            assert sorted(store.names()) == ["kept", "replaced"]
            assert torch.equal(store.get("replaced").result(), numbered(9000, 5))

    def test_a_put_that_fails_too_leaves_it_damaged(self, store, losing, monkeypatch):
        self.fail(store, losing)
        with monkeypatch.context() as patch:
            patch.setattr(losing, "write", lambda *_: FailedTransfer(OSError(errno.EIO, "write", "drive")), raising=False)
            assert store.put("replaced", numbered(5000)).exception().errno == errno.EIO
        with pytest.raises(OSError, match="'replaced' is damaged"):
            store.get("replaced")

    def test_what_was_flushed_before_the_manifest_failed_is_not(self, store, losing, monkeypatch):
        store.put("new", numbered(7000, 4)).result()
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "rename")))
            with pytest.raises(OSError, match="rename"):
                store.commit()
        losing.lose("store")
        with pytest.raises(OSError, match="Input/output"):
            store.commit()
        assert torch.equal(store.get("new").result(), numbered(7000, 4))
        store.commit()

    def test_another_directory_s_tensors_are_not(self, drive, losing):
        with TensorStore([drive / "a", drive / "b"], persist=True, engine=losing) as store:
            store.put("first", numbered(5 * MIB - 1)).result()  # in both
            store.put("second", numbered(MIB, 1)).result()
            store.put("third", numbered(MIB + 1, 2)).result()
            where = file_and_offset(drive, numbered(MIB, 1))[0].parent.name
            assert file_and_offset(drive, numbered(MIB + 1, 2))[0].parent.name != where
            losing.lose(where)
            with pytest.raises(OSError, match="Input/output"):
                store.commit()
            assert torch.equal(store.get("third").result(), numbered(MIB + 1, 2))
            for name in ("first", "second"):
                with pytest.raises(OSError, match="is damaged"):
                    store.get(name)

    def test_what_is_put_and_got_meanwhile_fails_with_it(self, store, losing, gate, faulty):
        store.put("new", numbered(7000, 4)).result()
        losing.lose("store")
        losing.gate.clear()
        commit = concurrent.futures.ThreadPoolExecutor(1)
        with commit:
            committing = commit.submit(store.commit)
            losing.awaited.wait(PATIENCE)
            real, losing.engine = losing.engine, faulty("threads", gate=gate)
            try:
                put, got = store.put("later", numbered(3000)), store.get("new")
                losing.gate.set()
                assert committing.exception(PATIENCE).errno == errno.EIO
                gate.release()
                assert put.exception(PATIENCE).errno == got.exception(PATIENCE).errno == errno.EIO
            finally:
                gate.release()
                losing.gate.set()
                losing.engine = real
        assert "later" not in store

    def test_ctrl_c_in_the_commit_does_not_hide_it(self, store, losing, monkeypatch):
        store.put("new", numbered(7000, 4)).result()
        losing.lose("store")

        def interrupted(*_):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(FailedFlush, "exception", interrupted)
            with pytest.raises(KeyboardInterrupt):
                store.commit()
        with pytest.raises(OSError, match="'new' is damaged"):
            store.get("new")
        with pytest.raises(OSError, match="Input/output"):
            store.commit()
        with pytest.raises(OSError, match=": new; put them again"):
            store.commit()


class TestChecksums:
    @pytest.fixture
    def checked(self, drive, engine):
        with TensorStore([drive / "a", drive / "b"], checksum=True, engine=engine) as store:
            store.put_many({"large": numbered(8 * MIB), "small": numbered(5000, 1), "empty": torch.empty(0)}).result()
            yield store

    def corrupt(self, drive, content):
        path, at = file_and_offset(drive, content)
        flip(path, at + content.nbytes - 1)
        return path, at

    @pytest.mark.parametrize("index", [0, 1])
    def test_a_bit_that_flipped_is_named_with_its_tensor_file_and_place(self, checked, drive, index):
        ends = 4 * MIB * (index + 1)
        path, at = self.corrupt(drive, numbered(8 * MIB)[ends - 4 * MIB : ends])
        until_there = zlib.crc32(bytes_of(numbered(ends)))
        gets = (lambda: checked.get("large"), lambda: checked.get("large", out=torch.empty(MIB, dtype=torch.float64)))
        for get in (*gets, lambda: checked.get_many(["small", "large"])):
            with pytest.raises(CorruptTensor) as found:
                get().result()
            assert (found.value.errno, found.value.filename) == (errno.EBADMSG, str(path))
            assert "'large'" in str(found.value)
            assert f"at offset {at}:" in str(found.value)
            assert f"{until_there:#010x}" in str(found.value)
        self.corrupt(drive, numbered(5000, 1))
        with pytest.raises(CorruptTensor, match="'small'"):
            checked.get("small").result()
        checked.put("large", numbered(8 * MIB)).result()
        assert torch.equal(checked.get("large").result(), numbered(8 * MIB))
        assert checked.info("empty").checksum == 0


class TestSpace:
    def test_a_full_disk_is_told_before_a_byte_is_written(self, small_disk):
        with TensorStore(small_disk.path / "store") as store:
            store.put("there", numbered(8 * MIB)).result()
            free = small_disk.bytes_free()
            for call in (
                lambda: store.reserve(100 * MIB),
                lambda: store.put("there", torch.empty(100 * MIB, dtype=torch.uint8)),
                lambda: store.put_many({str(index): numbered(5 * MIB) for index in range(10)}),
            ):
                with pytest.raises(OSError, match="more bytes wanted") as full:
                    call()
                assert (full.value.errno, full.value.filename) == (errno.ENOSPC, str(small_disk.path / "store"))
            assert store.names() == ["there"]
            assert small_disk.bytes_free() == free
            assert torch.equal(store.get("there").result(), numbered(8 * MIB))
            assert store.used_bytes == (8 * MIB,)

    def test_a_disk_that_is_full_at_the_commit_keeps_the_last_one(self, small_disk):
        with TensorStore(small_disk.path / "store", persist=True) as store:
            store.put("name", numbered(MIB))
            store.commit()
            store.put_many({f"{index:0100d}": torch.tensor(index) for index in range(3000)}).result()
            filler = small_disk / "filler"
            with filler.open("wb") as file, contextlib.suppress(OSError):
                while True:
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, 4096)
            with pytest.raises(OSError, match="No space") as full:
                store.commit()
            assert full.value.errno == errno.ENOSPC
        filler.unlink()
        with TensorStore(small_disk.path / "store", persist=True) as store:
            assert store.names() == ["name"]
            assert torch.equal(store.get("name").result(), numbered(MIB))

    def test_a_file_system_in_memory(self, tmpfs):
        with TensorStore(tmpfs.path / "store", checksum=True) as store:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # that the page cache is used: said once for a file system
                store.put_many({"large": numbered(6 * MIB), "small": numbered(77)}).result()
            assert torch.equal(store.get("large").result(), numbered(6 * MIB))
            assert torch.equal(store.map("small"), numbered(77))
            with pytest.raises(OSError, match="more bytes wanted"):
                store.reserve(100 * MIB)


class TestRemoved:
    def test_the_store_works_on_without_its_directory(self, drive):
        with TensorStore(drive / "store") as store:
            store.put("name", numbered(MIB)).result()
            shutil.rmtree(drive / "store")
            assert torch.equal(store.get("name").result(), numbered(MIB))
            store.put("more", numbered(18 * MIB)).result()  # which takes new space
            assert torch.equal(store.map("more"), numbered(18 * MIB))

    @pytest.mark.parametrize("again", [False, True])
    def test_a_commit_says_that_its_directory_is_gone(self, drive, again):
        with TensorStore([drive / "a", drive / "b"], persist=True) as store:
            store.put("name", torch.ones(3)).result()
            shutil.rmtree(drive / "b")
            if again:
                (drive / "b").mkdir()
            with pytest.raises(FileNotFoundError, match="removed while in use") as gone:
                store.commit()
            assert gone.value.filename == str(drive / "b")

    def test_a_persisted_store_whose_data_were_removed_is_refused(self, drive):
        with TensorStore(drive / "store", persist=True) as store:
            store.put("name", numbered(MIB))
            store.commit()
        os.truncate(drive / "store" / DATA_NAME, MIB // 2)
        for mode in ("persist", "read_only"):
            with pytest.raises(CorruptManifest, match=f"'name': {MIB} bytes at 0 are past the end of"):
                TensorStore(drive / "store", **{mode: True})
        os.unlink(drive / "store" / DATA_NAME)
        with pytest.raises(CorruptManifest, match=r"'name'.*past the end of"):
            TensorStore(drive / "store", persist=True)

    @pytest.mark.parametrize(
        ("tensors", "match"),
        [
            ({"odd": ("float31", (4,), ((0, 0, 16),), None)}, "float31"),
            ({"odd": ("float32", (5,), ((0, 0, 16),), None)}, "20 bytes"),
            ({"odd": ("float32", (4,), ((1, 0, 16),), None)}, "index 1"),
            ({"odd": ("float32", (4,), ((0, 1, 16),), None)}, "multiple of"),
            (
                {"one": ("uint8", (5000,), ((0, 0, 5000),), None), "two": ("uint8", (10,), ((0, 4096, 10),), None)},
                r"'two'.*are taken",
            ),
        ],
        ids=["dtype", "length", "directory", "offset", "overlap"],
    )
    def test_a_manifest_of_what_cannot_be(self, drive, tensors, match):
        with TensorStore(drive / "store", persist=True) as store:
            store.put("name", numbered(MIB))
            store.commit()
        odd = manifest.StoreManifest("store", 1, {name: manifest.StoredTensor(*stored) for name, stored in tensors.items()})
        manifest.publish(drive / "store", odd)
        for _ in range(2):  # the directory is not kept locked
            with pytest.raises(CorruptManifest, match=match):
                TensorStore(drive / "store", persist=True)
        assert manifest.load(drive / "store") == odd


class TestWaiting:
    """Nobody waits for the drive with the store's lock held: who holds another store's lock may wait for this one's."""

    def in_time(self, call):
        with concurrent.futures.ThreadPoolExecutor(1) as other:
            return other.submit(call).result(PATIENCE)

    @pytest.mark.parametrize("waits", ["put", "commit"])
    def test_others_use_the_store_while_it_waits_for_the_drive(self, drive, faulty, gate, waits):
        engine = faulty("threads", gate=gate, block_size=MIB)
        tensors = {str(index): numbered(64 << 10, index) for index in range(400)}
        with TensorStore(drive / "store", persist=True, engine=engine) as store:
            gate.release()
            store.put("name", numbered(MIB)).result()
            gate.hold()
            calls = [lambda: store.put_many(tensors)] if waits == "put" else [store.commit, store.commit]
            late = threading.Timer(PATIENCE / 2, gate.release)  # or a store that does not let others in would hang the test
            late.start()
            with concurrent.futures.ThreadPoolExecutor(2) as threads:
                try:
                    waiting = [threads.submit(call) for call in calls]
                    time.sleep(0.2)
                    assert "name" in self.in_time(store.names)
                    other = self.in_time(lambda: store.put("other", numbered(MIB)))
                    assert not other.done()
                    assert late.is_alive(), "they waited until the drive went on"
                finally:
                    late.cancel()
                    gate.release()
                for each in waiting:
                    each.result(PATIENCE)
            assert waits == "commit" or torch.equal(store.get("399").result(), tensors["399"])
            assert torch.equal(store.get("other").result(), numbered(MIB))
        with TensorStore(drive / "store", persist=True) as store:
            assert store.names() == (["name"] if waits == "commit" else [])

    @pytest.mark.parametrize("grow", ["put", "reserve"])
    def test_others_use_the_store_while_a_file_grows(self, drive, engine, monkeypatch, grow):
        """And another one, and the file, when it has grown."""
        begun, may_end = threading.Event(), threading.Event()
        real = data_file.preallocate

        def preallocate(*arguments):
            if not begun.is_set():
                begun.set()
                may_end.wait(PATIENCE / 2)  # or a store that does not let others in would hang the test
            return real(*arguments)

        with (
            TensorStore(drive / "one", engine=engine) as store,
            TensorStore(drive / "two", engine=engine) as other,
        ):
            many = {str(index): numbered(5000, index) for index in range(100)}
            for each in (store, other):
                each.put_many(many).result()
            monkeypatch.setattr(data_file, "preallocate", preallocate)
            with concurrent.futures.ThreadPoolExecutor(1) as thread:
                try:
                    growing = thread.submit(
                        lambda: store.put("large", numbered(20 * MIB)).result() if grow == "put" else store.reserve(40 * MIB)
                    )
                    assert begun.wait(PATIENCE)
                    for each in (store, other):
                        assert torch.equal(self.in_time(lambda each=each: each.get("7").result()), many["7"])
                        self.in_time(lambda each=each: each.put_many({"7": many["8"], "new": many["9"]}).result())
                        self.in_time(lambda each=each: each.delete("8").result())
                        assert self.in_time(lambda each=each: "large" not in each and len(each) == 100)
                    self.in_time(lambda: other.put("large", numbered(20 * MIB)).result())
                    assert not growing.done(), "they waited until the file had grown"
                finally:
                    may_end.set()
                growing.result(PATIENCE)
            assert store.allocated_bytes >= (20 if grow == "put" else 40) * MIB
            assert grow == "reserve" or torch.equal(store.get("large").result(), numbered(20 * MIB))
            assert torch.equal(store.get("7").result(), many["8"])
            assert torch.equal(store.get("new").result(), many["9"])


class TestSystemErrors:
    """They name the file that they are about, and leave nothing locked."""

    def failing(self, monkeypatch, function, wanted=lambda descriptor: True):
        real = getattr(os, function)

        def fail(descriptor, *arguments):
            if wanted(descriptor):
                raise OSError(errno.EIO, "Input/output error")
            return real(descriptor, *arguments)

        monkeypatch.setattr(os, function, fail)

    def test_a_close_that_fails_unlocks_the_directories(self, drive, monkeypatch):
        for _ in range(3):
            store = TensorStore(drive / "store", persist=True)
            store.put("name", numbered(MIB))
            store.commit()
            with monkeypatch.context() as patch:
                self.failing(patch, "ftruncate")
                with pytest.raises(OSError, match="Input/output") as failed:
                    store.close()
            assert (failed.value.errno, failed.value.filename) == (errno.EIO, str(drive / "store" / DATA_NAME))
            store.close()
        with TensorStore(drive / "store", persist=True) as store:
            assert torch.equal(store.get("name").result(), numbered(MIB))

    @pytest.mark.parametrize("call", ["open", "stat", "ftruncate"])
    def test_a_directory_that_cannot_be_taken_is_not_kept_locked(self, drive, monkeypatch, call):
        class Failing:
            def __new__(cls, path, mode):
                raise OSError(errno.EIO, "Input/output error")  # as its fstat has it

        with monkeypatch.context() as patch:
            if call == "open":
                patch.setattr(io, "FileIO", Failing)
            elif call == "stat":
                self.lasting(patch, drive / "store" / LOCK_NAME)
            else:
                self.failing(patch, "ftruncate")
            with pytest.raises(OSError, match="Input/output") as failed:
                TensorStore(drive / "store")
        assert (failed.value.errno, failed.value.filename) == (errno.EIO, str(drive / "store" / LOCK_NAME))
        TensorStore(drive / "store").close()  # the error, and what its traceback keeps, is still there

    @pytest.mark.parametrize(("directory", "match"), [(False, "Input/output"), (True, "it was replaced, but")])
    def test_a_manifest_that_cannot_be_flushed(self, drive, monkeypatch, directory, match):
        with TensorStore(drive / "store", persist=True) as store:
            store.put("name", numbered(MIB))
            with monkeypatch.context() as patch:
                self.failing(patch, "fsync", lambda descriptor: stat.S_ISDIR(os.fstat(descriptor).st_mode) == directory)
                with pytest.raises(OSError, match=match) as failed:
                    store.commit()
            assert (failed.value.errno, failed.value.filename) == (errno.EIO, str(drive / "store" / manifest.MANIFEST_NAME))
            assert (manifest.load(drive / "store") is not None) == directory
            store.put("name", numbered(MIB, 1))
            store.commit()
        with TensorStore(drive / "store", persist=True) as store:
            assert torch.equal(store.get("name").result(), numbered(MIB, 1))

    def lasting(self, monkeypatch, path):
        """The drive says of the path nothing but that it failed."""
        real = os.stat

        def fail(given, *arguments, **options):
            if str(given) == str(path):
                raise OSError(errno.EIO, "Input/output error", str(path))
            return real(given, *arguments, **options)

        monkeypatch.setattr(os, "stat", fail)

    def test_a_file_that_was_cut_off_is_not_mapped(self, drive):
        with TensorStore(drive / "store") as store:
            store.put("name", numbered(MIB)).result()
            os.truncate(drive / "store" / DATA_NAME, 4096)
            with pytest.raises(OSError, match="cut off at byte 4096") as failed:
                store.map("name")
            assert (failed.value.errno, failed.value.filename) == (errno.EBADMSG, str(drive / "store" / DATA_NAME))


WRITER = """
# Tensor i of commit n holds n everywhere; every commit replaces, adds and deletes.
store = TensorStore([directory + "/a", directory + "/b"], persist=True, checksum=True)
n = int(store.get("n").result()) if "n" in store else 0
while True:
    n += 1
    store.put("n", torch.tensor(n))
    store.put_many({f"small {i}": torch.full((1000 + i,), n) for i in range(n % 7, 20)})
    store.put("large", torch.full((700_000,), n))
    for name in [name for name in store.names() if name.startswith("only ")]:
        store.delete(name)
    store.put(f"only {n}", torch.full((9000,), n))
    store.commit()
    print(n, flush=True)
"""


@pytest.mark.slow
def test_a_crash_at_any_point_leaves_the_last_commit(drive, interpreters):
    """A process is killed at random points of putting and committing; what is opened then is one commit, whole."""
    random.seed(5)
    committed = 0
    for crash in range(28):
        child = interpreters.start(program(drive, WRITER))
        if crash % 4:
            interpreters.wait_for("\n")  # else it is killed before or amid its first commit
        time.sleep(random.uniform(0.0, 0.1))
        os.kill(child, signal.SIGKILL)
        printed = interpreters.wait(child).stdout.split()
        with TensorStore([drive / "a", drive / "b"], persist=True, checksum=True) as store:
            if "n" not in store:
                assert store.names() == []
                assert not printed
                continue
            n = int(store.get("n").result())
            assert n in (max([committed, *map(int, printed)]), max([committed, *map(int, printed)]) + 1)
            committed = n
            tensors = store.get_many(store.names()).result()
            assert [name for name in tensors if name.startswith("only ")] == [f"only {n}"]
            assert tensors["large"].eq(n).all()
            assert all(tensors[f"small {index}"].eq(n).all() for index in range(n % 7, 20))
            assert all((tensor == tensor.flatten()[0]).all() for tensor in tensors.values())
    assert committed >= 21


class TestUseByMany:
    def test_a_finalizer_in_the_midst_of_a_change_is_refused(self, drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with TensorStore(drive / "store") as store:
            store.put_many({str(index): torch.full((5000,), index) for index in range(4)}).result()
            refused = []

            def finalizer() -> None:
                uses: list[Callable[[], object]] = [lambda: store.delete("0"), lambda: store.put("0", torch.ones(1)), store.names]
                for use in (*uses, store.close):
                    try:
                        use()
                    except RuntimeError as error:
                        refused.append(str(error))

            allocate = StoreAllocator.allocate

            def allocating(space: StoreAllocator, sizes: Any) -> Any:
                placed = allocate(space, sizes)
                finalizer()  # the garbage collector may run one at any such point
                return placed

            monkeypatch.setattr(StoreAllocator, "allocate", allocating)
            store.put_many({f"new {index}": torch.full((5000,), 10 + index) for index in range(4)}).result()
            monkeypatch.undo()
            assert len(refused) == 4
            store.delete("0").result()
            store.put("newest", torch.full((5000,), 99)).result()
            assert [int(store.get(f"new {index}").result()[0]) for index in range(4)] == [10, 11, 12, 13]
            assert int(store.get("newest").result()[0]) == 99
