"""Guess the format of a file that is no checkpoint from its first bytes, for error messages."""

from __future__ import annotations

import codecs
import os

from deepnvme.files.regular_files import open_regular
from deepnvme.files.replacing import with_filename

_HEAD = 512
_SHOWN = 40
"""Most characters of a text file that an error message shows."""
SAFETENSORS = "a safetensors file"
UNKNOWN = "a file of another kind"
"""Beginning of the description that :func:`guess_format` returns for a file of an unknown format."""
_LONGEST_SAFETENSORS_HEADER = 100_000_000
_TORCH_MAGIC = b"l\xfc\x9cF\xf9 j\xa8P\x19"
"""The number at the beginning of files of torch before 1.6, as a pickle has it."""
_TORCH_MAGIC_AS_TEXT = b"L119547037146038801333356L"
_TAR = (257, b"ustar")
"""Offset and bytes of the signature of a tar archive: torch before 0.2 has saved tar archives."""
_BEGINNINGS = {
    b"\x93NUMPY": "a .npy file: use numpy.load",
    b"GGUF": "a GGUF file, as of llama.cpp",
    b"\x1f\x8b": "a file compressed by gzip: unpack it first",
    b"\x28\xb5\x2f\xfd": "a file compressed by zstd: unpack it first",
}


def guess_format(path: str | os.PathLike[str]) -> str | None:
    """Return a description of what a file looks like, such as "a .npy file: use numpy.load".

    None if the file begins like a zip archive or like the older formats of torch. Raises OSError if the file cannot be
    read.
    """
    with with_filename(path), open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(_HEAD)
    if head.startswith(b"PK\x03\x04") or _TORCH_MAGIC in head or head.startswith(_TORCH_MAGIC_AS_TEXT):
        return None
    offset, tar = _TAR
    if head[offset : offset + len(tar)] == tar:
        return None
    for beginning, text in _BEGINNINGS.items():
        if head.startswith(beginning):
            return text
    header = int.from_bytes(head[:8], "little")
    if head[8:9] == b"{" and 2 <= header <= min(_LONGEST_SAFETENSORS_HEADER, size - 8):
        return f"{SAFETENSORS}: use deepnvme.safetensors.load_file, or give it a name that ends in .safetensors"
    if len(head) > 1 and head[0] == 0x80 and head[1] <= 5:
        return "a pickle that torch.save has not written: use pickle.load, if you trust it"
    if not head.strip(b"\0"):
        return "zeros, as a download leaves that was broken off"
    return _text(head) or f"{UNKNOWN}, which begins with {head[:16]!r}"


def _text(head: bytes) -> str | None:
    """Describe a text file by its first bytes, such as "JSON"; return None if they are not text."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)  # the last character may be cut off
    except UnicodeDecodeError:
        return None
    if not all(character.isprintable() or character in "\n\r\t" for character in text):
        return None
    begins = text.lstrip().lower()
    if begins.startswith("version https://git-lfs"):
        return "a pointer of Git LFS: git lfs pull fetches the file itself"
    if begins.startswith(("<!doctype html", "<html")):
        return "an HTML page, as servers send instead of a file"
    if begins.startswith(("{", "[")):
        return "JSON"
    return f"a text that begins with {text.strip().partition(chr(10))[0][:_SHOWN]!r}"
