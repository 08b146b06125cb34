"""What is no checkpoint is named, with what it looks like."""

from __future__ import annotations

import errno
import gzip
import io
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import deepnvme
from deepnvme.checkpoint import CorruptCheckpoint
from deepnvme.checkpoint.formats.recognition import guess_format


def zipped(files: Mapping[str, bytes]) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return content.getvalue()


def by_numpy(save: Any, *arrays: Any) -> bytes:
    content = io.BytesIO()
    save(content, *arrays)
    return content.getvalue()


OTHERS: dict[str, tuple[bytes, str]] = {
    "text": ("größe\n".encode() * 200, "no checkpoint, but looks like a text that begins with 'größe'"),
    "page": (b"\n<!DOCTYPE html><html>404</html>", "an HTML page, as servers send instead of a file"),
    "json": (b'{"a": 1}', "but looks like JSON"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 1\n", "Git LFS: git lfs pull fetches"),
    "npy": (by_numpy(numpy.save, numpy.ones(3)), "a .npy file: use numpy.load"),
    "archive": (
        zipped({"a/readme.txt": b"x", "b/c": b""}),
        r"a zip archive that torch.save has not written: .* a/readme.txt, b/c",
    ),
    "gzip": (gzip.compress(b"abc"), "compressed by gzip: unpack it first"),
    "zeros": (bytes(5000), "looks like zeros, as a download leaves"),
    "pickle": (pickle.dumps({"a": 1}), "a pickle that torch.save has not written"),
    "unknown": (b"\x01\xff\xfe" * 1000, r"a file of another kind, which begins with b'\\x01\\xff\\xfe"),
}


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_no_checkpoint_is_named_with_what_it_looks_like(tmp_path: Path, kind: str, weights_only: bool) -> None:
    content, said = OTHERS[kind]
    path = tmp_path / "model.pt"
    path.write_bytes(content)
    with pytest.raises(CorruptCheckpoint, match=said) as caught:
        deepnvme.load(path, weights_only=weights_only)
    assert (caught.value.errno, caught.value.filename) == (errno.EBADMSG, str(path))
    assert "weights_only" not in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_a_safetensors_file_of_another_name_is_one(tmp_path: Path) -> None:
    deepnvme.safetensors.save_file({"a": torch.ones(3)}, tmp_path / "a.safetensors")
    (tmp_path / "a.safetensors").rename(tmp_path / "a.bin")
    with pytest.raises(CorruptCheckpoint, match=r"a safetensors file: use deepnvme.safetensors.load_file"):
        deepnvme.load(tmp_path / "a.bin")


def test_a_name_of_safetensors_alone_makes_none(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_text("<html></html>")
    with pytest.raises(CorruptCheckpoint, match="no safetensors file, but looks like an HTML page"):
        deepnvme.load(path)
    deepnvme.safetensors.save_file({"a": torch.ones(3)}, path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptCheckpoint, match=r"^((?!looks like).)*$"):  # it is damaged
        deepnvme.load(path)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_files_of_torch_are_not_taken_for_others(tmp_path: Path, protocol: int) -> None:
    """Nor if they are refused: the older format, and what weights_only does not allow."""
    torch.save({"a": torch.ones(3)}, tmp_path / "new.pt")
    torch.save(Path("x"), tmp_path / "old.pt", _use_new_zipfile_serialization=False, pickle_protocol=protocol)
    assert guess_format(tmp_path / "new.pt") is None
    assert guess_format(tmp_path / "old.pt") is None
    assert deepnvme.load(tmp_path / "old.pt", weights_only=False) == Path("x")
    if protocol == 2:
        with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
            deepnvme.load(tmp_path / "old.pt")
