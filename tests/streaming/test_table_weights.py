"""Embeddings that are read by rows from a checkpoint look up what they do in memory, and fail as torch's where they do."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from deepnvme import Engine
from deepnvme.checkpoint.formats.pt_records import CorruptCheckpoint
from deepnvme.streaming import WeightStore, stream, streamed_model, streaming_of
from deepnvme.streaming.placeholder import Placeholder
from deepnvme.streaming.streamed_forwards import StreamedForwards
from deepnvme.streaming.weights import checkpoint_weights
from deepnvme.tables import RowsUnreadable

from ..support.engines import FailedTransfer

ROWS, WIDTH = 3000, 24
IDS = torch.tensor([[0, 7, 2999], [7, 1500, 7]])


class Scaled(nn.Embedding):
    """As transformers has them: it asks the weight for its dtype."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * torch.tensor(1.7).to(self.weight.dtype)


class Model(nn.Module):
    """Tables of several kinds, one of which two modules have; and a weight that is no table."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(ROWS, WIDTH, padding_idx=7)
        self.scaled = Scaled(ROWS, WIDTH)
        self.again = nn.Embedding(ROWS, WIDTH, _weight=self.first.weight)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.linear(self.first(ids)) + self.scaled(ids) * self.again(ids.flip(0))  # type: ignore[no-any-return]


TABLES = ["first.weight", "scaled.weight"]
LEAST = ROWS * WIDTH * 2
"""Bytes of a table in half precision."""


def model(dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(0)
    made = Model().to(dtype)
    made.again.weight = made.first.weight
    return made


def saved(path: Path, made: nn.Module) -> Path:
    names = dict(made.named_parameters())  # each once
    safetensors.torch.save_file({name: weight.detach() for name, weight in names.items()}, path)
    return path


@pytest.fixture
def file(drive: Path) -> Path:
    return saved(drive / "model.safetensors", model())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_looked_up_is_what_it_is_in_memory(dtype: torch.dtype, file: Path) -> None:
    """In the checkpoint's dtype, and converted from that."""
    known, streamed = model().to(dtype), model(dtype)
    with stream(streamed, file, min_table_bytes=LEAST) as streaming, torch.inference_mode():
        assert list(streaming.tables) == TABLES
        for ids in (IDS, IDS.int(), IDS[:0], torch.randint(ROWS, (50, 70))):
            assert torch.equal(streamed(ids), known(ids))
        assert torch.equal(streamed.scaled(torch.tensor(3)), known.scaled(torch.tensor(3)))
        assert streamed.first.weight.device == torch.device("cpu")
        assert (streamed.first.weight.dtype, streamed.first.weight.shape) == (dtype, (ROWS, WIDTH))
        assert streamed.again.weight is streamed.first.weight
        stats = streaming.tables["scaled.weight"].stats()
        assert 0 < stats.rows_read < ROWS
        assert 0 < stats.hits < stats.hits + stats.misses
        streaming.close(restore=True)
    assert torch.equal(streamed(IDS), known(IDS))
    assert streamed.again.weight is streamed.first.weight
    assert streamed.first.weight.requires_grad


def test_gradients_flow_past_a_table_and_transforms_look_up(file: Path) -> None:
    known, streamed = model(), model()
    with stream(streamed, file, min_table_bytes=LEAST):
        inputs = torch.randn(6, WIDTH, requires_grad=True)
        (streamed.first(IDS.flatten()) * inputs).sum().backward()
        assert inputs.grad is not None
        assert torch.equal(inputs.grad, known.first(IDS.flatten()))
        assert torch.equal(torch.vmap(streamed.scaled)(IDS), known.scaled(IDS))


def test_what_is_no_table_is_streamed_as_a_whole(file: Path) -> None:
    for least in (None, LEAST * 2 + 1, "1GB"):
        with stream(streamed := model(), file, min_table_bytes=least) as streaming, torch.no_grad():
            assert streaming.tables == {}
            assert torch.equal(streamed(IDS), model()(IDS))
    with stream(model(), file) as streaming:
        assert streaming.tables == {}  # of 256 MB
    for reason in ("tied", "max_norm"):
        made, other = model(), model()
        for each in (made, other):
            if reason == "tied":
                each.linear = nn.Linear(WIDTH, ROWS)
                each.linear.weight = each.scaled.weight
            else:
                each.scaled.max_norm = 1.0
        path = saved(file.with_name(f"{reason}.safetensors"), made)
        with stream(other, path, min_table_bytes=LEAST) as streaming:
            assert list(streaming.tables) == TABLES[:1]
            if reason == "tied":
                assert torch.equal(other.linear(other.scaled(IDS)), made.linear(made.scaled(IDS)))


