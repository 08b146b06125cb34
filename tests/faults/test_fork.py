"""A forked child has the parent's memory and none of its threads: it gets an error, never a hang."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

# `child(function)` runs it in a fork and returns what it printed; more than a second is a hang.
HARNESS = """
import os, select, signal, threading, time, traceback, deepnvme
def child(function, seconds=2.0):
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        try:
            text = str(function())
        except BaseException as error:
            text = type(error).__name__ + ": " + str(error)
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    poll = select.poll()  # not select.select, which knows no descriptor above 1023
    poll.register(read, select.POLLIN)
    ready = poll.poll(seconds * 1000)
    text = os.read(read, 4096).decode() if ready else "hangs"
    os.close(read)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return text
path = {path!r}
tensor = torch.ones(10000)
"""

ENGINE_CALLS = {
    "read": "engine.read(tensor, path)",
    "write": "engine.write(tensor, path)",
    "write to an open file": "engine.write(tensor, file)",
    "read_many": "engine.read_many([tensor], path, [0])",
    "write_many": "engine.write_many([tensor] * 3, [path] * 3)",
    "gather": "engine.gather(path, torch.arange(2), tensor.view(2, -1))",
    "fsync": "engine.fsync(path)",
    "open": "engine.open(path)",
    "stats": "engine.stats()",
    "closed": "engine.closed",
    "cancel": "engine.cancel()",
    "close": "engine.close()",
    "close with a timeout": "engine.close(1)",
    "with": "engine.__exit__(None, None, None)",
}

HANDLE_CALLS = {
    "sync_pread": "handle.sync_pread(tensor, path)",
    "sync_pwrite": "handle.sync_pwrite(tensor, path)",
    "async_pread": "handle.async_pread(tensor, path)",
    "async_pwrite": "handle.async_pwrite(tensor, path)",
    "async_pread_many": "handle.async_pread_many([tensor], [path])",
    "async_pwrite_many": "handle.async_pwrite_many([tensor], [path])",
    "read": "handle.read(tensor, path, False)",
    "write": "handle.write(tensor, path, False)",
    "pread": "handle.pread(tensor, path, False, True)",
    "pwrite": "handle.pwrite(tensor, path, False, True)",
    "async_pwrite to a descriptor": "handle.async_pwrite(tensor, descriptor)",
    "wait": "handle.wait()",
    "stats": "handle.stats()",
}

ERROR = "RuntimeError: this engine belongs to the parent process"


@pytest.fixture
def harness(drive: Path) -> str:
    (drive / "file").write_bytes(bytes(40_000))
    return HARNESS.format(path=str(drive / "file"))


@pytest.fixture(params=["idle", "busy"])
def state(request: pytest.FixtureRequest) -> str:
    """What the parent is doing at the fork: nothing, or holding the engine's locks as often as can be."""
    if request.param == "idle":
        return ""
    return """
stop = False
def work():
    while not stop:
        engine.write(tensor, file)
        engine.stats()
thread = threading.Thread(target=work, daemon=True)
thread.start()
time.sleep(0.05)
"""


def test_every_method_of_an_inherited_engine_raises(interpreters: Any, harness: str, state: str) -> None:
    interpreters.run(harness + f"""
engine = deepnvme.Engine()
file = engine.open(path, "r+")
{state}
for name, call in {ENGINE_CALLS!r}.items():
    answer = child(lambda: eval(call))
    assert answer.startswith({ERROR!r}), name + ": " + answer
stop = True
""").check()  # fmt: skip


def test_every_method_of_an_inherited_handle_raises(interpreters: Any, harness: str) -> None:
    interpreters.run(harness + f"""
handle = op.aio_handle()
descriptor = os.open(path, os.O_RDWR)
handle.async_pwrite(tensor, path)
for name, call in {HANDLE_CALLS!r}.items():
    answer = child(lambda: eval(call))
    assert answer.startswith({ERROR!r}), name + ": " + answer
assert handle.wait() == 1
""").check()  # fmt: skip


