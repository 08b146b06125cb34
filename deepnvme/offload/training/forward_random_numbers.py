"""The random numbers of micro-batches that run side by side: those they would draw one after the other."""

from __future__ import annotations

import warnings

import torch

_MOST_DRAWS = 1 << 28
"""Random numbers of a forward that are counted, which takes some seconds then. A dropout on the CPU draws two an element."""
_MOST_SURPRISES = 4
"""Steps in a row whose forwards have not drawn what was expected: then the next ones will not either."""
_ROUND = 624
"""Numbers that the generator, a Mersenne Twister, draws between two changes of its whole state."""
_LEFT = slice(8, 12)
"""Bytes of the generator's state that say how many numbers are left until then: an int32."""


class DrawsDiffer(Exception):
    """Raised if a forward has not drawn as many random numbers as was expected."""


class ForwardRandomNumbers:
    """Foretells the state of torch's default generator at the beginning of each forward of a step.

    One forward after the other begins with the state that the one before has left. Forwards that run side by side begin before
    that is known, so each is expected to draw as many numbers as one of the last step has drawn.
    """

    def __init__(self) -> None:
        self._draws: int | None = 0
        self._surprises = 0  # in a row
        self._states: list[torch.Tensor] = []

    @property
    def predictable(self) -> bool:
        """Whether it is known how many numbers a forward draws."""
        return self._draws is not None

    def begin(self, count: int) -> list[torch.Tensor]:
        """Return the state that each of ``count`` forwards begins with; the first with the present one."""
        assert self._draws is not None
        generator = torch.Generator()
        generator.set_state(torch.get_rng_state())
        self._states = [generator.get_state()]
        for _ in range(count):
            _draw(generator, self._draws)
            self._states.append(generator.get_state())
        return self._states[:-1]

    def ended(self, index: int, state: torch.Tensor) -> None:
        """Note the state that a forward has left. Raises DrawsDiffer if the next one should have begun with another."""
        if torch.equal(state, self._states[index + 1]):
            self._surprises = 0
            return
        self._surprises += 1
        if self._surprises == _MOST_SURPRISES:
            self._give_up()
        raise DrawsDiffer

    def learn(self, before: torch.Tensor, after: torch.Tensor) -> None:
        """Expect forwards to draw as many random numbers as one that began and ended with these states."""
        draws = (_left(before) - _left(after)) % _ROUND
        generator = torch.Generator()
        generator.set_state(before)
        _draw(generator, draws)
        while not torch.equal(generator.get_state(), after):
            if draws > _MOST_DRAWS:
                return self._give_up()
            _draw(generator, _ROUND)
            draws += _ROUND
        self._draws = draws

    def _give_up(self) -> None:
        self._draws = None
        warnings.warn(
            "it cannot be told how many random numbers a forward will draw: micro-batches run one after the other from now on, so"
            " that each gets its own, and blocks are read for each of them",
            RuntimeWarning,
            stacklevel=2,
        )


def _left(state: torch.Tensor) -> int:
    return int(state[_LEFT].view(torch.int32))


def _draw(generator: torch.Generator, draws: int) -> None:
    numbers = torch.empty(min(draws, 1 << 16), dtype=torch.int32, device="cpu")
    for begin in range(0, draws, len(numbers) or 1):
        numbers[: draws - begin].random_(generator=generator)