def test_a_store_has_no_tables(drive: Path) -> None:
    with WeightStore.build(model(), drive / "store") as store:
        with pytest.raises(ValueError, match=r"min_table_bytes is for a checkpoint.* got 1$"):
            stream(model(), store, min_table_bytes=1)
        with stream(made := model(), store, min_table_bytes=None) as streaming:
            assert streaming.tables == {}
            assert torch.equal(made(IDS), model()(IDS))


def test_a_weight_that_is_not_looked_up_names_what_to_do(file: Path) -> None:
    with stream(streamed := model(), file, min_table_bytes=LEAST):
        for use in (lambda weight: weight @ weight.T, lambda weight: weight.numpy(), lambda weight: weight[0].tolist()):
            with pytest.raises(RuntimeError, match=r"'scaled\.weight' are read when ids look them up.* larger min_table_bytes"):
                use(streamed.scaled.weight)
    with pytest.raises(RuntimeError, match=r"'scaled\.weight' is streamed.* of an open stream"):
        streamed.scaled(IDS)
    with stream(streamed, file, min_table_bytes=LEAST):  # again
        assert torch.equal(streamed(IDS), model()(IDS))


def test_ids_of_no_row_are_torchs_error(file: Path) -> None:
    with stream(streamed := model(), file, min_table_bytes=LEAST) as streaming:
        before = streaming.tables["first.weight"].stats().bytes_read
        for ids in (torch.tensor([[1, ROWS]]), torch.tensor([-1])):
            for each in (model(), streamed):
                with pytest.raises(IndexError, match="index out of range in self"):
                    each(ids)
        with pytest.raises(IndexError, match=r"ids\[0, 1\] is 3000, and the table has the rows 0 to 2999 \('first\.weight'\)"):
            streamed(torch.tensor([[1, ROWS]]))
        assert streaming.tables["first.weight"].stats().bytes_read == before
        assert torch.equal(streamed(IDS), model()(IDS))


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_read_that_fails_names_row_and_file_and_the_next_call_works(
    interrupted: bool, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = Engine.gather

    def gather(self: Engine, *arguments: Any, **more: Any) -> Any:
        future = sound(self, *arguments, **more)
        if interrupted:
            signal.raise_signal(signal.SIGINT)
        return FailedTransfer(OSError(errno.EIO, "Input/output error", str(file))) if future.exception() is None else future

    with stream(streamed := model(), file, min_table_bytes=LEAST):
        with monkeypatch.context() as patched:
            patched.setattr(Engine, "gather", gather)
            with pytest.raises(KeyboardInterrupt if interrupted else RowsUnreadable) as raised:
                streamed(IDS)
        if isinstance(raised.value, RowsUnreadable):
            assert (raised.value.errno, raised.value.filename) == (errno.EIO, str(file))
            assert [each.row for each in raised.value.failed] == [0, 7, 1500, 2999]
            assert "row 0 at offset" in str(raised.value)
        assert torch.equal(streamed(IDS), model()(IDS))


@pytest.mark.parametrize("how", ["replaced", "written to", "cut off", "removed"])
def test_a_file_that_changes_is_an_error_that_names_it(how: str, file: Path) -> None:
    with stream(streamed := model(), file, min_table_bytes=LEAST, memory_budget="1MB") as streaming:
        assert torch.equal(streamed(IDS), model()(IDS))
        if how == "replaced":
            shutil.copy(file, file.with_name("new"))
            os.replace(file.with_name("new"), file)
        elif how == "written to":
            with open(file, "r+b") as opened:
                opened.seek(-WIDTH * 4, os.SEEK_END)
                opened.write(bytes(8))
        elif how == "cut off":
            os.truncate(file, file.stat().st_size // 2)
        else:
            file.unlink()
        wanted = FileNotFoundError if how == "removed" else CorruptCheckpoint
        for ids in (IDS, torch.arange(ROWS)):  # rows that are in memory, and others
            with pytest.raises(wanted) as raised:
                streamed.scaled(ids)
            assert raised.value.filename == str(file)
        if how != "removed":
            with pytest.raises(CorruptCheckpoint, match="was changed"):
                pickle.loads(pickle.dumps(streaming.tables["first.weight"]))


def test_an_index_that_changes_while_it_is_opened_is_an_error_that_names_the_new_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, index = file.with_name("other.safetensors"), file.with_name("model.safetensors.index.json")
    shutil.copy(file, other)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(safetensors.torch.load_file(file), file.name)}))
    weights_in = checkpoint_weights.weights_in

    def changed(checkpoint: Any) -> Any:
        index.write_text(index.read_text().replace(file.name, other.name))
        return weights_in(checkpoint)

    monkeypatch.setattr(checkpoint_weights, "weights_in", changed)
    with pytest.raises(CorruptCheckpoint, match="changed while it was opened") as raised:
        stream(model(), index, min_table_bytes=LEAST)
    assert raised.value.filename == str(other)


