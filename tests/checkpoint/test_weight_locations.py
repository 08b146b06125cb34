"""Where weights are read from."""

from __future__ import annotations

import contextlib
import json
import os
import zipfile

import pytest
import torch
from torch import nn

from deepnvme.checkpoint.formats.pt_records import CorruptCheckpoint
from deepnvme.checkpoint.weight_locations import OpenFiles, Weights, source_of, weights_in, weights_in_index
from deepnvme.safetensors import save_file

from ..support.archives import rezipped
from ..support.shards import save_sharded

WEIGHTS = {
    "a.weight": torch.arange(12.0).reshape(3, 4),
    "a.bias": torch.arange(5, dtype=torch.bfloat16),
    "b.flag": torch.tensor(True),
    "b.none": torch.empty(0, 3),
}


def read(source: Weights, name: str) -> torch.Tensor:
    dtype, shape = source.info(name)
    out = torch.zeros(source.info(name).nbytes, dtype=torch.uint8)
    source.read_into(name, out).result()
    return out.view(dtype).view(shape)


@pytest.fixture
def opened(engine):
    """Makes sources."""
    with contextlib.closing(OpenFiles(engine)) as files:
        yield lambda given: source_of(given, files)


def assert_holds(source: Weights, wanted: dict[str, torch.Tensor]) -> None:
    assert sorted(source.names()) == sorted(wanted)
    for name, tensor in wanted.items():
        found = read(source, name)
        assert found.dtype == tensor.dtype, name
        assert torch.equal(found, tensor), name


