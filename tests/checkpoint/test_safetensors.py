"""Files of safetensors: the same bytes, the same tensors, and more said of what is wrong."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepnvme.checkpoint import CorruptCheckpoint, safetensors_files
from deepnvme.checkpoint.formats.safetensors_header import (
    LONGEST_HEADER,
    parse_header,
)
from deepnvme.safetensors import load_file, load_model, save_file, save_model

from ..support.shards import save_sharded

safetensors = pytest.importorskip("safetensors.torch")

DTYPES = sorted((dtype for dtype in safetensors._SIZE if dtype is not None), key=str)


def tensors() -> dict[str, torch.Tensor]:
    """Of each dtype, large and small, scalar and empty."""
    made = {str(dtype): torch.arange(24, dtype=torch.uint8).view(dtype) if dtype.itemsize == 1 and dtype is not torch.bool
            else torch.arange(24).to(dtype) for dtype in DTYPES}  # fmt: skip
    return {
        **made,
        "large": torch.arange(300_001),
        "large bytes": torch.arange(600_007).to(torch.uint8),
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 3),
        'né "quoted"\n': torch.ones(2, 3),
        "a parameter": torch.nn.Parameter(torch.ones(3)),
    }


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return set(found) == set(expected) and all(
        (found[name].dtype, found[name].shape, found[name].stride()) == (each.dtype, each.shape, each.stride())
        and torch.equal(found[name].reshape(-1).view(torch.uint8), each.detach().reshape(-1).view(torch.uint8))
        for name, each in expected.items()
    )


class TestRefusals:
    """As safetensors' own, before anything is created."""

    @pytest.mark.parametrize(
        ("obj", "match"),
        [
            ([torch.ones(3)], "dict"),
            ({"a": 1}, "'a' must be a tensor"),
            ({1: torch.ones(3)}, "strings"),
            ({"a": torch.ones(3).to_sparse()}, "sparse"),
            ({"a": torch.ones(4, 4).t()}, "not contiguous"),
            ({"a": torch.ones(3), "b": torch.ones(8)[::2]}, "'b' is not contiguous"),
            ({"a": torch.ones(3, dtype=torch.complex128)}, "complex128"),
            ({"__metadata__": torch.ones(3)}, "format's own name"),
            ({"a": torch.empty(3, device="meta")}, "meta device"),
        ],
        ids=["list", "number", "name", "sparse", "transposed", "strided", "dtype", "metadata", "meta"],
    )
    def test_tensors_that_the_format_cannot_hold_are_refused(self, drive: Path, obj: Any, match: str) -> None:
        with pytest.raises((ValueError, TypeError, NotImplementedError), match=match) as ours:
            save_file(obj, drive / "file")
        assert list(drive.iterdir()) == []
        if "__metadata__" not in obj:  # which safetensors writes and then cannot read
            with pytest.raises(Exception) as theirs:  # noqa: PT011 - of several types
                safetensors.save_file(obj, str(drive / "file"))
            assert isinstance(ours.value, type(theirs.value))

    @pytest.mark.parametrize("overlap", ["same", "partly", "within"])
    def test_tensors_that_share_memory_are_refused(self, drive: Path, overlap: str) -> None:
        whole = torch.ones(10)
        parts = {"same": (whole, whole.view(2, 5)), "partly": (whole[:6], whole[5:]), "within": (whole, whole[3:5])}[overlap]
        obj = {"a": parts[0], "b": torch.ones(3), "c": parts[1]}
        for save in (safetensors.save_file, save_file):
            with pytest.raises(RuntimeError, match="share memory"):
                save(obj, drive / "file")

    def test_parts_of_one_storage_that_do_not_overlap_are_saved(self, drive: Path) -> None:
        whole = torch.arange(10)
        obj = {"a": whole[5:], "b": whole[:5], "c": whole[5:5]}
        save_file(obj, drive / "file")
        assert same(load_file(drive / "file"), obj)


