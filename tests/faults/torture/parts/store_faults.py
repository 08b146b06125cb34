"""Stores one after the other in the same directories, on a backend that fails, compared with a dictionary."""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path
from random import Random
from typing import Any

import torch

import deepnvme
from deepnvme.files.directory_lock import StoreLocked
from deepnvme.swap import TensorStore
from tests.native import EngineTestingBuilder

from .. import Leaked, Wrong

SHORT = 3
SECONDS = 60
_STORES = 12
_OPERATIONS = 12
_ERRORS = (errno.EIO, errno.ENOSPC)

Tensors = dict[str, torch.Tensor]


def attack(random: Random, directory: Path) -> None:
    with deepnvme.Engine(num_threads=1) as sound:
        _attack(random, directory, sound)


def _attack(random: Random, directory: Path, sound: deepnvme.Engine) -> None:
    directories = [directory / "a", directory / "b"][: random.choice([1, 2])]
    persist = random.random() < 0.7
    committed: list[Tensors] = [{}]  # each may be what the directories hold
    for number in range(_STORES):
        engine = _Exchangeable(_engine(random))
        try:
            store = TensorStore(directories, persist=persist, checksum=random.random() < 0.5, engine=engine)
            try:
                committed = _use(random, store, persist, committed, engine, sound)
            finally:
                with contextlib.suppress(OSError):  # of a put that nobody was told of
                    store.close()
        except StoreLocked as error:
            raise Leaked(f"store {number} in the same directories: {error}") from error
        finally:
            engine.close()
    if not persist and any(path.exists() for path in directories):
        raise Leaked("a store that does not persist left files behind")


class _Exchangeable:
    """A store's engine: another one at times."""

    def __init__(self, engine: Any) -> None:
        self.current = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.current, name)


def _engine(random: Random) -> Any:
    testing = EngineTestingBuilder().load()
    faults = testing.Faults()
    faults.error_every = random.choice([0, 2, 3, 5, 11, 30])
    faults.error = random.choice(_ERRORS)
    faults.short_every = random.choice([0, 0, 2, 3])
    faults.short_bytes = random.choice([512, 4096, 5000])
    faults.refuse_every = random.choice([0, 0, 3])
    backend = random.choice(["io_uring", "threads"])
    return testing.faulty_engine(backend, random.choice([4096, 65536]), random.choice([2, 32]), 1, False, faults, None, None)


def _use(
    random: Random,
    store: TensorStore,
    persist: bool,
    committed: list[Tensors],
    engine: _Exchangeable,
    sound: deepnvme.Engine,
) -> list[Tensors]:
    state = _found(store, {name: [each.get(name) for each in committed] for name in store.names()}, engine, sound)
    if not any(state.keys() == each.keys() for each in committed):
        raise Wrong(f"opened again, it holds {sorted(state)}, none of {[sorted(each) for each in committed]}")
    committed = [dict(state)]
    for _ in range(random.randrange(1, _OPERATIONS)):
        action = random.choice(["put", "put", "put", "delete", "commit", "check"])
        if action == "put":
            new = _tensors(random)
            error = _error(lambda new=new: store.put_many(new).result())
            # Of a put that failed each name by itself is old or new, or damaged.
            olds = {name: [new.get(name, state.get(name)), *[state.get(name)] * bool(error)] for name in store.names()}
            state = _found(store, olds, engine, sound)
        elif action == "delete" and state:
            gone = random.choice(sorted(state))
            store.delete(gone).result()
            del state[gone]
        elif action == "commit" and persist:
            if _error(store.commit) is None:
                committed = [dict(state)]
            else:
                state = _found(store, {name: [state.get(name)] for name in store.names()}, engine, sound)
                committed.append(dict(state))
        elif action == "check":
            state = _found(store, {name: [state.get(name)] for name in store.names()}, engine, sound)
    return committed if persist else [{}]


def _found(
    store: TensorStore, candidates: dict[str, list[torch.Tensor | None]], engine: _Exchangeable, sound: deepnvme.Engine
) -> Tensors:
    """What the store holds, as a sound engine reads it, each one of its candidates. What is damaged is deleted."""
    found: Tensors = {}
    for name, tensors in candidates.items():
        got = None
        failing, engine.current = engine.current, sound
        try:
            got = store.get(name).result()
        except OSError as error:
            _check(error)
            if "is damaged" not in str(error):
                raise
        finally:
            engine.current = failing
        if got is None:
            store.delete(name).result()
        elif not any(tensor is not None and torch.equal(tensor, got) for tensor in tensors):
            raise Wrong(f"{name!r} holds other bytes than were put")
        else:
            found[name] = got
    return found


def _error(operation: Any) -> OSError | None:
    try:
        operation()
    except OSError as error:
        _check(error)
        return error
    return None


def _check(error: OSError) -> None:
    if error.errno not in _ERRORS or error.filename is None:
        raise Wrong(f"{error!r}, filename {error.filename!r}, is not the backend's error") from error


def _tensors(random: Random) -> Tensors:
    sizes = [random.choice([0, 1, 4096, 5000, 70_000, 600_000, 5 << 20]) for _ in range(random.randrange(1, 8))]
    names = random.sample("abcdefghijklmnop", len(sizes))
    return {name: torch.full((size,), random.randrange(256), dtype=torch.uint8) for name, size in zip(names, sizes, strict=True)}
