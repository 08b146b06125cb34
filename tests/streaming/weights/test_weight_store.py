"""A model's weights on a drive: built, opened, read, and what is told of those that are not as they should be."""

from __future__ import annotations

import errno
import os
import zlib

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from deepnvme.model.quantization import dequantize, quantize
from deepnvme.model.structure import UNBLOCKED_EXTENT, weights_by_name
from deepnvme.model.weight_differences import WeightInfo
from deepnvme.safetensors import save_file
from deepnvme.store.data_file import DATA_NAME
from deepnvme.streaming import CorruptExtent, WeightMismatch, WeightStore
from deepnvme.swap import CorruptManifest, StoreLocked, TensorStore

from ...support.memory import bytes_of
from ...support.shards import save_sharded


class Model(nn.Module):
    """Two of its weights are one."""

    def __init__(self, layers: int = 3, width: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(600, 512)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, 7), nn.BatchNorm1d(7)) for _ in range(layers))
        self.head = nn.Linear(512, 600, bias=False)
        self.head.weight = self.embed.weight


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def store(model, drive):
    with WeightStore.build(model, drive / "store") as store:
        yield store


def contents(store: WeightStore) -> dict[str, torch.Tensor]:
    found = {}
    for name, extent in store.extents.items():
        memory = torch.empty(extent.nbytes, dtype=torch.uint8)
        assert store.read(name, memory).result().data_ptr() == memory.data_ptr()
        found |= extent.tensors(memory)
    return found | {alias: found[name] for alias, name in store.ties.items()}


def assert_holds(store: WeightStore, wanted: dict[str, torch.Tensor]) -> None:
    found = contents(store)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert bytes_of(found[name]) == bytes_of(tensor), name


class TestWhatIsBuilt:
    def test_a_module_with_its_blocks_ties_and_buffers(self, store, model):
        assert_holds(store, model.state_dict())
        assert store.ties == {"head.weight": "embed.weight"}
        assert store.blocks == {
            "embed": ("embed.weight",),
            **{f"layers.{index}": (f"layers.{index}",) for index in range(3)},
            "head": ("embed.weight",),
        }
        assert list(store.extents) == [UNBLOCKED_EXTENT, "embed.weight", "layers.0", "layers.1", "layers.2"]
        assert "layers.0.1.running_mean" in [weight.name for weight in store.extents[UNBLOCKED_EXTENT].weights]
        store.verify()
        store.check(model)

    @pytest.mark.parametrize("kind", ["safetensors", "shards", "pt", "mapping"])
    def test_a_checkpoint_by_its_names_or_with_a_module(self, model, drive, kind):
        state = model.state_dict()
        kept = {name: tensor for name, tensor in state.items() if name != "head.weight"}
        given = drive / "checkpoint"
        given.mkdir()
        if kind == "safetensors":
            save_file(kept, given / "model.safetensors")
        elif kind == "shards":
            save_sharded(kept, given, most=1_000_000)
        elif kind == "pt":
            torch.save(state, given / "model.pt")
        else:
            given = state
        with WeightStore.build(given, drive / "names") as store:
            assert_holds(store, state if kind in ("pt", "mapping") else kept)
            assert store.blocks["layers.1"] == ("layers.1",)
        with torch.device("meta"):
            empty = Model()
        with WeightStore.build(given, drive / "module", model=empty) as store:
            assert_holds(store, state)
            store.check(empty)

    @pytest.mark.parametrize("kind", ["module", "pt"])
    def test_a_default_device_of_one_s_own_changes_nothing(self, model, drive, kind):
        torch.save(model.state_dict(), drive / "model.pt")
        with torch.device("meta"), WeightStore.build(model if kind == "module" else drive / "model.pt", drive / "store") as store:
            store.verify()
        with WeightStore.open(drive / "store") as store:
            assert_holds(store, model.state_dict())

    def test_blocks_that_are_named(self, model, drive):
        with WeightStore.build(model, drive / "store", blocks=["layers.*.0"]) as store:
            assert store.blocks["layers.2.0"] == ("layers.2.0",)
            assert_holds(store, model.state_dict())

    def test_weights_are_aligned_in_their_extents_and_nothing_is_between_them(self, store):
        for name, extent in store.extents.items():
            memory = torch.full((extent.nbytes,), 255, dtype=torch.uint8)
            store.read(name, memory).result()
            for weight in extent.weights:
                assert weight.offset % 64 == 0
                memory[weight.offset : weight.end] = 0
            assert not memory.any()
            assert extent.nbytes % 4096 == 0

    def test_floating_point_is_converted_and_nothing_else(self, model, drive):
        model.register_buffer("count", torch.arange(3))
        with WeightStore.build(model, drive / "store", dtype=torch.bfloat16) as store:
            wanted = {
                name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in model.state_dict().items()
            }
            assert_holds(store, wanted)
            assert store.compare(model)[0] == "dtype: 'embed.weight' should be float32 [600, 512], found bfloat16 [600, 512]"
            store.check(model.bfloat16())

    @pytest.mark.parametrize("scheme", ["int8", "int4"])
    @pytest.mark.parametrize("dtype", [None, torch.bfloat16])
    def test_quantised_weights_come_back_as_the_scheme_has_them(self, model, drive, scheme, dtype):
        model.layers.insert(1, nn.Sequential(nn.Linear(200, 300), nn.BatchNorm1d(300)))
        with WeightStore.build(model, drive / "store", quantize=scheme, dtype=dtype) as store:
            found = contents(store)
            assert {name: weight.scheme for name, (_, weight) in store.weights.items() if weight.scheme} == {
                "embed.weight": scheme, "layers.1.0.weight": scheme,
            }  # fmt: skip
            for name, tensor in model.state_dict().items():
                expected = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
                if name in ("embed.weight", "head.weight", "layers.1.0.weight"):
                    worked_out = torch.empty_like(expected)
                    dequantize(scheme, quantize(expected, scheme), worked_out)
                    expected = worked_out
                assert torch.equal(found[name], expected), name
            assert store.compare(model if dtype is None else model.bfloat16()) == []
            assert store.nbytes < sum(weight.nbytes for weight in model.parameters()) * (0.3 if dtype is None else 0.6)
            store.verify()
            extent, weight = store.weights["embed.weight"]
            with pytest.raises(ValueError, match=f"'embed.weight' is quantised to {scheme}"):
                weight.view(torch.empty(extent.nbytes, dtype=torch.uint8))

    def test_several_directories_have_a_share_each(self, model, drive):
        model.large = nn.Parameter(torch.randn(3, 1 << 20))
        places = [drive / "a", drive / "b"]
        with WeightStore.build(model, places) as store:
            assert_holds(store, model.state_dict())
        assert min((place / DATA_NAME).stat().st_size for place in places) > 5 << 20
        with WeightStore.open(places[::-1]) as store:
            store.verify()
        with pytest.raises(ValueError, match="has 2 directories, got 1"):
            WeightStore.open(places[0])

    def test_progress_is_told_to_the_last_byte(self, model, drive):
        told = []
        with WeightStore.build(model, drive / "store", progress=lambda *args: told.append(args)) as store:
            assert [done for done, _ in told] == sorted(done for done, _ in told)
            assert told[-1] == (store.nbytes, store.nbytes)
            assert len(told) == len(store.extents)

    def test_it_says_where_its_weights_are_from(self, model, drive):
        with WeightStore.build(model, drive / "store", origin="a checkpoint") as store:
            assert store.origin == "a checkpoint"
        with WeightStore.open(drive / "store") as store:
            assert store.origin == "a checkpoint"


