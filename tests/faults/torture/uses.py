"""What users do with the package, at random, on a drive that fails; and what has to be there after each failure."""

from __future__ import annotations

import contextlib
import copy
import itertools
import random as randoms
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException, FileSystemReader

import deepnvme
from deepnvme.checkpoint import NVMeReader, NVMeWriter, verify
from deepnvme.streaming import WeightStore, stream
from deepnvme.swap import TensorStore

from ...support.activations import Training
from . import Torn, Wrong
from .parts.fuse_faults import Failed, FailingDrive

Tensors = Mapping[str, torch.Tensor]
_LARGEST = 300_000
"""Bytes of a tensor."""


def same(left: Any, right: Any) -> bool:
    """Whether two objects of dictionaries, tensors and what has a value of its own are the same, bit for bit."""
    if isinstance(left, torch.Tensor):
        return (
            isinstance(right, torch.Tensor)
            and left.dtype == right.dtype
            and left.shape == right.shape
            and torch.equal(left.reshape(-1).contiguous().view(torch.uint8), right.reshape(-1).contiguous().view(torch.uint8))
        )
    if isinstance(left, Mapping):
        return isinstance(right, Mapping) and left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return isinstance(right, type(left)) and len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def _bytes(random: randoms.Random, nbytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(random.randrange(1 << 31))
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def _tensor(random: randoms.Random) -> torch.Tensor:
    nbytes = random.choice((4, 4096, 65536, random.randrange(1, _LARGEST) // 4 * 4 + 4))
    tensor = _bytes(random, nbytes)
    return tensor.view(torch.int32) if random.random() < 0.3 else tensor


def _state(random: randoms.Random) -> dict[str, Any]:
    """What is saved: of a few tensors, now and then of one that needs several chunks."""
    state: dict[str, Any] = {f"layer{index}": _tensor(random) for index in range(random.randrange(1, 6))}
    if random.random() < 0.1:
        state["large"] = _bytes(random, 20 << 20)
    state["step"] = random.randrange(1000)
    return state


# The engine. ----------------------------------------------------------------------------------------------------------------


class _File:
    """What a file has to hold: ``known`` says of which bytes that is known."""

    def __init__(self) -> None:
        self.content = torch.zeros(0, dtype=torch.uint8)
        self.known = torch.zeros(0, dtype=torch.bool)

    def write(self, offset: int, data: torch.Tensor, done: bool) -> None:
        end = offset + len(data)
        if done and end > len(self.content):
            more = end - len(self.content)
            self.content = torch.cat([self.content, torch.zeros(more, dtype=torch.uint8)])
            self.known = torch.cat([self.known, torch.zeros(more, dtype=torch.bool)])
        end = min(end, len(self.content))
        if end > offset:
            self.content[offset:end] = data[: end - offset]
            self.known[offset:end] = done


def transfers(drive: FailingDrive, random: randoms.Random) -> None:
    """Engine.write, read and fsync, by path and by file."""
    files: dict[str, _File] = {}
    unsynced: dict[str, list[tuple[int, int]]] = {}
    backend = random.choice(("io_uring", "threads"))
    with deepnvme.Engine(
        cast(Any, backend), block_size=random.choice((4096, 65536, 1 << 20)), queue_depth=random.choice((2, 32)),
        num_threads=random.choice((1, 2)),
    ) as engine, contextlib.ExitStack() as opened:  # fmt: skip
        handles: dict[str, Any] = {}
        for _ in range(random.randrange(5, 25)):
            name = random.choice("abc")
            path = drive.path / name
            file = files.setdefault(name, _File())
            target = handles.get(name, str(path))
            action = random.choice(("write", "write", "write", "read", "read", "fsync", "open"))
            if action == "open" and name not in handles and len(file.content):
                made = drive.tries(f"open {name}", lambda path=path: engine.open(path, "rw"), path)
                if not isinstance(made, Failed):
                    handles[name] = opened.enter_context(made)
            elif action == "write":
                data = _bytes(random, random.choice((1, 4096, random.randrange(1, _LARGEST))))
                offset = random.choice((0, 4096, random.randrange(len(file.content) + 1)))
                what = f"write {len(data)} bytes at {offset} of {name}{' by file' if name in handles else ''}"
                done = drive.tries(what, lambda given=(data, target, offset): engine.write(*given).result(), path)
                file.write(offset, data, not isinstance(done, Failed))
                unsynced.setdefault(name, []).append((offset, offset + len(data)))
                if drive.mode == "writeback" and isinstance(done, Failed):
                    for begin, end in unsynced.pop(name):  # its pages may be others' too
                        file.known[begin:end] = False
            elif action == "read" and len(file.content):
                begin = random.randrange(len(file.content))
                out = torch.zeros(random.randrange(1, len(file.content) - begin + 1), dtype=torch.uint8)
                what = f"read {len(out)} bytes at {begin} of {name}"
                done = drive.tries(what, lambda given=(out, target, begin): engine.read(*given).result(), path)
                span = slice(begin, begin + len(out))
                if not isinstance(done, Failed) and not torch.equal(out[file.known[span]], file.content[span][file.known[span]]):
                    raise Wrong(f"read other bytes than were written to {name}")
            elif action == "fsync" and len(file.content):
                done = drive.tries(f"fsync {name}", lambda target=target: engine.fsync(target).result(), path)
                ranges = unsynced.pop(name, [])
                if isinstance(done, Failed):
                    for begin, end in ranges:  # what fsync failed for, no promise is made of
                        file.known[begin:end] = False
        for name, file in files.items():
            out = torch.zeros(len(file.content), dtype=torch.uint8)
            if len(out):
                drive.history.append(f"at the end: read {name}")
                engine.read(out, drive.path / name).result()
                if not torch.equal(out[file.known], file.content[file.known]):
                    raise Wrong(f"{name} does not hold at the end what was written")


# The store. -----------------------------------------------------------------------------------------------------------------


def store(drive: FailingDrive, random: randoms.Random) -> None:
    """TensorStore that persists: put, get, delete, commit, close, open."""
    directories = [drive.path / name for name in random.choice((["one"], ["one", "two"]))]
    checksum = random.random() < 0.3
    committed: list[dict[str, torch.Tensor]] = [{}]  # each may be what the last commit has left
    begun = False

    def open_store() -> TensorStore:
        return TensorStore(directories, persist=True, checksum=checksum)

    for _ in range(random.randrange(1, 4)):
        made = drive.tries("open the store", open_store, drive.path)
        if isinstance(made, Failed):
            drive.history.append("again, healed")
            made = open_store()
        opened = made
        try:
            current = _found(opened, committed) if begun or len(opened) else {}
            committed = [dict(current)]
            for _ in range(random.randrange(0, 15)):
                begun |= _use_store(drive, random, opened, current, committed)
            for name in current:
                if not same(opened.get(name).result(), current[name]):
                    raise Wrong(f"{name} in the store has other bytes than were put")
        except BaseException:
            with contextlib.suppress(OSError):
                opened.close()
            raise
        if isinstance(drive.tries("close the store", opened.close, drive.path), Failed):
            drive.history.append("again, healed")
            opened.close()
    with TensorStore(directories, persist=True, checksum=checksum) as last:
        if begun or len(last):
            _found(last, committed)


def _found(opened: TensorStore, candidates: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    there = {name: opened.get(name).result() for name in opened.names()}
    for candidate in candidates:
        if same(there, candidate):
            return dict(candidate)
    raise Wrong(f"the store holds {sorted(there)}, not what was committed: {[sorted(each) for each in candidates]}")


def _use_store(
    drive: FailingDrive, random: randoms.Random, opened: TensorStore, current: dict[str, torch.Tensor],
    committed: list[dict[str, torch.Tensor]],
) -> bool:  # fmt: skip
    """Whether a commit was tried."""
    name = random.choice("abcdefgh")
    action = random.choice(("put", "put", "put", "put_many", "get", "get", "get_many", "delete", "commit", "reserve"))
    if action == "put":
        tensor = _tensor(random)
        if not isinstance(drive.tries(f"put {name}", lambda: opened.put(name, tensor).result(), drive.path), Failed):
            current[name] = tensor
    elif action == "put_many":
        tensors = {each: _tensor(random) for each in random.sample("abcdefgh", 3)}
        if isinstance(drive.tries(f"put {list(tensors)}", lambda: opened.put_many(tensors).result(), drive.path), Failed):
            for each, tensor in tensors.items():  # each by itself: a name whose own transfer was well is put
                found = opened.get(each).result() if each in opened else None
                old = current.get(each)
                if found is not None and same(found, tensor):
                    current[each] = tensor
                elif not (found is old is None or (found is not None and old is not None and same(found, old))):
                    raise Wrong(f"after a put that failed, {each} is neither old nor new")
        else:
            current.update(tensors)
    elif action == "get" and name in current:
        found = drive.tries(f"get {name}", lambda: opened.get(name).result(), drive.path)
        if not isinstance(found, Failed) and not same(found, current[name]):
            raise Wrong(f"{name} was got with other bytes than were put")
    elif action == "get_many" and current:
        many = drive.tries("get all", lambda: opened.get_many(list(current)).result(), drive.path)
        if not isinstance(many, Failed) and not same(many, current):
            raise Wrong("get_many returned other bytes than were put")
    elif action == "delete" and name in current:
        opened.delete(name).result()
        del current[name]
    elif action == "reserve":
        drive.tries("reserve", lambda: opened.reserve(random.randrange(4 << 20)), drive.path)
    elif action == "commit":
        done = drive.tries("commit", opened.commit, drive.path)
        committed[:] = [*committed, dict(current)] if isinstance(done, Failed) else [dict(current)]
        if isinstance(done, Failed):
            _put_damaged_again(drive, random, opened, current)
        return True
    return False


def _put_damaged_again(
    drive: FailingDrive, random: randoms.Random, opened: TensorStore, current: dict[str, torch.Tensor]
) -> None:
    """After a commit that failed: it says which tensors it may have lost. They are put again, or deleted."""
    for name in list(current):
        try:
            found = opened.get(name).result()
        except OSError as error:
            if "is damaged" not in str(error):
                raise
            drive.check(error, drive.path)
            if random.random() < 0.5:
                opened.put(name, current[name]).result()
            else:
                opened.delete(name).result()
                del current[name]
        else:
            if not same(found, current[name]):
                raise Wrong(f"after a commit that failed, {name} in the store has other bytes than were put")


# Checkpoints. ---------------------------------------------------------------------------------------------------------------


def checkpoint(drive: FailingDrive, random: randoms.Random) -> None:
    """save, async_save, load and verify of one .pt file."""
    path = drive.path / "model.pt"
    candidates: list[Any] = [None]  # what the file may hold; None is no file
    for _ in range(random.randrange(3, 10)):
        action = random.choice(("save", "save", "async_save", "load", "verify"))
        if action == "save":
            new = _state(random)
            options: dict[str, Any] = {"fsync": random.random() < 0.8, "checksum": random.random() < 0.3}
            done = drive.tries(f"save {options}", lambda new=new, options=options: deepnvme.save(new, path, **options), path)
            candidates = [*candidates, new] if isinstance(done, Failed) else [new]
        elif action == "async_save":
            new = _state(random)
            done = drive.tries("async_save", lambda new=new: deepnvme.async_save(new, path).result(), path)
            candidates = [*candidates, new] if isinstance(done, Failed) else [new]
        elif action == "load" and None not in candidates:
            loaded = drive.tries("load", lambda: deepnvme.load(path), path)
            if not isinstance(loaded, Failed):
                _one_of(loaded, candidates)
        elif action == "verify" and None not in candidates:
            report = drive.tries("verify", lambda: verify(path), path)
            if not isinstance(report, Failed) and not report.ok:
                raise Torn(f"a file that was saved is not whole: {report}")
        if path.exists():
            drive.history.append("healed: load")
            candidates = [_one_of(deepnvme.load(path), candidates)]
        elif None not in candidates:
            raise Torn("the file has gone")
        else:
            candidates = [None]
    deepnvme.save({"last": 1}, path)
    drive.check_no_leftovers(drive.path)


def _one_of(loaded: Any, candidates: list[Any]) -> Any:
    for candidate in candidates:
        if candidate is not None and same(loaded, candidate):
            return candidate
    raise Torn("the file is neither the old nor the new one")


def manager(drive: FailingDrive, random: randoms.Random) -> None:
    """CheckpointManager: saving steps, loading them."""
    directory = drive.path / "run"
    keep = random.choice((1, 2, 3))
    made = drive.tries("make the manager", lambda: deepnvme.CheckpointManager(directory, keep), drive.path)
    checkpoints = deepnvme.CheckpointManager(directory, keep) if isinstance(made, Failed) else made
    states: dict[int, list[Any]] = {}
    saved = 0
    for step in range(random.randrange(3, 10)):
        state = _state(random)
        asynchronous = random.random() < 0.4

        def save(step: int = step, state: Any = state, asynchronous: bool = asynchronous) -> None:
            if asynchronous:
                checkpoints.save(step, state, asynchronous=True).result()
            else:
                checkpoints.save(step, state)

        done = drive.tries(f"save step {step}{' behind' if asynchronous else ''}", save, directory)
        states.setdefault(step, []).append(state)
        saved += not isinstance(done, Failed)
        if random.random() < 0.5 and checkpoints.latest() is not None:
            loaded = drive.tries("load the latest", checkpoints.load, directory)
            if not isinstance(loaded, Failed):
                _one_of(loaded, [state for each in states.values() for state in each])
        steps = checkpoints.steps()
        if not isinstance(done, Failed) and step not in steps:
            raise Torn(f"step {step} was saved, and is not there")
        if len(steps) < min(saved, max(keep - 1, 1)):
            raise Torn(f"{steps} are there, of {saved} that were saved, and {keep} to be kept")
        for other in steps:
            drive.history.append(f"healed: load step {other}")
            _one_of(checkpoints.load(other), states[other])
    checkpoints.save(100, {"last": 1})
    if len(checkpoints.steps()) > keep:
        raise Wrong(f"more than {keep} are kept: {checkpoints.steps()}")
    drive.check_no_leftovers(directory)


def distributed(drive: FailingDrive, random: randoms.Random) -> None:
    """NVMeWriter and NVMeReader of torch.distributed.checkpoint, in one process."""
    path = drive.path / "dcp"
    names = [f"layer{index}" for index in range(random.randrange(1, 5))]
    shapes = {name: (random.randrange(1, 60_000),) for name in names}

    def state() -> dict[str, Any]:
        return {name: _bytes(random, 4 * shapes[name][0]).view(torch.int32) for name in names}

    def read(reader: Any) -> dict[str, Any]:
        found: dict[str, Any] = {name: torch.zeros(shapes[name], dtype=torch.int32) for name in names}
        with _unwrapped():
            dcp.load(found, storage_reader=reader, no_dist=True)
        return found

    candidates: list[Any] = [None]
    for _ in range(random.randrange(2, 6)):
        new = state()
        options = {"thread_count": random.choice((1, 2)), "sync_files": random.random() < 0.8}

        def save(new: Any = new, options: Any = options) -> None:
            with _unwrapped():
                dcp.save(new, storage_writer=NVMeWriter(path, **options), no_dist=True)

        done = drive.tries(f"dcp.save {options}", save, path)
        candidates = [*candidates, new] if isinstance(done, Failed) else [new]
        if None not in candidates:
            found = drive.tries("dcp.load", lambda: read(NVMeReader(path)), path)
            if not isinstance(found, Failed):
                _one_of(found, candidates)
        if (path / ".metadata").exists():
            drive.history.append("healed: dcp.load")
            candidates = [_one_of(read(random.choice((NVMeReader, FileSystemReader))(path)), candidates)]
        elif None not in candidates:
            raise Torn("the metadata has gone")
        else:
            candidates = [None]
    dcp.save(state(), storage_writer=NVMeWriter(path), no_dist=True)
    drive.check_no_leftovers(path)


@contextlib.contextmanager
def _unwrapped() -> Iterator[None]:
    """What torch wraps into a CheckpointException; and into an AssertionError before, where the metadata cannot be read."""
    try:
        yield
    except CheckpointException as error:
        inner = next(iter(error.failures.values()))[0]
        said = re.search(r"metadata read failed: \[Errno (\d+)\][^:]*: '([^']*)'", str(inner))
        if isinstance(inner, AssertionError) and said is not None:
            raise OSError(int(said[1]), "metadata", said[2]) from error
        raise inner from error


# Weights. -------------------------------------------------------------------------------------------------------------------


def weights(drive: FailingDrive, random: randoms.Random) -> None:
    """WeightStore.build and open, and a model that is streamed."""
    torch.manual_seed(random.randrange(1000))
    width = random.choice((16, 100))
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(random.randrange(2, 8))))
    streamed = copy.deepcopy(model)
    x = torch.randn(3, width)
    with torch.no_grad():
        expected = model(x)
    path = drive.path / "weights"
    blocks = [name for name, _ in model.named_children()]

    def build() -> WeightStore:
        return WeightStore.build(model, path, blocks=blocks)

    made = drive.tries("build", build, drive.path)
    if isinstance(made, Failed):
        drive.history.append("again, healed")
        try:
            made = build()
        except FileExistsError:  # the fault came after the commit
            made = WeightStore.open(path)
    made.close()
    reopened = drive.tries("open", lambda: WeightStore.open(path), drive.path)
    with WeightStore.open(path) if isinstance(reopened, Failed) else reopened as opened:
        options: dict[str, Any] = {"prefetch": random.randrange(4), "memory_budget": random.choice((0, 100_000))}
        begun = drive.tries("stream", lambda: stream(streamed, opened, **options), path)
        with stream(streamed, opened, **options) if isinstance(begun, Failed) else begun, torch.no_grad():
            for _ in range(random.randrange(2, 8)):
                outcome = drive.tries("forward", lambda: streamed(x), path)
                if isinstance(outcome, Failed):
                    drive.history.append("again, healed")
                    outcome = streamed(x)
                if not torch.equal(outcome, expected):
                    raise Wrong("the streamed model computes something else")


# Training. ------------------------------------------------------------------------------------------------------------------


def optimizer(drive: FailingDrive, random: randoms.Random) -> None:
    """OffloadedOptimizer against the optimizer in memory."""
    kind = random.choice((torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad))
    settings: dict[str, Any] = {"lr": 0.01, **({"momentum": 0.9} if kind is torch.optim.SGD else {})}
    generator = torch.Generator().manual_seed(random.randrange(1000))
    shapes = [(random.randrange(1, 9000),) for _ in range(random.randrange(1, 5))]
    mine = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    plain = [nn.Parameter(param.detach().clone()) for param in mine]
    options: dict[str, Any] = {
        "sub_group_size": random.choice((4096, 1 << 22)),
        "dram_budget": random.choice((0, 0, 50_000)),
        "checksum": random.random() < 0.3,
        **random.choice(({}, {}, {"offload_gradients": True})),
    }
    reference = kind(plain, **settings)  # type: ignore[arg-type]
    path = drive.path / "states"

    def make() -> deepnvme.OffloadedOptimizer:
        return deepnvme.OffloadedOptimizer(mine, cast(Any, kind), nvme_path=path, **options, **settings)

    made = drive.tries(f"make {kind.__name__} {options}", make, drive.path)
    offloaded = make() if isinstance(made, Failed) else made
    try:
        for number in itertools.count():
            if number > 12 or (number > 4 and random.random() < 0.2):
                break
            gradients = [torch.randn(shape, generator=generator) for shape in shapes]
            _train(drive, random, offloaded, reference, mine, plain, gradients)
            action = random.random()
            if action < 0.2:
                state = drive.tries("state_dict", offloaded.state_dict, drive.path)  # mapped, and looked at healed
                if not isinstance(state, Failed) and not same(state["state"], reference.state_dict()["state"]):
                    raise Wrong("the state_dict is not that of the optimizer in memory")
                del state
            elif action < 0.3:
                saved = copy.deepcopy(reference.state_dict())
                drive.tries("load_state_dict", lambda saved=saved: offloaded.load_state_dict(saved), drive.path)
    except BaseException:
        with contextlib.suppress(OSError):
            offloaded.close()
        raise
    done = drive.tries("close", offloaded.close, drive.path)
    if isinstance(done, Failed):
        drive.history.append("again, healed")
        offloaded.close()


def _train(
    drive: FailingDrive, random: randoms.Random, offloaded: deepnvme.OffloadedOptimizer, reference: torch.optim.Optimizer,
    mine: list[nn.Parameter], plain: list[nn.Parameter], gradients: list[torch.Tensor],
) -> None:  # fmt: skip
    """One step, of as many attempts as it takes."""

    unfinished = False

    def attempt() -> None:
        if not unfinished:
            offloaded.zero_grad()
            sum((param * gradient).sum() for param, gradient in zip(mine, gradients, strict=True)).backward()  # type: ignore[union-attr]
        offloaded.step()

    for param, gradient in zip(plain, gradients, strict=True):
        param.grad = gradient.clone()
    before = offloaded.steps
    for _ in range(4):
        outcome = drive.tries("backward and step", attempt, drive.path)
        if not isinstance(outcome, Failed) or offloaded.steps != before:
            break
        unfinished = "is unfinished" in str(outcome.error) + "".join(getattr(outcome.error, "__notes__", []))
        drive.history.append("the step is unfinished" if unfinished else "nothing was stepped")
        if not unfinished and not all(map(same, mine, plain)):
            raise Wrong("a step of which nothing was made has changed parameters")
    else:
        drive.history.append("again, healed")
        attempt()
    reference.step()
    if not all(map(same, mine, plain)):
        raise Wrong("the step's parameters are not those of the optimizer in memory")
    reference.zero_grad()


def activations(drive: FailingDrive, random: randoms.Random) -> None:
    """save_on_disk: steps whose gradients are those in memory. A failed write is a warning, a failed read an error."""
    paths = [drive.path / name for name in random.choice((["one"], ["one", "two"]))]
    nbytes = random.choice((8, 64, 512)) << 10
    training = Training(paths, nbytes, memory_budget=random.randrange(4) * nbytes)

    def step() -> None:
        output = training.forward()
        if not same(training.gradients(output), training.expected):
            raise Wrong("the gradients are not those without a drive")

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            for _ in range(random.randrange(3, 12)):
                drive.tries("a step", step, drive.path)
                if random.random() < 0.3:
                    drive.history.append("again, healed")
                    step()
                    if random.random() < 0.3:
                        drive.tries("close", training.activations.close)
    finally:
        training.activations.close()


USES: tuple[Callable[[FailingDrive, randoms.Random], None], ...] = (
    transfers, store, checkpoint, manager, distributed, weights, optimizer, activations,
)  # fmt: skip
