"""What is saved loads with plain torch, in every way torch has."""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import deepnvme
from deepnvme.checkpoint import saving, verify
from deepnvme.memory.pool import BufferPool, OutOfBuffers

from ..support.interpreters import Interpreters
from ..support.objects import OBJECTS, assert_same


class TestFailures:
    def test_a_budget_that_is_too_small_is_told(self, drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(saving, "buffer_pool", lambda: BufferPool(4096))
        with pytest.raises(OutOfBuffers):
            deepnvme.save([torch.ones(100_000)], drive / "file.pt")
        assert list(drive.iterdir()) == []

    def test_an_error_of_progress_is_raised(self, drive: Path) -> None:
        def stop(done: int, total: int) -> None:
            raise InterruptedError

        with pytest.raises(InterruptedError):
            deepnvme.save([torch.ones(100)], drive / "file.pt", progress=stop)
        assert list(drive.iterdir()) == []


class TestTorchLoads:
    @pytest.mark.parametrize("kind", ["an optimizer", "large among small", "views", "every dtype"])
    @pytest.mark.parametrize("options", [{"mmap": True}, {"map_location": "meta"}], ids=str)
    def test_torch_loads_in_other_ways(self, drive: Path, kind: str, options: dict[str, Any]) -> None:
        obj = OBJECTS[kind]()
        deepnvme.save(obj, drive / "ours.pt")
        torch.save(obj, drive / "torchs.pt")
        assert_same(torch.load(drive / "ours.pt", **options), torch.load(drive / "torchs.pt", **options))

    def test_the_pickle_protocol_is_used(self, drive: Path) -> None:
        deepnvme.save(OBJECTS["an optimizer"](), drive / "file.pt", pickle_protocol=4)
        assert_same(torch.load(drive / "file.pt", weights_only=False), OBJECTS["an optimizer"]())

    @pytest.mark.parametrize("nbytes", [10, 1_000_003])
    def test_a_storage_that_ends_in_part_of_an_element_is_saved(self, drive: Path, nbytes: int) -> None:
        numel = nbytes // 4
        tensor = torch.arange(nbytes).to(torch.uint8)[: numel * 4].view(torch.float32)
        deepnvme.save([tensor, tensor[1:]], drive / "file.pt", checksum=True)
        for load in (torch.load, deepnvme.load):
            whole, part = load(drive / "file.pt")
            assert torch.equal(whole.view(torch.uint8), tensor.view(torch.uint8))
            assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        assert deepnvme.checkpoint.verify(drive / "file.pt").ok

    def test_distributed_tensors_are_saved(self, drive: Path, process_group: None) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        weight = distribute_tensor(torch.arange(600_000.0).view(4, -1), init_device_mesh("cpu", (1,)), [Shard(0)])
        deepnvme.save({"weight": weight}, drive / "file.pt")
        for load in (torch.load, deepnvme.load):
            found = load(drive / "file.pt", weights_only=False)["weight"]
            assert found.placements == weight.placements
            assert torch.equal(found.to_local(), weight.to_local())


def test_checksums_are_those_of_zip_tools(drive: Path) -> None:
    if shutil.which("unzip") is None:
        pytest.skip("needs unzip")
    deepnvme.save(OBJECTS["large among small"](), drive / "file.pt")
    assert "No errors detected" in subprocess.run(["unzip", "-t", drive / "file.pt"], capture_output=True, text=True).stdout


@pytest.mark.parametrize("kind", OBJECTS)
def test_the_file_has_checksums_unless_it_is_to_have_none(drive: Path, kind: str) -> None:
    for checksum in (None, True, False):
        deepnvme.save(OBJECTS[kind](), drive / "file.pt", checksum=checksum)
        with zipfile.ZipFile(drive / "file.pt") as archive:
            sums = {info.CRC for info in archive.infolist() if "/data/" in info.filename and info.file_size}
            assert archive.testzip() is None if checksum is not False else sums <= {0}
            assert checksum is False or 0 not in sums


@pytest.fixture
def torch_without_checksums() -> Iterator[None]:
    torch.serialization.set_crc32_options(False)
    yield
    torch.serialization.set_crc32_options(True)


@pytest.mark.usefixtures("torch_without_checksums")
def test_checksums_that_torch_is_to_leave_out_are_left_out_unless_they_are_asked_for(drive: Path) -> None:
    obj = {"weight": torch.arange(3000.0)}
    for checksum, left_out in ((None, True), (True, False)):
        deepnvme.save(obj, drive / "file.pt", checksum=checksum)
        with zipfile.ZipFile(drive / "file.pt") as archive:
            assert ({info.CRC for info in archive.infolist()} == {0}) == left_out
        assert torch.equal(torch.load(drive / "file.pt")["weight"], obj["weight"])
        assert torch.equal(deepnvme.load(drive / "file.pt", checksum=True)["weight"], obj["weight"])
        report = verify(drive / "file.pt")
        assert (report.checked_nbytes, report.problems) == (0 if left_out else 12_000, ())


def test_progress_is_told_bytes_up_to_those_of_the_file(drive: Path) -> None:
    told: list[tuple[int, int]] = []
    deepnvme.save(OBJECTS["large among small"](), drive / "file.pt", progress=lambda done, total: told.append((done, total)))
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    size = (drive / "file.pt").stat().st_size
    assert {total for _, total in told} == {size}
    assert told[-1][0] == size


def test_saving_takes_no_more_memory_than_said(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = BufferPool(16 << 20)
    monkeypatch.setattr(saving, "buffer_pool", lambda: pool)
    deepnvme.save([torch.ones(5000) for _ in range(2000)], drive / "file.pt")
    assert pool.allocated <= 16 << 20
    assert pool.in_use == 0


def test_a_forked_child_saves_with_an_engine_of_its_own(drive: Path, interpreters: Interpreters) -> None:
    interpreters.run(f"""
        import deepnvme
        torch.set_num_threads(1)  # those of OpenMP are not there in a child
        from pathlib import Path
        drive = Path({str(drive)!r})
        obj = [torch.arange(200_000), torch.arange(3)]
        deepnvme.save(obj, drive / "parents.pt")
        child = os.fork()
        deepnvme.save(obj, drive / ("childs.pt" if child == 0 else "again.pt"))
        assert torch.equal(deepnvme.load(drive / "parents.pt")[0], obj[0])
        if child == 0:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        for name in ("childs.pt", "again.pt"):
            assert torch.equal(torch.load(drive / name)[0], obj[0])
    """).check()
