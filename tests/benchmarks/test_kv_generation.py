"""The benchmark of KV caches: complete, tidy, and of the same tokens. Its figures are not looked at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("transformers", reason="needs transformers, to make a Llama: pip install transformers")

import kv_generation  # noqa: E402


def test_every_target_has_a_line_and_nothing_is_left_behind(tmp_path: Path, document_of: Callable[..., Any]) -> None:
    document = document_of(kv_generation.main, tmp_path, "--rounds", "1")
    assert [target["met"] for target in document["targets"][-3:]] == [True] * 3
    (on_drive,) = document["comparison"]["samples"][kv_generation.NVME]
    assert on_drive["bytes_written"] > 0
    assert on_drive["bytes_read"] > 0
