"""PyFileWriter: the file object of torch.save that DeepSpeed compares with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepnvme.integrations.deepspeed.io import PyFileWriter


def test_what_cannot_be_opened_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        PyFileWriter(tmp_path / "missing" / "file")


@pytest.mark.parametrize("zipped", [True, False])
def test_torch_saves_to_it(tmp_path: Path, zipped: bool) -> None:
    (tmp_path / "file").write_bytes(bytes(1_000_000))
    with PyFileWriter(tmp_path / "file") as file:
        torch.save({"t": torch.arange(9)}, file, _use_new_zipfile_serialization=zipped)
    assert torch.equal(torch.load(tmp_path / "file", weights_only=True)["t"], torch.arange(9))


def test_it_is_sought_flushed_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = PyFileWriter(tmp_path / "file")
    file.write(b"abc")
    file.write(memoryview(b"def"))
    assert file.tell() == 6
    file.seek(1)
    file.write(b"X")
    file.flush()
    assert (tmp_path / "file").read_bytes() == b"aXcdef"
    assert file.fileno() == -1
    file.close()
    file.close()
    with pytest.raises(ValueError, match="closed"):
        file.write(b"")
    file._dump_state()
    assert capsys.readouterr().out.startswith("stats = {")
    counted = {"close": 1, "fileno": 1, "flush": 1, "write": 3, "bytes": 7, "path": tmp_path / "file"}
    assert {key: file._stats[key] for key in counted} == counted
