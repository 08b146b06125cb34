"""A store that several want at a time is built by one of them."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import pytest
from torch import nn

from deepnvme.files.directory_lock import DirectoryLock
from deepnvme.streaming import WeightStore
from deepnvme.streaming.weights import build_once
from deepnvme.streaming.weights.build_once import BUILDING, opened_or_built
from deepnvme.swap import StoreLocked, TensorStore

from ...support.interpreters import Interpreters
from ...support.patience import PATIENCE, until

ORIGIN = {"checkpoint": "a"}


def build(where: Path) -> WeightStore:
    return WeightStore.build(nn.Linear(8, 8), where, origin=json.dumps(ORIGIN))


def never(_: Path) -> WeightStore:
    raise AssertionError("it is there already")


def test_one_that_builds_for_too_long_is_named(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_once, "BUILD_WAIT_SECONDS", 0.1)
    other = DirectoryLock(drive / BUILDING)
    with pytest.raises(StoreLocked, match=f"waited 0 s for .*{os.getpid()}.* to build the store") as late:
        opened_or_built([drive], ORIGIN, never)
    assert late.value.filename == str(drive)
    other.release()


def test_a_directory_that_somebody_has_for_something_else_is_not_waited_for(drive: Path) -> None:
    with TensorStore(drive, persist=True), pytest.raises(StoreLocked, match=str(os.getpid())):
        opened_or_built([drive], ORIGIN, lambda _: build(drive))
    opened_or_built([drive], ORIGIN, lambda _: build(drive)).close()


@pytest.mark.parametrize("origin", ["by hand", "[" * 60_000, "[1]"])
def test_a_store_of_somebody_elses_origin_is_refused(drive: Path, origin: str) -> None:
    WeightStore.build(nn.Linear(8, 8), drive, origin=origin).close()
    with pytest.raises(ValueError, match=f"'{drive}' has the store of another checkpoint") as refused:
        opened_or_built([drive], ORIGIN, never)
    assert len(str(refused.value)) < 1000


def test_a_build_that_fails_leaves_nothing_and_the_next_one_builds(drive: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        opened_or_built([drive / "store"], ORIGIN, lambda _: 1 / 0)  # type: ignore[arg-type, return-value]
    assert not any(drive.iterdir())
    opened_or_built([drive / "store"], ORIGIN, lambda _: build(drive / "store")).close()


def test_whoever_waits_says_for_whom_and_opens_what_was_built(drive: Path, caplog: pytest.LogCaptureFixture) -> None:
    building = threading.Event()

    def slowly(_: Path) -> WeightStore:
        building.set()
        until(lambda: caplog.records)  # the other one waits
        return build(drive)

    first = threading.Thread(target=lambda: opened_or_built([drive], ORIGIN, slowly).close())
    first.start()
    assert building.wait(PATIENCE)
    with opened_or_built([drive], ORIGIN, never) as store:
        assert store.origin == json.dumps(ORIGIN)
    first.join()
    (said,) = caplog.messages
    assert str(drive) in said
    assert str(os.getpid()) in said
    assert not (drive / BUILDING).exists()


def test_of_processes_one_builds(drive: Path, interpreters: Interpreters) -> None:
    interpreters.run(
        f"""
        import json, logging, os, time
        from pathlib import Path
        from torch import nn
        from deepnvme.streaming import WeightStore
        from deepnvme.streaming.weights.build_once import opened_or_built

        logging.disable()
        drive = Path({str(drive)!r})

        def build(directory):
            with open(drive / "builders", "a") as file:
                file.write(str(os.getpid()) + chr(10))
            time.sleep(0.2)
            return WeightStore.build(nn.Linear(8, 8), drive / "store", origin=json.dumps({ORIGIN}))

        children = []
        for _ in range(3):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    with opened_or_built([drive / "store"], {ORIGIN}, build) as store:
                        store.verify()
                        code = 0
                finally:
                    os._exit(code)
            children.append(child)
        for child in children:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        """
    ).check()
    assert len((drive / "builders").read_text().split()) == 1


def test_a_builder_that_is_killed_is_succeeded(drive: Path, interpreters: Interpreters) -> None:
    child = interpreters.start(
        f"""
        import time
        from pathlib import Path
        from deepnvme.streaming.weights.build_once import opened_or_built

        def build(directory):
            (directory / "half").touch()
            print("builds", flush=True)
            time.sleep(3600)

        opened_or_built([Path({str(drive)!r})], {ORIGIN}, build)
        """
    )
    interpreters.wait_for("builds")
    threading.Timer(0.2, os.kill, (child, signal.SIGKILL)).start()

    def succeed(directory: Path) -> WeightStore:
        assert (directory / "half").exists(), "for the next one to remove"
        return build(drive)

    with opened_or_built([drive], ORIGIN, succeed) as store:
        assert list(store.weights) == ["weight", "bias"]
    assert interpreters.wait(child).returncode == -signal.SIGKILL
