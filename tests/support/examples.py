"""How many examples a property test tries: all that it wants, or a part in a quick run."""

from __future__ import annotations

from hypothesis import settings

_USUAL = 100  # hypothesis's own default, of which all counts here are written


def examples(number: int) -> int:
    """``number``, or with ``--quick`` as much less as hypothesis's default is then."""
    return max(1, number * settings().max_examples // _USUAL)
