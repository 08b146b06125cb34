"""OffloadedTraining in several processes: each has a shard of every block; the bits are those of micro-batches in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from ...support.interpreters import Interpreters
from ...support.training_ranks import run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("count", [2, 4])
def test_ranks_train_as_micro_batches_in_one_process(count: int, drive: Path, interpreters: Interpreters) -> None:
    run(
        count,
        """
        for options in (
            {},
            {"master_weights": True, "dtype": "bfloat16"},
            {"activations": "nvme", "activation_budget": 1 << 16},
            {"parameters": "memory"},
            {"accumulation": "horizontal"},
        ):
            print(options, file=sys.stderr)  # of the failure
            dtype = getattr(torch, options.pop("dtype", "float32"))
            # the first rank's values count
            with trained(Model(rank).to(dtype), **options) as together, trained(
                Model().to(dtype), f"alone{rank}", micro_batches=ranks, **options
            ) as alone:
                assert list(train(together, range(4))) == list(train_alone(alone, range(4)))
                assert together.steps == 4
                # evaluated alike
                with torch.no_grad():
                    assert torch.equal(together.model(batches(9)[0]), alone.model(batches(9)[0]))
                found, expected = together.state_dict(), alone.state_dict()
                for state in found, expected:
                    for name in [name for name in state["model"] if name.endswith("calls")]:
                        del state["model"][name]
                assert_same_states(found, expected)
                # each has a shard on its drive
                sharded = [value for value in found["model"].values() if hasattr(value, "to_local")]
                assert len(sharded) == 4 * 6 + 2
                assert sum(each.to_local().numel() for each in sharded) == sum(each.numel() for each in sharded) / ranks
        """,
        drive=drive,
        interpreters=interpreters,
    )


def test_frozen_parameters_scalars_and_tied_tiles_are_shared_too(drive: Path, interpreters: Interpreters) -> None:
    run(
        2,
        """
        def adapted(seed):
            model = Model(seed)
            for layer in model.layers:
                layer.wide.requires_grad_(False)
                layer.scales = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(())) for _ in range(4))
                layer.register_forward_hook(lambda layer, inputs, output: output * sum(layer.scales) / 4)
            return model

        with trained(adapted(rank)) as together, trained(adapted(0), f"alone{rank}", micro_batches=ranks) as alone:
            assert list(train(together, range(4))) == list(train_alone(alone, range(4)))
            found, expected = together.state_dict(), alone.state_dict()
            for state in found, expected:
                for name in [name for name in state["model"] if name.endswith("calls")]:
                    del state["model"][name]
                del state["optimizer"]["param_groups"]  # scalars are in that of what is in no block, with several ranks
            assert_same_states(found, expected)
            assert hasattr(found["model"]["layers.0.wide.weight"], "to_local")
            assert not hasattr(found["model"]["layers.0.scales.0"], "to_local")
        """,
        """
        from deepnvme.offload import tile_large_layers

        def tiled(seed):
            model = Model(seed, layers=1)
            assert {"embedding", "head"} <= set(tile_large_layers(model, 16 * WIDTH * 4))
            return model

        with trained(tiled(rank)) as together, trained(tiled(0), f"alone{rank}", micro_batches=ranks) as alone:
            # shards of 8 elements: the last bits differ
            found, expected = list(train(together, range(4))), list(train_alone(alone, range(4)))
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=0)
            assert hasattr(together.state_dict()["model"]["embedding.tiles.0.weight"], "to_local")
        """,
        drive=drive,
        interpreters=interpreters,
    )


@pytest.mark.parametrize("count", [2, 4])
def test_rows_that_cannot_be_shared_evenly_are_saved_whole_and_loaded_by_any_number_of_ranks(
    count: int, drive: Path, interpreters: Interpreters
) -> None:
    run(
        count,
        """
        class Odd(torch.nn.Module):
            def __init__(self, seed=0):
                torch.manual_seed(seed)
                super().__init__()
                self.a, self.b, self.c = torch.nn.Linear(9, 5), torch.nn.Linear(5, 1), torch.nn.Linear(1, 7)

            def forward(self, x):
                return self.c(self.b(torch.tanh(self.a(x)))).square().mean()

        def odd(model, directory, **options):
            options = {"lr": 0.1, "momentum": 0.9, **options}
            return OffloadedTraining(
                model, torch.optim.SGD, path=drive / directory, blocks=[model.a, model.b, model.c], **options
            )

        model, reference = Odd(rank), Odd()
        plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
        inputs = [torch.randn(ranks, 3, 9, generator=torch.Generator().manual_seed(step)) for step in range(5)]
        with odd(model, "together", process_group=dist.group.WORLD) as training:
            for step in range(3):
                training.step(inputs[step][rank])
                for each in inputs[step]:
                    (reference(each) / ranks).backward()
                plain.step()
                plain.zero_grad()
            state = training.state_dict()
            rows = [value.to_local().shape[0] for value in state["model"].values()]
            assert rows == {(2, 0): [3, 3, 1, 1, 4, 4], (2, 1): [2, 2, 0, 0, 3, 3]}.get((ranks, rank), rows)
            for name, value in reference.state_dict().items():
                torch.testing.assert_close(whole(state["model"][name]), value)
            training.save(drive / "odd.pt")
            dist.barrier()
            saved = torch.load(drive / "odd.pt", mmap=True)
            assert_same_states(state, saved)

            # whole tensors and DTensors are loaded, and go on alike; one process goes on with what several have saved
            goes_on = [training.step(inputs[3][rank]).item(), training.step(inputs[4][rank]).item()]
            for given in saved, state:
                training.load_state_dict(given)
                assert training.steps == 3
                assert [training.step(inputs[3][rank]).item(), training.step(inputs[4][rank]).item()] == goes_on
            after = {name: whole(value).clone() for name, value in training.state_dict()["model"].items()}
            with odd(Odd(1), f"alone{rank}", micro_batches=ranks) as alone:
                alone.load_state_dict(saved)
                for batch in inputs[3:]:
                    for each in batch:
                        with alone.micro_batch():
                            (alone.model(each) / ranks).backward()
                    alone.step()
                for name, value in alone.state_dict()["model"].items():
                    torch.testing.assert_close(after[name], value)
            training.close(restore=True)
        for name, value in model.state_dict().items():
            assert torch.equal(value, after[name]), name
        """,
        drive=drive,
        interpreters=interpreters,
    )


def test_micro_batches_one_after_the_other_leave_all_ranks_alike(drive: Path, interpreters: Interpreters) -> None:
    run(
        2,
        """
        for options in (
            {"max_norm": 0.5},
            {},
        ):
            print(options, file=sys.stderr)  # of the failure
            with trained(Model(), micro_batches=2, **options) as together, trained(
                Model(), f"alone{rank}", micro_batches=4, **options
            ) as alone:
                for step in range(3):
                    parts = batches(step, 4)
                    for part in parts[rank::2]:
                        with together.micro_batch():
                            (together.model(part) / 2).backward()
                    for part in parts:
                        with alone.micro_batch():
                            (alone.model(part) / 4).backward()
                    if "max_norm" in options:
                        torch.testing.assert_close(together.gradient_norm(), alone.gradient_norm(), rtol=1e-4, atol=0)
                    together.step()
                    alone.step()
                found, expected = together.state_dict()["model"], alone.state_dict()["model"]
                for name, value in expected.items():
                    if not name.endswith("calls"):
                        torch.testing.assert_close(whole(found[name]), value, rtol=2e-3, atol=2e-4)
                first = together.model.head.weight.detach().clone()
                dist.broadcast(first, 0)
                assert torch.equal(first, together.model.head.weight)
        """,
        drive=drive,
        interpreters=interpreters,
    )
