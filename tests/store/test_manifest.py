"""The persisted form: replaced as a whole or not at all, and never believed when it is not whole."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import tracemalloc
import zlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepnvme.files.identity import join, membership
from deepnvme.store import manifest
from deepnvme.store.manifest import MANIFEST_NAME, MEMBERSHIP_NAME, CorruptManifest, StoredTensor, StoreManifest
from deepnvme.store.volumes import find_store

from ..support.examples import examples
from ..support.patience import PATIENCE

ONE = StoreManifest("store", 1, {"a": StoredTensor("float32", (2, 3), ((0, 4096, 24),), (123,))})

names = st.text(st.characters(codec=None)) | st.sampled_from(["\ud800", "\0", "", "a\nb", "é", '"'])
stored = st.builds(
    StoredTensor,
    st.sampled_from(["float32", "bfloat16"]),
    st.lists(st.integers(0, 1 << 40), max_size=4).map(tuple),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1 << 50), st.integers(1, 1 << 50)), max_size=3).map(tuple),
    st.none() | st.lists(st.integers(0, (1 << 32) - 1), max_size=3).map(tuple),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=examples(50))
@given(st.dictionaries(names, stored, max_size=5))
def test_what_was_published_is_loaded(tmp_path, tensors):
    published = StoreManifest("identity", 4, tensors)
    manifest.publish(tmp_path, published)
    loaded = manifest.load(tmp_path)
    assert loaded == published
    assert list(loaded.tensors) == list(tensors)


def test_any_byte_that_is_not_what_was_written_is_noticed(tmp_path):
    manifest.publish(tmp_path, ONE)
    path = tmp_path / MANIFEST_NAME
    whole = path.read_bytes()
    for place in range(len(whole) - 1):  # but the newline at the end, which says nothing
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(CorruptManifest) as refused:
            manifest.load(tmp_path)
        assert (refused.value.errno, refused.value.filename) == (errno.EBADMSG, str(path))


def test_another_version_is_refused_with_both_versions_named(tmp_path):
    manifest.publish(tmp_path, ONE)
    path = tmp_path / MANIFEST_NAME
    head, body = path.read_bytes().splitlines()
    path.write_bytes(json.dumps({**json.loads(head), "version": 7}).encode() + b"\n" + body)
    with pytest.raises(CorruptManifest, match=r", 1\).*, 7\)"):
        manifest.load(tmp_path)


BODY = '{"store":"s","directories":1,"tensors":{%s}}'
WRONG = {
    "brackets": "[" * (8 << 20),
    "lists as tensors": BODY % ('"a":[' + "[]," * (4 << 20) + "[]]"),
    "lists as parts": BODY % ('"a":["float32",[1],[' + "[]," * (4 << 20) + "[]],null]"),
    "empty numbers": BODY % ('"a":["float32",[' + "," * (8 << 20) + "],[],null]"),
    "infinity": BODY % '"a":["float32",[Infinity],[],null]',
    "a fraction": BODY % '"a":["float32",[1.0],[],null]',
    "a part too short": BODY % '"a":["float32",[1],[[0,0]],null]',
    "no dtype": BODY % '"a":[1,[1],[],null]',
    "digits": BODY % ('"a":["float32",[' + "1" * (4 << 20) + "],[],null]"),
    "a name without end": BODY % ('"' + "a" * (8 << 20)),
    "more behind it": BODY % "" + "{}",
}


def write(path, body):
    head = json.dumps({"format": "deepnvme tensor store", "version": 1, "crc32": zlib.crc32(body)})
    path.write_bytes(head.encode() + b"\n" + body + b"\n")


@pytest.mark.parametrize("name", [MANIFEST_NAME, MEMBERSHIP_NAME])
@pytest.mark.parametrize("kind", ["device", "FIFO"])
def test_what_is_no_file_is_refused_at_once(tmp_path, name, kind):
    path = tmp_path / name
    os.mkfifo(path) if kind == "FIFO" else path.symlink_to("/dev/zero")
    program = f"""
