"""Arrow files of Hugging Face datasets are read in place, with the values that the library reads."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from deepnvme.data import CorruptSamples, SampleDataset

from ..support.files import flip
from ..support.sample_formats import same_samples, write_arrow

datasets: Any = pytest.importorskip("datasets", reason="needs datasets: pip install datasets")
pyarrow: Any = pytest.importorskip("pyarrow")
ipc: Any = pytest.importorskip("pyarrow.ipc")


def stream(path: Path, columns: dict[str, Any], rows: int = 100, **options: Any) -> Path:
    table = pyarrow.table(columns)
    with ipc.new_stream(path, table.schema, options=ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


BYTES = pyarrow.array([b"a", b"", b"ccc"])


@pytest.mark.parametrize(
    ("column", "reason"),
    [
        ([[[1]], [[2]], [[3]]], "column 'x' is list<item: list<item: int64>>"),
        (["a", None, "b"], "column 'x' of .* has nulls"),
        ([1, None, 2], "column 'x' of .* has nulls"),
        ([[1], [None], [2]], "column 'x' of .* has nulls"),
        ([{"bytes": None, "path": "a.jpg"}] * 3, "column 'x' of .* has nulls|column 'x' is struct"),
        ([{"a": 1}] * 3, "column 'x' is struct"),
        ([["a"], [], ["b"]], "column 'x' is list<item: string>"),
        ([True, False, True], "column 'x' is bool"),
        (pyarrow.array(["a", "b", "a"]).dictionary_encode(), "column 'x' is dictionary"),
        (pyarrow.array([1, 2, 3], pyarrow.timestamp("s")), "column 'x' is timestamp"),
    ],
)
def test_a_column_that_is_not_read_in_place_is_refused(drive: Path, column: Any, reason: str) -> None:
    path = stream(drive / "a.arrow", {"data": BYTES, "x": column})
    with pytest.raises(ValueError, match=reason):
        SampleDataset(path)


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_compressed_batches_are_refused(drive: Path, compression: str) -> None:
    path = stream(drive / "a.arrow", {"data": [b"a" * 1000] * 1000}, compression=compression)
    with pytest.raises(ValueError, match=r"column 'data' of .* is compressed"):
        SampleDataset(path)


def test_a_file_of_numbers_and_one_with_other_columns_are_refused(drive: Path) -> None:
    with pytest.raises(ValueError, match="only numbers"):
        SampleDataset(stream(drive / "numbers.arrow", {"x": [1, 2]}))
    paths = [stream(drive / "a.arrow", {"x": ["1"]}), stream(drive / "b.arrow", {"x": [b"1"]})]
    with pytest.raises(ValueError, match=r"b\.arrow' has other columns than the file before it"):
        SampleDataset(paths)


def test_two_columns_with_one_name_are_refused(drive: Path) -> None:
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array([1])], names=["x", "x"])
    with ipc.new_stream(drive / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(ValueError, match="two columns with one name"):
        SampleDataset(drive / "a.arrow")


def test_a_file_without_rows_is_refused(drive: Path) -> None:
    with pytest.raises(ValueError, match="there are no samples in"):
        SampleDataset(stream(drive / "a.arrow", {"x": pyarrow.array([], pyarrow.string())}))


@pytest.mark.parametrize("kept", [0, 1, 7, 300, -8, -500])
def test_a_file_that_is_cut_off_is_an_error(drive: Path, kept: int) -> None:
    path = stream(drive / "a.arrow", {"data": [b"a" * 100] * 500})
    os.truncate(path, kept % path.stat().st_size)
    with pytest.raises(CorruptSamples) as raised:
        SampleDataset(path)
    assert (raised.value.errno, raised.value.filename) == (errno.EBADMSG, str(path))


def test_damaged_metadata_is_an_error_or_changes_nothing(drive: Path) -> None:
    """Arrow has no checksums: a flipped bit of a value goes unseen. One of the metadata must not lead outside of the file."""
    path = stream(drive / "a.arrow", {"data": [b"a" * 10] * 20})
    for at in range(0, path.stat().st_size, 3):
        flip(path, at)
        try:
            dataset = SampleDataset(path, errors="skip")
            assert len(dataset.__getitems__(range(len(dataset)))) + dataset.skipped == len(dataset)
        except (CorruptSamples, ValueError):
            pass
        flip(path, at)
    assert len(SampleDataset(path)) == 20


def test_offsets_that_descend_are_an_error(drive: Path) -> None:
    path = stream(drive / "a.arrow", {"data": [b"a" * 10] * 20})
    data = path.read_bytes()
    at = data.index(b"".join(number.to_bytes(4, "little") for number in (0, 10, 20, 30)))
    path.write_bytes(data[:at] + (25).to_bytes(4, "little").join([data[at:][:4], data[at:][8:]]))
    with pytest.raises(CorruptSamples, match="offsets of column 'data' descend"):
        SampleDataset(path)


@pytest.mark.parametrize("state", [b"", b"{}", b"[]", b'{"_data_files": [{}]}', b'{"_data_files": 3}'])
def test_a_damaged_state_is_an_error(drive: Path, state: bytes) -> None:
    write_arrow(drive / "saved", [{"x": "a"}], 1)
    (drive / "saved" / "state.json").write_bytes(state)
    with pytest.raises(CorruptSamples) as raised:
        SampleDataset(drive / "saved")
    assert raised.value.filename == str(drive / "saved" / "state.json")


def test_a_file_of_a_directory_that_is_missing_is_an_error(drive: Path) -> None:
    write_arrow(drive / "saved", [{"x": "a"}, {"x": "b"}], 2)
    (drive / "saved" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(FileNotFoundError, match="data-00001"):
        SampleDataset(drive / "saved")


def test_without_pyarrow_the_error_says_what_to_install(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stream(drive / "a.arrow", {"x": ["a"]})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.ipc", None)
    monkeypatch.delitem(sys.modules, "deepnvme.data.arrow", raising=False)
    with pytest.raises(ImportError, match="pip install pyarrow"):
        SampleDataset(path)


def test_each_kind_of_column_has_the_values_that_the_library_reads(drive: Path) -> None:
    features = datasets.Features(
        {
            "image": datasets.Image(decode=False),
            "label": datasets.ClassLabel(10),
            "text": datasets.Value("string"),
            "long": datasets.Value("large_string"),
            "blob": datasets.Value("binary"),
            "ids": datasets.Sequence(datasets.Value("int32")),
            "point": datasets.Sequence(datasets.Value("float32"), length=3),
            "half": datasets.Value("float16"),
            "small": datasets.Value("uint8"),
            "double": datasets.Value("float64"),
        }
    )
    rows = [
        {
            "image": {"bytes": bytes([number % 256]) * (number % 900), "path": None},
            "label": number % 10,
            "text": "é" * (number % 4),
            "long": str(number),
            "blob": number.to_bytes(2, "big"),
            "ids": list(range(number % 6)),
            "point": [number / 2, 0.5, -1.0],
            "half": number % 100 / 4,
            "small": number % 256,
            "double": number / 3,
        }
        for number in range(2300)  # batches of 1000 rows
    ]
    dataset = datasets.Dataset.from_list(rows, features=features)
    dataset.save_to_disk(drive / "saved", num_shards=2)
    dtypes = {
        "label": torch.int64,
        "ids": torch.int32,
        "point": torch.float32,
        "half": torch.float16,
        "small": torch.uint8,
        "double": torch.float64,
    }
    found = SampleDataset(drive / "saved")
    numbers = torch.randperm(2300)[:500].tolist()
    expected = []
    for row in datasets.load_from_disk(drive / "saved").select(numbers):
        tensors = {name: torch.tensor(row[name], dtype=dtype) for name, dtype in dtypes.items()}
        expected.append({**row, "image": row["image"]["bytes"], **tensors})
    assert same_samples(found.__getitems__(numbers), expected)
    files = sorted((drive / "saved").glob("*.arrow"))
    assert same_samples(SampleDataset(files).__getitems__(numbers), expected)
    assert json.loads((drive / "saved" / "state.json").read_text())["_data_files"] == [{"filename": file.name} for file in files]


def test_columns_of_empty_values_have_no_place(drive: Path) -> None:
    path = stream(drive / "a.arrow", {"empty": [""] * 250, "ids": pyarrow.array([[]] * 250, pyarrow.large_list(pyarrow.int8()))})
    expected = {"empty": "", "ids": torch.empty(0, dtype=torch.int8)}
    assert same_samples(SampleDataset(path).__getitems__([3, 200]), [expected] * 2)
