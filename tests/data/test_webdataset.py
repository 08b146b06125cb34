"""Tar files of WebDataset are read in place, whatever tar they are."""

from __future__ import annotations

import errno
import io
import os
import resource
import subprocess
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepnvme.data import CorruptSamples, DataLoader, SampleDataset, SampleUnreadable

from ..support.files import flip, open_files

pytestmark = pytest.mark.usefixtures("indexes")
NAMES = ["a", "b/c", "d" * 120, "é", "with space", "x/" * 60 + "deep"]
EXTENSIONS = ["jpg", "cls", "seg.PNG", "json"]


def write_tar(path: Path, samples: Sequence[dict[str, bytes]], kind: int, keys: Sequence[str]) -> None:
    with tarfile.open(path, "w", format=kind) as archive:
        for key, sample in zip(keys, samples, strict=True):
            for extension, data in sample.items():
                info = tarfile.TarInfo(f"{key}.{extension}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
            directory = tarfile.TarInfo(f"{key}-directory")
            directory.type = tarfile.DIRTYPE
            archive.addfile(directory)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(
    samples=st.lists(st.dictionaries(st.sampled_from(EXTENSIONS), st.binary(max_size=1500), min_size=1), max_size=12),
    kind=st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
    names=st.lists(st.sampled_from(NAMES), min_size=12, max_size=12),
)
def test_webdataset(drive: Path, samples: list[dict[str, bytes]], kind: int, names: list[str]) -> None:
    path = drive / f"{time.monotonic_ns()}.tar"
    limit = 90 if kind == tarfile.USTAR_FORMAT else 500
    keys = [f"{number}-{name}"[:limit].rstrip("/") for number, name in enumerate(names[: len(samples)])]
    write_tar(path, samples, kind, keys)
    expected = [
        {"__key__": key, **{name.lower(): data for name, data in sample.items()}}
        for key, sample in zip(keys, samples, strict=True)
    ]
    for _ in range(2):  # without an index, and with it
        dataset = SampleDataset(path)
        assert len(dataset) == len(samples)
        assert dataset.__getitems__(range(len(samples))) == expected


def test_several_archives_follow_one_another_and_keep_their_indexes(drive: Path, indexes: Path) -> None:
    paths = [drive / f"{number}.tar" for number in range(3)]
    for number, path in enumerate(paths):
        write_tar(path, [{"cls": b"%d" % (10 * number + at)} for at in range(number)], tarfile.PAX_FORMAT, ["a", "b"][:number])
    dataset = SampleDataset(paths)
    assert [sample["cls"] for sample in dataset.__getitems__(range(3))] == [b"10", b"20", b"21"]
    kept = list(indexes.iterdir())
    assert len(kept) == 3
    for path in kept:
        flip(path, path.stat().st_size - 3)  # damaged: made again
    assert SampleDataset(paths)[2]["cls"] == b"21"
    write_tar(paths[2], [{"cls": b"new"}], tarfile.PAX_FORMAT, ["a"])
    os.utime(paths[2], ns=(0, 12345))
    assert [each["cls"] for each in SampleDataset(paths).__getitems__([0, 1])] == [b"10", b"new"]
    with pytest.raises(SampleUnreadable, match="was changed"):
        dataset[2]
    with DataLoader(SampleDataset(paths), 2, collate_fn=list) as loader:
        assert [[each["cls"] for each in batch] for batch in loader] == [[b"10", b"new"]]


def test_hidden_files_are_no_part_of_a_sample(drive: Path) -> None:
    """As WebDataset has it. macOS adds such a file to each file."""
    path = drive / "hidden.tar"
    samples = [{"hidden": b"x"}, {"cls": b"1"}, {"_a.cls": b"x"}, {"jpg": b"2"}]
    write_tar(path, samples, tarfile.PAX_FORMAT, ["", "d/a", "d/", "d/a"])
    assert SampleDataset(path).__getitems__([0]) == [{"__key__": "d/a", "cls": b"1", "jpg": b"2"}]
    assert len(SampleDataset(path)) == 1


def test_a_sparse_file_of_an_archive_is_refused(drive: Path) -> None:
    with (drive / "a.cls").open("wb") as file:
        file.seek(1 << 20)
        file.write(b"1")
    subprocess.run(["tar", "-S", "-C", str(drive), "-cf", str(drive / "sparse.tar"), "a.cls"], check=True)
    with pytest.raises(CorruptSamples, match=r"'a\.cls' is sparse"):
        SampleDataset(drive / "sparse.tar")


def test_an_index_that_cannot_be_kept_is_no_error(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tar(drive / "a.tar", [{"cls": b"1"}], tarfile.PAX_FORMAT, ["a"])
    (drive / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(drive / "file"))
    for _ in range(2):
        assert SampleDataset(drive / "a.tar")[0] == {"__key__": "a", "cls": b"1"}


def test_a_batch_of_more_files_than_stay_open(drive: Path) -> None:
    paths = [drive / f"{number:03}.tar" for number in range(300)]
    for number, path in enumerate(paths):
        write_tar(path, [{"cls": b"%d" % number}], tarfile.USTAR_FORMAT, ["a"])
    dataset = SampleDataset(paths)
    for _ in range(2):
        assert [each["cls"] for each in dataset.__getitems__(range(300))] == [b"%d" % number for number in range(300)]
    assert len(open_files(drive, "*.tar")) <= 2 * 128


def test_files_that_the_process_may_not_open_are_an_error_or_wait(drive: Path) -> None:
    paths = [drive / f"{number:03}.tar" for number in range(120)]
    for number, path in enumerate(paths):
        write_tar(path, [{"cls": b"%d" % number}], tarfile.USTAR_FORMAT, ["a"])
    dataset = SampleDataset(paths)
    dataset[0]
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 60, before[1]))
    try:
        with DataLoader(dataset, 15, collate_fn=list, prefetch=8) as loader:  # batches have 15 files, the queue 120
            assert [sample["cls"] for batch in loader for sample in batch] == [b"%d" % number for number in range(120)]
        with pytest.raises(OSError, match="the samples are in 120 files, which exceeds the limit of open files") as raised:
            dataset.__getitems__(range(120))
        assert raised.value.errno == errno.EMFILE
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("at", [3, 1537 + 3])
def test_a_damaged_header_of_an_archive_is_an_error(drive: Path, at: int) -> None:
    path = drive / "damaged.tar"
    write_tar(path, [{"cls": bytes(600)}] * 3, tarfile.PAX_FORMAT, ["a", "b", "c"])
    flip(path, at)
    with pytest.raises(CorruptSamples, match=f"no tar archive|no header of a file at offset {at // 512 * 512}") as raised:
        SampleDataset(path)
    assert raised.value.filename == str(path)


@pytest.mark.parametrize("length", [0, 100, 700, 1536 + 512 + 700])
def test_an_archive_that_is_cut_off_is_an_error(drive: Path, length: int) -> None:
    path = drive / "cut.tar"
    write_tar(path, [{"cls": bytes(600)}] * 3, tarfile.PAX_FORMAT, ["a", "b", "c"])
    os.truncate(path, length)
    with pytest.raises(CorruptSamples):
        SampleDataset(path)