class TestFiles:
    def test_weights_of_safetensors_are_found(self, drive, opened):
        save_file(WEIGHTS, drive / "w.safetensors")
        assert_holds(opened(drive / "w.safetensors"), WEIGHTS)
        assert all(weight.elements is None for weight in weights_in(drive / "w.safetensors").values())

    @pytest.mark.parametrize("length", [128, 128 + 256 * 2])
    def test_a_header_whose_length_begins_as_a_pickle_is_safetensors(self, drive, opened, length):
        name = "a" * (length - len('{"":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'))
        save_file({name: torch.ones(1)}, drive / "a.safetensors")
        assert (drive / "a.safetensors").read_bytes()[:2] == length.to_bytes(2, "little")
        assert torch.equal(read(opened(drive / "a.safetensors"), name), torch.ones(1))

    @pytest.mark.parametrize("given", ["index", "directory"])
    def test_weights_of_shards_are_found(self, drive, opened, given):
        save_sharded(WEIGHTS, drive, most=30)
        index = drive / "model.safetensors.index.json"
        assert len(set(json.loads(index.read_text())["weight_map"].values())) > 1
        assert_holds(opened(index if given == "index" else drive), WEIGHTS)

    def test_weights_of_torch_save_are_found(self, drive, opened):
        torch.save(WEIGHTS, drive / "w.pt")
        assert_holds(opened(drive / "w.pt"), WEIGHTS)
        there = weights_in(drive / "w.pt")
        assert all(weight.elements is None for name, weight in there.items() if name != "b.none")

    def test_views_of_torch_save_are_found(self, drive, opened):
        base = torch.arange(64, dtype=torch.float32)
        weights = {
            "slice": base[10:20],
            "transposed": base.view(8, 8).t(),
            "strided": base[::3],
            "parameter": nn.Parameter(torch.ones(2)),
        }
        torch.save(weights, drive / "w.pt")
        assert_holds(opened(drive / "w.pt"), {name: weight.detach() for name, weight in weights.items()})
        there = weights_in(drive / "w.pt")
        assert there["slice"].elements is None
        assert there["transposed"].elements.stride == (1, 8)
        torch.save({"conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj()}, drive / "w.pt")
        with pytest.raises(ValueError, match="'conjugate' as a conjugate or negative view"):
            weights_in(drive / "w.pt")

    def test_shards_of_torch_save_are_found(self, drive, opened):
        torch.save({"a": torch.ones(2)}, drive / "1.bin")
        torch.save({"b": torch.zeros(3)}, drive / "2.bin")
        (drive / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": "1.bin", "b": "2.bin"}}))
        assert_holds(opened(drive), {"a": torch.ones(2), "b": torch.zeros(3)})

    def test_tied_weights_of_torch_save_are_ties(self, drive, opened):
        weight = torch.ones(3)
        torch.save({"a": weight, "b": weight, "c": weight[:2], "none": torch.empty(0), "other": torch.empty(0)}, drive / "w.pt")
        assert opened(drive / "w.pt").ties() == {"b": "a"}


class TestBadFiles:
    def test_a_directory_without_a_checkpoint_is_told(self, drive):
        with pytest.raises(FileNotFoundError, match=r"no checkpoint here: expected one of model\.safetensors") as refused:
            weights_in(drive)
        assert refused.value.filename == str(drive)

    def test_a_directory_with_several_checkpoints_is_refused(self, drive):
        for name in ("one", "two"):
            save_file(WEIGHTS, drive / f"{name}.safetensors")
        with pytest.raises(ValueError, match=r"several checkpoints.*one\.safetensors.*two\.safetensors"):
            weights_in(drive)

    def test_a_missing_shard_is_named_with_its_tensors(self, drive):
        shard = next(path for path in save_sharded(WEIGHTS, drive, most=30) if path.suffix == ".safetensors")
        shard.unlink()
        with pytest.raises(FileNotFoundError, match=r"with 1 of its tensors \(a\.weight\)") as refused:
            weights_in(drive)
        assert refused.value.filename == str(shard)

    @pytest.mark.parametrize("suffix", ["safetensors", "pt"])
    def test_a_file_cut_off_is_corrupt(self, drive, suffix):
        path = drive / f"w.{suffix}"
        save_file(WEIGHTS, path) if suffix == "safetensors" else torch.save(WEIGHTS, path)
        os.truncate(path, path.stat().st_size - 10)
        with pytest.raises(CorruptCheckpoint):
            weights_in(path)

    def test_torch_save_of_more_than_weights_says_what(self, drive):
        torch.save({"model": WEIGHTS, "epoch": 3}, drive / "w.pt")
        with pytest.raises(ValueError, match="holds more than weights: 'model', 'epoch'; give the state_dict"):
            weights_in(drive / "w.pt")
        torch.save([torch.ones(1)], drive / "w.pt")
        with pytest.raises(ValueError, match="holds list"):
            weights_in(drive / "w.pt")

    def test_formats_that_have_to_be_in_memory_are_refused(self, drive):
        torch.save(WEIGHTS, drive / "old.pt", _use_new_zipfile_serialization=False)
        with pytest.raises(ValueError, match=r"before 1\.6"):
            weights_in(drive / "old.pt")
        torch.save(WEIGHTS, drive / "z.pt")
        rezipped(drive / "z.pt", zipfile.ZIP_DEFLATED)
        with pytest.raises(ValueError, match="is compressed"):
            weights_in(drive / "z.pt")

    def test_a_file_changed_while_it_is_read_is_told(self, drive, opened):
        save_file(WEIGHTS, drive / "w.safetensors")
        source = opened(drive / "w.safetensors")
        read(source, "a.weight")
        source.check_unchanged()
        save_file(WEIGHTS, drive / "w.safetensors")
        with pytest.raises(CorruptCheckpoint, match="changed while"):
            source.check_unchanged()


class TestMemory:
    def test_ties_and_buffers_of_a_module_are_found(self, opened):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3))
        model[1].weight = model[0].weight
        source = opened(model)
        assert_holds(source, model.state_dict())
        assert source.ties() == {"1.weight": "0.weight"}

    def test_strides_and_conjugates_are_read_as_they_are(self, opened):
        weights = {"t": torch.arange(12.0).view(3, 4).t(), "c": torch.tensor([1 + 1j]).conj()}
        assert_holds(opened(weights), weights)

    @pytest.mark.parametrize(
        ("given", "match"),
        [
            (3, "got int"),
            ({"a": [1.0]}, "'a' must be a tensor, got list"),
            ({1: torch.ones(1)}, "name must be a str, got 1"),
            ({"a": torch.ones(3).to_sparse()}, "dense tensor"),
            ({"a": torch.empty(3, device="meta")}, "meta device"),
        ],
    )
    def test_objects_without_weights_are_refused(self, engine, given, match):
        with pytest.raises(TypeError, match=match):
            source_of(given, OpenFiles(engine))


class TestOffloadIndex:
    """Weights where accelerate's index says that they are."""

    @pytest.fixture
    def indexed(self, engine, drive):
        """Makes sources of an index, in the drive's directory."""
        return lambda index, folder=drive, **beside: Weights({**weights_in_index(index, folder), **beside}, OpenFiles(engine))

    def test_a_file_without_the_weight_that_is_said_to_be_in_it(self, indexed, drive):
        save_file({"a": WEIGHTS["a.weight"]}, drive / "w.safetensors")
        with pytest.raises(CorruptCheckpoint, match=r"'b', which is not there.*w\.safetensors"):
            indexed({"a": {"safetensors_file": drive / "w.safetensors", "weight_name": "b"}})

    def test_a_raw_file_that_was_cut_off(self, indexed, drive):
        (drive / "a.dat").write_bytes(bytes(47))
        with pytest.raises(CorruptCheckpoint, match="expected 48 bytes of 'a', found 47"):
            indexed({"a": {"dtype": "float32", "shape": [3, 4]}})

    def test_a_weight_has_the_dtype_that_the_index_says_whatever_the_file_has(self, indexed, drive):
        save_file({"first": WEIGHTS["a.weight"], "second": WEIGHTS["a.weight"].clone()}, drive / "w.safetensors")
        source = indexed(
            {
                "a": {"safetensors_file": drive / "w.safetensors", "weight_name": "first", "dtype": "bfloat16"},
                "second": {"safetensors_file": drive / "w.safetensors"},
            }
        )
        assert read(source, "a").equal(WEIGHTS["a.weight"].bfloat16())
        assert read(source, "second").equal(WEIGHTS["a.weight"])
        assert sorted(source.names()) == ["a", "second"]

    def test_what_accelerate_writes_is_found(self, indexed, drive):
        offload = pytest.importorskip("accelerate.utils.offload", reason="needs accelerate")
        weights = {"a": WEIGHTS["a.weight"], "half": WEIGHTS["a.weight"].bfloat16(), "one": torch.tensor(3.0)}
        offload.offload_state_dict(str(drive), weights)
        source = indexed(json.loads((drive / "index.json").read_text()))
        for name, weight in weights.items():
            assert read(source, name).equal(weight.view(source.info(name).shape)), name
            assert source.info(name).dtype == weight.dtype
