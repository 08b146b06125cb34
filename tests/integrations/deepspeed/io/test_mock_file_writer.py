"""MockFileWriter: counts, and writes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepnvme.integrations.deepspeed.io import MockFileWriter


def test_what_cannot_be_opened_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        MockFileWriter(tmp_path / "missing" / "file")


def test_the_file_stays_empty_and_what_it_would_have_is_counted(tmp_path: Path) -> None:
    with MockFileWriter(tmp_path / "file") as file:
        torch.save({"t": torch.arange(9)}, file)
        saved = file.tell()
        assert file.write(memoryview(bytes(12)).cast("I")) == 12
        tensors = [torch.zeros(5), torch.zeros(3, dtype=torch.uint8)]
        assert file.save_torch_storage_object_list([(t.untyped_storage(), t.dtype) for t in tensors], True) == 20 + 3 + 16
    assert saved > 72
    assert file._stats["bytes"] == saved + 12 + 39
    assert (file._stats["save_storage"], file._stats["save_storage_bytes"], file._stats["close"]) == (2, 23, 1)
    assert (tmp_path / "file").read_bytes() == b""
