"""Attacks on the package: seeded programs that make tries, for hours by `make torture`, shortly by `make test-programs`.

A part is a module of ``parts``. Its docstring's first line says what it attacks. It has

``attack(random, directory)``
    One try, with a :class:`random.Random` of its own and an empty directory on the drive, which is removed afterwards. It returns
    where the package kept its promises, and raises :class:`Wrong`, :class:`Torn` or :class:`Leaked` where it did not. Any other
    exception counts as Wrong. It may start processes, and must not leave any.
``SHORT``
    How many tries `make test-programs` makes: at most some 10 seconds of them.
``SECONDS``
    A try that takes longer counts as hung.
``requires()``
    What is missing here to run it, or None. Optional.

Descriptors, threads, locked memory and buffers of the pool that a try leaves behind are found by the runner.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Has `harness`, which knows the random numbers of micro-batches. Only pytest has it on the path by itself.
sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))


class Wrong(AssertionError):
    """The package gave other data, another state or another error than it promises."""


class Torn(AssertionError):
    """A file is neither the old nor the new one."""


class Leaked(AssertionError):
    """Something that was taken was not given back."""