@pytest.mark.parametrize(("rows", "width"), [(0, WIDTH), (10, 0)])
def test_an_embedding_without_elements_is_no_table(rows: int, width: int, file: Path) -> None:
    for count in (1, 2):
        made = nn.ModuleList(nn.Embedding(size, width) for size in (rows, 10)[:count])
        path = saved(file.with_name("empty.safetensors"), made)
        with stream(made, path, min_table_bytes=0) as streaming:
            assert list(streaming.tables) == (["1.weight"] if count == 2 and width else [])


def test_a_model_that_cannot_be_streamed_keeps_its_weights(file: Path) -> None:
    made = model()
    made.extra = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="extra"):
        stream(made, file, min_table_bytes=LEAST)
    with pytest.raises(ValueError, match="prefetch"):
        stream(other := model(), file, min_table_bytes=LEAST, prefetch=-1)
    for each in (made, other):
        assert torch.equal(each(IDS), model()(IDS))
        assert not isinstance(each.first.weight, Placeholder)
        assert streaming_of(each) is None


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("least", [LEAST, None])
def test_ctrl_c_in_stream_loses_no_weights(
    least: int | None, released: bool, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the model's own weights are released, they come back. Afterwards the stream is found, and owns its files."""

    after = [(streamed_model, "trim_heap"), (StreamedForwards, "read_ahead")]
    for owner, name in after if released else [(StreamedForwards, "wrap")]:
        streamed = model()
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, lambda *_: signal.raise_signal(signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                stream(streamed, file, min_table_bytes=least)
        streaming = streaming_of(streamed)
        assert (streaming is not None) == released
        assert torch.equal(streamed(IDS), model()(IDS))
        if streaming is not None:
            assert len(streaming.tables) == (0 if least is None else len(TABLES))
            streaming.close(restore=True)
            assert torch.equal(streamed(IDS), model()(IDS))
        assert not any(isinstance(weight, Placeholder) for weight in streamed.parameters())
        assert not [each for each in Path("/proc/self/fd").iterdir() if each.exists() and each.samefile(file)]


def test_close_waits_for_lookups_in_other_threads(file: Path) -> None:
    """None of which has a wrong byte, or hangs."""
    known = model().first.weight
    for _ in range(10):
        streaming = stream(streamed := model(), file, min_table_bytes=LEAST)
        begun, wrong = threading.Barrier(3), []

        def look_up(made: Model = streamed, begun: threading.Barrier = begun, wrong: list[bool] = wrong) -> None:
            begun.wait()
            while True:
                ids = torch.randint(ROWS, (500,))
                try:
                    rows = made.first(ids)
                except (ValueError, RuntimeError):  # the table is closed, or the weight no table any more
                    return
                wrong.append(not torch.equal(rows, known[ids]))

        threads = [threading.Thread(target=look_up) for _ in range(2)]
        for thread in threads:
            thread.start()
        begun.wait()
        streaming.close()
        for thread in threads:
            thread.join()
        assert not any(wrong)
