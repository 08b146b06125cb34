"""transformers' Trainer writes its checkpoints in the background: whole or not there, the same files, rotation and bits."""

from __future__ import annotations

import functools
import json
import os
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import deepnvme
from deepnvme.checkpoint import background, publication
from deepnvme.checkpoint.background import wait_for_saves
from deepnvme.integrations.transformers import async_checkpoints, offload_training

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those of packages that it imports
    import transformers

from ..support.patience import PATIENCE

STAGING = ".checkpoint.deepnvme-tmp"
CONFIG = transformers.GPT2Config(vocab_size=5000, n_embd=64, n_layer=1, n_head=2, n_positions=16)
"""With dropout, so that a resumed training needs the random number generators, and with files of more than 1 MiB."""


def trainer_of(
    directory: Path, trainer_class: type[transformers.Trainer] = transformers.Trainer, optimizer: Any = None, **options: Any
) -> transformers.Trainer:
    arguments: dict[str, Any] = {
        "output_dir": str(directory), "max_steps": 4, "logging_steps": 1, "per_device_train_batch_size": 2, "use_cpu": True,
        "report_to": [], "disable_tqdm": True, "save_strategy": "steps", "save_steps": 1, "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
    }  # fmt: skip
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(CONFIG)
    rows = torch.randint(5000, (32, 16), generator=torch.Generator().manual_seed(5))
    data = [{"input_ids": row, "labels": row} for row in rows]
    given = {} if optimizer is None else {"optimizers": (optimizer(model.parameters()), None)}
    arguments = {**arguments, **options}
    return trainer_class(model, transformers.TrainingArguments(**arguments), train_dataset=data, eval_dataset=data[:4], **given)


def in_background(trainer: transformers.Trainer) -> transformers.Trainer:
    async_checkpoints(trainer)
    return trainer


def names(directory: Path) -> list[str]:
    return sorted(each.name for each in directory.iterdir())


def losses(trainer: transformers.Trainer) -> list[float]:
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def assert_same_checkpoint(found: Path, expected: Path) -> None:
    assert names(found) == names(expected)
    for name in ("optimizer.pt", "scheduler.pt"):
        ours, theirs = (torch.load(path / name) for path in (found, expected))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    ours, theirs = (deepnvme.safetensors.load_file(path / "model.safetensors") for path in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    ours, theirs = (json.loads((path / "trainer_state.json").read_text()) for path in (found, expected))
    assert ours.keys() == theirs.keys()
    assert (ours["best_model_checkpoint"] or "").replace(str(found.parent), "") == (
        theirs["best_model_checkpoint"] or ""
    ).replace(str(expected.parent), "")


class EachStep(transformers.TrainerCallback):
    """Calls a function with the number of each step when it ends."""

    def __init__(self, call: Any) -> None:
        self.call = call

    def on_step_end(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
        self.call(state.global_step)


def fails(self: Any, *_: Any) -> None:
    raise OSError(28, "No space left on device", "drive")


def failing_from(step: int, monkeypatch: pytest.MonkeyPatch) -> EachStep:
    """Return a callback that has saves fail from the one of a step."""

    def at(now: int) -> None:
        if now == step:
            wait_for_saves("/")  # the earlier ones succeed
            monkeypatch.setattr(publication.Publication, "publish", fails)

    return EachStep(at)


class Waiting(transformers.Trainer):
    """Saves the optimizer when the model is written."""

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        wait_for_saves(output_dir)
        super()._save_optimizer_and_scheduler(output_dir)


@pytest.mark.parametrize("trainer_class", [transformers.Trainer, Waiting])
def test_the_error_of_a_save_is_raised_by_the_next_one(
    drive: Path, monkeypatch: pytest.MonkeyPatch, trainer_class: type[transformers.Trainer]
) -> None:
    trainer = in_background(trainer_of(drive, trainer_class))
    callback = failing_from(2, monkeypatch)
    trainer.add_callback(callback)
    with pytest.raises(OSError, match="No space left"):
        trainer.train()
    trainer.remove_callback(callback)
    # 2 if the model's file failed before the optimizer's was begun
    assert trainer.state.global_step in ((2,) if trainer_class is Waiting else (2, 3))
    assert names(drive) == ["checkpoint-1"]
    monkeypatch.undo()
    background.raise_unseen()  # it was raised once, for both files
    trainer.train(resume_from_checkpoint=True)
    assert names(drive) == [f"checkpoint-{step}" for step in range(1, 5)]


def test_the_error_of_the_last_save_is_raised_when_the_training_ends(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = in_background(trainer_of(drive, save_only_model=True))
    trainer.add_callback(failing_from(4, monkeypatch))
    with pytest.raises(OSError, match="No space left"):
        trainer.train()
    assert names(drive) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    background.raise_unseen()  # it was raised once


def test_an_error_of_the_trainer_leaves_nothing(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = in_background(trainer_of(drive))
    monkeypatch.setattr(type(trainer), "_save_rng_state", fails)
    with pytest.raises(OSError, match="No space left"):
        trainer.train()
    assert names(drive) == []
    saved = torch.save
    assert saved.__module__ == "torch.serialization"


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"push_to_hub": True}, "push_to_hub"),
        ({"enable_jit_checkpoint": True}, "enable_jit_checkpoint"),
        ({"world_size": 2}, "several processes"),
        ({"is_fsdp_enabled": True}, "FSDP"),
    ],
)
def test_trainers_that_need_their_checkpoints_at_once_are_refused(drive: Path, options: dict[str, Any], what: str) -> None:
    class Arguments(transformers.TrainingArguments):
        world_size = options.get("world_size", 1)

    trainer = trainer_of(drive)
    trainer.args.__class__ = Arguments
    for name in options.keys() & {"push_to_hub", "enable_jit_checkpoint"}:
        setattr(trainer.args, name, True)
    trainer.is_fsdp_enabled = "is_fsdp_enabled" in options
    with pytest.raises(ValueError, match=what):
        async_checkpoints(trainer)
    assert type(trainer) is transformers.Trainer


