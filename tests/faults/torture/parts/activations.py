"""Faults and Ctrl-C under save_on_disk: the same gradients, or an error that says why; nothing is held once the graph is gone."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import random as randoms
import signal
import threading
import time
import warnings
from pathlib import Path

from ....support.activations import KIB, Training, files_below, held_by, hooks_are_set
from ....support.engines import transfers_through
from ....support.interrupts import lost_in_finalizers
from .. import Leaked, Wrong, streams

SHORT, SECONDS = 4, 60


def attack(random: randoms.Random, directory: Path) -> None:
    paths = [directory / name for name in random.choice((["one"], ["one", "two"]))]
    training = Training(paths, nbytes=random.choice((8, 16, 512)) * KIB)
    training.activations = type(training.activations)(
        paths, memory_budget=random.choice((0, 50, 100, 3000)) * KIB, min_bytes=random.choice((1, 10 * KIB))
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        training.step()
        for _ in range(random.randint(3, 8)):
            random.choice((_with_faults, _with_a_signal))(random, training)
            _check(training)
    training.activations.close()
    left = [name for path in paths for name in files_below(path)]
    if left:
        raise Leaked(f"left behind: {left}")


def _check(training: Training) -> None:
    """Nothing is held, by any lock either; and a step is as ever."""
    if hooks_are_set():
        raise Wrong("hooks are still there")
    streams.in_another_thread(lambda: held_by(training.activations))
    training.check_nothing_is_held()
    training.step()


def _with_faults(random: randoms.Random, training: Training) -> None:
    error = random.choice([errno.EIO, errno.ENOSPC])
    with transfers_through(streams.faulty_engine(random, error)):
        for _ in range(random.randint(1, 3)):
            try:
                training.step()
            except OSError as raised:
                named = Path(os.fsdecode(raised.filename))
                if raised.errno != error or not any(path in named.parents for path in training.activations._paths):
                    raise Wrong(f"{raised!r} with filename {raised.filename!r} was raised for errno {error}") from raised


def _with_a_signal(random: randoms.Random, training: Training) -> None:
    """At a moment by lot, as a terminal sends it: most come while torch computes."""
    begun = time.perf_counter()
    training.step()
    seconds = random.uniform(0, time.perf_counter() - begun)
    done = threading.Event()

    def send() -> None:
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGINT)
        done.set()

    thread = threading.Thread(target=send)
    with lost_in_finalizers():
        came = False
        try:
            thread.start()
            training.step()
            while not done.is_set():
                time.sleep(0.0001)
            time.sleep(0.001)
        except KeyboardInterrupt:
            came = True
        with contextlib.suppress(KeyboardInterrupt):
            thread.join()
    gc.collect()
    if not came:
        raise Wrong("a Ctrl-C was swallowed")
