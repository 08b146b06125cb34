"""FSDP2 in two processes: each rank has the states of its shards, and the losses are those with states in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from ...support.interpreters import Interpreters
from ...support.torch_versions import fsdp_on_cpu
from ...support.two_ranks import run_two

pytestmark = pytest.mark.slow


@fsdp_on_cpu
def test_training_and_checkpoints_are_those_of_fsdp_with_states_in_memory(drive: Path, interpreters: Interpreters) -> None:
    run_two(
        """
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
        )
        import torch.distributed.checkpoint as dcp

        model, other = sharded(), sharded()
        plain = torch.optim.AdamW(model.parameters(), **ADAM)
        optimizer = offloaded(other, memory_budget=50_000)
        assert train(other, optimizer, range(10)) == train(model, plain, range(10))
        assert_same(other, model)
        assert os.listdir(os.path.join(drive, "states", f"rank{rank}"))

        # each rank has the states of its shards
        assert_same_states(optimizer.state_dict(), plain.state_dict())
        own = sum(param.to_local().numel() for param in other.parameters())
        assert optimizer.report().bytes_written < 4 * 4 * own

        # by names, as torch.distributed.checkpoint wants them, and in one piece
        expected = get_optimizer_state_dict(model, plain)
        assert_same_states(get_optimizer_state_dict(other, optimizer), expected)
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        complete = get_optimizer_state_dict(other, optimizer, options=whole)
        assert_same_states(complete, get_optimizer_state_dict(model, plain, options=whole))

        # saved by one, loaded by the other, both ways
        folder = os.path.join(drive, "checkpoint")
        dcp.save({"optimizer": get_optimizer_state_dict(other, optimizer)}, checkpoint_id=folder)
        for use_offloaded in (True, False):
            third = sharded()
            again = offloaded(third, "again") if use_offloaded else torch.optim.AdamW(third.parameters(), **ADAM)
            states = {"optimizer": get_optimizer_state_dict(third, again)}
            dcp.load(states, checkpoint_id=folder)
            set_optimizer_state_dict(third, again, states["optimizer"])
            assert_same_states(get_optimizer_state_dict(third, again), expected)
            if use_offloaded:
                broadcast = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
                set_optimizer_state_dict(third, again, complete, options=broadcast)
                assert_same_states(get_optimizer_state_dict(third, again), expected)
            third.load_state_dict(model.state_dict())
            fourth = sharded()
            fourth.load_state_dict(model.state_dict())
            reference = torch.optim.AdamW(fourth.parameters(), **ADAM)
            reference.load_state_dict(copy.deepcopy(plain.state_dict()))
            assert train(third, again, range(10, 13)) == train(fourth, reference, range(10, 13))
            assert_same(third, fourth)
            if use_offloaded:
                again.close()
        optimizer.close()
        """,
        drive,
        interpreters,
    )


@fsdp_on_cpu
def test_gradients_are_offloaded_and_master_weights_kept(drive: Path, interpreters: Interpreters) -> None:
    run_two(
        """
        model = sharded()
        plain = torch.optim.AdamW(model.parameters(), **ADAM)
        expected = train(model, plain, range(5))
        other = sharded()
        with offloaded(other, memory_budget=30_000, offload_gradients=True) as optimizer:
            assert train(other, optimizer, range(5)) == expected
            assert_same(other, model)

        # what a model in float32 does whose weights are rounded for forward and backward
        other, masters = sharded(torch.bfloat16), sharded(torch.bfloat16)
        full = [torch.nn.Parameter(param.to_local().detach().float()) for param in masters.parameters()]
        plain = torch.optim.AdamW(full, **ADAM)
        class Rounded:
            def zero_grad(self):
                masters.zero_grad()
            @torch.no_grad()
            def step(self):
                for master, param in zip(full, masters.parameters(), strict=True):
                    master.grad = param.grad.to_local().float()
                plain.step()
                for master, param in zip(full, masters.parameters(), strict=True):
                    param.to_local().copy_(master)
        with offloaded(other, master_weights=True) as optimizer:
            assert train(other, optimizer, range(5)) == train(masters, Rounded(), range(5))
            assert_same(other, masters)
        """,
        drive,
        interpreters,
    )


@fsdp_on_cpu
def test_a_step_that_fails_on_one_rank_raises_on_all_and_all_finish_it(drive: Path, interpreters: Interpreters) -> None:
    run_two(
        """
        from unittest import mock
        from tests.support.engines import failing

        def fail(*arguments):
            raise OSError(5, "as asked for")

        for options in ({}, {"memory_budget": 1 << 40}, {"offload_gradients": True}):
            model, other = sharded(), sharded()
            plain = torch.optim.AdamW(model.parameters(), **ADAM)
            with offloaded(other, **options) as optimizer:
                train(other, optimizer, range(2))
                train(model, plain, range(2))
                for unable in (0, 1):
                    step = 2 + unable
                    train(model, plain, [step])
                    in_memory = "memory_budget" in options
                    fault = mock.patch.object(torch.optim.AdamW, "step", fail) if in_memory else failing("read", 0)
                    def fail_first(_, optimizer):
                        try:
                            with fault if rank == unable else contextlib.nullcontext():
                                optimizer.step()
                        except (OSError, RuntimeError) as error:
                            said = str(error) + "".join(getattr(error, "__notes__", []))
                            own = "as asked for" if in_memory else "read of"
                            assert (own if rank == unable else f"rank {unable} failed in this step") in said, said
                            assert f"step {step + 1} is unfinished" in said and "Call step() on all ranks" in said, said
                        else:
                            raise AssertionError(f"rank {rank} has made a step that rank {unable} could not make")
                        assert optimizer.steps == step
                    train(other, optimizer, [step], fail_first)  # whose own step() finishes it
                    assert optimizer.steps == step + 1
                    assert_same(other, model)
        """,
        drive,
        interpreters,
    )


def test_clipping_waits_for_no_rank_without_gradients_and_fails_on_all_or_none(drive: Path, interpreters: Interpreters) -> None:
    run_two(
        """
        from tests.support.engines import failing

        model, other = sharded(), sharded()
        plain = torch.optim.AdamW(model.parameters(), **ADAM)
        def clip(model, optimizer):
            if rank == 1:
                model.zero_grad()
                for param in model.parameters():
                    param.grad = torch.zeros_like(param)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            expected.append(sum(param.grad.to_local().norm() ** 2 for param in model.parameters()) ** 0.5)
        expected, norms = [], []
        with offloaded(other, offload_gradients=True) as optimizer:
            train(model, plain, [0], clip)
            def clip_offloaded(_, optimizer):
                if rank == 1:
                    optimizer.zero_grad()
                norms.append(optimizer.clip_grad_norm_(0.1))
                norms.append(optimizer.clip_grad_norm_(0.1))
            train(other, optimizer, [0], clip_offloaded)
            total = expected[0].clone().square()
            dist.all_reduce(total)
            torch.testing.assert_close(norms[1], total.sqrt(), rtol=1e-4, atol=0)

            def clip_and_fail(_, optimizer):
                try:
                    with failing("read", 0) if rank == 0 else contextlib.nullcontext():
                        optimizer.clip_grad_norm_(0.1)
                except (OSError, RuntimeError) as error:
                    assert ("read of" if rank == 0 else "rank 0 failed in this step") in str(error), error
                else:
                    raise AssertionError("clipped by half of the norm")
            train(other, optimizer, [1], clip_and_fail)
        """,
        drive,
        interpreters,
    )