import pathlib, resource
from deepnvme.files.identity import membership
from deepnvme.store import CorruptManifest, manifest
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
try:
    directory = pathlib.Path({str(tmp_path)!r})
    {"manifest.load(directory)" if name == MANIFEST_NAME else "membership(directory / manifest.MEMBERSHIP_NAME, CorruptManifest)"}
except CorruptManifest as error:
    print(error.filename)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stdout == f"{path}\n"


@pytest.mark.parametrize("how", WRONG)
def test_what_publish_does_not_write_is_refused_at_once(tmp_path, how):
    body = WRONG[how].encode()
    write(tmp_path / MANIFEST_NAME, body)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptManifest) as refused:
            manifest.load(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 40 * len(body) + (1 << 20)
    finally:
        tracemalloc.stop()
    assert refused.value.filename == str(tmp_path / MANIFEST_NAME)


def test_a_shape_of_more_sizes_than_torch_has_is_refused(tmp_path):
    tensor = StoredTensor("int8", (1 << 61,) * 100_000, (), None)  # whose product would take minutes
    manifest.publish(tmp_path, StoreManifest("store", 1, {"tensor": tensor}))
    with pytest.raises(CorruptManifest, match="at most 64 numbers"):
        manifest.load(tmp_path)


@pytest.mark.parametrize("name", [MANIFEST_NAME, MEMBERSHIP_NAME])
@pytest.mark.parametrize("line", [b"[" * 60_000, b"[" * (1 << 20), b"1" * 60_000, None], ids=["deep", "long", "digits", "huge"])
def test_a_line_that_takes_too_much_is_refused(tmp_path, name, line):
    with (tmp_path / name).open("wb") as file:
        file.truncate(1 << 40) if line is None else file.write(line)
    with pytest.raises(CorruptManifest) as refused:
        manifest.load(tmp_path) if name == MANIFEST_NAME else membership(tmp_path / name, CorruptManifest)
    assert refused.value.filename == str(tmp_path / name)


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_publication_that_fails_leaves_the_old_manifest_and_nothing_else(tmp_path, monkeypatch, call):
    manifest.publish(tmp_path, ONE)

    def fails(*arguments):
        raise OSError(errno.EIO, "no")

    monkeypatch.setattr(os, call, fails)
    with pytest.raises(OSError, match="no"):
        manifest.publish(tmp_path, StoreManifest("store", 1, {}))
    monkeypatch.undo()
    assert manifest.load(tmp_path) == ONE
    assert os.listdir(tmp_path) == [MANIFEST_NAME]


class TestRecognise:
    @pytest.fixture
    def directories(self, tmp_path):
        made = [tmp_path / name for name in "abc"]
        for directory in made:
            directory.mkdir()
        join(made, MEMBERSHIP_NAME, "store")
        manifest.publish(made[0], StoreManifest("store", 3, {}))
        return made

    def test_two_stores(self, directories):
        manifest.publish(directories[1], ONE)
        with pytest.raises(ValueError, match="hold a store each"):
            find_store(directories)

    def test_a_member_without_the_first_directory(self, directories):
        with pytest.raises(ValueError, match=str(directories[0])):
            find_store([directories[1]])

    def test_members_of_a_store_that_never_committed_mean_nothing(self, directories):
        (directories[0] / MANIFEST_NAME).unlink()
        assert find_store(directories) == (None, [0, 1, 2])

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ('{"store": "1"}', "KeyError: 'index'"),
            ('{"store": "1", "index": "one", "first": ""}', "TypeError: expected an integer of at least 0, got 'one'"),
            ('{"store": 1, "index": 1, "first": ""}', "TypeError: expected a string, got int"),
            ("[1]", "expected an object"),
            ("{", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ],
    )
    def test_a_membership_that_is_not_whole(self, directories, text, why):
        (directories[1] / MEMBERSHIP_NAME).write_text(text)
        with pytest.raises(CorruptManifest, match=re.escape(f"manifest of a tensor store: {why}; restore it")):
            find_store(directories)
