"""What is wrong with a file is found and named, and a sound one is said to be so."""

from __future__ import annotations

import json
import os
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
from deepnvme.checkpoint import verify
from deepnvme.safetensors import save_file

from ..support.archives import place_of, rezipped
from ..support.examples import examples
from ..support.files import flip
from ..support.interpreters import Interpreters
from ..support.objects import OBJECTS
from ..support.shards import save_sharded


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

    @pytest.mark.parametrize("written", ["deflated", "of before 1.6", "html"])
    def test_what_cannot_be_verified_is_not_said_to_be_sound(self, path: Path, written: str) -> None:
        if written == "deflated":
            rezipped(path, zipfile.ZIP_DEFLATED)
        elif written == "html":
            path.write_bytes(b"<!DOCTYPE html><html></html>")
        else:
            torch.save([torch.ones(3)], path, _use_new_zipfile_serialization=False)
        assert len(verify(path).problems) == 1

    def test_a_file_cut_off_is_told(self, path: Path) -> None:
        with path.open("r+b") as file:
            file.truncate(place_of(path, "/data/1") + 5)
        (problem,) = verify(path).problems
        assert f"the file was cut off at byte {path.stat().st_size}" in problem

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
        *shards, index = save_sharded({"a": torch.arange(3), "b": torch.ones(3)}, drive, most=12)
        shards[0].write_bytes(shards[0].read_bytes()[:-1])
        assert [str(shards[0]) in problem for problem in verify(index).problems] == [True]
        shards[0].unlink()
        assert verify(index).problems == (f"shard {shards[0]} is not there",)

    def test_a_tensor_missing_from_its_shard_is_found(self, drive: Path) -> None:
        *_, index = save_sharded({"a": torch.arange(3), "b": torch.ones(3)}, drive, most=12)
        written = json.loads(index.read_text())
        written["weight_map"]["c"] = written["weight_map"]["a"]
        index.write_text(json.dumps(written))
        (problem,) = verify(index).problems
        assert problem.endswith("that are not there: c")


class TestSound:
    @pytest.mark.parametrize("kind", OBJECTS)
    def test_every_kind_of_object_is_sound(self, drive: Path, kind: str) -> None:
        for save in (lambda obj, path: deepnvme.save(obj, path, checksum=True), deepnvme.save, torch.save):
            save(OBJECTS[kind](), drive / "file.pt")
            assert verify(drive / "file.pt").problems == ()

    def test_tensors_bytes_and_checksums_are_counted(self, path: Path) -> None:
        report = verify(path)
        assert report.ok
        assert (report.tensors, report.nbytes, report.checked_nbytes) == (4, 8 * 1_500_017, 8 * 1_500_017)

    @pytest.mark.parametrize("save", [deepnvme.save, torch.save])
    def test_the_contents_of_a_file_that_was_saved_with_defaults_are_checked(
        self, drive: Path, save: Callable[[object, Path], None]
    ) -> None:
        save([torch.ones(5), torch.empty(0), torch.arange(600_000)], drive / "file.pt")
        report = verify(drive / "file.pt")
        assert (report.ok, report.checked_nbytes, report.nbytes) == (True, 4_800_020, 4_800_020)
        flip(drive / "file.pt", place_of(drive / "file.pt", "/data/2") + 3_000_000)
        assert [problem[:9] for problem in verify(drive / "file.pt").problems] == ["storage 2"]


class TestCommand:
    def test_it_says_what_each_file_is_and_ends_with_0(self, path: Path, drive: Path, capsys: pytest.CaptureFixture[str]) -> None:
        save_file({"a": torch.ones(3)}, drive / "a.safetensors")
        with pytest.raises(SystemExit) as ended:
            main(["verify", str(path), str(drive / "a.safetensors")])
        assert ended.value.code == 0
        assert capsys.readouterr().out.splitlines() == [
            f"{path}: ok (structure, and checksums of 12000136 of 12000136 bytes)",
            f"{drive / 'a.safetensors'}: ok (structure; 12 bytes of contents not checked: the format has no checksums)",
        ]

    def test_it_says_what_of_a_file_has_no_checksum(self, drive: Path) -> None:
        deepnvme.save([torch.ones(3)], drive / "none.pt", checksum=False)
        flip(drive / "none.pt", place_of(drive / "none.pt", "/data/0"))
        report = verify(drive / "none.pt")
        assert (report.ok, report.checked_nbytes) == (True, 0)
        assert report.checked() == "structure; 12 bytes of contents not checked: the file has no checksums"

    def test_it_ends_with_1_if_anything_is_wrong(self, path: Path, drive: Path, capsys: pytest.CaptureFixture[str]) -> None:
        flip(path, place_of(path, "/data/0"))
        with pytest.raises(SystemExit) as ended:
            main(["verify", str(drive / "missing"), str(path)])
        assert ended.value.code == 1
        said = capsys.readouterr()
        assert said.err == f"{drive / 'missing'}: No such file or directory\n"
        assert said.out.splitlines()[0] == f"{path}: 1 wrong (structure, and checksums of 12000136 of 12000136 bytes)"
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

    def test_the_package_alone_has_to_be_imported(self, path: Path, interpreters: Interpreters) -> None:
        names = "deepnvme.safetensors, deepnvme.swap.buffer_pool, deepnvme.io.FastFileWriter"
        interpreters.run(f"import deepnvme; assert deepnvme.checkpoint.verify({str(path)!r}).ok; {names}").check()

    @pytest.mark.parametrize(("words", "status"), [([], 2), (["--help"], 0), (["nothing"], 2), (["verify"], 2)])
    def test_wrong_words_end_with_the_usage(self, words: list[str], status: int, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == status
        said = capsys.readouterr()
        assert "usage: deepnvme" in said.out + said.err
