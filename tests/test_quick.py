"""What ``--quick`` leaves out, and what it does not."""

from __future__ import annotations

import pytest

from .support.examples import examples


def test_a_quick_run_tries_a_quarter_of_the_examples_and_any_other_run_all(request: pytest.FixtureRequest) -> None:
    quick = request.config.getoption("--quick")
    assert (examples(60), examples(1)) == ((15, 1) if quick else (60, 1))
