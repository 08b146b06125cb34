"""The result is torch.load's, whoever wrote the file; what is wrong with it is said."""

from __future__ import annotations

import argparse
import contextlib
import errno
import inspect
import io
import mmap
import os
import pickle
import struct
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import deepnvme
from deepnvme.checkpoint import CorruptCheckpoint, loading, verify
from deepnvme.checkpoint.formats.pickle_scan import is_plain
from deepnvme.checkpoint.formats.pt_pickle import pickled

from ..support.archives import big_endian, place_of, rewritten, rezipped
from ..support.engines import transfers_through
from ..support.files import flip
from ..support.objects import OBJECTS, SAFE, assert_same, tensors_of


@pytest.fixture
def path(drive: Path) -> Path:
    return drive / "file.pt"


def count_calls(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[Any]:
    called: list[Any] = []
    function = getattr(module, name)

    def counted(*arguments: Any, **options: Any) -> Any:
        called.append(arguments)
        return function(*arguments, **options)

    monkeypatch.setattr(module, name, counted)
    return called


def overwrite(path: Path) -> None:
    """In place: a mapping of the file shows it. (Where the file were cut off, looking at one would end the tests with SIGBUS.)"""
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))


class TestFilesThatAreNotThere:
    def test_a_missing_file_is_named(self, path: Path) -> None:
        with pytest.raises(FileNotFoundError) as failed:
            deepnvme.load(path)
        assert failed.value.filename == str(path)

    def test_a_directory_is_refused(self, drive: Path) -> None:
        with pytest.raises(IsADirectoryError):
            deepnvme.load(drive)

    def test_an_empty_file_is_corrupt(self, path: Path) -> None:
        path.touch()
        with pytest.raises(CorruptCheckpoint, match="neither an archive"):
            deepnvme.load(path)

    @pytest.mark.parametrize("content", [b"PK\3\4", b"PK\3\4" + bytes(10_000)], ids=["head", "zeros"])
    def test_a_file_that_only_begins_as_an_archive_is_corrupt(self, path: Path, content: bytes) -> None:
        path.write_bytes(content)
        with pytest.raises((CorruptCheckpoint, pickle.UnpicklingError)):
            deepnvme.load(path)


