"""OffloadedTraining in several processes: each has a shard of every block; the bits are those of micro-batches in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ..support.interpreters import Interpreters
from ..support.training_ranks import run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"master_weights": True, "dtype": "bfloat16"},
        {"activations": "recompute"},
        {"activations": "nvme", "activation_budget": 1 << 16},
        {"parameters": "memory"},
        {"deferred": True},
        {"accumulation": "horizontal"},
    ],
    ids=lambda options: ", ".join(map(str, options.values())) or "default",
)
def test_ranks_train_as_micro_batches_in_one_process(
    count: int, options: dict[str, Any], drive: Path, interpreters: Interpreters
) -> None:
    run(
        count,
        f"""
        options = {options!r}
        dtype = getattr(torch, options.pop("dtype", "float32"))
        # the first rank's values count
        with trained(Model(rank).to(dtype), **options) as together, trained(
            Model().to(dtype), f"alone{{rank}}", micro_batches=ranks, **options
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
        drive,
        interpreters,
    )


def test_frozen_parameters_and_scalars_are_shared_too(drive: Path, interpreters: Interpreters) -> None:
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
        drive,
        interpreters,
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
                model, torch.optim.SGD, nvme_path=drive / directory, blocks=[model.a, model.b, model.c], **options
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
        drive,
        interpreters,
    )


@pytest.mark.parametrize(
    "options",
    [{}, {"max_norm": 0.5}, {"deferred": True, "max_norm": 0.5}, {"micro_batches": 2, "activations": "recompute"}],
    ids=lambda options: ", ".join(options) or "default",
)
def test_a_step_that_one_rank_cannot_make_is_made_by_none(
    options: dict[str, Any], drive: Path, interpreters: Interpreters
) -> None:
    run(
        2,
        f"""
        options = {options!r}
        parts = options.get("micro_batches", 1)
        model = Model()

        def steps(training, numbers):
            batch = [torch.cat([batches(step + 100 * part)[rank] for part in range(parts)]) for step in numbers]
            return [training.step(each).item() for each in batch]

        def raise_error(*_):
            raise ArithmeticError("as asked for")

        with trained(Model(), "expected", process_group=dist.group.WORLD, **options) as training:
            expected = steps(training, range(5))
        with trained(model, **options) as training:
            assert steps(training, range(2)) == expected[:2]
            for unable in range(ranks):
                for what in "read", "write", "forward", "backward":
                    before, fault, handle = training.steps, contextlib.nullcontext(), None
                    if rank == unable and what in ("read", "write"):
                        fault = FailingDrive(lambda operation: operation == what)
                    elif rank == unable and what == "forward":
                        interrupt = lambda *_: signal.raise_signal(signal.SIGINT)
                        handle = model.layers[2].register_forward_hook(interrupt)
                    elif rank == unable:
                        handle = model.layers[1].register_full_backward_hook(raise_error)
                    try:
                        with fault:
                            steps(training, [2])
                            training.state_dict()  # completes a deferred step
                    except (OSError, KeyboardInterrupt, ArithmeticError) as error:
                        assert rank == unable, error
                    except RankFailed as error:
                        assert rank != unable and f"rank {{unable}} failed in this step" in str(error), error
                    else:
                        raise AssertionError(f"rank {{rank}} has made a step that rank {{unable}} could not make")
                    if handle is not None:
                        handle.remove()
                    assert training.steps in (before, before - bool(options.get("deferred"))), (what, training.steps)
                    steps(training, range(training.steps, before))
            assert steps(training, range(2, 5)) == expected[2:]
        """,
        drive,
        interpreters,
    )


