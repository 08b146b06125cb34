"""A group that writes one file: it is the file of one, and where one rank fails all do and nothing is there."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from deepnvme.checkpoint.formats.file_image import FileImage
from deepnvme.checkpoint.parallel import outside_dtensors

from ..support.interpreters import Interpreters

# Launching processes takes seconds: each launch tests many things.
PRELUDE = """
import errno, os, pathlib, re, sys, warnings
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import deepnvme
from deepnvme.checkpoint import publication, saving, parallel

warnings.simplefilter("default")  # torch's own
torch.set_num_threads(1)
rank = next((rank for rank in range(1, size) if (os.fork() == 0)), 0)
dist.init_process_group("gloo", init_method=f"file://{drive}.ranks", rank=rank, world_size=size)
group = dist.group.WORLD
path = drive / "a.pt"


def together(ok):
    outcomes = [None] * size
    dist.all_gather_object(outcomes, ok)
    assert all(outcomes), outcomes


def refused(kind, pattern, obj, others=None, **options):
    '''That ranks raise: each ``kind``, or where ``others`` is given, only rank 1, and the others that.'''
    expected = kind if others is None or rank == 1 else others
    try:
        deepnvme.save(obj, path, group=group, **options)
        found = None
    except BaseException as error:
        found = error
    together(type(found) is expected and re.search(pattern, str(found)) is not None or print(repr(found)))
    assert sorted(os.listdir(drive)) == [], os.listdir(drive)


def whole(numel, *shape, dtype=torch.float32):
    return torch.arange(numel).to(dtype).view(shape or (numel,))


def saved(obj, expected, **options):
    deepnvme.save(obj, path, group=group, **options)
    if rank == 0:
        deepnvme.save(expected, drive / "expected.pt", checksum=False)  # as files of groups are
        assert path.read_bytes() == (drive / "expected.pt").read_bytes()
        os.unlink(drive / "expected.pt")
        assert os.listdir(drive) == ["a.pt"]
        for mmap in (False, True):
            same(torch.load(path, mmap=mmap), expected)
    same(deepnvme.load(path), expected)  # by all
    dist.barrier()
    if rank == 0:
        os.unlink(path)
    dist.barrier()


def same(found, expected):
    assert list(found) == list(expected)
    for key, value in expected.items():
        assert torch.equal(found[key], value) if isinstance(value, torch.Tensor) else found[key] == value, key
        if isinstance(value, torch.Tensor):
            assert found[key].requires_grad == value.requires_grad
"""

CLOSING = """
together(True)
dist.destroy_process_group()
if rank:
    sys.stdout.flush()
    os._exit(0)
