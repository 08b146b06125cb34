"""A model that is streamed from a checkpoint's own files computes what it does in memory, and never with wrong bytes."""

from __future__ import annotations

import contextlib
import copy
import errno
import itertools
import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from deepnvme.checkpoint import CorruptCheckpoint
from deepnvme.checkpoint.weight_locations import Location
from deepnvme.drives.aio_config import AioConfig
from deepnvme.streaming import Streaming, WeightInfo, WeightMismatch, WeightStore, stream, streaming_of
from deepnvme.streaming.weights.checkpoint_weights import CheckpointWeights, lay_out, located_in

from ...support.engines import FailingDrive, transfers_through
from ...support.examples import examples
from ...support.models import WIDTH, entangled, stack

INPUT = torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH)
ORDER = [0, 1, 2, 3, 4, 5]
PAGE = 4096


def saved(model: nn.Module, path: Path) -> Path:
    safetensors.torch.save_file({name: weight.detach().clone() for name, weight in model.state_dict().items()}, path)
    return path


def sharded(model: nn.Module, folder: Path) -> Path:
    """Two shards, over which the weights of each block are spread, and their index."""
    folder.mkdir()
    state = model.state_dict()
    names = {f"{number}.safetensors": list(state)[number::2] for number in range(2)}
    for shard, inside in names.items():
        safetensors.torch.save_file({name: state[name] for name in inside}, folder / shard)
    index = {"weight_map": {name: shard for shard, inside in names.items() for name in inside}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def shifted(path: Path, spaces: int) -> None:
    """Move the tensors of a file by some bytes, by spaces at the end of the header."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].rstrip(b" ") + b" " * spaces
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])


def check(streamed: nn.Module, memory: nn.Module, order: list[int] = ORDER) -> None:
    with torch.no_grad():
        assert torch.equal(streamed(INPUT, order), memory(INPUT, order))


@pytest.fixture
def file(drive: Path) -> Path:
    return saved(stack(), drive / "model.safetensors")


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def replaced(path: Path) -> None:
    (path.parent / "new").write_bytes(bytes(path.stat().st_size))
    os.replace(path.parent / "new", path)


def overwritten(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(bytes(100))


def cut_off(path: Path) -> None:
    os.truncate(path, 300)


@pytest.mark.parametrize("change", [replaced, overwritten, cut_off])
def test_a_file_that_changes_meanwhile_is_named_and_nothing_is_computed_with_it(
    change: Callable[[Path], None], file: Path
) -> None:
    memory, streamed = stack(), stack()
    with stream(streamed, file, prefetch=1):
        check(streamed, memory)
        change(file)
        for _ in range(2):
            with pytest.raises(CorruptCheckpoint, match="was changed while its weights were streamed: load the model") as raised:
                check(streamed, memory, [3, 5, 1])
            assert raised.value.filename == str(file)


def test_a_file_that_is_removed_meanwhile_is_named(file: Path) -> None:
    memory, streamed = stack(), stack()
    with stream(streamed, file, prefetch=0):
        check(streamed, memory)
        file.unlink()
        with pytest.raises(FileNotFoundError) as raised:
            check(streamed, memory, [3, 5])
        assert raised.value.filename == str(file)


def test_a_file_that_was_changed_before_the_first_read_is_named(file: Path) -> None:
    streamed = stack()
    with CheckpointWeights(*located_in(file, streamed), streamed) as weights:
        overwritten(file)
        with stream(streamed, weights), pytest.raises(CorruptCheckpoint, match="was changed"):
            check(streamed, stack())


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_read_that_fails_names_the_file_and_the_next_call_works(prefetch: int, file: Path, faulty: Any) -> None:
    memory, streamed = stack(), stack()
    with stream(streamed, file, prefetch=prefetch):
        check(streamed, memory)
        with transfers_through(faulty("threads", error=errno.EIO, error_every=1)):
            with pytest.raises(OSError, match="offset") as raised:
                check(streamed, memory)
            assert (raised.value.errno, raised.value.filename) == (errno.EIO, str(file))
        check(streamed, memory)


def test_one_of_an_extents_reads_that_fails_fails_the_extent(drive: Path) -> None:
    memory, streamed = stack(), stack()
    counted = iter(range(100))
    with stream(streamed, sharded(memory, drive / "shards"), prefetch=0):
        with FailingDrive(lambda _: next(counted) == 3), pytest.raises(OSError, match="at offset") as raised:
            check(streamed, memory)
        assert raised.value.errno == errno.EIO
        check(streamed, memory)


def test_an_index_that_lies_and_a_shard_that_is_missing(drive: Path) -> None:
    folder = sharded(stack(), drive / "shards")
    index = folder / "model.safetensors.index.json"
    told = json.loads(index.read_text())
    index.write_text(json.dumps({"weight_map": {**told["weight_map"], "parts.0.weight": "1.safetensors"}}))
    with pytest.raises(CorruptCheckpoint, match=r"parts\.0\.weight"):
        stream(stack(), folder)
    index.write_text(json.dumps(told))
    (folder / "1.safetensors").unlink()
    streamed = stack()
    with pytest.raises(FileNotFoundError, match="a shard of the checkpoint is missing"):
        stream(streamed, folder)
    check(streamed, stack())  # left as it was


def test_weights_that_are_not_those_of_the_model_are_named(file: Path, drive: Path) -> None:
    with pytest.raises(WeightMismatch, match=r"missing: 'parts\.6\.weight'"):
        stream(stack(7), file)
    with pytest.raises(WeightMismatch, match=r"unexpected: 'parts\.5\.weight'"):
        stream(stack(5), file)
    state = {name: weight.detach().to(torch.int32) for name, weight in stack().state_dict().items()}
    safetensors.torch.save_file(state, drive / "integers.safetensors")
    with pytest.raises(WeightMismatch, match=r"dtype: 'parts\.0\.weight' should be float32 .*, found int32"):
        stream(stack(), drive / "integers.safetensors")
    with pytest.raises(FileNotFoundError):
        stream(stack(), drive / "nowhere")


def test_what_lies_in_no_file_as_it_is_in_memory_is_refused(drive: Path) -> None:
    with pytest.raises(TypeError, match="'weight' lies in no file"):
        CheckpointWeights({"weight": torch.ones(3)}, {}, nn.LayerNorm(3))
    with pytest.raises(CorruptCheckpoint, match="was changed while it was opened"):
        CheckpointWeights({"weight": Location("gone", 0, WeightInfo(torch.float32, (3,)))}, {}, nn.LayerNorm(3))


def test_a_model_that_is_streamed_already_and_settings_for_a_store_are_refused(file: Path, drive: Path) -> None:
    streamed = stack()
    with stream(streamed, file):
        with pytest.raises(RuntimeError, match="streamed already"):
            stream(streamed, file)
        check(streamed, stack())
    with WeightStore.build(stack(), drive / "store") as store, pytest.raises(ValueError, match="aio_config is for a checkpoint"):
        stream(stack(), store, aio_config=AioConfig())


# -- what is computed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("spaces", [0, 1, 2, 3, 8])
def test_tensors_may_begin_at_any_byte(spaces: int, prefetch: int, file: Path) -> None:
    shifted(file, spaces)
    memory, streamed = stack(), stack()
    with stream(streamed, file, prefetch=prefetch) as streaming:
        for order in (ORDER, ORDER[::-1], ORDER):
            check(streamed, memory, order)
    assert streaming.report().bytes_read


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float16])
@pytest.mark.parametrize("spaces", [0, 3])
def test_weights_of_another_dtype_are_converted(dtype: torch.dtype, spaces: int, drive: Path) -> None:
    other = stack().to(dtype)
    file = saved(other, drive / "model.safetensors")
    shifted(file, spaces)
    with torch.device("meta"):
        streamed = stack()
    with stream(streamed, file):
        check(streamed, other.float())


def test_a_state_dict_of_torchs_with_transposed_weights(drive: Path) -> None:
    memory, streamed = stack(), stack()
    state = {name: weight.t().contiguous().t() for name, weight in memory.state_dict().items()}
    torch.save(state, drive / "model.pt")
    with stream(streamed, drive / "model.pt"):
        check(streamed, memory)


def test_the_current_directory_may_change_meanwhile(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    streamed = stack()
    monkeypatch.chdir(file.parent)
    with stream(streamed, file.name):
        monkeypatch.chdir("/")
        check(streamed, stack())


def test_a_block_in_several_files(drive: Path) -> None:
    memory, streamed = stack(), stack()
    with stream(streamed, sharded(memory, drive / "shards"), memory_budget=2 * PAGE):
        check(streamed, memory)
        check(streamed, memory, [5, 2, 2, 0])


def test_shared_modules_tied_weights_and_blocks_in_blocks(drive: Path) -> None:
    memory = entangled()
    streamed = copy.deepcopy(memory)
    with stream(streamed, saved(memory, drive / "model.safetensors")) as streaming:
        for _ in range(2):
            check(streamed, memory, [0, 1, 2, 3, 4, 5, 6, 0])
        assert streamed.parts[0].weight is streamed.parts[1].weight
    assert streaming_of(streamed) is None
    assert not streaming.report().resident_bytes


def test_weights_without_elements_and_buffers(drive: Path) -> None:
    def made(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(3)]
        for block in blocks:
            block.register_parameter("empty", nn.Parameter(torch.empty(0, 3)))
        return nn.Sequential(*blocks).eval()

    memory, streamed = made(0), made(1)
    memory[1][1].running_mean.normal_()
    with stream(streamed, saved(memory, drive / "model.safetensors")), torch.no_grad():
        assert torch.equal(streamed(INPUT), memory(INPUT))
        assert streamed[1][1].num_batches_tracked == 0


def test_nothing_is_written_and_the_files_are_closed_at_the_end(file: Path, drive: Path) -> None:
    def opened() -> list[str]:
        links = []
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # of the listing itself
                links.append(os.readlink(f"/proc/self/fd/{number}"))
        return [link for link in links if link.startswith(str(drive))]

    before = file.stat()
    memory, streamed = stack(), stack()
    with stream(streamed, file) as streaming:
        check(streamed, memory)
        assert set(opened()) == {str(file)}
        streaming.close(restore=True)
    assert opened() == []
    assert (list(drive.iterdir()), file.stat().st_mtime_ns, file.stat().st_size) == ([file], before.st_mtime_ns, before.st_size)
    check(streamed, memory)
    streamed.parts[0].weight.sum().backward()


def test_two_models_on_one_file_in_several_threads(file: Path) -> None:
    memory, models = stack(), [stack(), stack()]
    streams = [stream(model, file, prefetch=prefetch) for prefetch, model in enumerate(models)]
    together = threading.Barrier(4)

    def calls(number: int) -> None:
        together.wait()
        for _ in range(10):
            check(models[number % 2], memory)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(calls, range(4)))
    for each in streams:
        each.close()


def test_a_stream_says_what_it_reads_from(file: Path) -> None:
    streamed = stack()
    with stream(streamed, file) as streaming:
        assert str(file) in repr(streaming)
        assert isinstance(streaming, Streaming)
    streamed = stack()
    with (
        CheckpointWeights(*located_in(file, streamed), streamed) as weights,
        pytest.raises(WeightMismatch, match=r"the checkpoint in '.*model"),
    ):
        stream(stack(5), weights)


# -- where weights are read from ---------------------------------------------------------------------------------------


@settings(max_examples=examples(200))
@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3 * PAGE), st.integers(0, 2 * PAGE)), min_size=1, max_size=8),
    st.sampled_from([1, 16]),
)
def test_runs_are_whole_pages_that_have_every_weight(places: list[tuple[str, int, int]], alignment: int) -> None:
    sizes = {path: max((begin + nbytes for each, begin, nbytes in places if each == path), default=0) for path in "ab"}
    contents = {path: torch.randint(256, (size,), dtype=torch.uint8) for path, size in sizes.items()}
    located = {
        str(index): (Location(path, begin, WeightInfo(torch.uint8, (nbytes,))), WeightInfo(torch.uint8, (nbytes,)))
        for index, (path, begin, nbytes) in enumerate(places)
    }
    extent, runs = lay_out("extent", located, sizes, alignment)
    memory = torch.zeros(extent.nbytes, dtype=torch.uint8)
    for run in runs:
        assert run.offset % PAGE == run.place % PAGE == 0
        assert run.nbytes % PAGE == 0 or run.offset + run.nbytes == sizes[run.path]
        memory[run.place : run.place + run.nbytes] = contents[run.path][run.offset : run.offset + run.nbytes]
    assert {weight.name for weight in extent.weights} == set(located)
    for weight in extent.weights:
        path, begin, nbytes = places[int(weight.name)]
        assert torch.equal(weight.stored(memory), contents[path][begin : begin + nbytes])
        assert weight.ready == (not nbytes or not weight.offset % alignment)
    ends = [(run.path, run.offset, run.offset + run.nbytes) for run in runs]
    assert all(path != other or end < begin for (path, _, end), (other, begin, _) in itertools.pairwise(ends))
