"""A persisted store that several have open, to be read."""

from __future__ import annotations

import errno
import io
import os
import signal

import pytest
import torch

from deepnvme.store.data_file import DATA_NAME
from deepnvme.store.manifest import MANIFEST_NAME
from deepnvme.swap import StoreLocked, TensorStore

from ..support.memory import numbered

READER = """
import os, sys, time
from deepnvme.swap import TensorStore
store = TensorStore({path!r}, read_only=True)
print("reads", int(store.get("there").result().sum()), flush=True)
{then}
"""


@pytest.fixture
def persisted(drive, engine):
    with TensorStore(drive / "store", persist=True, engine=engine) as store:
        store.put("there", torch.arange(10_000)).result()
        store.put("empty", torch.empty(0)).result()
        store.commit()
    return drive / "store"


def test_writing_is_refused_and_nothing_is_changed(persisted, engine):
    before = {path.name: path.read_bytes() for path in persisted.iterdir()}
    with TensorStore(persisted, read_only=True, engine=engine) as store:
        attempts = [
            lambda: store.put("there", torch.zeros(3)),
            lambda: store.put_many({}),
            lambda: store.delete("there"),
            lambda: store.reserve(1 << 20),
            store.commit,
        ]
        for attempt in attempts:
            with pytest.raises(io.UnsupportedOperation, match="persist=True"):
                attempt()
        assert torch.equal(store.get("there").result(), torch.arange(10_000))
        assert torch.equal(store.map("there"), torch.arange(10_000))
        assert {path.name: path.read_bytes() for path in persisted.iterdir()} == before
    assert {path.name: path.read_bytes() for path in persisted.iterdir()} == before


def test_a_place_without_a_store_is_refused_and_nothing_is_made(drive):
    with pytest.raises(FileNotFoundError, match="data file is missing") as refused:
        TensorStore(drive / "none", read_only=True)
    assert refused.value.filename == str(drive / "none")
    assert list(drive.iterdir()) == []


def test_what_was_never_committed_is_refused(drive, engine, interpreters):
    body = "import os, torch; from deepnvme.swap import TensorStore\n"
    body += f"store = TensorStore({str(drive)!r}, persist=True); store.put('there', torch.ones(3)).result(); os._exit(9)"
    assert interpreters.run(body).returncode == 9
    with pytest.raises(FileNotFoundError, match="ever committed"):
        TensorStore(drive, read_only=True, engine=engine)


def test_a_writer_is_kept_out_by_readers_and_they_by_a_writer(persisted, engine):
    with TensorStore(persisted, read_only=True, engine=engine):
        with pytest.raises(StoreLocked, match="open for reading") as refused:
            TensorStore(persisted, persist=True, engine=engine)
        assert (refused.value.errno, refused.value.filename) == (errno.EBUSY, str(persisted))
    with TensorStore(persisted, persist=True, engine=engine) as writer:
        with pytest.raises(StoreLocked, match=rf"the TensorStore of this process \({os.getpid()}\)"):
            TensorStore(persisted, read_only=True, engine=engine)
        writer.put("more", torch.ones(3)).result()
        writer.commit()
    with TensorStore(persisted, read_only=True, engine=engine) as reader:
        assert reader.names() == ["there", "empty", "more"]


def test_a_reader_that_was_killed_keeps_nobody_out(persisted, engine, interpreters):
    child = interpreters.start(READER.format(path=str(persisted), then="time.sleep(3600)"))
    try:
        interpreters.wait_for("reads")
        with pytest.raises(StoreLocked, match="open for reading"):
            TensorStore(persisted, persist=True, engine=engine)
    finally:
        os.kill(child, signal.SIGKILL)
        interpreters.wait(child)
    TensorStore(persisted, persist=True, engine=engine).close()


def test_several_directories_are_found_in_any_order(drive, engine):
    places = [drive / "a", drive / "b"]
    tensor = numbered(9 << 20)
    with TensorStore(places, persist=True, engine=engine) as store:
        store.put("there", tensor).result()
        store.commit()
    with TensorStore(places[::-1], read_only=True, engine=engine) as store:
        assert torch.equal(store.get("there").result(), tensor)
    with pytest.raises(ValueError, match="has 2 directories, got 1"):
        TensorStore(places[0], read_only=True, engine=engine)
    (places[1] / DATA_NAME).unlink()
    with pytest.raises(FileNotFoundError, match="not all of it") as refused:
        TensorStore(places, read_only=True, engine=engine)
    assert refused.value.filename == str(places[1])
    assert (places[0] / MANIFEST_NAME).exists()


def test_a_directory_that_nobody_may_write_to_is_read(persisted, interpreters):
    for path in (*persisted.iterdir(), persisted):
        path.chmod(0o555 if path.is_dir() else 0o444)
    as_nobody = "import os, deepnvme.store\nif os.geteuid() == 0: os.setgid(65534); os.setuid(65534)\n"
    assert interpreters.run(as_nobody + READER.format(path=str(persisted), then="")).check() == "reads 49995000\n"
