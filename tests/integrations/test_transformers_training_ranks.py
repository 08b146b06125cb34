"""transformers' Trainer in several processes, each with a shard of the model on its drive, in place of DDP."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..support.interpreters import Interpreters
from ..support.ranks import run_ranks

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_trainer_in_several_processes_learns_as_with_ddp(
    accumulation: int, drive: Path, tmp_path: Path, interpreters: Interpreters
) -> None:
    pytest.importorskip("transformers")
    run_ranks(
        2,
        f"""
        tmp_path, accumulation = Path({str(tmp_path)!r}), {accumulation}
        # as torchrun does
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        warnings.simplefilter("ignore")
        import torch
        from tests.integrations.test_transformers_training import integration, logs, offload, trainer_of, transformers

        options = {{"dropout": False, "gradient_accumulation_steps": accumulation, "save_strategy": "steps"}}
        options |= {{"save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "ddp_backend": "gloo", "max_steps": 4}}
        options |= {{"max_grad_norm": 0.5}}

        def trainer(name, **others):
            return trainer_of(tmp_path / name, **{{**options, **others}})

        def assert_close(found, expected):
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4, msg=lambda said: f"{{name}}: {{said}}")

        known = trainer("known")
        assert known.args.world_size == 2
        known.train()
        assert isinstance(known.model_wrapped, torch.nn.parallel.DistributedDataParallel)

        trained = trainer("trained")
        try:
            offload(trained, drive, process_group=dist.new_group([rank]))
        except ValueError as error:
            assert "the process_group has 1 processes, and the trainer divides its batches over 2" in str(error), error
        else:
            raise AssertionError("taken")
        dist.barrier()
        training = offload(trained, drive)
        trained.train()
        assert not isinstance(trained.model_wrapped, torch.nn.parallel.DistributedDataParallel)
        found, expected = logs(trained), logs(known)
        assert len(found) == len(expected)
        for one, other in zip(found, expected):
            assert_close(one, other)
        model = {{name: value.full_tensor() if hasattr(value, "to_local") else value
                 for name, value in training.state_dict()["model"].items()}}
        assert_close(model, known.model.state_dict())
        shards = [value for value in training.state_dict()["model"].values() if hasattr(value, "to_local")]
        assert shards and all(each.to_local().numel() < each.numel() for each in shards)

        # What is saved are ordinary checkpoints, written once.
        trained.save_model(tmp_path / "saved")
        dist.barrier()
        def files(name):
            return sorted(str(each.relative_to(tmp_path / name)) for each in (tmp_path / name).rglob("*"))
        assert files("trained") == files("known"), (files("trained"), files("known"))
        whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
        assert_close(whole.state_dict(), known.model.state_dict())
        states = [torch.load(tmp_path / name / "checkpoint-2/optimizer.pt")["state"] for name in ("trained", "known")]
        assert states[0].keys() == states[1].keys()
        for index, state in states[1].items():
            assert_close(states[0][index], state)

        # Both are resumed from.
        last = logs(trained)[-2]
        for name in "trained", "known":
            resumed = trainer(f"from {{name}}")
            with offload(resumed, drive) as again:
                resumed.train(resume_from_checkpoint=str(tmp_path / name / "checkpoint-2"))
                assert again.steps == 2  # since then
                assert_close(logs(resumed)[-2], last)
        training.close()
        """,
        drive,
        interpreters,
    )


def test_what_one_process_cannot_save_is_an_error_of_all(drive: Path, tmp_path: Path, interpreters: Interpreters) -> None:
    """None waits for the other, and what is saved next is whole."""
    pytest.importorskip("transformers")
    run_ranks(
        2,
        f"""
        tmp_path = Path({str(tmp_path)!r})
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        warnings.simplefilter("ignore")
        from unittest import mock
        from deepnvme.offload.training.ranks import RankFailed
        from tests.integrations.test_transformers_training import offload, trainer_of, transformers

        trainer = trainer_of(tmp_path / "trained", dropout=False, ddp_backend="gloo", max_steps=1)
        training = offload(trainer, drive)
        trainer.train()
        trainer.state.best_global_step = 1  # so that a checkpoint has a barrier of the trainer's
        save, checkpoint = lambda: trainer.save_model(tmp_path / "saved"), lambda: trainer._save_checkpoint(trainer.model, None)

        def left():
            # once both are done
            dist.barrier()
            found = list((tmp_path / "trained").glob(".*"))
            dist.barrier()
            return found

        class AsAsked(OSError):
            pass

        for unable, owner, what, call in (
            (1, os, "makedirs", save),
            (0, torch, "load", save),
            (0, transformers.Trainer, "_save", save),
            (0, transformers.Trainer, "_save", checkpoint),
            (0, transformers.Trainer, "_save_optimizer_and_scheduler", checkpoint),
            (0, os, "unlink", save),
        ):
            print(unable, what, file=sys.stderr)  # of the failure
            fails = rank == unable
            with mock.patch.object(owner, what, side_effect=AsAsked) if fails else contextlib.nullcontext():
                try:
                    call()
                except AsAsked:
                    assert fails
                except RankFailed as error:
                    assert not fails and f"rank {{unable}} failed" in str(error), error
                else:
                    raise AssertionError(f"rank {{rank}} has saved what rank {{unable}} could not")
            assert what == "unlink" or not left()

        # A process that does not save maps nothing.
        with mock.patch.object(torch, "load", wraps=torch.load) as load:
            save()
        assert load.call_count == (rank == 0)
        assert not left()
        whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
        for name, value in training.state_dict()["model"].items():
            assert torch.equal(value.full_tensor() if hasattr(value, "to_local") else value, whole[name]), name
        training.close()
        """,
        drive,
        interpreters,
    )
