"""What is wrong with a file is found and named, and a sound one is said to be so."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import deepnvme
from deepnvme.__main__ import main
from deepnvme.checkpoint import CorruptCheckpoint, verify
from deepnvme.memory.pool import BufferPool
from deepnvme.safetensors import load_file, save_file, save_sharded

from ..support.archives import place_of, rezipped
from ..support.examples import examples
from ..support.files import flip
from ..support.interpreters import Interpreters
from ..support.objects import OBJECTS


@pytest.fixture
def path(drive: Path) -> Path:
    """With checksums: of small storages, one that is empty, and one of several chunks."""
    deepnvme.save([torch.arange(10), torch.arange(1_500_000), torch.empty(0), torch.arange(7)], drive / "file.pt", checksum=True)
    return drive / "file.pt"


class TestProblems:
    @pytest.mark.parametrize(("key", "at"), [(0, 0), (1, 0), (1, 8_000_000), (1, 11_999_999), (3, 55)])
    def test_a_flipped_bit_is_found(self, path: Path, key: int, at: int) -> None:
        flip(path, place_of(path, f"/data/{key}") + at)
        (problem,) = verify(path).problems
        assert problem.startswith(f"storage {key}, ")
        assert "expected CRC-32" in problem

    def test_damage_of_the_pickle_is_found(self, path: Path) -> None:
        flip(path, place_of(path, "data.pkl") + 60)
        assert any(problem.startswith("the pickle") for problem in verify(path).problems)

    @pytest.mark.parametrize("save", [deepnvme.save, torch.save])
    def test_of_a_file_with_any_bit_flipped_only_one_that_loads_is_sound(
        self, drive: Path, save: Callable[[object, Path], None]
    ) -> None:
        path = drive / "file.pt"
        obj: list[Any] = [torch.arange(5), torch.empty(0), "text"]
        save(obj, path)
        data, random = path.read_bytes(), Random(0)
        places = [at for at in range(len(data)) if data[at] not in b"Z\0" or random.random() < 0.05]  # padding is often enough
        places += range(len(data) - 98, len(data))  # the three ends of the directory
        for at in random.sample(places, examples(300)):
            flipped = bytearray(data)
            flipped[at] ^= 1 << random.randrange(8)
            path.write_bytes(flipped)
            if not verify(path).ok:
                continue
            loaded = deepnvme.load(path)
            assert torch.equal(loaded[0], obj[0]), f"byte {at} is {flipped[at]}"
            assert (loaded[1].numel(), loaded[2]) == (0, "text"), f"byte {at} is {flipped[at]}"
            with zipfile.ZipFile(path) as archive:
                assert archive.testzip() is None, f"byte {at} is {flipped[at]}"

    @pytest.mark.parametrize("save", [deepnvme.save, torch.save])
    @pytest.mark.parametrize(
        ("structure", "at"),
        [(b"PK\1\2", 6), (b"PK\1\2", 38), (b"PK\1\2", 45), (b"PK\6\6", 16), (b"PK\6\6", 24), (b"PK\6\7", 0),
         (b"PK\6\7", 16), (b"PK\5\6", 4), (b"PK\5\6", 8)],
        ids=["version", "folder", "offset", "disk", "count", "locator", "disks", "its disk", "its count"],
    )  # fmt: skip
    def test_damage_of_the_directory_is_found(
        self, drive: Path, save: Callable[[object, Path], None], structure: bytes, at: int
    ) -> None:
        save([torch.arange(5)], drive / "file.pt")
        data = bytearray((drive / "file.pt").read_bytes())
        data[data.rindex(structure) + at] ^= 0x90
        (drive / "file.pt").write_bytes(data)
        assert len(verify(drive / "file.pt").problems) == 1

    @pytest.mark.parametrize(("record", "header"), [("byteorder", True), ("data/0", True), ("serialization_id", False)])
    def test_damage_of_other_records_and_names_is_found(self, path: Path, record: str, header: bool) -> None:
        data = bytearray(path.read_bytes())
        data[data.index(record.encode()) if header else place_of(path, record)] ^= 1
        path.write_bytes(data)
        (problem,) = verify(path).problems
        assert record.replace("data/", "storage ") in problem

    def test_a_checksum_of_an_empty_storage_is_damage(self, path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[data.rindex(b"archive/data/2") - 30] ^= 1
        path.write_bytes(data)
        (problem,) = verify(path).problems
        assert problem.startswith("storage 2, 0 bytes")

    @pytest.mark.slow
    @pytest.mark.parametrize(("record", "said"), [("data/0", "storage 0"), ("data.pkl", "record data.pkl")])
    def test_damage_of_a_compressed_file_is_found(self, path: Path, record: str, said: str) -> None:
        rezipped(path, zipfile.ZIP_DEFLATED)
        flip(path, place_of(path, record) + 10)
        (problem,) = verify(path).problems
        assert problem.startswith(f"{said}: ")

    @pytest.mark.slow
    @pytest.mark.parametrize(("field", "at"), [(b"PK\1\2", 6), ("\xe9".encode(), 0)], ids=["its version", "a name"])
    def test_damage_of_the_headers_of_a_compressed_file_is_found(self, path: Path, field: bytes, at: int) -> None:
        rezipped(path, zipfile.ZIP_DEFLATED, folder="\xe9")
        content = bytearray(path.read_bytes())
        content[content.index(field) + at] = 0xFF
        path.write_bytes(content)
        assert len(verify(path).problems) == 1
        with pytest.raises(CorruptCheckpoint):
            deepnvme.load(path, checksum=True)

    def test_a_file_cut_off_is_told(self, path: Path) -> None:
        with path.open("r+b") as file:
            file.truncate(place_of(path, "/data/1") + 5)
        (problem,) = verify(path).problems
        assert f"the file was cut off at byte {path.stat().st_size}" in problem

    @pytest.mark.parametrize(
        ("content", "said"),
        [(b"<!DOCTYPE html><html></html>", "HTML page"), (b"version https://git-lfs.github.com/spec/v1\n", "pointer of Git LFS"),
         (pickle.dumps([1, 2, "three"]), "a pickle that torch.save has not written")],
        ids=["html", "lfs", "pickle"],
    )  # fmt: skip
    @pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
    def test_a_file_that_is_no_checkpoint_is_named(self, drive: Path, content: bytes, said: str, name: str) -> None:
        (drive / name).write_bytes(content)
        (problem,) = verify(drive / name).problems
        assert said in problem
        with pytest.raises(CorruptCheckpoint, match=said):
            load_file(drive / name)

    @pytest.mark.parametrize(
        ("damage", "said"),
        [
            (lambda data: data[:-1], "tensor 'b' is cut off: expected 12 bytes, found 11"),
            (lambda data: data + b"x", "it should end"),
            (lambda data: data[:5], "expected 8 bytes, found 5"),
            (lambda data: data.replace(b"F32", b"F16"), "should have 6 bytes by its shape, and has 12"),
        ],
    )
    def test_damage_of_safetensors_is_found(self, drive: Path, damage: Callable[[bytes], bytes], said: str) -> None:
        path = drive / "file.safetensors"
        save_file({"a": torch.arange(3), "b": torch.ones(3)}, path)
        path.write_bytes(damage(path.read_bytes()))
        (problem,) = verify(path).problems
        assert said in problem

    def test_damage_of_shards_is_found(self, drive: Path) -> None:
        *shards, index = save_sharded({"a": torch.arange(3), "b": torch.ones(3)}, drive, max_shard_size=12)
        shards[0].write_bytes(shards[0].read_bytes()[:-1])
        assert [str(shards[0]) in problem for problem in verify(index).problems] == [True]
        shards[0].unlink()
        assert verify(index).problems == (f"shard {shards[0]} is not there",)

    def test_a_tensor_missing_from_its_shard_is_found(self, drive: Path) -> None:
        *_, index = save_sharded({"a": torch.arange(3), "b": torch.ones(3)}, drive, max_shard_size=12)
        written = json.loads(index.read_text())
        written["weight_map"]["c"] = written["weight_map"]["a"]
        index.write_text(json.dumps(written))
        (problem,) = verify(index).problems
        assert "tensor 'c'" in problem


class TestSound:
    @pytest.mark.parametrize("kind", OBJECTS)
    def test_every_kind_of_object_is_sound(self, drive: Path, kind: str) -> None:
        for save in (lambda obj, path: deepnvme.save(obj, path, checksum=True), deepnvme.save, torch.save):
            save(OBJECTS[kind](), drive / "file.pt")
            assert verify(drive / "file.pt").problems == ()

    def test_tensors_bytes_and_checksums_are_counted(self, path: Path) -> None:
        report = verify(path, pool=BufferPool(4 << 20))
        assert report.ok
        assert (report.tensors, report.nbytes, report.checksums) == (4, 8 * 1_500_017, 3)

    @pytest.mark.parametrize("kind", OBJECTS)
    def test_a_compressed_file_is_sound_and_told_to_be_compressed(
        self, drive: Path, kind: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        torch.save(OBJECTS[kind](), drive / "file.pt")
        before = verify(drive / "file.pt")
        rezipped(drive / "file.pt", zipfile.ZIP_DEFLATED)
        after = verify(drive / "file.pt")
        assert (after.ok, after.compressed) == (True, True)
        assert (after.tensors, after.nbytes, after.checksums) == (before.tensors, before.nbytes, before.checksums)
        with pytest.raises(SystemExit):
            main(["verify", str(drive / "file.pt")])
        assert capsys.readouterr().out.endswith("; compressed)\n")

    @pytest.mark.parametrize("save", [deepnvme.save, torch.save])
    def test_the_contents_of_a_file_that_was_saved_with_defaults_are_checked(
        self, drive: Path, save: Callable[[object, Path], None]
    ) -> None:
        save([torch.ones(5), torch.empty(0), torch.arange(600_000)], drive / "file.pt")
        report = verify(drive / "file.pt")
        assert (report.ok, report.checked_nbytes, report.contents_checked) == (True, 4_800_020, True)
        flip(drive / "file.pt", place_of(drive / "file.pt", "/data/2") + 3_000_000)
        assert [problem[:9] for problem in verify(drive / "file.pt").problems] == ["storage 2"]


class TestCommand:
    def test_it_says_what_each_file_is_and_ends_with_0(self, path: Path, drive: Path, capsys: pytest.CaptureFixture[str]) -> None:
        save_file({"a": torch.ones(3)}, drive / "a.safetensors")
        with pytest.raises(SystemExit) as ended:
            main(["verify", str(path), str(drive / "a.safetensors")])
        assert ended.value.code == 0
        assert capsys.readouterr().out.splitlines() == [
            f"{path}: ok (structure, and checksums of all 4 storages, 12000136 bytes)",
            f"{drive / 'a.safetensors'}: ok as far as checked"
            " (structure; contents of 1 tensors, 12 bytes, not checked: the format has no checksums)",
        ]

    def test_it_says_what_of_a_file_has_no_checksum(self, path: Path, drive: Path, capsys: pytest.CaptureFixture[str]) -> None:
        deepnvme.save([torch.ones(3)], drive / "none.pt", checksum=False)
        flip(drive / "none.pt", place_of(drive / "none.pt", "/data/0"))
        report = verify(drive / "none.pt")
        assert (report.ok, report.checksums, report.checked_nbytes, report.contents_checked) == (True, 0, 0, False)
        assert report.checked() == "structure; contents of 1 storages, 12 bytes, not checked: the file has no checksums"
        with zipfile.ZipFile(path) as archive:
            crc = next(each.CRC for each in archive.infolist() if each.filename.endswith("data/0")).to_bytes(4, "little")
        path.write_bytes(path.read_bytes().replace(crc, bytes(4)))
        report = verify(path)
        assert (report.ok, report.checksums, report.checked_nbytes) == (True, 2, 8 * 1_500_007)
        assert report.checked() == (
            "structure, and checksums of 2 of 4 storages, 12000056 of 12000136 bytes; contents of the others not checked:"
            " they have none"
        )

    @pytest.mark.parametrize(("checksum", "options", "status"), [
        (True, ["--require-checksums"], 0), (False, ["--require-checksums"], 3), (False, [], 0),
    ])  # fmt: skip
    def test_it_ends_with_3_if_checksums_are_required_and_there_are_none(
        self, path: Path, drive: Path, checksum: bool, options: list[str], status: int
    ) -> None:
        deepnvme.save([torch.ones(3)], drive / "file2.pt", checksum=checksum)
        flip(path, place_of(path, "/data/0"))
        for files, expected in (([drive / "file2.pt"], status), ([drive / "file2.pt", path], 1)):  # what is wrong counts more
            with pytest.raises(SystemExit) as ended:
                main(["verify", *options, *map(str, files)])
            assert ended.value.code == expected

    @pytest.mark.parametrize(("options", "status"), [([], 0), (["--require-checksums"], 3)])
    def test_a_file_that_has_nothing_to_verify_it_by_is_not_wrong(
        self, path: Path, options: list[str], status: int, capsys: pytest.CaptureFixture[str]
    ) -> None:
        torch.save([torch.ones(3)], path, _use_new_zipfile_serialization=False)
        report = verify(path)
        assert (report.ok, report.contents_checked) == (True, False)
        with pytest.raises(SystemExit) as ended:
            main(["verify", *options, str(path)])
        assert ended.value.code == status
        assert capsys.readouterr().out.startswith(f"{path}: not checked (torch.save wrote it before torch 1.6")

    def test_it_ends_with_1_if_anything_is_wrong(self, path: Path, drive: Path, capsys: pytest.CaptureFixture[str]) -> None:
        flip(path, place_of(path, "/data/0"))
        with pytest.raises(SystemExit) as ended:
            main(["verify", str(drive / "missing"), str(path)])
        assert ended.value.code == 1
        said = capsys.readouterr()
        assert said.err == f"{drive / 'missing'}: No such file or directory\n"
        assert said.out.splitlines()[0] == f"{path}: 1 wrong (structure, and checksums of all 4 storages, 12000136 bytes)"
        assert said.out.splitlines()[1].startswith("  storage 0, 80 bytes")

    def test_that_nobody_reads_it_to_the_end_is_no_error(self, path: Path) -> None:
        reader, writer = os.pipe()
        os.close(reader)
        with open(writer, "wb") as closed:
            command = [sys.executable, "-m", "deepnvme", "verify", str(path), str(path)]
            done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True)
        assert (done.returncode, done.stderr) == (1, "")

    def test_a_fifo_is_refused_rather_than_waited_for(self, drive: Path, capsys: pytest.CaptureFixture[str]) -> None:
        os.mkfifo(drive / "fifo.pt")
        with pytest.raises(SystemExit) as ended:
            main(["verify", str(drive / "fifo.pt")])
        assert ended.value.code == 1
        assert capsys.readouterr().err == f"{drive / 'fifo.pt'}: it is no regular file\n"

    @pytest.mark.slow
    @pytest.mark.parametrize("module", [["deepnvme.checkpoint.verify"], ["deepnvme", "verify"]], ids=" ".join)
    def test_it_is_a_module(self, path: Path, module: list[str]) -> None:
        done = subprocess.run([sys.executable, "-W", "error", "-m", *module, path], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        assert "ok" in done.stdout

    def test_the_package_alone_has_to_be_imported(self, path: Path, interpreters: Interpreters) -> None:
        names = "deepnvme.safetensors, deepnvme.swap.buffer_pool, deepnvme.io.FastFileWriter"
        interpreters.run(f"import deepnvme; assert deepnvme.checkpoint.verify({str(path)!r}).ok; {names}").check()

    @pytest.mark.parametrize("first", ["deepnvme.checkpoint", "deepnvme.checkpoint.verify"])
    def test_the_function_stays_one_when_the_module_is_imported(self, path: Path, interpreters: Interpreters, first: str) -> None:
        program = (
            f"import {first}, deepnvme.checkpoint.verify, importlib\n"
            "from deepnvme.checkpoint import verify\n"
            "assert importlib.import_module('deepnvme.checkpoint.verify') is verify\n"
            f"assert deepnvme.checkpoint.verify({str(path)!r}).ok and verify({str(path)!r}).ok"
        )
        ended = interpreters.run(program)
        assert (ended.returncode, ended.stderr) == (0, "")

    @pytest.mark.parametrize(("words", "status"), [([], 2), (["--help"], 0), (["nothing"], 2), (["verify"], 2)])
    def test_wrong_words_end_with_the_usage(self, words: list[str], status: int, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == status
        said = capsys.readouterr()
        assert "verify" in said.out + said.err
