"""transformers' Trainer keeps its activations on a drive, and learns the same, bit for bit."""

from __future__ import annotations

import copy
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from deepnvme.integrations import transformers as integration

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those of packages that it imports
    import transformers

BATCH, LENGTH, HIDDEN, LAYERS = 4, 32, 64, 6
INPUT_BYTES = 4 * BATCH * LENGTH * HIDDEN
"""Of a layer's input."""
BUDGET = 4 * INPUT_BYTES
CHECKPOINTING: dict[str, dict[str, Any]] = {
    "all activations": {},
    "reentrant": {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}},
    "not reentrant": {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}},
}
SIZES: dict[str, Any] = {"vocab_size": 96, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
CONFIGS: dict[str, transformers.PretrainedConfig] = {
    "llama": transformers.LlamaConfig(intermediate_size=128, **SIZES),
    "gpt2": transformers.GPT2Config(n_positions=LENGTH, **SIZES),  # has dropout
}


@pytest.fixture(autouse=True)
def disabled_afterwards(drive: Path) -> Iterator[None]:
    yield
    integration.disable()
    assert [path for path in (drive / "activations").rglob("*") if path.is_file()] == []


def enable(drive: Path, **options: Any) -> None:
    integration.enable(drive / "activations", **{"memory_budget": BUDGET, "min_bytes": INPUT_BYTES // 8, **options})


def model_of(kind: str) -> transformers.PreTrainedModel:
    torch.manual_seed(3)
    return transformers.AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[kind]))


def batches(rows: int = 32) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(96, (rows, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


def trainer_of(
    drive: Path, kind: str = "llama", trainer_class: type[transformers.Trainer] = transformers.Trainer, **options: Any
) -> transformers.Trainer:
    arguments: dict[str, Any] = {
        "output_dir": str(drive / "trained"), "max_steps": 3, "logging_steps": 1, "per_device_train_batch_size": BATCH,
        "use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "train_sampling_strategy": "sequential",
    }  # fmt: skip
    arguments |= options
    data = batches()
    return trainer_class(model_of(kind), transformers.TrainingArguments(**arguments), train_dataset=data, eval_dataset=data[:4])


def trained(trainer: transformers.Trainer) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights."""
    trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert len(losses) == 3
    return losses, {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}


def assert_same(one: tuple[list[float], dict[str, torch.Tensor]], other: tuple[list[float], dict[str, torch.Tensor]]) -> None:
    assert one[0] == other[0]
    assert all(torch.equal(weight, other[1][name]) for name, weight in one[1].items())


@pytest.mark.parametrize(("kind", "checkpointing"), [*(("llama", each) for each in CHECKPOINTING), ("gpt2", "all activations")])
def test_a_trainer_learns_the_same_with_its_activations_on_the_drive(kind: str, checkpointing: str, drive: Path) -> None:
    options = CHECKPOINTING[checkpointing]
    known = trained(trainer_of(drive, kind, **options))
    enable(drive)
    trainer = trainer_of(drive, kind, **options)
    assert_same(trained(trainer), known)
    report = integration.report()
    assert report.saved_bytes > BUDGET
    assert report.bytes_written > 0
    assert 0 < report.peak_bytes <= BUDGET + 4 * INPUT_BYTES  # one tensor may be as large as the budget
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert all(log["activations_written_gb"] > 0 and log["activations_read_gb"] > 0 for log in logs)
    assert logs[-1]["activations_saved_gb"] == report.saved_bytes / 1e9
    assert logs[-1]["activations_peak_gb"] == report.peak_bytes / 1e9
    assert logs[-1]["activations_waiting_s"] >= 0


@pytest.mark.parametrize("how", ["reentrant", "not reentrant", "offload"])
def test_with_activation_checkpointing_the_inputs_of_layers_are_saved(how: str, drive: Path) -> None:
    """Also those that transformers' option offload would keep in the memory of the CPU. The backward saves nothing."""
    kwargs = {"use_reentrant": how == "reentrant", "offload": how == "offload"}
    enable(drive)
    trained(trainer_of(drive, activation_checkpointing=True, activation_checkpointing_kwargs=kwargs))
    saved = integration.report().saved_bytes
    outside_of_layers = 6 * INPUT_BYTES  # norm, output head, loss
    assert LAYERS * INPUT_BYTES <= saved <= LAYERS * INPUT_BYTES + outside_of_layers
    trained(trainer_of(drive))
    assert integration.report().saved_bytes > 4 * saved


def test_an_evaluation_saves_nothing(drive: Path) -> None:
    known = trained(trainer_of(drive, eval_strategy="steps", eval_steps=1))
    enable(drive)
    trainer = trainer_of(drive, eval_strategy="steps", eval_steps=1)
    assert_same(trained(trainer), known)
    before = integration.report()
    assert before.bytes_written > 0
    trainer.evaluate()
    assert integration.report() == before
    evaluations = [log for log in trainer.state.log_history if "eval_loss" in log]
    assert len(evaluations) == 4
    assert not any(name.startswith("activations") for log in evaluations for name in log)


class WithLoss(transformers.Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **options: Any) -> Any:
        outputs = model(**inputs)
        return (outputs.loss * 2, outputs) if return_outputs else outputs.loss * 2


class WithStep(transformers.Trainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        model.train()
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
        self.accelerator.backward(loss)
        return loss.detach()


class WithContext(transformers.Trainer):
    def compute_loss_context_manager(self) -> Any:
        contexts = super().compute_loss_context_manager()
        contexts.enter_context(torch.autocast("cpu", torch.bfloat16))
        return contexts


@pytest.mark.parametrize("trainer_class", [WithLoss, WithStep, WithContext], ids=lambda each: each.__name__)
def test_trainers_that_override_methods_save_on_the_drive(trainer_class: type[transformers.Trainer], drive: Path) -> None:
    known = trained(trainer_of(drive, trainer_class=trainer_class))
    enable(drive)
    trainer = trainer_of(drive, trainer_class=trainer_class)
    assert_same(trained(trainer), known)
    assert trainer.state.log_history[-2]["activations_written_gb"] > 0


class Failing(transformers.Trainer):
    def compute_loss(self, *arguments: Any, **options: Any) -> Any:
        super().compute_loss(*arguments, **options)
        raise ArithmeticError("of the loss")


def test_nothing_is_saved_after_a_forward_that_has_failed(drive: Path) -> None:
    enable(drive)
    with pytest.raises(ArithmeticError):
        trained(trainer_of(drive, trainer_class=Failing))
    before = integration.report()
    assert before.saved_bytes > 0
    model_of("llama")(input_ids=batches()[0]["input_ids"][None]).logits.sum().backward()
    assert integration.report() == before
    assert isinstance(transformers.modeling_utils.save_on_cpu(), torch.autograd.graph.save_on_cpu)


class WithoutContexts(transformers.Trainer):
    def compute_loss_context_manager(self) -> Any:
        return torch.autocast("cpu", torch.bfloat16)


def test_a_trainer_that_leaves_the_context_out_warns(drive: Path) -> None:
    enable(drive)
    with pytest.warns(RuntimeWarning, match="compute_loss_context_manager") as warned:
        trained(trainer_of(drive, trainer_class=WithoutContexts))
    assert len(warned) == 1
    assert integration.report().saved_bytes == 0
    assert not (drive / "activations").exists()


def test_tensors_that_are_all_too_small_are_warned_of(drive: Path) -> None:
    known = trained(trainer_of(drive))
    enable(drive, min_bytes=1 << 30)
    with pytest.warns(RuntimeWarning, match=r"min_bytes \(1073741824\)") as warned:
        assert_same(trained(trainer_of(drive)), known)
    assert len(warned) == 1


def test_disabling_restores_what_was_replaced(drive: Path) -> None:
    def replaced() -> list[Any]:
        return [vars(transformers.Trainer)[name] for name in ("compute_loss_context_manager", "log")] + [
            transformers.modeling_utils.save_on_cpu
        ]

    before = replaced()
    for _ in range(2):
        enable(drive)
        enable(drive)
        assert not any(one is other for one, other in zip(before, replaced(), strict=True))
        trained(trainer_of(drive))
        integration.disable()
        integration.disable()
        assert replaced() == before
        trainer = trainer_of(drive)
        trained(trainer)
        assert "activations_written_gb" not in trainer.state.log_history[-2]
    with pytest.raises(RuntimeError, match="enable"):
        integration.report()


def test_the_options_of_the_last_call_count(drive: Path) -> None:
    enable(drive)
    trained(trainer_of(drive))
    assert integration.report().bytes_written > 0
    enable(drive, memory_budget=1 << 30)
    trained(trainer_of(drive))
    report = integration.report()
    assert report.bytes_written == 0
    assert report.saved_bytes == report.peak_bytes > 0


def test_trainers_in_several_threads_learn_the_same(drive: Path) -> None:
    known = trained(trainer_of(drive))
    found: list[tuple[list[float], dict[str, torch.Tensor]]] = []
    ready = [trainer_of(drive) for _ in range(3)]

    def train(trainer: transformers.Trainer) -> None:
        enable(drive)
        found.append(trained(trainer))

    threads = [threading.Thread(target=train, args=(trainer,)) for trainer in ready]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    for each in found:
        assert_same(each, known)


def test_without_accelerate_there_is_nothing_to_enable(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ImportError, match="nothing to enable"):
        enable(drive)


@pytest.fixture
def trl() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("trl", reason="needs trl: pip install trl")


def sft_trainer(trl: ModuleType, drive: Path, **options: Any) -> transformers.Trainer:
    """TRL's for supervised fine-tuning."""
    datasets = pytest.importorskip("datasets", reason="needs datasets: pip install datasets")
    tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers: pip install tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<eos>": 0, "<unk>": 1}, unk_token="<unk>"))
    arguments: dict[str, Any] = {
        "output_dir": str(drive / "trained"), "max_steps": 3, "logging_steps": 1, "per_device_train_batch_size": BATCH,
        "use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "train_sampling_strategy": "sequential",
        "bf16": False, "gradient_checkpointing": False, "max_length": LENGTH,
        "dataset_kwargs": {"skip_prepare_dataset": True},
    }  # fmt: skip
    rows = [{"input_ids": batch["input_ids"].tolist()} for batch in batches()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return trl.SFTTrainer(
            model_of("llama"),
            trl.SFTConfig(**{**arguments, **options}),
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<eos>"),
        )


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_trls_activation_offloading_saves_on_the_drive(checkpointing: str, trl: ModuleType, drive: Path) -> None:
    options = CHECKPOINTING[checkpointing]
    known = trained(sft_trainer(trl, drive, **options))
    enable(drive)
    trainer = sft_trainer(trl, drive, activation_offloading=True, **options)
    assert_same(trained(trainer), known)
    report = integration.report()
    assert report.bytes_written > 0
    assert report.peak_bytes <= BUDGET
    assert [log["activations_written_gb"] > 0 for log in trainer.state.log_history if "loss" in log] == [True] * 3


def test_trls_context_in_a_loop_of_ones_own_saves_on_the_drive(
    trl: ModuleType, drive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And after disabling it is TRL's own."""
    enable(drive)
    trl.models  # noqa: B018  # it is imported on first use
    model, inputs = model_of("llama"), {name: torch.stack([row[name] for row in batches()]) for name in ("input_ids", "labels")}
    make = trl.models.get_act_offloading_ctx_manager
    context = make(model, use_pin_memory=False, use_streams=False, min_offload_size=1 << 40)
    for _ in range(2):
        with context:
            model(**inputs).loss.backward()
        assert integration.report().bytes_written > 0
    integration.disable()
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))  # TRL's own needs one
    with context:
        model(**inputs).loss.backward()
    offloading = trl.models.activation_offloading
    assert isinstance(trl.models.get_act_offloading_ctx_manager(model, use_streams=False), offloading.OffloadActivations)
    assert isinstance(make(model, use_streams=False), offloading.OffloadActivations)
