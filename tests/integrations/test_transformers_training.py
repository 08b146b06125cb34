"""transformers' Trainer trains with its model on the drive, and learns the same, bit for bit."""

from __future__ import annotations

import copy
import functools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from deepnvme.integrations import transformers as integration
from deepnvme.offload.training import OffloadedTraining

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those of packages that it imports
    import transformers

BATCH, LENGTH, LAYERS = 2, 16, 4
SIZES: dict[str, Any] = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
CONFIGS: dict[str, transformers.PretrainedConfig] = {
    "llama": transformers.LlamaConfig(intermediate_size=128, attention_dropout=0.1, **SIZES),
    "gpt2": transformers.GPT2Config(n_positions=LENGTH, **SIZES),  # has dropout, biases, and a head tied to its embedding
}
WITHOUT_DROPOUT = {"llama": {"attention_dropout": 0.0}, "gpt2": {"attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0}}
BUDGET = 2_000_000
"""Bytes of some of the layers."""


def model_of(kind: str, dropout: bool = True) -> transformers.PreTrainedModel:
    torch.manual_seed(3)
    config = copy.deepcopy(CONFIGS[kind])
    if not dropout:
        config.update(WITHOUT_DROPOUT[kind])
    return transformers.AutoModelForCausalLM.from_config(config)


def batches(rows: int = 64) -> list[dict[str, torch.Tensor]]:
    """Rows with another number of labels each."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for row in torch.randint(96, (rows, LENGTH), generator=generator):
        labels = row.clone()
        labels[: int(row[0]) % 8] = -100
        found.append({"input_ids": row, "labels": labels})
    return found


def trainer_of(
    directory: Path, kind: str = "gpt2", trainer_class: type[transformers.Trainer] = transformers.Trainer, **options: Any
) -> transformers.Trainer:
    arguments: dict[str, Any] = {
        "output_dir": str(directory), "max_steps": 3, "logging_steps": 1, "per_device_train_batch_size": BATCH, "use_cpu": True,
        "report_to": [], "disable_tqdm": True, "save_strategy": "no", "weight_decay": 0.1, "learning_rate": 1e-2,
        "warmup_steps": 1,
    }  # fmt: skip
    given = {name: options.pop(name) for name in ("callbacks", "optimizers", "rows", "dropout") if name in options}
    data = batches(given.pop("rows", 64))
    arguments |= options
    # Each micro-batch of an offloaded training draws random numbers of its own.
    model = model_of(kind, given.pop("dropout", arguments.get("gradient_accumulation_steps", 1) == 1))
    return trainer_class(model, transformers.TrainingArguments(**arguments), train_dataset=data, eval_dataset=data[:4], **given)


def offload(trainer: transformers.Trainer, drive: Path, **options: Any) -> OffloadedTraining:
    return integration.offload_training(trainer, drive / "offloaded", **{"memory_budget": BUDGET, **options})


def logs(trainer: transformers.Trainer) -> list[dict[str, float]]:
    """Without times."""
    return [
        {name: value for name, value in log.items() if not name.endswith(("_runtime", "_per_second"))}
        for log in trainer.state.log_history
    ]


def assert_same(training: OffloadedTraining, expected: torch.nn.Module) -> None:
    found = training.state_dict()["model"]
    for name, value in expected.state_dict().items():
        assert torch.equal(found[name], value), name


def train_both(drive: Path, tmp_path: Path, offloading: dict[str, Any] | None = None, **options: Any) -> transformers.Trainer:
    """Train in both ways, compare, and return the trainer whose training is offloaded."""
    known = trainer_of(tmp_path / "known", **options)
    known.train()
    trainer = trainer_of(tmp_path / "trained", **options)
    training = offload(trainer, drive, **(offloading or {}))
    trainer.train()
    assert training.steps == known.state.global_step
    found, expected = logs(trainer), logs(known)
    if options.get("max_grad_norm") == 0:
        for log in expected:
            log.pop("grad_norm", None)
    assert found == expected
    assert len([log for log in found if "loss" in log]) == training.steps
    assert_same(training, known.model)
    return trainer


@pytest.mark.parametrize(
    ("kind", "max_grad_norm", "accumulation"), [("llama", 0.1, 1), ("llama", 0, 4), ("gpt2", 0, 1), ("gpt2", 0.1, 4)]
)
def test_a_trainer_learns_the_same(drive: Path, tmp_path: Path, kind: str, max_grad_norm: float, accumulation: int) -> None:
    options = {"max_grad_norm": max_grad_norm, "gradient_accumulation_steps": accumulation}
    trainer = train_both(drive, tmp_path, kind=kind, **options)
    assert isinstance(trainer, transformers.Trainer)
    trainer.offloaded_training.close()
    assert not (drive / "offloaded").exists()


def test_a_trainer_is_made_and_offloaded_again(drive: Path, tmp_path: Path) -> None:
    """As by a notebook's cell that runs again: with a model of its own, and then with the same."""
    for _ in range(2):
        trainer = trainer_of(tmp_path / "trained", max_steps=1)
        training = offload(trainer, drive)
        trainer.train()
    again = transformers.Trainer(trainer.model, trainer.args, train_dataset=trainer.train_dataset)
    with pytest.raises(RuntimeError, match=rf"is trained by the OffloadedTraining .* made at {__file__}:.*close\(restore=True\)"):
        offload(again, drive)
    training.close(restore=True)
    offload(again, drive)
    again.train()
    assert again.offloaded_training.steps == 1
    again.offloaded_training.close()


def test_the_last_step_of_an_epoch_may_have_fewer_batches(drive: Path, tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": 4, "max_steps": -1, "num_train_epochs": 2, "rows": 14}
    trainer = train_both(drive, tmp_path, **options)
    assert trainer.state.global_step == 4


@pytest.mark.parametrize(
    ("activations", "checkpointing", "accumulation"),
    [("nvme", None, 2), ("nvme", False, 1), ("nvme", True, 2)],
)
def test_layers_that_are_computed_again(
    drive: Path, tmp_path: Path, activations: str, checkpointing: bool | None, accumulation: int
) -> None:
    options: dict[str, Any] = {"gradient_accumulation_steps": accumulation}
    if checkpointing is not None:
        options |= {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": checkpointing}}
    train_both(drive, tmp_path, {"activations": activations, "activation_budget": 20_000}, **options)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_autocast_to_bfloat16(drive: Path, tmp_path: Path, accumulation: int) -> None:
    train_both(drive, tmp_path, bf16=True, gradient_accumulation_steps=accumulation)


@pytest.mark.parametrize("options", [
    {"optim": "adamw_torch"}, {"optim": "sgd", "optim_args": "momentum=0.9"}, {"optim": "adafactor"}, {"optim": "adagrad"},
    {"lr_scheduler_type": "cosine"},
    {"label_smoothing_factor": 0.1}, {"neftune_noise_alpha": 5.0, "gradient_accumulation_steps": 1},
])  # fmt: skip
def test_options_of_the_training_arguments(drive: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    train_both(drive, tmp_path, **{"gradient_accumulation_steps": 2, **options})


def test_an_optimizer_of_ones_own(drive: Path, tmp_path: Path) -> None:
    """Whose groups are others than those that the trainer would make."""

    def trainer() -> transformers.Trainer:
        made = trainer_of(tmp_path / "trained")
        params = list(made.model.parameters())
        made.optimizer = torch.optim.AdamW([{"params": params[:7], "lr": 1e-3}, {"params": params[7:]}], lr=1e-2)
        return made

    known = trainer()
    known.train()
    found = trainer()
    training = offload(found, drive)
    found.train()
    assert logs(found) == logs(known)
    assert_same(training, known.model)


class WithLoss(transformers.Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **options: Any) -> Any:
        outputs = model(**inputs)
        return (outputs.loss * 2, outputs) if return_outputs else outputs.loss * 2


class WithStep(transformers.Trainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        model.train()
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, self._prepare_inputs(inputs)) / 3
        self.accelerator.backward(loss)
        return loss.detach()


@pytest.mark.parametrize("trainer_class", [WithLoss, WithStep], ids=lambda each: each.__name__)
def test_trainers_that_override_methods(drive: Path, tmp_path: Path, trainer_class: type[transformers.Trainer]) -> None:
    trainer = train_both(drive, tmp_path, trainer_class=trainer_class, gradient_accumulation_steps=2)
    assert isinstance(trainer, trainer_class)


class WithBackward(transformers.Trainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        loss = self.compute_loss(model, inputs)
        loss.backward()
        return loss.detach()


def test_a_backward_that_the_accelerator_does_not_know_of_is_an_error(drive: Path, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path / "trained", trainer_class=WithBackward)
    offload(trainer, drive)
    with pytest.raises(RuntimeError, match=r"has to call accelerator\.backward"):
        trainer.train()


# Between the steps, and after them


def test_the_trainer_is_as_ever_after_training(drive: Path, tmp_path: Path) -> None:
    """Evaluates, predicts, generates, saves and trains on; and has the model in memory in the end."""
    known, trainer = (trainer_of(tmp_path / name) for name in ("known", "trained"))
    training = offload(trainer, drive)
    for each in (known, trainer):
        transformers.set_seed(1)
        each.train()
    assert trainer.evaluate()["eval_loss"] == known.evaluate()["eval_loss"]
    expected, found = (each.predict(each.eval_dataset).predictions for each in (known, trainer))
    assert (expected == found).all()
    ids = torch.arange(5)[None]
    expected, found = (each.model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0) for each in (known, trainer))
    assert torch.equal(expected, found)
    trainer.save_model()
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    for name, value in known.model.state_dict().items():
        assert torch.equal(saved.state_dict()[name], value), name
    for each in (known, trainer):
        transformers.set_seed(2)
        each.train()
    assert logs(trainer) == logs(known)
    assert_same(training, known.model)
    training.close(restore=True)
    for name, value in known.model.state_dict().items():
        assert torch.equal(trainer.model.state_dict()[name], value), name
    assert trainer.evaluate()["eval_loss"] == known.evaluate()["eval_loss"]
    trainer.save_model(str(tmp_path / "again"))
    assert (tmp_path / "again" / "model.safetensors").exists()
    with pytest.raises(RuntimeError, match="closed"):
        trainer.train()


class Failing(transformers.TrainerCallback):
    def on_pre_optimizer_step(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2:
            raise ZeroDivisionError


def test_a_training_that_fails_leaves_the_step_before(drive: Path, tmp_path: Path) -> None:
    known = trainer_of(tmp_path / "known", callbacks=[StopsAt(2)])
    known.train()
    trainer = trainer_of(tmp_path / "trained", callbacks=[Failing()])
    training = offload(trainer, drive)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert training.steps == 2
    assert_same(training, known.model)
    trainer.save_model()
    assert (tmp_path / "trained" / "model.safetensors").exists()


# Checkpoints


def assert_same_files(found: Path, expected: Path) -> None:
    """Ordinary checkpoints, with the same values."""
    assert {path.name for path in found.iterdir()} == {path.name for path in expected.iterdir()}
    ours, theirs = (transformers.AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (found, expected))
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    ours, theirs = (torch.load(path / "optimizer.pt", weights_only=True) for path in (found, expected))
    assert [group["params"] for group in ours["param_groups"]] == [group["params"] for group in theirs["param_groups"]]
    assert ours["param_groups"] == theirs["param_groups"]
    assert list(ours["state"]) == sorted(theirs["state"])
    for index, state in theirs["state"].items():
        assert all(torch.equal(ours["state"][index][key], value) for key, value in state.items())
    ours, theirs = (torch.load(path / "scheduler.pt", weights_only=True) for path in (found, expected))
    assert ours == theirs


@pytest.mark.parametrize(("kind", "shards"), [("llama", True), ("gpt2", False)])
def test_checkpoints_are_ordinary_and_resumed_from(
    drive: Path, tmp_path: Path, kind: str, shards: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a trainer with the model on the drive, and by one with it in memory."""
    if shards:
        save = transformers.PreTrainedModel.save_pretrained
        in_shards = functools.partialmethod(save, max_shard_size=200_000)
        monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", in_shards)
    options = {"kind": kind, "save_strategy": "steps", "save_steps": 2, "max_steps": 4, "gradient_accumulation_steps": 2}
    trainer = train_both(drive, tmp_path, **options)
    expected = logs(trainer)
    for step in (2, 4):
        assert_same_files(tmp_path / f"trained/checkpoint-{step}", tmp_path / f"known/checkpoint-{step}")
    assert ((tmp_path / "trained/checkpoint-2/model.safetensors.index.json").exists()) is shards
    reference = trainer.offloaded_training.state_dict()["model"]
    for offloaded in (True, False):
        for source in ("trained", "known"):
            again = trainer_of(tmp_path / "again", **{**options, "save_strategy": "no"})
            if offloaded:
                training = offload(again, drive)
            again.train(resume_from_checkpoint=str(tmp_path / source / "checkpoint-2"))
            assert [log for log in logs(again) if "loss" in log] == [log for log in expected if "loss" in log]
            found = training.state_dict()["model"] if offloaded else again.model.state_dict()
            assert all(torch.equal(found[name], value) for name, value in reference.items())


def test_resuming_from_the_last_checkpoint(drive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its states of the optimizer are mapped."""
    mapped = {}
    load = torch.load

    def noting(path: Any, *arguments: Any, **options: Any) -> Any:
        mapped[Path(path).name] = torch.utils.serialization.config.load.mmap
        return load(path, *arguments, **options)

    options = {"save_strategy": "steps", "save_steps": 1}
    first = trainer_of(tmp_path / "trained", **{**options, "max_steps": 4})
    first.add_callback(StopsAt(2))
    offload(first, drive)
    first.train()
    assert first.state.global_step == 2
    known = trainer_of(tmp_path / "known", max_steps=4)
    known.train()
    trainer = trainer_of(tmp_path / "trained", **{**options, "max_steps": 4})
    training = offload(trainer, drive)
    monkeypatch.setattr(torch, "load", noting)
    trainer.train(resume_from_checkpoint=True)
    assert mapped["optimizer.pt"]
    assert not torch.utils.serialization.config.load.mmap
    assert_same(training, known.model)


class StopsAt(transformers.TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == self.step


def test_the_best_model_is_loaded_in_the_end(drive: Path, tmp_path: Path) -> None:
    options = {
        "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss", "greater_is_better": True, "max_steps": 6,
    }  # fmt: skip
    trainer = train_both(drive, tmp_path, **options)
    assert trainer.state.best_global_step < 6


# What cannot be offloaded


@pytest.mark.parametrize("option", ["bf16_full_eval", "auto_find_batch_size"])
def test_options_that_cannot_be_offloaded_are_named(drive: Path, tmp_path: Path, option: str) -> None:
    trainer = trainer_of(tmp_path / "trained", **{option: True})
    with pytest.raises(ValueError, match=option):
        offload(trainer, drive)
    assert not (drive / "offloaded").exists()
    assert (type(trainer), trainer.optimizer) == (transformers.Trainer, None)


def test_a_model_init_fp16_and_several_processes_are_named(drive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(tmp_path / "trained")
    trainer.args.fp16 = True  # transformers refuses it itself on some machines
    with pytest.raises(ValueError, match="fp16: use bf16"):
        offload(trainer, drive)
    trainer.args.fp16, trainer.model_init = False, lambda: model_of("gpt2")
    with pytest.raises(ValueError, match="model_init"):
        offload(trainer, drive)
    monkeypatch.setattr(transformers.TrainingArguments, "world_size", 2)
    with pytest.raises(ValueError, match="several processes: use OffloadedTraining in a loop"):
        offload(trainer, drive)


def test_an_optimizer_that_steps_all_parameters_at_once_is_an_error(drive: Path, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path / "trained")
    trainer.optimizer = torch.optim.LBFGS(trainer.model.parameters())
    with pytest.raises(ValueError, match="a LBFGS may not step each parameter by itself: use one of ASGD, Ada"):
        offload(trainer, drive)
    assert type(trainer.optimizer) is torch.optim.LBFGS


def test_an_optimizer_that_has_stepped_is_an_error(drive: Path, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path / "trained", max_steps=1, optim="adagrad")
    trainer.train()
    trainer.optimizer = trainer.optimizer.optimizer
    with pytest.raises(ValueError, match="has states already"):
        offload(trainer, drive)


def test_offloading_twice_is_an_error(drive: Path, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path / "trained")
    with offload(trainer, drive), pytest.raises(RuntimeError, match="already"):
        offload(trainer, drive)


def test_another_trainer_than_expected_is_an_error(drive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(tmp_path / "trained")
    monkeypatch.setattr(transformers.Trainer, "get_batch_samples", lambda trainer, iterator, num_batches: None)
    with pytest.raises(RuntimeError, match=r"Trainer\.get_batch_samples\(epoch_iterator, num_batches, device\) is not in transf"):
        offload(trainer, drive)


def test_enable_for_activations_leaves_an_offloaded_training_alone(drive: Path, tmp_path: Path) -> None:
    integration.enable(drive / "activations", memory_budget=0, min_bytes=1)
    try:
        trainer = trainer_of(tmp_path / "trained")
        with offload(trainer, drive), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that nothing goes out
            trainer.train()
            assert integration.report().saved_bytes == 0
    finally:
        integration.disable()
