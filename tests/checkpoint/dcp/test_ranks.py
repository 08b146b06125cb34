"""Distributed checkpoints of two processes: FSDP2's and others', loaded as they were cut and otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from ...support.interpreters import Interpreters
from ...support.torch_versions import fsdp_on_cpu
from ...support.two_ranks import run_two

pytestmark = pytest.mark.slow


@fsdp_on_cpu
def test_models_and_optimizers_are_saved_and_loaded_by_either_and_cut_anew(drive: Path, interpreters: Interpreters) -> None:
    run_two(
        """
        import shutil
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
        from torch.distributed.checkpoint.state_dict import get_state_dict
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor
        from deepnvme import NVMeReader, NVMeWriter

        warnings.simplefilter("ignore")
        model = sharded()
        optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
        train(model, optimizer, range(2))
        large = torch.randn(600, 602, generator=torch.Generator().manual_seed(5))

        def state(model, optimizer, placement, value):
            weights, states = get_state_dict(model, optimizer)
            extra = distribute_tensor(large * value, mesh, [placement])
            return {"model": weights, "optimizer": states, "extra": extra, "step": 7 * value}

        saved = state(model, optimizer, Shard(0), 1)
        for number, (writer, reader) in enumerate(
            [(NVMeWriter, FileSystemReader), (FileSystemWriter, NVMeReader), (NVMeWriter, NVMeReader)]
        ):
            folder = os.path.join(drive, f"{number}")
            dcp.save(saved, storage_writer=writer(folder))
            if number == 2:
                dist.barrier()
                dcp.async_save(saved, storage_writer=writer(folder, thread_count=2)).result()
            dist.barrier()
            other = sharded()
            found = state(other, torch.optim.AdamW(other.parameters(), **ADAM), Shard(0), 0)
            dcp.load(found, storage_reader=reader(folder))
            assert torch.equal(found["extra"].full_tensor(), large)
            assert found["step"] == 7, found["step"]
            assert_same_states(found["model"], saved["model"])
            assert_same_states(found["optimizer"], saved["optimizer"])
            for placement in (Shard(1), Replicate()):
                found = {"extra": distribute_tensor(large * 0, mesh, [placement])}
                dcp.load(found, storage_reader=reader(folder))
                assert torch.equal(found["extra"].full_tensor(), large), placement

        # whole in one process, without the others
        if rank == 0:
            found = {"extra": torch.zeros(600, 602), "step": 0}
            dcp.load(found, storage_reader=NVMeReader(os.path.join(drive, "2")), no_dist=True)
            assert torch.equal(found["extra"], large) and found["step"] == 7
            assert len(os.listdir(os.path.join(drive, "2"))) == 5, os.listdir(os.path.join(drive, "2"))
        dist.barrier()

        # a rank that cannot write makes all raise, and the earlier checkpoint stays
        class Fails(NVMeWriter):
            def write_data(self, plan, planner):
                if rank == 1:
                    raise OSError(5, "broken drive")
                return super().write_data(plan, planner)

        try:
            dcp.save({"extra": saved["extra"], "step": 9}, storage_writer=Fails(os.path.join(drive, "2")))
        except dcp.api.CheckpointException as error:
            assert list(error.failures) == [1]
        else:
            raise AssertionError("nothing was raised")
        found = {"extra": distribute_tensor(large * 0, mesh, [Shard(1)]), "step": 0}
        dcp.load(found, storage_reader=NVMeReader(os.path.join(drive, "2")))
        assert torch.equal(found["extra"].full_tensor(), large) and found["step"] == 7

        # each rank by itself
        if "use_collectives" in dcp.save.__code__.co_varnames:
            folder = os.path.join(drive, "alone")
            for step in (1, 2):
                dcp.save({"extra": saved["extra"], "step": step + rank}, storage_writer=NVMeWriter(folder), use_collectives=False)
                dist.barrier()
                assert sorted(os.listdir(folder))[2:] == ["__0.metadata", "__1.metadata"] or len(os.listdir(folder)) == 4
                for reader in (FileSystemReader, NVMeReader):
                    found = {"extra": distribute_tensor(large * 0, mesh, [Shard(0)]), "step": 0}
                    dcp.load(found, storage_reader=reader(folder))
                    assert torch.equal(found["extra"].full_tensor(), large) and found["step"] == step + rank
                dist.barrier()
        """,
        drive,
        interpreters,
    )
