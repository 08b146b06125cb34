"""Ctrl-C at a random point of random operations of a store and its pool, compared with a dictionary; errors of the drive too."""

from __future__ import annotations

import errno
import random as random_module
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import deepnvme
from deepnvme.store import writing
from deepnvme.swap import BufferPool, TensorStore

from .. import Leaked, Wrong
from ..interruption import interrupted

SHORT = 4
SECONDS = 120
_STORES = 4
_OPERATIONS = 6

Tensors = dict[str, torch.Tensor]


def attack(random: random_module.Random, directory: Path) -> None:
    before, sys.unraisablehook = sys.unraisablehook, lambda _: None  # interrupts within finalizers, which are lost
    try:
        with mock.patch.object(writing, "_BATCH", random.choice([4, 1024])):  # a put in several parts, or in one
            _attack(random, directory)
    finally:
        sys.unraisablehook = before


def _attack(random: random_module.Random, directory: Path) -> None:
    pool = BufferPool(24 << 20)
    directories = [directory / "a", directory / "b"][: random.choice([1, 2])]
    persist, checksum = random.random() < 0.7, random.random() < 0.5
    kept: Tensors = {}  # what the directories hold
    with deepnvme.Engine(num_threads=1) as engine:
        for _ in range(_STORES):
            with TensorStore(directories, persist=persist, checksum=checksum, engine=engine, pool=pool) as store:
                found = store.get_many(store.names()).result()
                if not _same(found, kept):
                    raise Wrong(f"opened again, it holds {sorted(found)}, and not {sorted(kept)}")
                kept = _use(random, store, persist, kept)
            if pool.in_use:
                raise Leaked(f"{pool.in_use} bytes of the pool are in use")


def _use(random: random_module.Random, store: TensorStore, persist: bool, kept: Tensors) -> Tensors:
    state = dict(kept)
    for _ in range(_OPERATIONS):
        new, operation = _operation(random, store, state, persist)
        number = int(10 ** random.uniform(0, 3.7))
        where = interrupted(number, operation).where
        if not where:
            state = new
            continue
        found = _found(store)
        if persist and not (_same(found, state) or _same(found, new)):
            raise Wrong(f"after Ctrl-C in {where} it holds {sorted(found)}, neither the old nor the new state")
        for name, tensor in found.items():
            if not any(name in each and torch.equal(each[name], tensor) for each in (state, new)):
                raise Wrong(f"after Ctrl-C in {where} {name!r} is neither as it was nor as it was put")
        state = found
        for name in set(store.names()) - set(found):
            store.delete(name).result()
    if persist:
        store.commit()
    store.reserve(0)
    used = sum(store.used_bytes)
    if used != sum(-(-tensor.nbytes // 4096) * 4096 for tensor in state.values()):
        raise Leaked(f"{used} bytes of the files are taken for {sorted(state)}")
    return state if persist else {}


def _operation(random: random_module.Random, store: TensorStore, state: Tensors, persist: bool) -> tuple[Tensors, Any]:
    kind = random.choice(["put", "put", "delete", "get", "reserve", *["commit"] * persist])
    if kind == "put":
        tensors = _tensors(random)
        return {**state, **tensors}, lambda: store.put_many(tensors).result()
    if kind == "delete" and state:
        gone = random.choice(sorted(state))
        return {name: each for name, each in state.items() if name != gone}, lambda: store.delete(gone).result()
    if kind == "commit":
        return state, store.commit
    if kind == "reserve":
        return state, lambda: store.reserve(random.randrange(8 << 20))
    return state, lambda: _compare(store, state)


def _compare(store: TensorStore, state: Tensors) -> None:
    if not _same(store.get_many(list(state)).result(), state):
        raise Wrong("what was read is not what was put")


def _tensors(random: random_module.Random) -> Tensors:
    sizes = [random.choice([0, 1, 4096, 5000, 70_000, 600_000, 5 << 20]) for _ in range(random.randrange(1, 30))]
    value = random.randrange(256)
    names = random.sample(range(40), len(sizes))
    return {f"{name}": torch.full((size,), value, dtype=torch.uint8) for name, size in zip(names, sizes, strict=True)}


def _found(store: TensorStore) -> Tensors:
    found: Tensors = {}
    for name in store.names():
        try:
            found[name] = store.get(name).result()
        except KeyError:
            continue  # of a put that was undone just now
        except OSError as error:
            if error.errno != errno.ECANCELED:
                raise
    return found


def _same(found: Tensors, expected: Tensors) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