def test_a_trainer_is_changed_once_and_only_one_that_is_known(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = in_background(trainer_of(drive))
    with pytest.raises(RuntimeError, match="in the background already"):
        async_checkpoints(trainer)
    monkeypatch.delattr(transformers.Trainer, "_finalize_training")
    with pytest.raises(RuntimeError, match=r"Trainer._finalize_training\(trial\) is not in transformers .*: async_checkpoints"):
        async_checkpoints(trainer_of(drive))


@pytest.mark.parametrize(
    "options",
    [
        {"save_total_limit": 2},
        {
            "save_total_limit": 1, "load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1,
            "metric_for_best_model": "loss", "greater_is_better": True,
        },
        {"save_strategy": "best", "eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss"},
    ],
)  # fmt: skip
def test_the_same_checkpoints_are_left_as_by_the_trainer_itself(drive: Path, options: dict[str, Any]) -> None:
    known = trainer_of(drive / "known", **options)
    known.train()
    ours = in_background(trainer_of(drive / "ours", **options))
    ours.train()
    assert losses(ours) == losses(known)
    assert names(drive / "ours") == names(drive / "known")
    for name in names(drive / "ours"):
        assert_same_checkpoint(drive / "ours" / name, drive / "known" / name)
    torch.testing.assert_close(ours.model.state_dict(), known.model.state_dict(), rtol=0, atol=0)


def test_a_checkpoint_of_an_earlier_training_is_replaced(drive: Path) -> None:
    for _ in range(2):
        (drive / "checkpoint-1").mkdir(exist_ok=True)
        (drive / "checkpoint-1" / "other.txt").write_text("of an earlier training")
        (drive / STAGING).mkdir(exist_ok=True)  # as a killed process leaves it
        in_background(trainer_of(drive, max_steps=1)).train()
        assert names(drive) == ["checkpoint-1"]
        assert "other.txt" not in names(drive / "checkpoint-1")


def test_the_training_goes_on_while_a_checkpoint_is_written(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, publish, seen = threading.Event(), publication.Publication.publish, []

    def waits(self: Any) -> None:
        assert go_on.wait(PATIENCE)
        publish(self)

    def look(step: int) -> None:
        if step == 2:
            seen.append(names(drive))
            go_on.set()

    monkeypatch.setattr(publication.Publication, "publish", waits)
    trainer = in_background(trainer_of(drive, max_steps=2, save_steps=1))
    trainer.add_callback(EachStep(look))
    trainer.train()
    assert seen == [[STAGING]]
    assert names(drive) == ["checkpoint-1", "checkpoint-2"]


def test_a_checkpoint_is_removed_after_the_next_one_is_whole(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, rename = [], os.rename

    def look(source: Any, target: Any) -> None:
        seen.append((names(drive), Path(target).name))
        rename(source, target)

    monkeypatch.setattr(os, "rename", look)
    in_background(trainer_of(drive, max_steps=2, save_total_limit=1)).train()
    assert seen == [
        ([STAGING], "checkpoint-1"),
        ([STAGING, "checkpoint-1"], "checkpoint-2"),
        ([STAGING, "checkpoint-1", "checkpoint-2"], "checkpoint-1"),  # to where it is removed
    ]
    assert names(drive) == ["checkpoint-2"]


def test_the_values_of_the_moment_are_saved(drive: Path) -> None:
    class Averaging(transformers.Trainer):
        """Saves other weights than it trains."""

        def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
            weight = self.model.transformer.wpe.weight
            kept = weight.detach().clone()
            weight.data.fill_(7.0)
            super()._save(output_dir, state_dict)
            weight.data.copy_(kept)

    in_background(trainer_of(drive, Averaging, max_steps=1)).train()
    saved = deepnvme.safetensors.load_file(drive / "checkpoint-1" / "model.safetensors")
    assert bool((saved["transformer.wpe.weight"] == 7).all())


@pytest.mark.parametrize("kind", ["in memory", "OffloadedOptimizer", "offload_training"])
def test_a_resumed_training_has_the_losses_of_an_uninterrupted_one(drive: Path, kind: str) -> None:
    def make(number: int) -> transformers.Trainer:
        def optimizer(parameters: Any) -> deepnvme.OffloadedOptimizer:
            return deepnvme.OffloadedOptimizer(parameters, torch.optim.AdamW, path=drive / f"states {number}", lr=1e-2)

        made = trainer_of(drive / "run", optimizer=optimizer if kind == "OffloadedOptimizer" else None, max_grad_norm=0)
        if kind == "offload_training":
            offload_training(made, drive / f"training {number}", memory_budget=8 << 20)
        return in_background(made)

    in_memory = functools.partial(torch.optim.AdamW, lr=1e-2)
    known = trainer_of(drive / "known", max_grad_norm=0, optimizer=in_memory if kind == "OffloadedOptimizer" else None)
    known.train()

    class Stopped(Exception):
        pass

    def stop(step: int) -> None:
        if step == 3:
            raise Stopped

    first = make(1)
    first.add_callback(EachStep(stop))
    with pytest.raises(Stopped):
        first.train()
    wait_for_saves(drive / "run")
    assert names(drive / "run") == ["checkpoint-1", "checkpoint-2"]
    resumed = make(2)
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(known)
    for step in range(1, 5):
        assert_same_checkpoint(drive / "run" / f"checkpoint-{step}", drive / "known" / f"checkpoint-{step}")


@pytest.mark.parametrize("same", [True, False])
def test_a_training_is_resumed_from_a_checkpoint_that_a_trainer_still_writes(
    drive: Path, monkeypatch: pytest.MonkeyPatch, same: bool
) -> None:
    publish = publication.Publication.publish

    def slowly(self: Any) -> None:
        time.sleep(0.2)
        publish(self)

    def interrupt(step: int) -> None:
        if step == 2 and not monkeypatch.undo():
            raise KeyboardInterrupt

    monkeypatch.setattr(publication.Publication, "publish", slowly)
    trainer = in_background(trainer_of(drive, max_steps=2))
    callback = EachStep(interrupt)
    trainer.add_callback(callback)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.remove_callback(callback)
    if not same:
        trainer = in_background(trainer_of(drive, max_steps=2))
    seen: list[int] = []
    trainer.add_callback(EachStep(seen.append))
    trainer.train(resume_from_checkpoint=True)
    assert seen == [2]