DTYPES = [
    dtype
    for name in (
        "bool", "uint8", "int8", "int16", "int64", "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
        "float8_e4m3fn", "float8_e5m2", "uint16",
    )
    if (dtype := getattr(torch, name, None)) is not None
]  # fmt: skip
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple) | st.just((3, 1500))
NAMES = st.text(st.characters(exclude_characters="\0"), max_size=12)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    weights=st.dictionaries(NAMES, st.tuples(st.sampled_from(DTYPES), SHAPES), min_size=1, max_size=8),
    seed=st.integers(0, 99),
)
def test_any_weights_come_back_as_they_were(io_dir, weights, seed):
    generator = torch.Generator().manual_seed(seed)
    given = {}
    for name, (dtype, shape) in weights.items():
        info = WeightInfo(dtype, shape)
        raw = torch.randint(2 if dtype == torch.bool else 256, (info.nbytes,), generator=generator, dtype=torch.uint8)
        given[name] = raw.view(dtype).view(shape)
    place = io_dir / f"any-{os.urandom(8).hex()}"
    with WeightStore.build(given, place) as store:
        assert_holds(store, given)
        store.verify()
    for path in place.iterdir():
        path.unlink()
    place.rmdir()


class TestBadInput:
    def test_a_checkpoint_of_another_model_says_what_differs_before_anything_is_made(self, model, drive):
        state = model.state_dict()
        del state["layers.1.0.weight"]
        state["layers.0.0.bias"] = torch.ones(3)
        state["more"] = torch.ones(2)
        with pytest.raises(WeightMismatch) as refused:
            WeightStore.build(state, drive / "store", model=Model())
        assert str(refused.value) == (
            "these are not the weights of Model: 3 differences\n"
            "  shape: 'layers.0.0.bias' should be float32 [7], found float32 [3]\n"
            "  missing: 'layers.1.0.weight', float32 [7, 5]\n"
            "  unexpected: 'more', float32 [2]"
        )
        assert list(drive.iterdir()) == []

    def test_a_store_of_another_version_says_what_differs(self, store):
        assert store.compare(Model()) == []
        with pytest.raises(WeightMismatch, match=r"\(built for Model\) is not of this Model: 7 differences\n  unexpected: 'la"):
            store.check(Model(layers=2))
        with pytest.raises(WeightMismatch, match=r"3 differences\n  shape: 'layers\.0\.0\.weight' should be float32 \[7, 6\]"):
            store.check(Model(width=6))

    def test_ties_that_the_model_has_and_the_weights_have_not(self, model, drive):
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        with WeightStore.build(model, drive / "store") as store:
            assert store.compare(Model()) == [
                "tied: 'embed.weight' and 'head.weight' are one weight in the model, and were found to be several"
            ]
            store.check(model)

    def test_ties_that_only_the_weights_have_do_no_harm(self, store, model):
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        store.check(model)

    def test_where_a_tied_weight_is_known_by_its_other_name(self, model, drive):
        state = model.state_dict()
        del state["embed.weight"]
        with WeightStore.build(state, drive / "store", model=Model()) as store:
            assert_holds(store, model.state_dict())

    def test_nothing_to_build_of(self, drive):
        for nothing in ({}, nn.ReLU()):
            with pytest.raises(ValueError, match="no weight"):
                WeightStore.build(nothing, drive / "store")

    def test_a_value_that_cannot_be_quantised_is_named(self, model, drive):
        with torch.no_grad():
            model.embed.weight[3, 5] = float("inf")
        with pytest.raises(ValueError, match=r"'embed\.weight' holds inf at \[3, 5\]"):
            WeightStore.build(model, drive / "store", quantize="int8")
        assert list(drive.iterdir()) == []

    def test_options_that_mean_nothing(self, model, drive):
        with pytest.raises(ValueError, match="one of int8, int4, or None, got 'int2'"):
            WeightStore.build(model, drive / "store", quantize="int2")
        with pytest.raises(ValueError, match=r"floating point, got torch\.int8"):
            WeightStore.build(model, drive / "store", dtype=torch.int8)
        with pytest.raises(ValueError, match="model= is for a checkpoint"):
            WeightStore.build(model, drive / "store", model=model)

    def test_a_checkpoint_with_a_missing_shard_makes_nothing(self, model, drive):
        paths = save_sharded(dict(list(model.state_dict().items())[:5]), drive / "checkpoint", most=100)
        paths[1].unlink()
        with pytest.raises(FileNotFoundError, match="shard"):
            WeightStore.build(drive / "checkpoint", drive / "store")
        assert not (drive / "store").exists()

    def test_a_directory_with_a_store_is_left_alone(self, store, model, drive):
        store.close()
        with pytest.raises(FileExistsError, match="store of weights: open it") as refused:
            WeightStore.build(Model(layers=1), drive / "store")
        assert refused.value.filename == str(drive / "store")
        with WeightStore.open(drive / "store") as again:
            assert_holds(again, model.state_dict())

    def test_a_store_of_anything_else_is_no_weight_store(self, model, drive):
        with TensorStore(drive, persist=True) as tensors:
            tensors.put("x", torch.ones(3)).result()
            tensors.commit()
        with pytest.raises(ValueError, match="holds 1 tensors, and no weights"):
            WeightStore.open(drive)
        with pytest.raises(FileExistsError, match="store of 1 tensors"):
            WeightStore.build(model, drive)

    def test_nothing_was_built(self, drive):
        with pytest.raises(FileNotFoundError, match="no store here"):
            WeightStore.open(drive / "none")

    def test_an_extent_that_is_not_there(self, store):
        with pytest.raises(KeyError, match=r"has no extent 'layers\.9'"):
            store.read("layers.9", torch.empty(4096, dtype=torch.uint8))

    def test_memory_of_another_size(self, store):
        with pytest.raises(ValueError, match="of 4096 bytes, got 4095 bytes"):
            store.read("layers.0", torch.empty(4095, dtype=torch.uint8))

    def test_a_closed_store(self, store):
        store.close()
        store.close()
        with pytest.raises(ValueError, match="closed"):
            store.read("layers.0", torch.empty(4096, dtype=torch.uint8))