@pytest.mark.parametrize("options", [{"max_norm": 0.5}, {"max_norm": 0.5, "clip_by": "previous"}, {}], ids=str)
def test_micro_batches_one_after_the_other_leave_all_ranks_alike(
    options: dict[str, Any], drive: Path, interpreters: Interpreters
) -> None:
    run(
        2,
        f"""
        options = {options!r}
        with trained(Model(), micro_batches=2, **options) as together, trained(
            Model(), f"alone{{rank}}", micro_batches=4, **options
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
        drive,
        interpreters,
    )


def test_tiles_that_are_tied_are_shared_too(drive: Path, interpreters: Interpreters) -> None:
    run(
        2,
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
        drive,
        interpreters,
    )


def test_an_interrupt_while_a_rank_waits_for_the_others_undoes_the_step(drive: Path, interpreters: Interpreters) -> None:
    run(
        2,
        """
        import threading, time
        with trained(Model()) as training:
            list(train(training, range(2)))
            for moment in 0.0, 0.3:
                if rank == 0:
                    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
                else:
                    slow = training.model.layers[1].register_forward_pre_hook(lambda *_: time.sleep(1 + moment))
                try:
                    list(train(training, [2]))
                except (KeyboardInterrupt if rank == 0 else RankFailed):
                    pass
                else:
                    raise AssertionError("made")
                if rank == 1:
                    slow.remove()
                assert training.steps == 2
            list(train(training, [2, 3]))
            assert training.steps == 4
        """,
        drive,
        interpreters,
    )


def test_a_constructor_that_fails_on_one_rank_fails_on_all(drive: Path, interpreters: Interpreters) -> None:
    run(
        2,
        """
        torch.save(Model().state_dict(), drive / f"weights{rank}.pt")
        if rank == 1:
            (drive / "weights1.pt").unlink()
        with torch.device("meta"):
            empty = Model()
        try:
            trained(empty, checkpoint=drive / f"weights{rank}.pt")
        except (FileNotFoundError if rank == 1 else RankFailed):
            pass
        else:
            raise AssertionError("made")
        """,
        drive,
        interpreters,
    )


def test_a_call_that_one_rank_makes_alone_is_an_error(drive: Path, interpreters: Interpreters) -> None:
    run(
        2,
        """
        with trained(Model()) as training:
            list(train(training, range(2)))
            for alone in (lambda: training.save(drive / "alone.pt"), lambda: evaluate(training.model)):
                try:
                    alone() if rank == 0 else list(train(training, [2]))
                except RuntimeError as error:
                    assert "the ranks do not use the same blocks in the same order" in str(error), error
                else:
                    raise AssertionError("made")
            assert training.steps == 2
            list(train(training, [2]))
        """,
        drive,
        interpreters,
    )


def test_ranks_that_do_different_things_are_told_so(drive: Path, interpreters: Interpreters) -> None:
    run(
        2,
        """
        model = Model()
        with trained(model) as training:
            list(train(training, range(2)))
            layers = model.layers
            if rank == 1:
                model.layers = torch.nn.ModuleList(reversed(layers))
            try:
                list(train(training, [2]))
            except RuntimeError as error:
                assert "the ranks do not use the same blocks in the same order" in str(error), error
            else:
                raise AssertionError("made")
            model.layers = layers
            assert training.steps == 2
            list(train(training, [2]))

            # one undoes a step that the other is in
            if rank == 0:
                with training.micro_batch():
                    model(batches(3)[rank]).backward()
                training.undo_step()
            else:
                try:
                    list(train(training, [3]))
                except RankFailed as error:
                    assert "rank 0 failed" in str(error)
                else:
                    raise AssertionError("made")
            assert training.steps == 3
            list(train(training, [3]))
        """,
        drive,
        interpreters,
    )


def test_a_rank_that_is_gone_is_an_error_of_the_others_and_their_last_step_stays(drive: Path, interpreters: Interpreters) -> None:
    with pytest.raises(AssertionError, match="rank 0 is as after step 2"):
        run(
            2,
            """
            with trained(Model()) as training:
                list(train(training, range(2)))
                if rank == 1:
                    os._exit(0)
                try:
                    list(train(training, [2]))
                except RuntimeError as error:
                    assert not isinstance(error, RankFailed)
                    training.state_dict()
                    raise SystemExit(f"rank 0 is as after step {training.steps}")
            """,
            drive,
            interpreters,
        )


def test_what_several_processes_cannot_do_is_refused_at_once(drive: Path, interpreters: Interpreters) -> None:
    run(
        2,
        """
        for options, said in (
            ({"activations": "auto"}, 'activations="auto" is for one process'),
            ({"quantize": "int8"}, "quantize='int8' is for one process"),
        ):
            try:
                trained(Model(), **options)
            except ValueError as error:
                assert said in str(error), error
            else:
                raise AssertionError(options)
        try:
            OffloadedTraining(Model(), torch.optim.Adafactor, nvme_path=drive, process_group=dist.group.WORLD)
        except ValueError as error:
            assert "the optimizer must be one of ASGD, Adadelta" in str(error) and "got Adafactor" in str(error), error
        assert not os.path.exists(drive / "together")
        """,
        drive,
        interpreters,
    )