class TestPicklesThatTakeTooMuch:
    @pytest.mark.parametrize(
        ("stream", "why"),
        [
            (b"(" * 1_500_000, "nested"),
            (b"}N" + b"\x85" * 1_000_000 + b"Ns.", "nested"),
            (b"N\x85" * 1_500_000, "memo"),
            (b"]" * 1_500_000, "memo"),
            (b"]0" * 1_000_000, "memo"),
            (b"]r\xff\xff\xff\x0f.", "memo"),
            (b"N" * 1_500_000, "cut off"),
        ],
        ids=["marks", "tuples", "small tuples", "lists", "dropped", "numbers", "endless"],
    )
    @pytest.mark.parametrize("safe", [True, False])
    def test_are_refused_before_they_are_unpickled(
        self, path: Path, stream: bytes, why: str, safe: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a/data.pkl", b"\x80\2" + stream)
            archive.writestr("a/version", b"3")
        unpickled = count_calls(monkeypatch, loading, "unpickle") + count_calls(monkeypatch, loading, "torch_load")
        with pytest.raises(CorruptCheckpoint, match=why):
            deepnvme.load(path, weights_only=safe)
        assert not unpickled
        (problem,) = verify(path).problems
        assert why in problem


class TestArchivesThatTakeTooMuch:
    """Each of these guards is there for its file alone."""

    @pytest.fixture
    def archive(self, path: Path) -> Path:
        with zipfile.ZipFile(path, "w") as made:
            made.writestr("a/data.pkl", pickle.dumps([1], 2))
            made.writestr("a/version", b"3")
            made.writestr("a/data/0", b"x" * 100_000)
        return path

    @pytest.mark.parametrize(
        ("structure", "at", "field", "why"),
        [
            (b"PK\5\6", 12, struct.pack("<I", 1 << 30), "cannot be read"),
            (b"PK\5\6", 16, struct.pack("<I", 1 << 30), "not where its end says"),
            (b"PK\1\2", 24, struct.pack("<I", 1 << 30), "is stored, and cannot have"),
            (b"PK\1\2", 20, struct.pack("<II", 1 << 30, 1 << 30), "and the file has"),
            (b"PK\1\2", 42, struct.pack("<I", 0), "within record"),
        ],
        ids=["bytes", "place", "another size", "more than the file", "shared"],
    )
    def test_a_directory_that_contradicts_the_file_is_refused(
        self, archive: Path, structure: bytes, at: int, field: bytes, why: str
    ) -> None:
        data = bytearray(archive.read_bytes())
        place = data.rindex(structure) + at
        data[place : place + len(field)] = field
        archive.write_bytes(data)
        with pytest.raises(CorruptCheckpoint, match=why):
            deepnvme.load(archive)
        assert not verify(archive).ok

    def test_two_records_with_one_name_are_refused(self, archive: Path) -> None:
        with zipfile.ZipFile(archive, "a") as more, pytest.warns(UserWarning, match="Duplicate name"):
            more.writestr("a/version", b"3")
        with pytest.raises(CorruptCheckpoint, match="same name"):
            deepnvme.load(archive)


class TestCutFiles:
    @pytest.mark.parametrize("save", [deepnvme.save, torch.save], ids=["ours", "torch's"])
    def test_a_file_cut_off_anywhere_is_corrupt(self, path: Path, save: Callable[..., None]) -> None:
        save(OBJECTS["an optimizer"](), path)
        data = path.read_bytes()
        for size in range(4, len(data) - 1000, max(1, len(data) // 97)):
            path.write_bytes(data[:size])
            with pytest.raises(CorruptCheckpoint, match=f"the file was cut off at byte {size}") as cut:
                deepnvme.load(path)
            assert (cut.value.errno, cut.value.filename) == (errno.EBADMSG, str(path))

    def test_nothing_of_the_pickle_is_called(self, path: Path, drive: Path) -> None:
        class Evil:
            def __reduce__(self) -> Any:
                return os.mkdir, (str(drive / "evil"),)

        torch.save([Evil(), torch.ones(1000)], path)
        os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(CorruptCheckpoint):
            deepnvme.load(path, weights_only=False)
        assert not (drive / "evil").exists()


class TestDamagedFiles:
    @pytest.mark.parametrize("key", [0, 1])
    def test_a_flipped_bit_is_found_by_its_checksum(self, path: Path, key: int) -> None:
        deepnvme.save([torch.ones(100), torch.ones(300_000)], path, checksum=True)
        deepnvme.load(path, checksum=True)
        flip(path, place_of(path, f"/data/{key}") + 17)
        with pytest.raises(CorruptCheckpoint, match=rf"storage {key}, .* expected CRC-32 [0-9a-f]{{8}}, found [0-9a-f]{{8}}"):
            deepnvme.load(path, checksum=True)

    @pytest.mark.parametrize("save", [deepnvme.save, torch.save], ids=["ours", "torch's"])
    @pytest.mark.parametrize("options", [{}, {"checksum": True}, {"mmap": True}, {"keys": ["step"]}], ids=str)
    def test_a_flipped_bit_in_the_pickle_is_found_always(
        self, path: Path, save: Callable[..., None], options: dict[str, Any]
    ) -> None:
        save({"step": 3, "name": torch.ones(3)}, path)
        flip(path, place_of(path, "data.pkl") + path.read_bytes()[place_of(path, "data.pkl") :].index(b"name"))
        with pytest.raises(CorruptCheckpoint, match=r"the pickle, .* expected CRC-32 [0-9a-f]{8}, found [0-9a-f]{8}"):
            deepnvme.load(path, **options)

    def test_a_storage_of_another_name_is_told(self, path: Path) -> None:
        deepnvme.save({"a": torch.ones(3)}, path)
        flip(path, path.read_bytes().rindex(b"/data/0") + 6)
        with pytest.raises(CorruptCheckpoint, match=r"storage 1: the header at byte .* names it b'archive/data/0'"):
            deepnvme.load(path)

    @pytest.mark.parametrize(
        "options", [{}, {"keys": ["a"]}, {"map_location": lambda storage, location: storage}], ids=["whole", "keys", "a function"]
    )
    def test_a_missing_storage_is_named(self, path: Path, options: dict[str, Any]) -> None:
        torch.save({"a": torch.ones(3)}, path)
        path = rewritten(path, lambda name, data: None if name.endswith("/data/0") else data)
        with pytest.raises(CorruptCheckpoint, match="storage 0: expected 12 bytes, found none"):
            deepnvme.load(path, **options)

    @pytest.mark.parametrize("where", [None, lambda storage, location: storage], ids=["plain", "a function"])
    @pytest.mark.parametrize("nbytes", [40, 2 << 20])
    def test_a_tensor_larger_than_its_storage_is_damage(self, path: Path, where: Any, nbytes: int) -> None:
        tensor = torch.ones(nbytes)
        tensor.untyped_storage().resize_(nbytes)
        deepnvme.save([tensor], path)
        for options in ({}, {"weights_only": False, "encoding": "ascii"}):
            with pytest.raises(CorruptCheckpoint, match=r"a tensor is larger than its storage|expected 160 bytes, found 40"):
                deepnvme.load(path, where, **options)

    @pytest.mark.parametrize(
        ("names", "why"),
        [
            (("a/data.pkl", "b/version"), "b/version"),
            (("a/version",), "it has a/version"),
            (("a/data.pkl",), "it has a/data.pkl"),
        ],
    )
    def test_an_archive_that_torch_has_not_made_is_refused(self, path: Path, names: tuple[str, ...], why: str) -> None:
        with zipfile.ZipFile(path, "w") as made:
            for name in names:
                made.writestr(name, b"3")
        with pytest.raises(CorruptCheckpoint, match=why):
            deepnvme.load(path)

    @pytest.mark.parametrize("written", ["deflated", "big", "old"])
    def test_checksums_of_files_that_are_left_to_torch_are_refused(self, path: Path, written: str) -> None:
        torch.save([torch.arange(1000, dtype=torch.int32)], path, _use_new_zipfile_serialization=written != "old")
        if written == "deflated":
            rezipped(path, zipfile.ZIP_DEFLATED)
        elif written == "big":
            path = rewritten(path, big_endian)
        with pytest.raises(ValueError, match="left to torch"):
            deepnvme.load(path, checksum=True)

    @pytest.mark.parametrize("content", [b"<html></html>", bytes(999), pickle.dumps([1], 2)], ids=ascii)
    def test_a_file_that_is_no_checkpoint_is_said_to_be_none(self, path: Path, content: bytes) -> None:
        path.write_bytes(content)
        with pytest.raises((CorruptCheckpoint, pickle.UnpicklingError, RuntimeError)) as failed:
            deepnvme.load(path)
        assert content[:1] == b"\x80" or "neither an archive of torch.save" in str(failed.value)
        assert not verify(path).ok

    def test_a_record_of_another_size_than_in_the_pickle_is_named(self, path: Path) -> None:
        torch.save([torch.ones(100)], path)
        cut = rewritten(path, lambda name, data: data[: 396 if name.endswith("/data/0") else None])
        for where in (None, lambda storage, location: storage):
            with pytest.raises(CorruptCheckpoint, match=r"storage 0 .* expected 400 bytes, found 396"):
                deepnvme.load(cut, where)


class TestRefusals:
    @pytest.mark.filterwarnings("ignore:.*torch.jit")
    def test_torchscript_is_named_with_what_loads_it(self, path: Path) -> None:
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path)
        with pytest.raises(CorruptCheckpoint, match=r"a TorchScript archive.*torch\.jit\.load"):
            deepnvme.load(path, weights_only=False)

    def test_a_missing_key_is_named_with_the_keys_of_the_file(self, path: Path) -> None:
        deepnvme.save({"a": 1, "b": 2}, path)
        with pytest.raises(KeyError, match="no 'c'; there is 'a', 'b'"):
            deepnvme.load(path, keys=["a", "c"])

    def test_an_error_of_the_drive_is_raised(self, path: Path, faulty: Callable[..., Any]) -> None:
        deepnvme.save([torch.ones(300_000), torch.ones(3)], path)
        with transfers_through(faulty("threads", error_every=2)), pytest.raises(OSError, match="read") as failed:
            deepnvme.load(path)
        assert failed.value.errno == errno.EIO


class Sum:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.sum = tensor, int(tensor.sum())

    def __reduce__(self) -> Any:
        return Sum, (self.tensor,)


def aligned_to(alignment: int) -> contextlib.AbstractContextManager[None]:
    """Where torch.save lets storages begin."""
    serialization = pytest.importorskip("torch.utils.serialization", reason="needs torch 2.7: alignment")
    patched: contextlib.AbstractContextManager[None] = serialization.config.patch("save.storage_alignment", alignment)
    return patched


class TestTheSameAsTorchs:
    @pytest.mark.parametrize("kind", OBJECTS)
    @pytest.mark.parametrize("save", [deepnvme.save, torch.save], ids=["ours", "torch's"])
    def test_every_kind_of_object_is_loaded(self, path: Path, kind: str, save: Callable[..., None]) -> None:
        obj = OBJECTS[kind]()
        save(obj, path)
        assert_same(deepnvme.load(path, weights_only=kind in SAFE), torch.load(path, weights_only=kind in SAFE))

    @pytest.mark.parametrize("kind", ["views", "shared storages", "tied weights", "an optimizer"])
    def test_storages_are_shared_as_they_were(self, path: Path, kind: str) -> None:
        def sharing(obj: Any) -> list[int]:
            pointers = [tensor.untyped_storage().data_ptr() for tensor in tensors_of(obj)]
            return [pointers.index(pointer) for pointer in pointers]

        obj = OBJECTS[kind]()
        torch.save(obj, path)
        assert sharing(deepnvme.load(path)) == sharing(obj)

    @pytest.mark.parametrize("written", ["renamed", "zipped again", "deflated", "legacy", "unaligned", "mmap", "8192"])
    def test_a_file_written_in_any_way_is_loaded(self, path: Path, written: str) -> None:
        obj = OBJECTS["large among small"]()
        alignment = {"unaligned": 1, "8192": 8192}.get(written, 64)
        with contextlib.nullcontext() if alignment == 64 else aligned_to(alignment):
            torch.save(obj, path, _use_new_zipfile_serialization=written != "legacy")
        if written == "renamed":
            path = path.rename(path.with_name("other.bin"))
            rezipped(path, folder="née")
        elif written == "zipped again":
            rezipped(path)
        elif written == "deflated":
            rezipped(path, zipfile.ZIP_DEFLATED)
        assert_same(deepnvme.load(path, mmap=written == "mmap"), obj)

    def test_a_file_without_a_byte_order_is_loaded(self, path: Path) -> None:
        torch.save([torch.arange(1000, dtype=torch.int32)], path)
        without = rewritten(path, lambda name, data: None if name.endswith("byteorder") else data)
        assert deepnvme.load(without)[0][1] == 1
        torch.serialization.set_default_load_endianness(torch.serialization.LoadEndianness.BIG)
        try:
            assert deepnvme.load(without)[0][1] == 1 << 24
        finally:
            torch.serialization.set_default_load_endianness(None)

    @pytest.mark.parametrize("location", ["cpu", torch.device("cpu"), {"cpu": "cpu"}, "meta", {"cpu": "meta"}], ids=str)
    def test_map_location_is_obeyed(self, path: Path, location: Any) -> None:
        obj = OBJECTS["an optimizer"]()
        torch.save(obj, path)
        assert_same(deepnvme.load(path, location), torch.load(path, location))

    @pytest.mark.parametrize("keys", [None, ["b"]], ids=str)
    @pytest.mark.parametrize("answer", ["itself", "none", "a copy"])
    def test_what_a_function_gives_is_no_part_of_the_file(self, path: Path, keys: list[str] | None, answer: str) -> None:
        obj = {"a": torch.arange(300_000), "b": torch.arange(300_001)}
        torch.save(obj, path)
        asked = []

        def locate(storage: Any, location: str) -> Any:
            asked.append((storage.nbytes(), location))
            return {"itself": storage, "none": None, "a copy": storage.clone()}[answer]

        found = deepnvme.load(path, locate, keys=keys)
        overwrite(path)
        assert_same(found, {key: obj[key] for key in keys or obj})
        assert asked == [(obj[key].nbytes, "cpu") for key in keys or obj]

    @pytest.mark.parametrize("keys", [None, ["b"]], ids=str)
    def test_objects_that_look_at_their_tensors_are_loaded(self, path: Path, keys: list[str] | None) -> None:
        obj = {"a": Sum(torch.arange(1000)), "b": Sum(torch.arange(300_000))}
        deepnvme.save(obj, path, checksum=True)
        found = deepnvme.load(path, weights_only=False, keys=keys, checksum=True)
        assert {key: each.sum for key, each in found.items()} == {key: obj[key].sum for key in keys or obj}

    def test_each_storage_has_memory_of_its_own(self, path: Path) -> None:
        torch.save([torch.ones(300_000), torch.ones(3)], path)
        found = deepnvme.load(path)
        before = path.read_bytes()
        for tensor in found:
            tensor.zero_()
        assert path.read_bytes() == before
        path.unlink()
        assert not any(tensor.any() for tensor in found)


class TestWhatIsPlain:
    @pytest.mark.parametrize(
        "beside",
        [b"bytes", {1, "a"}, frozenset((2,)), defaultdict(list, a=[1]), argparse.Namespace(rate=0.1), Path("a/b")],
        ids=lambda beside: type(beside).__name__,
    )
    @pytest.mark.parametrize("protocol", [2, 4])
    def test_ordinary_objects_beside_tensors(self, path: Path, beside: Any, protocol: int) -> None:
        saved = {"beside": beside, "tensor": torch.ones(3)}
        torch.save(saved, path, pickle_protocol=protocol)
        assert is_plain(pickled(saved, protocol).stream) is (protocol == 2)
        found = deepnvme.load(path, weights_only=False)
        assert found["beside"] == beside
        assert torch.equal(found["tensor"], torch.ones(3))

    def test_what_looks_at_its_tensors_is_not(self) -> None:
        for obj in (Sum(torch.arange(3)), torch.eye(3).to_sparse()):
            assert not is_plain(pickled(obj, 2).stream)


class TestKeys:
    def test_only_their_bytes_are_read(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        obj = {"small": torch.arange(10), "wanted": torch.arange(1_000_000), "large": torch.arange(3_000_000)}
        deepnvme.save(obj, path)
        with deepnvme.Engine() as engine:
            monkeypatch.setattr(loading, "shared_engine", lambda path, config: engine)
            found = deepnvme.load(path, keys=["wanted"])
            assert 8_000_000 <= engine.stats().bytes_read <= 8_000_000 + 2 * 4096  # chunks are whole pages
        assert_same(found, {"wanted": obj["wanted"]})

    def test_entries_keep_the_order_and_share_memory(self, path: Path) -> None:
        whole = torch.arange(1000)
        deepnvme.save(OrderedDict(a=whole[:3], b=[whole[5:]], c=torch.ones(3)), path)
        found = deepnvme.load(path, keys=iter(("b", "a")))
        assert list(found) == ["b", "a"]
        assert found["a"].untyped_storage().data_ptr() == found["b"][0].untyped_storage().data_ptr()
        assert torch.equal(found["b"][0], whole[5:])


def test_large_storages_are_read_in_place(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save([torch.arange(1_000_003), torch.arange(2_000_000)], path)  # at multiples of 64
    with deepnvme.Engine() as engine:
        monkeypatch.setattr(loading, "shared_engine", lambda path, config: engine)
        deepnvme.load(path)
        stats = engine.stats()
    if not stats.bytes_direct:
        pytest.skip("needs a file system with direct I/O")
    assert stats.bytes_staged == 0
    assert stats.bytes_zero_copy > 0.99 * stats.bytes_read


def test_a_file_replaced_while_it_is_read_is_read_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deepnvme.save([torch.zeros(300_000), torch.zeros(5)], path)
    read = loading.read
    calls = []

    def replaced(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 1:
            deepnvme.save([torch.ones(3), torch.ones(300_000), torch.ones(5)], path)
        read(*arguments)

    monkeypatch.setattr(loading, "read", replaced)
    assert_same(deepnvme.load(path), [torch.ones(3), torch.ones(300_000), torch.ones(5)])


def test_nothing_of_the_file_is_mapped(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of a mapping that others have cut off ends the process."""
    torch.save({"a": torch.ones(300_000), "b": torch.ones(3), "c": torch.ones(3).to_sparse()}, path)
    monkeypatch.setattr(torch.UntypedStorage, "from_file", None)
    mapped = []
    opened_at = mmap.mmap

    def map_nothing(descriptor: int, *arguments: Any, **options: Any) -> Any:
        if descriptor != -1:
            mapped.append(descriptor)
        return opened_at(descriptor, *arguments, **options)

    monkeypatch.setattr(mmap, "mmap", map_nothing)
    deepnvme.load(path)
    deepnvme.load(path, keys=["a"])
    deepnvme.load(path, lambda storage, location: storage)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(CorruptCheckpoint):
        deepnvme.load(path)
    assert not verify(path).ok
    assert mapped == []


class TestInPlaceOfTorchs:
    """``torch.load = deepnvme.load``: its arguments, its environment, what it takes."""

    @pytest.fixture(autouse=True)
    def replaced(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch, "load", deepnvme.load)
        monkeypatch.setattr(torch, "save", deepnvme.save)

    @pytest.mark.parametrize("written", ["as a file", "by torch", "deflated", "of before 1.6"])
    def test_a_file_is_loaded(self, path: Path, written: str) -> None:
        obj = {"a": torch.arange(300_000), "b": torch.ones(3)}
        if written in ("by torch", "deflated"):
            torch.serialization.save(obj, path)
        else:
            torch.save(obj, path, pickle, 2, written != "of before 1.6")
        if written == "deflated":
            rezipped(path, zipfile.ZIP_DEFLATED)
        assert_same(torch.load(path), obj)
        assert_same(torch.load(path, "cpu", pickle), obj)
        assert_same(torch.load(str(path), map_location="cpu", weights_only=False, encoding="utf-8"), obj)

    def test_arguments_have_the_names_of_torch(self, path: Path) -> None:
        ours, torchs = (
            [name for name, each in inspect.signature(function).parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
            for function in (deepnvme.load, torch.serialization.load)
        )
        assert ours == torchs
        ours, torchs = (
            list(inspect.signature(function).parameters)[:6] for function in (deepnvme.save, torch.serialization.save)
        )
        assert ours == torchs
        obj = {"a": torch.ones(3)}
        for file in (path, io.BytesIO()):
            torch.save(obj=obj, f=file, pickle_module=pickle, pickle_protocol=2)
            if isinstance(file, io.BytesIO):
                file.seek(0)
            assert_same(torch.load(f=file, map_location="cpu", pickle_module=None, weights_only=True), obj)

    def test_a_file_object_is_loaded(self) -> None:
        obj = {"a": torch.ones(3), "b": torch.zeros(2)}
        data = io.BytesIO()
        torch.save(obj, data)
        data.seek(0)
        assert_same(torch.load(data), obj)
        for options in ({"checksum": True}, {"keys": ["b"]}):
            with pytest.raises(ValueError, match="path"):
                torch.load(data, **options)

    def test_a_safetensors_file_is_loaded(self, drive: Path) -> None:
        deepnvme.safetensors.save_file({"a": torch.ones(3)}, drive / "w.safetensors")
        assert_same(torch.load(drive / "w.safetensors", "cpu"), {"a": torch.ones(3)})
        with pytest.raises(RuntimeError, match="map_location"):
            torch.load(drive / "w.safetensors", {"cpu": "cpu"})
        with pytest.raises(ValueError, match="mmap=True is for"):
            torch.load(drive / "w.safetensors", mmap=True)
        with pytest.raises(ValueError, match="no checksums"):
            torch.load(drive / "w.safetensors", checksum=True)

    def test_keys_of_safetensors_are_all_that_is_read(self, drive: Path) -> None:
        path = drive / "w.safetensors"
        deepnvme.safetensors.save_file({name: torch.full((1 << 20,), index) for index, name in enumerate("abc")}, path)
        told: list[tuple[int, int]] = []
        loaded = torch.load(path, keys=["b"], progress=lambda *now: told.append(now))
        assert_same(loaded, {"b": torch.full((1 << 20,), 1)})
        assert told[-1] == (8 << 20, 8 << 20)
        with pytest.raises(KeyError, match="the file has no 'd'; there is 'a', 'b', 'c'"):
            torch.load(path, keys=["b", "d"])

    def test_the_environment_decides_on_weights_only(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.save(OBJECTS["a module"](), path)
        with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
            torch.load(path)
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
        torch.load(path)
        with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
            torch.load(path, weights_only=True)
        monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "yes")
        with pytest.raises(RuntimeError, match="both"):
            torch.load(path)
        monkeypatch.delenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
        with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
            torch.load(path, weights_only=False)
        with pytest.raises(RuntimeError, match="pickle_module"):
            torch.load(path, pickle_module=pickle)


def test_progress_is_told_bytes_up_to_those_wanted(path: Path) -> None:
    obj = OBJECTS["large among small"]()
    deepnvme.save(obj, path)
    told: list[tuple[int, int]] = []
    deepnvme.load(path, progress=lambda done, total: told.append((done, total)))
    total = sum(tensor.nbytes for tensor in obj)
    assert told[-1] == (total, total)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    with pytest.raises(ZeroDivisionError):  # what the function raises is no error of the file
        deepnvme.load(path, progress=lambda done, total: 1 // 0)
