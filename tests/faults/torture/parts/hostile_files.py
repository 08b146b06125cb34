"""Files made to take memory or time before they are refused: each is refused within limits of both, in a process of its own."""

from __future__ import annotations

import json
import os
import pickle
import random as random_module
import struct
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import Metadata

from .. import Wrong

SHORT = 2
SECONDS = 240
_LIMIT_SECONDS = 20
"""Of processor time, which others on the machine do not add to."""
_WALL_SECONDS = 9 * _LIMIT_SECONDS
"""Until the process is given up: time for up to two readers, each within its limit, beside other load."""
_LIMIT_MIB = 300
"""Beyond what the interpreter and torch take; the largest of these files has 78, and is there as bytes and as text at a time."""

_READER = """
import pathlib, pickle, sys, time
import torch, deepnvme
from deepnvme.checkpoint import CorruptCheckpoint, NVMeReader, verify
from deepnvme.ops.op_builder import AsyncIOBuilder
from deepnvme.safetensors import load_file
from deepnvme.swap import CorruptManifest, TensorStore
path = sys.argv[1]
def load_metadata(path): NVMeReader(pathlib.Path(path).parent).read_metadata()
def open_store(path): TensorStore(pathlib.Path(path).parent, persist=True).close()
readers = {
    ".index.json": (load_file, verify), ".pt": (deepnvme.load, verify),
    ".safetensors": (load_file, verify), ".metadata": (load_metadata,), ".json": (open_store,)
}
AsyncIOBuilder().load()
def peak():  # ru_maxrss begins with that of the parent, which has made the file
    return int(pathlib.Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) >> 10
before = peak()
for read in next(each for suffix, each in readers.items() if path.endswith(suffix)):
    begin = time.process_time()
    try:
        found = read(path)
        outcome = "ok" if read is not verify or found.ok else "refused"
    except (CorruptCheckpoint, CorruptManifest, pickle.UnpicklingError):
        outcome = "refused"
    except Exception as error:  # a device in place of a file is EINVAL
        outcome = "refused" if isinstance(error, OSError) and error.errno == 22 else repr(error)
    print(read.__name__, round(time.process_time() - begin), peak() - before, outcome, sep="\\t")
"""


def pt(path: Path, stream: bytes, storages: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", stream)
        for key, data in storages.items():
            archive.writestr(f"a/data/{key}", data)
        archive.writestr("a/version", b"3")


def other_sizes(path: Path) -> None:
    torch.save([torch.ones(1000)], path)
    with zipfile.ZipFile(path) as archive:
        stream = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    pt(path, stream, {"0": bytes(1 << 30)})


def stored_operations(path: Path) -> None:
    pt(path, b"\x80\x02" + b"]0" * (25 << 20), {})


def stored_lists(path: Path) -> None:
    pt(path, b"\x80\x02" + b"]" * (50 << 20) + b".", {})


def a_huge_directory(path: Path) -> None:
    pt(path, b"\x80\x02N.", {})
    data = path.read_bytes()
    with path.open("wb") as file:
        file.truncate(8 << 30)
        file.write(data[:100])
        file.seek(0, 2)
        end_64 = file.tell()
        file.write(struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, 1 << 40, 1 << 40, 7 << 30, 0))
        file.write(struct.pack("<4sIQI", b"PK\6\7", 0, end_64, 1))
        file.write(struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0))


def header(path: Path, text: bytes) -> None:
    path.write_bytes(struct.pack("<Q", len(text)) + text)


def metadata(path: Path, stream: bytes) -> None:
    path.with_name(".metadata").write_bytes(b"\x80\2" + stream)


def manifest(path: Path, body: bytes) -> None:
    head = json.dumps({"format": "deepnvme tensor store", "version": 1, "crc32": zlib.crc32(body)}).encode()
    path.with_name("deepnvme-store.json").write_bytes(head + b"\n" + body + b"\n")


_METADATA = b"torch.distributed.checkpoint.metadata"
_STORAGE_META = pickle.dumps(Metadata({}, storage_data={}, storage_meta=5))  # type: ignore[arg-type]
FILES: dict[str, Callable[[Path], None]] = {
    "other sizes.pt": other_sizes,
    "operations.pt": stored_operations,
    "lists.pt": stored_lists,
    "directory.pt": a_huge_directory,
    "number.pt": lambda path: pt(path, b"\x80\x02]r\xff\xff\xff\x0f.", {}),
    "memo.pt": lambda path: pt(path, b"\x80\x04N" + b"\x94" * (78 << 20) + b".", {}),
    "calls itself.metadata": lambda path: metadata(path, b"ctorch\nSize\nq\0(h\0)NNtb)R."),
    "renames.metadata": lambda path: metadata(path, b"c%b\nMetadata\n(N}X\x08\0\0\0__name__X\1\0\0\0astb." % _METADATA),
    "storage.metadata": lambda path: path.with_name(".metadata").write_bytes(_STORAGE_META) and None,
    "zero.metadata": lambda path: path.with_name(".metadata").symlink_to("/dev/zero"),
    "fifo.metadata": lambda path: os.mkfifo(path.with_name(".metadata")),
    "bytes.metadata": lambda path: metadata(path, b"c__builtin__\nbytes\nJ\xff\xff\xff\x7f\x85R."),
    "lists.metadata": lambda path: metadata(path, b"]" * (50 << 20) + b"."),
    "brackets.json": lambda path: manifest(path, b"[" * (60 << 20)),
    "lists.json": lambda path: manifest(path, b'{"store":"s","directories":1,"tensors":{"a":[' + b"[]," * (20 << 20) + b"[]]}}"),
    "shards.index.json": lambda path: path.write_bytes(b'{"weight_map":{"a":[' + b"[]," * (30 << 20) + b"[]]}}"),
    "brackets.safetensors": lambda path: header(path, b"[" * (78 << 20)),
    "shape.safetensors": lambda path: header(path, b'{"a":{"dtype":"U8","shape":[' + b"0," * (39 << 20) + b"0]}}"),
    "digits.safetensors": lambda path: header(path, b'{"a":' + b"1" * (78 << 20) + b"}"),
    "length.safetensors": lambda path: path.write_bytes(struct.pack("<Q", 1 << 62)) and None,
}


def attack(random: random_module.Random, directory: Path) -> None:
    name = random.choice(list(FILES))
    path = directory / name
    FILES[name](path)
    path = next(directory.iterdir())  # metadata and manifests have names of their own
    try:
        done = subprocess.run(
            [sys.executable, "-c", _READER, str(path)], capture_output=True, text=True, timeout=_WALL_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise Wrong(f"{name}: not refused after {error.timeout} seconds") from error
    if done.returncode != 0:
        raise Wrong(f"{name}: ended with {done.returncode}: {done.stderr[-500:]}")
    for line in done.stdout.splitlines():
        read, seconds, mib, outcome = line.split("\t")
        if outcome != "refused" or int(seconds) > _LIMIT_SECONDS or int(mib) > _LIMIT_MIB:
            raise Wrong(f"{name}: {read} took {seconds} s and {mib} MiB: {outcome}")
