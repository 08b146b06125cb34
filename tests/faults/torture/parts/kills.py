"""SIGKILL at a moment drawn by lot, while a child saves, builds or commits again and again.

What is there then is what the child had said was saved, or the next, whole; and what it left behind goes with the next.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch

import deepnvme
from deepnvme.checkpoint.publication import SUFFIX
from deepnvme.swap import TensorStore

from .. import Leaked, Torn, Wrong

SHORT = 3
SECONDS = 120
_ROOT = Path(__file__).resolve().parents[4]
_SIZES = (1000, 70_000, 300_000)


def tensors(value: int) -> dict[str, torch.Tensor]:
    """Through chunks and from where they are."""
    return {f"t{number}": torch.full((size,), float(value)) for number, size in enumerate(_SIZES)}


def value_of(found: dict[str, torch.Tensor]) -> int:
    """That all of them have. Raises Torn."""
    values = {int(bound) for tensor in found.values() for bound in tensor.aminmax()}
    if len(values) != 1 or [tensor.numel() for tensor in found.values()] != list(_SIZES):
        raise Torn(f"there are {values} in {list(found)}")
    return values.pop()


class Saving:
    """A way to save values, one after the other, and to see which is there."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "saved.pt"
        self.directory = directory

    def save(self, value: int) -> None:
        deepnvme.save(tensors(value), self.path, fsync=value % 3 == 0)

    def load(self) -> int:
        return value_of(torch.load(self.path, weights_only=True))

    def leftovers(self) -> list[str]:
        return [entry.name for entry in self.directory.iterdir() if entry.name.endswith(SUFFIX)]


class SavingBehind(Saving):
    def save(self, value: int) -> None:
        deepnvme.async_save(tensors(value), self.path, fsync=False).result()


class Managing(Saving):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.manager = deepnvme.CheckpointManager(directory, keep=2)

    def save(self, value: int) -> None:
        self.manager.save(value, tensors(value), fsync=False)

    def load(self) -> int:
        steps = self.manager.steps()
        found = [value_of(self.manager.load(step)) for step in steps]
        if found != steps:
            raise Torn(f"the checkpoints of {steps} have {found}")
        return steps[-1]


class SavingSafetensors(Saving):
    def save(self, value: int) -> None:
        deepnvme.safetensors.save_file(tensors(value), self.path, fsync=False)

    def load(self) -> int:
        return value_of(deepnvme.safetensors.load_file(self.path))


class Committing(Saving):
    """Each with a put of all tensors before it, in place of those before."""

    store: TensorStore | None = None

    def save(self, value: int) -> None:
        if self.store is None:
            self.store = TensorStore(self.directory / "store", persist=True)
        for name, tensor in tensors(value).items():
            self.store.put(name, tensor)
        self.store.commit()

    def load(self) -> int:
        if self.store is not None:
            self.store.close()
            self.store = None
        with TensorStore(self.directory / "store", persist=True) as store:
            return value_of({name: store.get(name).result() for name in sorted(store.names())})


WAYS: dict[str, type[Saving]] = {way.__name__: way for way in (Saving, SavingBehind, Managing, SavingSafetensors, Committing)}


def attack(random: Random, directory: Path) -> None:
    name = random.choice(list(WAYS))
    child = subprocess.Popen(
        [sys.executable, "-m", __name__, name, str(directory)],
        cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout is not None
    assert child.stderr is not None
    try:
        said = [child.stdout.readline() for _ in range(2)]
        time.sleep(random.random() * random.choice([0.02, 0.2, 1.0]))
    finally:
        child.send_signal(signal.SIGKILL)
        out, err = child.communicate()
    if child.returncode != -signal.SIGKILL or not all(said):
        raise Wrong(f"{name} ended by itself: {err}")
    last = max(int(line) for line in [*said, *out.splitlines(keepends=True)] if line.endswith("\n"))
    check(WAYS[name](directory), last, name)


def check(way: Saving, last: int, what: str) -> None:
    """That the last value that is known to be saved is there, or the next; and nothing of this after another. Raises Torn, Wrong
    or Leaked."""
    try:
        found = way.load()
        if found not in (last, last + 1):
            raise Wrong(f"{found} is there")
        way.save(found + 1)
        if way.load() != found + 1:
            raise Wrong(f"the next left {way.load()}")
        if way.leftovers():
            raise Leaked(f"there are {way.leftovers()} after the next")
    except Exception as error:
        kind = type(error) if isinstance(error, Torn | Wrong | Leaked) else Wrong
        text = str(error) if kind is not Wrong else "".join(traceback.format_exception(error))
        raise kind(f"{what}, after {last} was saved: {text}") from error


def go_on(save: Callable[[int], None]) -> None:
    """Save one value after the other, and say so, until killed."""
    torch.set_num_threads(1)
    value = 0
    while True:
        save(value)
        os.write(1, f"{value}\n".encode())  # at once, and at a time
        value += 1


if __name__ == "__main__":
    go_on(WAYS[sys.argv[1]](Path(sys.argv[2])).save)
