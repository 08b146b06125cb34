"""OffloadedTraining in several processes, of which one fails, is gone, has no memory left, or does what the others do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from ...support.interpreters import Interpreters
from ...support.training_ranks import run

pytestmark = pytest.mark.slow


def test_a_step_that_one_rank_cannot_make_is_made_by_none(drive: Path, interpreters: Interpreters) -> None:
    run(
        2,
        """
        for options in (
            {},
            {"max_norm": 0.5},
            {"micro_batches": 2, "activations": "nvme", "activation_budget": 1 << 16},
        ):
            print(options, file=sys.stderr)  # of the failure
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
                        except (OSError, KeyboardInterrupt, ArithmeticError) as error:
                            assert rank == unable, error
                        except RankFailed as error:
                            assert rank != unable and f"rank {unable} failed" in str(error), error
                        else:
                            raise AssertionError(f"rank {rank} has made a step that rank {unable} could not make")
                        if handle is not None:
                            handle.remove()
                        assert training.steps == before, (what, training.steps)
                        steps(training, range(training.steps, before))
                assert steps(training, range(2, 5)) == expected[2:]
        """,
        drive=drive,
        interpreters=interpreters,
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
        drive=drive,
        interpreters=interpreters,
    )


def test_ranks_that_do_different_things_are_told_so(drive: Path, interpreters: Interpreters) -> None:
    """One makes a call alone, or undoes a step that the other is in."""
    run(
        2,
        """
        with trained(Model()) as training:
            list(train(training, range(2)))
            state = training.state_dict()
            for alone in (
                lambda: training.save(drive / "alone.pt"),
                lambda: training.load_state_dict(state),
                lambda: evaluate(training.model),
            ):
                try:
                    alone() if rank == 0 else list(train(training, [2]))
                except RuntimeError as error:
                    assert "the ranks do not use the same blocks in the same order" in str(error), error
                else:
                    raise AssertionError("made")
            assert training.steps == 2
            list(train(training, [2]))
        """,
        """
        model = Model()
        with trained(model) as training:
            list(train(training, range(2)))
            # one undoes a step that the other is in
            if rank == 0:
                with training.micro_batch():
                    model(batches(2)[rank]).backward()
                training.undo_step()
            else:
                try:
                    list(train(training, [2]))
                except RankFailed as error:
                    assert "rank 0 failed" in str(error)
                else:
                    raise AssertionError("made")
            assert training.steps == 2
            list(train(training, [2]))
        """,
        drive=drive,
        interpreters=interpreters,
    )


def test_a_constructor_that_fails_on_one_rank_or_refuses_options_fails_on_all(drive: Path, interpreters: Interpreters) -> None:
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
        except (FileNotFoundError if rank == 1 else RankFailed) as error:
            assert rank == 1 or str(error) == "rank 1 failed, and its own error says why", error  # there is no step yet
        else:
            raise AssertionError("made")
        """,
        """
        for options, said in (
            ({"quantize": "int8"}, "quantize='int8' is for one process"),
        ):
            try:
                trained(Model(), **options)
            except ValueError as error:
                assert said in str(error), error
            else:
                raise AssertionError(options)
        try:
            OffloadedTraining(Model(), torch.optim.Adafactor, path=drive, process_group=dist.group.WORLD)
        except ValueError as error:
            assert "the optimizer must be one of ASGD, Adadelta" in str(error) and "got Adafactor" in str(error), error
        assert not os.path.exists(drive / "together")
        """,
        drive=drive,
        interpreters=interpreters,
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
            drive=drive,
            interpreters=interpreters,
        )


def test_a_rank_without_memory_for_an_exchange_says_so(drive: Path, interpreters: Interpreters) -> None:
    """Each allocation of each exchange fails once, before the other rank waits for data, and none after that."""
    run(
        2,
        """
        from unittest import mock
        from torch.utils._python_dispatch import TorchDispatchMode
        from torch.utils._pytree import tree_leaves
        from deepnvme.offload.training.ranks import TrainingRanks


        class FailingAllocation(TorchDispatchMode):
            def __init__(self, number):
                super().__init__()
                self.left = number

            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                found = function(*args, **(kwargs or {}))
                if function.namespace == "aten":
                    given, new = (
                        {each.untyped_storage()._cdata for each in tree_leaves(tree) if isinstance(each, torch.Tensor)}
                        for tree in ((args, kwargs), found)
                    )
                    if not new <= given:
                        self.left -= 1
                        if self.left == -1:
                            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
                return found


        class Uneven(Model):
            # The second rank has fewer rows of one parameter, and no gradient of another.
            def __init__(self):
                super().__init__(layers=2)
                for layer in self.layers:
                    layer.wide, layer.narrow = torch.nn.Linear(WIDTH, 41), torch.nn.Linear(41, WIDTH)
                    layer.register_forward_hook(lambda layer, inputs, output: output if rank else output + 0 * self.unused.sum())
                self.unused = torch.nn.Parameter(torch.zeros(41))


        def fails(function, which, number):
            # Whether all ranks have failed, since one had no memory for what is allocated as that number in such exchanges.
            sound, failing = getattr(TrainingRanks, which), FailingAllocation(number)

            def with_failure(self, *arguments, **options):
                with failing if rank else contextlib.nullcontext():
                    return sound(self, *arguments, **options)

            with mock.patch.object(TrainingRanks, which, with_failure):
                try:
                    function()
                except RankFailed:
                    assert rank == 0
                    failed = True
                except RuntimeError as error:
                    assert "allocate" in str(error) and rank == 1, error
                    failed = True
                else:
                    failed = False
            votes = torch.tensor([int(failed)])
            dist.all_reduce(votes)
            assert votes.item() in (0, ranks)
            return failed


        model = Uneven()
        options = {"max_norm": 0.5, "memory_budget": 0}
        with trained(Uneven(), "expected", process_group=dist.group.WORLD, **options) as expected:
            losses = list(train(expected, range(9)))
        with trained(model, **options) as training:
            step = 0
            failures = {}
            for which in "gather", "average_gradients", "norms_of_shards":
                failures[which] = 0
                while fails(lambda: list(train(training, [step])), which, failures[which]):
                    assert training.steps == step
                    failures[which] += 1
                step += 1
                assert training.steps == step
            assert min(failures.values()) > 3, failures
            assert list(train(training, range(3, 9))) == losses[3:]
        """,
        drive=drive,
        interpreters=interpreters,
    )


def test_a_forward_between_steps_that_fails_on_one_rank_fails_on_all(drive: Path, interpreters: Interpreters) -> None:
    run(
        2,
        """
        options = {"max_norm": 0.5, "memory_budget": 0}
        with trained(Model(layers=8), "expected", process_group=dist.group.WORLD, **options) as training:
            expected = list(train(training, range(6)))
        with trained(Model(layers=8), **options) as training:
            assert list(train(training, range(2))) == expected[:2]
            for unable in range(ranks):
                training.model.eval()
                fault = FailingDrive(lambda operation: operation == "read") if rank == unable else contextlib.nullcontext()
                try:
                    with fault:
                        evaluate(training.model)
                except OSError as error:
                    assert rank == unable, error
                except RankFailed as error:
                    assert rank != unable and f"rank {unable} failed" in str(error), error
                else:
                    raise AssertionError("evaluated")
                evaluate(training.model)
                training.model.train()
                step = training.steps
                assert step == 2 + unable
                assert list(train(training, [step])) == [expected[step]]
        """,
        drive=drive,
        interpreters=interpreters,
    )
