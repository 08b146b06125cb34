"""Storms of Ctrl-C over what changes state: afterwards it works, and the drive has the last commit."""

from __future__ import annotations

import contextlib
import copy
import itertools
import random as randoms
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import deepnvme
from deepnvme.offload import OffloadedTraining
from deepnvme.streaming import WeightStore, stream, streaming_of
from deepnvme.swap import BufferPool, TensorStore
from deepnvme.tables import Table

from ....support.activations import training_in
from ....support.interrupts import ctrl_c_every, lost_in_finalizers
from ....support.offloaded_training import assert_same_values
from .. import Leaked, Torn, Wrong, streams

SHORT, SECONDS = 5, 60
_STORM_SECONDS = 2.0

Tensors = dict[str, torch.Tensor]


def attack(random: randoms.Random, directory: Path) -> None:
    with lost_in_finalizers(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # a file that was just opened is closed by its finalizer
        random.choice((_store, _save, _async_save, _safetensors, _manager, _stream, _table, _activations, _training))(
            random, directory
        )


def _storm(random: randoms.Random, operation: Callable[[int], object], check: Callable[[int], object]) -> None:
    """Call ``operation`` with 1, 2, 3 and so on under Ctrl-C for two seconds; call ``check`` after each, without."""
    until = time.monotonic() + _STORM_SECONDS
    heard = 0
    for number in itertools.count(1):
        with ctrl_c_every(random.choice((0.0002, 0.001, 0.003, 0.01))) as storm:
            try:
                operation(number)
            except KeyboardInterrupt:
                torch.set_grad_enabled(True)  # which torch's own decorators may not have come to
        streams.in_another_thread(lambda number=number: check(number))  # type: ignore[misc]
        heard += storm.count
        if time.monotonic() > until:
            break
    if not heard:
        raise Wrong("no Ctrl-C was heard")


def _tensors(random: randoms.Random) -> Callable[[int], Tensors]:
    """Returns tensors that all have the value given."""
    sizes = random.choices([0, 1, 1000, 70_000, 600_000, 3_000_000], k=random.randint(1, 12))
    return lambda value: {f"t{index}": torch.full((size,), float(value)) for index, size in enumerate([*sizes, 10])}


def _value_of(found: Tensors, made: Callable[[int], Tensors]) -> int:
    """Return the value that all tensors have. Raises Torn."""
    value = int(found["t0"][0]) if found.get("t0", torch.empty(0)).numel() else int(next(iter(reversed(found.values())))[0])
    if found.keys() != made(value).keys() or not all(bool((each == value).all()) for each in found.values()):
        raise Torn(f"what is there is neither the old nor the new: { ({name: each[:1] for name, each in found.items()}) }")
    return value


def _store(random: randoms.Random, directory: Path) -> None:
    made = _tensors(random)
    directories = [directory / "a", directory / "b"][: random.choice([1, 2])]
    committed = 0
    with TensorStore(directories, persist=True, checksum=random.random() < 0.5) as store:
        store.put_many(made(0)).result()
        store.commit()

        def operation(number: int) -> None:
            store.put_many(made(number)).result()
            store.commit()

        def check(number: int) -> None:
            found = store.get_many(store.names()).result()
            if _value_of(found, made) not in (committed, number):
                raise Wrong(f"the store holds neither state {committed} nor {number}")
            remake(number)

        def remake(number: int) -> None:
            nonlocal committed
            operation(number)
            committed = number
            used = sum(-(-tensor.nbytes // 4096) * 4096 for tensor in made(number).values())
            if sum(store.used_bytes) != used:
                raise Leaked(f"{sum(store.used_bytes)} bytes are taken for {used}")

        _storm(random, operation, check)
    with TensorStore(directories, persist=True) as store:
        if _value_of(store.get_many(store.names()).result(), made) != committed:
            raise Wrong("the store that is opened again has not the last commit")


def _saves(
    random: randoms.Random, path: Path, save: Callable[[Tensors], object], load: Callable[[], Tensors], pool: BufferPool
) -> None:
    made, last = _tensors(random), 0
    save(made(0))

    def check(number: int) -> None:
        nonlocal last
        if not last <= _value_of(load(), made) <= number:
            raise Torn(f"{path.name} is neither as it was nor as it was saved")
        save(made(number))
        last = number
        if _value_of(load(), made) != number:
            raise Wrong("the next save has left something else")
        left = {each.name for each in path.parent.iterdir()} - {path.name}
        if left or pool.in_use:
            raise Leaked(f"left behind: {left}, {pool.in_use} bytes of the pool")

    _storm(random, lambda number: save(made(number)), check)


def _save(random: randoms.Random, directory: Path) -> None:
    path, pool, fsync = directory / "a.pt", BufferPool(24 << 20), random.random() < 0.3
    _saves(random, path, lambda tensors: deepnvme.save(tensors, path, fsync=fsync, pool=pool), lambda: deepnvme.load(path), pool)


def _async_save(random: randoms.Random, directory: Path) -> None:
    path, pool = directory / "a.pt", BufferPool(random.choice([6, 64]) << 20)

    def save(tensors: Tensors) -> None:
        deepnvme.async_save(tensors, path, fsync=False, pool=pool).result()

    def load() -> Tensors:
        deepnvme.save({}, path.with_name("b.pt"))
        path.with_name("b.pt").unlink()
        found: Tensors = deepnvme.load(path)
        return found

    _saves(random, path, save, load, pool)


def _safetensors(random: randoms.Random, directory: Path) -> None:
    path, pool, files = directory / "a.safetensors", BufferPool(24 << 20), deepnvme.safetensors
    _saves(random, path, lambda each: files.save_file(each, path, pool=pool), lambda: files.load_file(path), pool)


def _manager(random: randoms.Random, directory: Path) -> None:
    manager, pool = deepnvme.CheckpointManager(directory, keep=1), BufferPool(24 << 20)
    made = _tensors(random)
    steps: Iterator[int] = itertools.count()

    def save(number: int) -> None:
        manager.save(next(steps), made(number), fsync=False, pool=pool)

    def check(number: int) -> None:
        save(number)
        if _value_of(manager.load(), made) != number or len(manager.steps()) != 1:
            raise Wrong(f"the newest checkpoint is not the last one that was saved, or one of {manager.steps()} was to go")

    _storm(random, save, check)


def _stream(random: randoms.Random, directory: Path) -> None:
    wanted, model = streams.output(streams.model()), streams.model()
    budget = random.randint(2, streams.BLOCKS) * streams.BLOCK_BYTES
    streams.built(directory / "store").close()
    with WeightStore.open(directory / "store") as store:
        with stream(model, store, memory_budget=budget) as streaming:

            def check(number: int) -> None:
                streams.check_output(model, wanted)
                if streaming.report().resident_bytes > budget:
                    raise Wrong("more stays in memory than the budget")

            _storm(random, lambda number: [streams.output(model) for _ in range(20)], check)
            with contextlib.suppress(KeyboardInterrupt), ctrl_c_every(random.choice((0.0005, 0.002))):
                streaming.close(restore=True)
            streaming.close(restore=True)
        if streaming_of(model) is not None:
            raise Wrong("a closed stream still has the model's forwards")
        streams.check_output(model, wanted)


def _table(random: randoms.Random, directory: Path) -> None:
    rows, width = 300, 130
    ids = torch.arange(rows)
    committed = 0
    paths: list[Any] = [directory / "a", directory / "b"][: random.choice([1, 2])]
    with Table.from_tensor(
        paths, torch.zeros(rows, width), updatable=True, memory_budget=random.choice([0, 64 << 10, 1 << 20])
    ) as table:

        def operation(number: int) -> None:
            table.write(ids, torch.full((rows, width), float(number)))
            table.commit()

        def check(number: int) -> None:
            nonlocal committed
            if random.random() < 0.5:
                table.rollback()
                if torch.unique(table.read(ids)).tolist() not in ([committed], [number]):
                    raise Torn(f"a rollback has brought neither commit {committed} nor {number}")
            operation(number)
            committed = number

        _storm(random, operation, check)
    with Table.open(paths) as reader:
        if torch.unique(reader.read(ids)).tolist() != [committed]:
            raise Wrong("the drive has not the last commit")


def _activations(random: randoms.Random, directory: Path) -> None:
    with training_in(directory, nbytes=random.choice((1 << 14, 1 << 19))) as training:
        warnings.simplefilter("ignore", RuntimeWarning)

        def check(number: int) -> None:
            training.check_nothing_is_held()

        for _ in range(3):
            _storm(random, lambda number: training.step(), check)
            training.step()


def _training(random: randoms.Random, directory: Path) -> None:
    """Steps of OffloadedTraining: each is made as a whole or not at all, with the bits of training in memory."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(random.randint(2, 5))))
    in_memory = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(in_memory.parameters(), lr=1e-2)
    states = [copy.deepcopy(in_memory.state_dict())]
    options = {
        "micro_batches": random.choice([1, 2]),
        "activations": random.choice(["memory", "nvme", "recompute"]),
        "accumulation": random.choice(["vertical", "horizontal"]),
        "memory_budget": random.choice([0, 1 << 20]),
        "max_norm": random.choice([None, 0.1]),
    }

    def batch(step: int) -> torch.Tensor:
        return torch.randn(8, 64, generator=torch.Generator().manual_seed(step))

    def loss(of: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = of(rows)
        return output.square().mean()

    def state_after(steps: int) -> Tensors:
        while len(states) <= steps:
            parts = options["micro_batches"]
            for part in batch(len(states) - 1).chunk(parts):
                (loss(in_memory, part) / parts).backward()
            if options["max_norm"] is not None:
                torch.nn.utils.clip_grad_norm_(in_memory.parameters(), options["max_norm"])
            optimizer.step()
            optimizer.zero_grad()
            states.append(copy.deepcopy(in_memory.state_dict()))
        return states[steps]

    training = OffloadedTraining(model, torch.optim.AdamW, nvme_path=directory, lr=1e-2, **options)

    def step(_: int) -> None:
        parts = batch(training.steps).chunk(options["micro_batches"])
        training.run_micro_batches([lambda part=part: loss(model, part) / len(parts) for part in parts])
        training.step()

    def check(_: int) -> None:
        training.undo_step()  # if the storm came between the micro-batches and step()
        assert_same_values(training.state_dict()["model"], state_after(training.steps))

    _storm(random, step, check)
    before = training.steps
    step(0)
    if training.steps != before + 1:
        raise Wrong(f"{training.steps} steps after a step that was made, {before} before")
    check(0)
    training.close(restore=True)