def written(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def field(begin: int, end: int, shape: list[Any] | None = None, dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


class TestCorruptFiles:
    @pytest.mark.parametrize(
        ("content", "match"),
        [
            (b"", "expected 8 bytes, found 0"),
            (b"1234", "expected 8 bytes, found 4"),
            (written({}, length=LONGEST_HEADER + 1), "may have"),
            (written({}, length=100), "expected 100 bytes, found 2"),
            (written(b"[]"), "no JSON object"),
            (written(b"{"), "no JSON"),
            (written(b"\xff\xfe"), "no JSON"),
            (written(b"[" * 100_000), "no JSON"),
            (written(b'{"a": %b}' % (b"1" * 5000)), "no JSON"),
            (written({"a": field(0, 0, dtype=["U8"])}), "has no dtype"),  # type: ignore[arg-type]
            (written({"__metadata__": {"a": 1}}), "metadata"),
            (written({"a": 1}), "has no dtype"),
            (written({"a": {"dtype": "U8", "shape": [1]}}), "has no dtype"),
            (written({"a": field(0, 4, dtype="U7")}, bytes(4)), "'U7'"),
            (written({"a": field(0, 4, [-4])}, bytes(4)), "shape"),
            (written({"a": field(0, 4, [True, 4])}, bytes(4)), "shape"),
            (written({"a": field(0, 4, [2.0, 2])}, bytes(4)), "shape"),
            (written({"a": field(4, 0, [0])}, bytes(4)), "data_offsets"),
            (written({"a": field(0, 0, [1 << 62, 1 << 62, 0])}), "shape"),
            (written({"a": field(0, 4, [3])}, bytes(4)), "should have 3 bytes by its shape, and has 4"),
            (written({"a": field(0, 1 << 62, [1 << 31, 1 << 31])}), "cut off"),
            (written({"a": field(0, 4)}, bytes(3)), "'a' is cut off: expected 4 bytes, found 3"),
            (written({"a": field(0, 4)}, bytes(5)), "should end"),
            (written({"a": field(0, 4), "b": field(3, 7)}, bytes(7)), "'b' overlaps"),
            (written({"a": field(0, 4), "b": field(5, 7)}, bytes(7)), "'b' leaves a gap"),
            (written({"a": field(1, 4)}, bytes(4)), "'a' leaves a gap"),
        ],
    )
    def test_corrupt_files_are_refused_as_by_safetensors(self, drive: Path, content: bytes, match: str) -> None:
        path = drive / "file"
        path.write_bytes(content)
        with pytest.raises(CorruptCheckpoint, match=match) as refused:
            load_file(path)
        assert refused.value.filename == str(path)
        with pytest.raises(Exception):  # noqa: B017, PT011 - of several types
            safetensors.load_file(path)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("header", "match"),
        [
            (b'{"__metadata__": {}, "__metadata__": {}}', "twice"),
            (b'{"__metadata__": {"a": "", "a": ""}}', "'a' is there twice"),
            (b'{"a": %b, "a": %b}' % (2 * (json.dumps(field(0, 0)).encode(),)), "'a' is there twice"),
            (b'{"a": {"dtype": "U8", "shape": [%b1], "data_offsets": [0, 1]}}' % (b"%d, " % (1 << 62) * 300_000), "shape"),
            (b'{"a": {"dtype": "U8", "shape": [NaN], "data_offsets": [0, 0]}}', "no JSON"),
            (b'{"\\ud800": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}', "no JSON"),
            (b'{"a":' * 300_000, "no JSON"),
            (b"[" * (78 << 20), "81788928 values, and may have 8000000"),
            (b'{"a":[' + b"{}," * (20 << 20) + b"{}]}", "and may have 8000000"),
        ],
        ids=[
            "metadata twice", "a name twice", "a tensor twice", "a huge shape", "not a number", "half a pair", "objects",
            "brackets", "empty objects",
        ],
    )  # fmt: skip
    def test_headers_that_would_take_too_much_are_refused(self, drive: Path, header: bytes, match: str) -> None:
        path = drive / "file"
        path.write_bytes(written(header))
        tracemalloc.start()
        try:
            with pytest.raises(CorruptCheckpoint, match=match) as refused:
                load_file(path)
            assert tracemalloc.get_traced_memory()[1] < 100_000_000
        finally:
            tracemalloc.stop()
        assert len(str(refused.value)) < 2000

    def test_what_would_not_be_read_is_not_written(self, drive: Path) -> None:
        with pytest.raises(ValueError, match="up to 8000007 values, and may have 8000000: use several files"):
            save_file({"," * 8_000_000: torch.ones(1)}, drive / "file")
        assert not (drive / "file").exists()

    @given(st.binary(max_size=60), st.integers(0, 100))
    def test_a_header_of_any_bytes_is_refused_in_one_way(self, text: bytes, size: int) -> None:
        try:
            parse_header(text, 8 + len(text), 8 + len(text) + size)
        except ValueError:
            pass
        else:
            assert text.strip() == b"{}"

    def test_a_file_cut_off_anywhere_is_corrupt(self, drive: Path) -> None:
        path = drive / "file"
        save_file(tensors(), path)
        content = path.read_bytes()
        for size in range(0, len(content), len(content) // 50):
            path.write_bytes(content[:size])
            with pytest.raises(CorruptCheckpoint):
                load_file(path)


class TestTheSameAsSafetensors:
    @pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}, {"né": '\n\x7f\u2028"\\/\x01'}], ids=repr)
    def test_the_bytes_are_those_of_safetensors(self, drive: Path, metadata: dict[str, str] | None) -> None:
        save_file(tensors(), drive / "ours", metadata)
        safetensors.save_file(tensors(), drive / "theirs", metadata)
        assert (drive / "ours").read_bytes() == (drive / "theirs").read_bytes()

    @pytest.mark.parametrize("save", [save_file, safetensors.save_file], ids=["ours", "theirs"])
    def test_the_tensors_are_those_of_safetensors(self, drive: Path, save: Any) -> None:
        save(tensors(), drive / "file")
        found, expected = load_file(drive / "file"), safetensors.load_file(drive / "file")
        assert list(found) == sorted(expected)
        assert same(found, expected)

    def test_each_tensor_has_memory_of_its_own(self, drive: Path) -> None:
        save_file(tensors(), drive / "file")
        found = load_file(drive / "file")
        assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in found.values())
        (drive / "file").unlink()
        assert same(found, tensors())

    def test_tensors_at_unaligned_offsets_are_loaded(self, drive: Path) -> None:
        header = {"a": field(0, 1), "b": field(1, 1 + 4 * 200_000, [200_000], "F32")}
        text = json.dumps(header).encode()
        large = torch.arange(200_000.0)
        content = written(text + b" " * (-len(text) % 8), b"x" + bytes(large.view(torch.uint8).tolist()))
        (drive / "file").write_bytes(content)
        found = load_file(drive / "file")["b"]
        assert found.data_ptr() % 4 == 0
        assert torch.equal(found, large)

    @pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), "meta"], ids=str)
    def test_tensors_are_loaded_to_other_devices(self, drive: Path, device: Any) -> None:
        save_file({"a": torch.ones(3)}, drive / "file")
        assert load_file(drive / "file", device)["a"].device == torch.device(device)
        assert load_file(str(drive / "file"), device=device, backend="pread")["a"].shape == (3,)

    def test_conjugate_and_negative_views_have_their_values(self, drive: Path) -> None:
        tensor = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
        save_file({"a": tensor.conj()}, drive / "file")
        assert torch.equal(load_file(drive / "file")["a"], tensor.conj().resolve_conj())


