"""transformers' Trainer with gradient checkpointing: ``python -m harness.trainer_worker SETTINGS REQUESTS REPLIES``.

A process of its own, so that its memory can be seen.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from deepnvme.integrations import transformers as integration
from harness.meter import measure
from harness.serving import serve


class TrainerWorker:
    """Trains a Llama with random weights on random tokens, the same in every process.

    Args:
        enabled: Whether ``deepnvme.integrations.transformers.enable`` is called first.
        directory: Where files go.
        memory_budget: Bytes, of what gradient checkpointing keeps.
        width, layers, sequences, tokens: Of the Llama and its batch.
    """

    def __init__(
        self, *, enabled: bool, directory: str, memory_budget: int, width: int, layers: int, sequences: int, tokens: int
    ) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        self._enabled, self._directory, self._memory_budget = enabled, Path(directory), memory_budget
        torch.manual_seed(0)
        sizes: dict[str, Any] = {"num_attention_heads": 4, "vocab_size": 256, "max_position_embeddings": tokens}
        self._model = LlamaForCausalLM(
            LlamaConfig(hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers, **sizes)
        )
        self._tiny = LlamaForCausalLM(LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=1, **sizes))
        self._sequences, self._tokens = sequences, tokens

    def describe(self) -> dict[str, Any]:
        import transformers

        return {"torch": torch.__version__, "transformers": transformers.__version__}

    def train(self, *, steps: int) -> dict[str, Any]:
        """Return the loss of each step, their time, and by how much the process's memory grew."""
        if self._enabled:
            integration.enable(self._directory / "activations", memory_budget=self._memory_budget)
        self._trained(self._tiny, tokens=16, steps=1)  # code, threads and arenas come with the first use
        for parameter in self._model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        taken: dict[str, Any] = {}

        def training() -> None:
            begun = time.perf_counter()
            taken["losses"] = self._trained(self._model, self._tokens, steps)
            taken["seconds"] = (time.perf_counter() - begun) / steps

        taken["growth"] = measure(training)["peak_growth"]
        if self._enabled:
            report = integration.report()
            taken |= {"peak_bytes": report.peak_bytes, "bytes_written": report.bytes_written}
            integration.disable()
        return taken

    def _trained(self, model: Any, tokens: int, steps: int) -> list[float]:
        from transformers import Trainer, TrainingArguments

        generator = torch.Generator().manual_seed(1)
        rows = [
            {"input_ids": ids, "labels": ids}
            for ids in torch.randint(0, 256, (self._sequences * steps, tokens), generator=generator)
        ]
        arguments = TrainingArguments(
            output_dir=str(self._directory / "output"),
            per_device_train_batch_size=self._sequences,
            max_steps=steps,
            gradient_checkpointing=True,
            optim="sgd",  # no states: what grows are activations
            learning_rate=0.1,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=rows)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    settings, request_fd, reply_fd = sys.argv[1:]
    serve(lambda: TrainerWorker(**json.loads(settings)), ("train",), int(request_fd), int(reply_fd))


if __name__ == "__main__":
    main()
