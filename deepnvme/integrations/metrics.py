"""Log the numbers of reports: with TensorBoard, Weights & Biases, loggers of Lightning, and transformers' ``Trainer``.

    writer = torch.utils.tensorboard.SummaryWriter()
    for step, batch in enumerate(loader):
        train(batch)
        log_metrics(writer, step, optimizer.report())

Every report and statistics object of this package has ``as_dict()``, which returns its numbers by name. This module can be
imported without any of these projects.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from deepnvme.telemetry.report_figures import ReportFigures

__all__ = ["PREFIX", "log_metrics", "log_with_trainer"]

PREFIX = "deepnvme/"
"""Prefix of the metrics' names, unless another one is given."""


def log_metrics(writer: Any, step: int, report: ReportFigures, *, prefix: str = PREFIX) -> None:
    """Log all numbers of a report with a logger of another project.

    Args:
        writer: An object with one of these methods:
            ``add_scalar(name, value, step)``: TensorBoard's ``SummaryWriter``;
            ``log_metrics(numbers, step)``: a logger of Lightning;
            ``log(numbers)``: a run of Weights & Biases, or the module ``wandb``. Here the step is logged as a number,
            ``deepnvme/global_step``, because wandb's own step counts its calls, and wandb drops values for an earlier step.
        step: Number of the step.
        report: A report, for instance from ``optimizer.report()``, ``training.report()``, or ``engine.stats()``.
        prefix: Put in front of all names.

    Raises:
        TypeError: If the writer has none of these methods.
    """
    numbers = report.as_dict(prefix)
    if hasattr(writer, "add_scalar"):
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
    elif hasattr(writer, "log_metrics"):
        writer.log_metrics(numbers, step)
    elif hasattr(writer, "log"):
        writer.log({**numbers, f"{prefix}global_step": step})
    else:
        raise TypeError(f"a writer has a method add_scalar, log_metrics or log; {type(writer).__name__} has none of them")


def log_with_trainer(trainer: Any, report: Callable[[], ReportFigures], *, prefix: str = PREFIX) -> None:
    """Add the numbers of a report to the logs of a transformers ``Trainer``, which go wherever ``report_to`` sends them.

    >>> training = deepnvme.integrations.transformers.offload_training(trainer, "/mnt/nvme/training")
    >>> log_with_trainer(trainer, training.report)

    The numbers are added to logs of training steps, but not to those of evaluations or of the end of training. They are missing
    in ``trainer.state.log_history``, which the trainer writes before it calls any callback.

    Args:
        trainer: A ``transformers.Trainer``, or a trainer of TRL.
        report: Returns the report, such as ``optimizer.report``. Called for each log.
        prefix: Put in front of all names.

    Raises:
        ImportError: If transformers is not installed.
    """
    base: Any = importlib.import_module("transformers").TrainerCallback

    class ReportCallback(base):  # type: ignore[misc]
        """Callback that adds the report's numbers to the trainer's logs, before other callbacks write them."""

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
            """Add the report's numbers to the logs of a training step."""
            if logs is not None and "loss" in logs:
                logs.update(report().as_dict(prefix))

    # The first callback: other callbacks send the logs away.
    trainer.callback_handler.callbacks.insert(0, ReportCallback())