def damage(drive, model, key: str) -> int:
    """Change the first byte of a weight on the drive; return the checksum that its extent should have."""
    data = (drive / "store" / DATA_NAME).read_bytes()
    wanted = bytes_of(weights_by_name(model)[key])
    at = data.index(wanted)
    with open(drive / "store" / DATA_NAME, "r+b") as file:
        file.seek(at)
        file.write(bytes([data[at] ^ 1]))
    return zlib.crc32(data[at // 4096 * 4096 : at // 4096 * 4096 + 4096])


class TestCorruption:
    def test_a_wrong_byte_is_told_when_its_extent_is_read(self, store, model, drive):
        expected = damage(drive, model, "layers.1.0.weight")
        memory = torch.empty(4096, dtype=torch.uint8)
        with pytest.raises(CorruptExtent) as refused:
            store.read("layers.1", memory).result()
        assert (refused.value.errno, refused.value.filename) == (errno.EBADMSG, str(drive / "store"))
        found = zlib.crc32(bytes_of(memory))
        assert refused.value.strerror == (
            "extent 'layers.1' ('layers.1.0.weight', 'layers.1.0.bias', 'layers.1.1.weight', 'layers.1.1.bias') is corrupt:"
            f" expected CRC-32 {expected:#010x}, found {found:#010x}; build the store again"
        )
        with pytest.raises(CorruptExtent):  # it stays so
            store.read("layers.1", memory).result()
        store.read("layers.0", memory).result()

    def test_an_extent_is_verified_when_it_is_read_first_and_not_again(self, store, model, drive):
        memory = torch.empty(4096, dtype=torch.uint8)
        store.read("layers.1", memory).result()
        damage(drive, model, "layers.1.0.weight")
        store.read("layers.1", memory).result()
        with pytest.raises(CorruptExtent):
            store.verify()

    def test_verifying_names_all_that_differ(self, store, model, drive):
        damage(drive, model, "layers.0.0.weight")
        damage(drive, model, "layers.2.0.weight")
        with pytest.raises(CorruptExtent, match=r"'layers\.0' .* expected .*'layers\.2' .* expected"):
            store.verify()

    def test_one_that_says_too_much_is_refused_before_it_is_read(self, drive, monkeypatch):
        with TensorStore(drive / "store", persist=True) as store:
            store.put("manifest", torch.zeros((64 << 20) + 1, dtype=torch.uint8))
            store.commit()
        monkeypatch.setattr(TensorStore, "get", None)
        with pytest.raises(CorruptManifest, match="has 67108865 bytes, and may have 67108864"):
            WeightStore.open(drive / "store")

    def test_extents_that_were_cut_off(self, store, drive):
        store.close()
        os.truncate(drive / "store" / DATA_NAME, 8192)
        with pytest.raises(CorruptManifest, match="are past the end"):
            WeightStore.open(drive / "store")

    def test_data_that_are_gone(self, store, drive):
        store.close()
        (drive / "store" / DATA_NAME).unlink()
        with pytest.raises(FileNotFoundError, match="data file is missing"):
            WeightStore.open(drive / "store")

    def test_an_extent_that_is_missing_or_of_another_size(self, store, drive):
        store.close()
        with TensorStore(drive / "store", persist=True) as tensors:
            tensors.put("extent/layers.1", torch.ones(3)).result()
            tensors.commit()
        with pytest.raises(CorruptExtent, match=r"'layers\.1' should have 4096 bytes, found 12 bytes"):
            WeightStore.open(drive / "store")
        with TensorStore(drive / "store", persist=True) as tensors:
            tensors.delete("extent/layers.1")
            tensors.commit()
        with pytest.raises(CorruptExtent, match=r"'layers\.1' should have 4096 bytes, found none"):
            WeightStore.open(drive / "store")

    def test_a_manifest_that_was_changed(self, store, model, drive):
        data = bytearray((drive / "store" / DATA_NAME).read_bytes())
        at = data.index(b'"running_mean"' if b'"running_mean"' in data else b"running_mean")
        store.close()
        with open(drive / "store" / DATA_NAME, "r+b") as file:
            file.seek(at)
            file.write(b"R")
        with pytest.raises(CorruptManifest, match=r"what it says of weights: .*expected CRC-32"):
            WeightStore.open(drive / "store")


class TestSharing:
    def test_several_stores_and_processes_at_once(self, store, model, drive, interpreters):
        with WeightStore.open(drive / "store") as other:
            assert_holds(other, model.state_dict())
            program = "from deepnvme.streaming import WeightStore\n"
            program += f"with WeightStore.open({str(drive / 'store')!r}) as store: store.verify(); print(len(store.weights))"
            assert interpreters.run(program).check() == "22\n"

    def test_building_where_one_is_open_is_refused(self, store, model, drive):
        with pytest.raises(StoreLocked, match="open for reading"):
            WeightStore.build(model, drive / "store")

    def test_a_forked_child_is_refused_and_its_end_changes_nothing(self, store, model):
        child = os.fork()
        if child == 0:
            try:
                store.read("layers.0", torch.empty(4096, dtype=torch.uint8))
            except RuntimeError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert_holds(store, model.state_dict())
