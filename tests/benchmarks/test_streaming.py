"""The benchmark of streaming: complete, tidy, and clear about what could not be compared. Its figures are not looked at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import streaming

pytestmark = pytest.mark.slow

pytest.importorskip("transformers", reason="needs transformers, to make a Llama: pip install transformers")


def test_every_target_has_a_line_and_nothing_is_left_behind(tmp_path: Path, document_of: Callable[..., Any]) -> None:
    document = document_of(
        streaming.main, tmp_path, "--rounds", "1", *(f"--only={part}" for part in ("build", "first", "identity"))
    )
    built, _, _, *exact = document["targets"]
    assert built["figure"]["median"] > 0
    assert [target["met"] for target in exact] == [True] * 4  # bytes written, and three identities