def test_a_streamed_model_and_offloaded_experts_refuse_a_call(interpreters: Any, drive: Path) -> None:
    interpreters.run(HARNESS.format(path=str(drive / "model.safetensors")) + """
from safetensors.torch import save_file
from deepnvme.streaming import offload_experts, stream
torch.set_num_threads(2)
layer = torch.nn.Module()
layer.experts = torch.nn.ModuleList(torch.nn.Linear(512, 512) for _ in range(2))
layer.forward = lambda hidden: layer.experts[0](hidden)
model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512))
for each, file in ((model, path), (layer, path + ".experts.safetensors")):
    save_file(each.state_dict(), file)
hidden = torch.ones(512, 512)
with torch.inference_mode(), stream(model, path, memory_budget="1GB"), offload_experts(layer, file):
    for module in (model, layer):
        module(hidden)  # from now on all weights that it uses are in memory, and torch has threads
        answer = child(lambda: module(hidden), seconds=20)
        assert answer.startswith("RuntimeError") and answer.endswith("load the model here"), answer
        module(hidden)
""").check()  # fmt: skip


@pytest.mark.parametrize("write", ["engine.write(tensor, path)", "engine.write_many([tensor], path, [0])"])
@pytest.mark.parametrize(
    "call", ["future.result()", "future.exception()", "future.result(3600)", "future.cancel()", "future.done()"]
)
def test_what_is_asked_of_an_inherited_future_raises(interpreters: Any, harness: str, write: str, call: str) -> None:
    """It would never end: the thread that would end it is in the parent."""
    interpreters.run(harness + f"""
gate = testing.Gate()
gate.hold()
engine = testing.instant_engine(gate, 4096, 32, 1)
future = {write}
answer = child(lambda: {call})
gate.release()
assert answer.startswith("RuntimeError"), answer
assert future.result() == 40000
""").check()  # fmt: skip


@pytest.mark.parametrize("made", ["engine = deepnvme.Engine()", "engine = op.aio_handle()"])
def test_dropping_what_was_inherited_does_not_hang(interpreters: Any, harness: str, made: str) -> None:
    interpreters.run(harness + f"""
import gc
{made}
getattr(engine, "async_pwrite", getattr(engine, "write", None))(tensor, path)
def drop():
    global engine
    del engine
    gc.collect()
    return "dropped"
assert child(drop) == "dropped"
""").check()  # fmt: skip


@pytest.mark.parametrize("backend", ["io_uring", "libaio", "threads"])
def test_a_child_can_make_its_own_engine(interpreters: Any, harness: str, backends: list[Any], backend: Any, drive: Path) -> None:
    if backend not in backends:
        pytest.skip(f"needs {backend}")
    interpreters.run(harness + f"""
engine = deepnvme.Engine({backend!r})
engine.write(tensor, path).result()
def own():
    with deepnvme.Engine({backend!r}) as engine:
        engine.write(tensor * 2, path + ".child").result()
        return engine.read(torch.empty(10000), path + ".child").result()
assert child(own) == "40000"
assert engine.read(torch.empty(10000), path).result() == 40000
""").check()  # fmt: skip
    assert (drive / "file.child").stat().st_size == 40_000


def test_the_parent_does_not_notice_its_children(interpreters: Any, harness: str) -> None:
    interpreters.run(harness + """
engine = deepnvme.Engine(num_threads=2)
tensors = [torch.full((250000,), float(index)) for index in range(10)]
for round_ in range(10):
    futures = [engine.write(tensor, path + str(index)) for index, tensor in enumerate(tensors)]
    assert child(lambda: "born") == "born"
    assert [future.result() for future in futures] == [1000000] * 10
target = torch.empty(250000)
for index, tensor in enumerate(tensors):
    engine.read(target, path + str(index)).result()
    assert target.equal(tensor)
""").check()  # fmt: skip


def test_a_child_leaves_as_any_interpreter_does(interpreters: Any, harness: str) -> None:
    """Through the exit handlers, not os._exit, with requests of its parent in flight."""
    interpreters.run(harness + """
engine, handle = deepnvme.Engine(), op.aio_handle()
for index in range(20):
    engine.write(tensor, path + str(index))
    handle.async_pwrite(tensor, path + str(index))
pid = os.fork()
if pid == 0:
    sys.exit(7)
for _ in range(4000):
    done, status = os.waitpid(pid, os.WNOHANG)
    if done:
        break
    time.sleep(0.05)
else:
    os.kill(pid, signal.SIGKILL)
    raise AssertionError("the child hangs at its exit")
assert os.waitstatus_to_exitcode(status) == 7
assert handle.wait() == 20
""").check()  # fmt: skip


def test_pinned_memory_is_readable_in_a_child(interpreters: Any, harness: str) -> None:
    interpreters.run(harness + """
engine = deepnvme.Engine()
pinned = engine.empty_pinned(10000)
pinned.fill_(3)
assert child(lambda: (op.is_pinned(pinned), float(pinned.sum()))) == "(True, 30000.0)"
""").check()  # fmt: skip