def test_a_file_replaced_while_it_is_read_is_read_again(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"a": torch.zeros(300_000), "b": torch.zeros(5)}, drive / "file")
    read = safetensors_files.read
    calls = []

    def replaced(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 1:
            save_file({"b": torch.ones(300_000), "long name": torch.ones(5)}, drive / "file")
        read(*arguments)

    monkeypatch.setattr(safetensors_files, "read", replaced)
    assert same(load_file(drive / "file"), {"b": torch.ones(300_000), "long name": torch.ones(5)})


class TestShards:
    def test_all_are_loaded_by_their_index(self, drive: Path) -> None:
        obj = {name: torch.full((100,), float(index)) for index, name in enumerate("edcba")}
        assert same(load_file(save_sharded(obj, drive, 900)[-1]), obj)

    @pytest.mark.parametrize("index", ["[]", "{", '{"weight_map": {"a": 1}}', '{"weight_map": ["a"]}', "{}"])
    def test_a_broken_index_is_corrupt(self, drive: Path, index: str) -> None:
        (drive / "model.safetensors.index.json").write_text(index)
        with pytest.raises(CorruptCheckpoint, match="no index"):
            load_file(drive / "model.safetensors.index.json")

    @pytest.mark.parametrize(
        "index",
        [
            b'{"weight_map": {"a": "s", "b": [' + b"[]," * 1_000_000 + b"[]]}}",
            b'{"weight_map": {' + b'"a":"s",' * 1_000_000 + b'"b":"s"}}',
            b"[" * 1_000_000,
            b'{"weight_map": {"\xff": "s"}}',
        ],
        ids=["lists", "a name twice", "brackets", "no text"],
    )
    def test_an_index_that_would_take_too_much_is_refused(self, drive: Path, index: bytes) -> None:
        path = drive / "model.safetensors.index.json"
        path.write_bytes(index)
        tracemalloc.start()
        try:
            with pytest.raises(CorruptCheckpoint, match="no index") as refused:
                load_file(path)
            assert tracemalloc.get_traced_memory()[1] < 200_000_000
        finally:
            tracemalloc.stop()
        assert refused.value.filename == str(path)

    @pytest.mark.parametrize("shard", ["../file", "/etc/passwd", "..", "", "a\0b"])
    def test_an_index_that_leads_elsewhere_is_refused(self, drive: Path, shard: str) -> None:
        (drive / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
        with pytest.raises(CorruptCheckpoint, match="no name of a file beside the index"):
            load_file(drive / "model.safetensors.index.json")

    def test_a_tensor_missing_from_its_shard_is_named(self, drive: Path) -> None:
        save_file({"a": torch.ones(1)}, drive / "shard")
        (drive / "index.json").write_text(json.dumps({"weight_map": {"a": "shard", "b": "shard"}}))
        with pytest.raises(CorruptCheckpoint, match="not there: b"):
            load_file(drive / "index.json")


class Tied(torch.nn.Module):
    """Names that stand for one tensor, parts of one storage that another name has all of, and a transposed weight."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.zeroth = torch.nn.Linear(3, 4)
        self.first = torch.nn.Linear(3, 4)
        self.first.weight = self.zeroth.weight
        self.register_buffer("whole", torch.randn(10))
        self.register_buffer("a_part", self.whole[2:5])
        self.register_buffer("transposed", torch.randn(5, 4).t())


class TestModels:
    def test_the_bytes_of_a_model_are_those_of_safetensors(self, drive: Path) -> None:
        untied, tied = torch.nn.Linear(3, 4), Tied(0)
        tied.a_part = torch.zeros(3)  # the order of several metadata is drawn by lot there
        for model in (untied, tied):
            for metadata in (None, {}, {"zeroth.weight": "mine"}):
                save_model(model, drive / "ours", metadata)
                safetensors.save_model(model, str(drive / "theirs"), None if metadata is None else dict(metadata))
                assert (drive / "ours").read_bytes() == (drive / "theirs").read_bytes()
            assert metadata == {"zeroth.weight": "mine"}

    def test_names_that_are_left_out_are_in_the_metadata(self, drive: Path) -> None:
        save_model(Tied(0), drive / "file", {"format": "pt"})
        with pytest.importorskip("safetensors").safe_open(drive / "file", "pt") as saved:
            assert saved.metadata() == {"format": "pt", "zeroth.weight": "first.weight", "a_part": "whole"}
        assert list(load_file(drive / "file")) == ["first.bias", "first.weight", "transposed", "whole", "zeroth.bias"]

    @pytest.mark.parametrize("save", [save_model, safetensors.save_model], ids=["ours", "theirs"])
    @pytest.mark.parametrize("load", [load_model, safetensors.load_model], ids=["ours", "theirs"])
    def test_a_model_is_loaded(self, drive: Path, save: Any, load: Any) -> None:
        saved, loaded = Tied(0), Tied(1)
        save(saved, str(drive / "file"))
        assert load(loaded, drive / "file") == (set(), [])
        assert same(loaded.state_dict(), saved.state_dict())
        assert loaded.first.weight is loaded.zeroth.weight

    @pytest.mark.parametrize(
        ("lacking", "more"),
        [
            ((), ()), (("zeroth.bias",), ()), (("first.weight",), ()), ((), ("other", "another")), (("whole",), ("other",)),
            ((), ("zeroth.weight",)), (("first.weight",), ("zeroth.weight",)),
        ],
        ids=str,
    )  # fmt: skip
    def test_missing_and_unexpected_names_are_told(self, drive: Path, lacking: tuple[str, ...], more: tuple[str, ...]) -> None:
        save_model(Tied(0), drive / "whole")
        tensors = load_file(drive / "whole")
        for name in lacking:
            tensors.pop(name)
        save_file({**tensors, **{name: torch.ones(4, 3) for name in more}}, drive / "file")
        ours, theirs = (load(Tied(1), drive / "file", strict=False) for load in (load_model, safetensors.load_model))
        assert (ours[0], sorted(ours[1])) == (theirs[0], sorted(theirs[1]))
        errors = []
        for load in (load_model, safetensors.load_model):
            try:
                load(Tied(1), drive / "file")
            except RuntimeError as error:
                errors.append(str(error))
        assert len(set(errors)) == (1 if theirs[0] or theirs[1] else 0)

    def test_parts_of_a_storage_that_no_name_covers_are_refused(self, drive: Path) -> None:
        model = torch.nn.Module()
        model.register_buffer("part", torch.arange(10)[:5])
        for save in (save_model, safetensors.save_model):
            with pytest.raises(RuntimeError, match="part"):
                save(model, str(drive / "file"))
        assert list(drive.iterdir()) == []

    def test_tensors_that_are_not_contiguous_are_refused_without_force_contiguous(self, drive: Path) -> None:
        with pytest.raises(ValueError, match=r"'transposed' is not contiguous .* force_contiguous=True"):
            save_model(Tied(0), drive / "file", force_contiguous=False)
        with pytest.raises(ValueError, match="force_contiguous=True"):
            safetensors.save_model(Tied(0), str(drive / "file"), force_contiguous=False)
