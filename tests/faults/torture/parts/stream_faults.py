"""Reads that fail and stop failing, under a stream of weights: the same output, or each error once, with errno and path."""

from __future__ import annotations

import errno
import random as randoms
from pathlib import Path

from deepnvme.streaming import WeightStore, stream

from ....support.engines import transfers_through
from .. import Wrong, streams

SHORT, SECONDS = 6, 60

_ERRORS = (errno.EIO, errno.ENODEV, errno.ETIMEDOUT, errno.ENXIO)


def attack(random: randoms.Random, directory: Path) -> None:
    quantize = random.choice([None, None, "int8"])
    path = directory / "store"
    streams.built(path, quantize).close()
    with WeightStore.open(path) as store:
        model = streams.model()
        with stream(model, store) as streaming:
            wanted = streams.output(model)
            streaming.close(restore=True)
        budget = random.choice([0, 0, 3 * streams.BLOCK_BYTES, 1 << 20])
        with stream(model, store, prefetch=random.randint(0, 3), memory_budget=budget) as streaming:
            for _ in range(random.randint(0, 2)):
                streams.check_output(model, wanted)
            error = random.choice(_ERRORS)
            told: list[OSError] = []
            with transfers_through(streams.faulty_engine(random, error)):
                for _ in range(random.randint(1, 12)):
                    try:
                        streams.check_output(model, wanted)
                    except OSError as raised:
                        told.append(raised)  # with its traceback
            if len(set(map(id, told))) != len(told) or len(told) > 4:
                raise Wrong(f"{len(told)} errors were raised, of at most 4 faults")
            for each in told:
                if each.errno != error or not str(each.filename).startswith(str(path)):
                    raise Wrong(f"{each!r} with filename {each.filename!r} was raised for errno {error} in '{path}'")
            for _ in range(3):  # the fault is mended
                streams.check_output(model, wanted)
            streaming.close(restore=random.random() < 0.5)