assert all(os.wait()[1] == 0 for _ in range(1, size))
"""


def run(size: int, program: str, drive: Path, interpreters: Interpreters) -> None:
    opening = f"import pathlib\ndrive, size = pathlib.Path({str(drive)!r}), {size}\n"
    interpreters.run(opening + PRELUDE + textwrap.dedent(program) + CLOSING).check()


@pytest.fixture(autouse=True)
def gloo() -> None:
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("needs torch.distributed with gloo")


@pytest.mark.slow
def test_one_that_fails_makes_all_raise_and_nothing_is_published(drive: Path, interpreters: Interpreters) -> None:
    run(
        2,
        """
        import pickle
        state = {"a": whole(100_000), "step": 3}
        one = rank == 1

        # before anything is written
        refused(pickle.PicklingError, "Can.t pickle .function", {**state, **({"f": (lambda: 0)} if one else {})}, RuntimeError)
        refused(ValueError, "ranks 0 and ranks 1 hold different objects", {**state, "step": rank})
        refused(ValueError, "ranks 0 and ranks 1 hold different objects", {"a": whole(100_000 + rank)})
        text = "text" * 10
        refused(ValueError, "one object here and several there", {"a": text, "b": "".join(["text"] * 10) if one else text})
        mesh = init_device_mesh("cpu", (2,))
        partial = DTensor.from_local(whole(10), mesh, [Partial()])
        refused(ValueError, "cannot be saved: redistribute it to shards or replicas", {"a": partial})
        sharded = distribute_tensor(whole(10), mesh, [Shard(0)])
        refused(ValueError, "save without checksum", {"a": sharded}, checksum=True)
        refused(TypeError, "full_tensor", {"a": DTensor.from_local(whole(5, dtype=torch.uint16), mesh, [Shard(0)])})

        # an earlier save of one rank, that nobody looked at
        if one:
            deepnvme.checkpoint.background.wait_for_saves(deepnvme.async_save([1], drive / "missing" / "b.pt").path)
        refused(FileNotFoundError, "missing/b.pt", state, RuntimeError)

        # a rank has no engine or memory, writes, or rank 0 begins or publishes, in vain
        def failing(error):
            def fail(*args, **more):
                raise error
            return fail

        for module, name, at, error in (
            (publication, "shared_engine", 1, OSError(errno.ENOMEM, "Cannot allocate memory")),
            (parallel, "buffer_pool", 1, MemoryError("none")),
            (parallel, "write", 1, OSError(errno.EIO, "Input/output error", "a.pt")),
            (parallel, "write", 1, KeyboardInterrupt()),
            (publication, "_start", 0, PermissionError(errno.EACCES, "Permission denied", "a.pt")),
            (publication.os, "replace", 0, OSError(errno.EROFS, "Read-only file system", "a.pt")),
        ):
            before = getattr(module, name)
            if rank == at:
                setattr(module, name, failing(error))
            try:
                deepnvme.save({**state, "b": sharded}, path, group=group)
                found = None
            except BaseException as caught:
                found = caught
            setattr(module, name, before)
            if rank == at:
                together(type(found) is type(error) or print(repr(found)))
            else:
                text = str(found)
                together(type(found) is RuntimeError and f"rank {at}: {type(error).__name__}" in text or print(repr(found)))
            assert sorted(os.listdir(drive)) == [], os.listdir(drive)

        # the file that is there stays, and who is not of the group is told
        saved(state, state)
        deepnvme.save(state, path, group=group)
        before = path.read_bytes()
        try:
            deepnvme.save({**state, **({"f": (lambda: 0)} if one else {})}, path, group=group)
        except (pickle.PicklingError, RuntimeError):
            pass
        together(path.read_bytes() == before)
        alone = dist.new_group([0])
        if one:
            try:
                deepnvme.save(state, path, group=alone)
                ok = False
            except ValueError as error:
                ok = "is not of the group" in str(error)
        else:
            deepnvme.save(state, path, group=alone)
            ok = True
        together(ok)
        """,
        drive,
        interpreters,
    )


@pytest.mark.slow
def test_the_file_is_that_of_one_process_with_whole_tensors(drive: Path, interpreters: Interpreters) -> None:
    run(
        3,
        """
        mesh = init_device_mesh("cpu", (3,))
        torch.manual_seed(0)

        # the same object: large, small, empty and shared tensors, views of larger storages, and what is none
        large = torch.randint(0, 255, (5_000_001,), dtype=torch.uint8)
        tensors = {"large": large, "view": large[5:], **{str(n): torch.randn(n) for n in (0, 1, 1023, 1024, 70_001)}}
        same_object = {**tensors, "transposed": torch.randn(30, 50).t(), "step": 7, "name": "run"}
        told = []
        saved(same_object, same_object, checksum=False, progress=lambda done, total: told.append((done, total)))
        assert all(done <= total for done, total in told)
        deepnvme.save(same_object, path, group=group, checksum=True, fsync=False)
        same(deepnvme.load(path, checksum=True), same_object)
        dist.barrier()
        if rank == 0:
            os.unlink(path)
        dist.barrier()

        # shards: even, uneven, with ranks that have none, of rows, columns and inner dimensions, replicas, tied, on pages and off
        wholes = {
            "rows": (whole(600 * 1001, 600, 1001), Shard(0)), "uneven": (whole(7 * 5, 7, 5), Shard(0)),
            "two": (whole(2), Shard(0)), "empty": (whole(0), Shard(0)),
            "columns": (whole(40 * 4096, 40, 4096), Shard(1)), "wide": (whole(3 * 500_001, 3, 500_001), Shard(1)),
            "inner": (whole(4 * 5 * 6, 4, 5, 6), Shard(1)), "last": (whole(4 * 5 * 6, 4, 5, 6, dtype=torch.bfloat16), Shard(-1)),
            "replicas": (whole(300_003, dtype=torch.float64), Replicate()), "scalar": (torch.tensor(3.5), Replicate()),
            "transposed": (torch.randn(20, 30).t(), Shard(0)),
        }
        if torch.__version__ >= (2, 7):  # before, torch cannot distribute it
            wholes["none"] = torch.empty(4, 0), Shard(0)
        state = {key: distribute_tensor(value.clone(), mesh, [placement]) for key, (value, placement) in wholes.items()}
        expected = {key: value.contiguous() for key, (value, _) in wholes.items()}
        state["tied"], expected["tied"] = state["rows"].detach(), expected["rows"].detach()
        state["param"] = torch.nn.Parameter(distribute_tensor(torch.ones(10, 3), mesh, [Shard(0)]))
        expected["param"] = torch.ones(10, 3, requires_grad=True)
        state["common"] = expected["common"] = torch.arange(10_000)
        state["transposed"] = DTensor.from_local(state["transposed"].to_local().t().contiguous().t(), mesh, [Shard(0)])
        state["step"] = expected["step"] = 3
        saved(state, expected)

        # a mesh of some of the group, and a group of some of the mesh
        from torch.distributed.device_mesh import DeviceMesh
        some, two = DeviceMesh("cpu", [0, 2]), dist.new_group([0, 1])
        saved({"a": distribute_tensor(whole(10), some, [Shard(0)])}, {"a": whole(10)})
        if rank < 2:
            try:
                deepnvme.save({"a": state["rows"]}, path, group=two)
                ok = False
            except ValueError as error:
                ok = "give the group of all ranks of its mesh" in str(error)
        else:
            ok = True
        together(ok and not path.exists())

        # the manager: the oldest is recycled, once
        manager = deepnvme.CheckpointManager(drive / "run", keep=2)
        for step in range(4):
            manager.save(step, {"a": state["rows"], "step": step}, group=group)
            assert manager.latest() == step
            same(manager.load(), {"a": expected["rows"], "step": step})
            dist.barrier()
        assert manager.steps() == [2, 3]

        try:
            manager.save(9, state, asynchronous=True, group=group)
        except ValueError:
            ok = manager.steps() == [2, 3]
        together(ok)
        """,
        drive,
        interpreters,
    )


@pytest.mark.slow
def test_meshes_of_two_dimensions(drive: Path, interpreters: Interpreters) -> None:
    run(
        4,
        """
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        tensor = whole(601 * 301, 601, 301)
        placements = [
            [Shard(0), Shard(0)], [Shard(0), Shard(1)], [Shard(1), Shard(0)], [Shard(1), Shard(1)], [Replicate(), Shard(0)],
            [Shard(1), Replicate()], [Replicate(), Replicate()],
        ]
        state = {str(placed): distribute_tensor(tensor.clone(), mesh, placed) for placed in placements}
        saved(state, {key: tensor.clone() for key in state})

        # FSDP2 over tensor parallelism
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 64))
        expected = {key: value.clone() for key, value in model.state_dict().items()}
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        assert "Strided" in str(model[0].weight.placements)
        state = dict(model.state_dict())
        saved(state, expected)
        """,
        drive,
        interpreters,
    )


def test_what_all_hold_is_outside_of_dtensors() -> None:
    image = FileImage()
    image.add_text(bytes(60_000))
    assert outside_dtensors(image) == [(0, 60_000)]
    image.spread = [(4096, 9000), (9000, 20_000), (40_960, 60_000)]
    assert outside_dtensors(image) == [(0, 4096), (20_000, 40_960)]
