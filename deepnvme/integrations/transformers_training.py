"""Make transformers' ``Trainer`` train a model whose parameters, gradients and optimizer states are on a drive.

    trainer = transformers.Trainer(model, arguments, train_dataset=data)
    offload_training(trainer, "/mnt/nvme/training", memory_budget="8GB")
    trainer.train()

The training loop is still that of transformers. The trainer's class becomes a subclass made here, and its optimizer becomes one
that steps a :class:`deepnvme.offload.OffloadedTraining`. The loop gets the batches of a step from ``get_batch_samples``, and
calls ``training_step`` for each batch, which runs the forward and calls ``accelerator.backward``. Here, the first call of
``training_step`` runs the forwards and backwards of all batches of the step, so that each block of the model is read once for
all of them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.optim import Optimizer

from deepnvme._former_names import former_names, option_names, refuse_options
from deepnvme.offload import OffloadedTraining
from deepnvme.states.partition import ELEMENTWISE

if TYPE_CHECKING:
    from deepnvme.drives.profiles import AnyPath

__all__ = ["offload_training"]

_OVERRIDDEN = {
    "train": (),
    "get_batch_samples": ("epoch_iterator", "num_batches", "device"),
    "training_step": ("model", "inputs", "num_items_in_batch"),
    "_save": ("output_dir", "state_dict"),
    "_load_from_checkpoint": ("resume_from_checkpoint", "model"),
    "_load_best_model": (),
    "_load_optimizer_and_scheduler": ("checkpoint",),
}
"""Methods of ``Trainer`` that are overridden, with the names of the arguments that are used."""


@former_names(nvme_path="path")
def offload_training(
    trainer: Any, path: AnyPath | Sequence[AnyPath], *, blocks: Iterable[nn.Module | str] | None = None, **options: Any
) -> OffloadedTraining:
    """Keep the layers of a trainer's model, their gradients and the optimizer's states on a drive from now on.

    Losses, weights, logs and checkpoints are bit for bit those of the same training in memory, with two exceptions:
    ``grad_norm`` is not logged if gradients are not clipped, and with gradient accumulation dropout draws other random numbers.
    After ``train()`` the trainer can evaluate, save and train further as usual. To get the parameters back into memory, call
    ``close(restore=True)`` of the returned training; the trainer cannot train after that.

    Args:
        trainer: A trainer on the CPU that has not trained yet, of one process.
        path: As for :class:`deepnvme.offload.OffloadedTraining`.
        blocks: As for :class:`deepnvme.offload.OffloadedTraining`.
        **options: Other options of :class:`deepnvme.offload.OffloadedTraining`: ``memory_budget``, ``activations``, ... The
            optimizer and its options, ``micro_batches`` and ``max_norm`` are taken from the ``TrainingArguments``.

    Returns:
        The training, which is also ``trainer.offloaded_training``.

    Raises:
        ImportError: If transformers, or accelerate that its trainer needs, is not installed.
        RuntimeError: If ``Trainer`` differs in this version of transformers, or the trainer is offloaded already.
        TypeError: For an unknown option, such as a misspelt one.
        ValueError: If the trainer, or one of its options, does not support offloading. Nothing is changed then.
        OSError: If the drive cannot be read or written.
    """
    check_version(_OVERRIDDEN, "offload_training")
    _check(trainer)
    of_training = option_names(OffloadedTraining.__init__)
    because = "it takes the options of OffloadedTraining, and the optimizer's are in the TrainingArguments"
    refuse_options("offload_training", options.keys() - of_training.keys(), of_training, because)
    optimizer_class, optimizer_options, param_groups = _optimizer_of(trainer)
    max_norm = trainer.args.max_grad_norm if trainer.args.max_grad_norm > 0 else None
    training = OffloadedTraining(
        trainer.model,
        optimizer_class,
        blocks=blocks,
        path=path,
        param_groups=param_groups,
        max_norm=max_norm,
        **optimizer_options,
        **options,
    )
    steps = _Steps(training, max_norm)
    accelerator = trainer.accelerator
    accelerator.backward, accelerator.clip_grad_norm_ = steps.backward, steps.clip_grad_norm
    trainer.optimizer = _OffloadedOptimizer(training)
    trainer.offloaded_training = training
    trainer.__class__ = _offloaded(type(trainer), training, steps)
    return training


def _offloaded(base: Any, training: OffloadedTraining, steps: _Steps) -> type:
    """Return a subclass of a trainer's class that trains with this offloaded training."""

    class OffloadedTrainer(base):  # type: ignore[misc]
        """The trainer's class, with steps run by the offloaded training, and model and optimizer states saved from the drive."""

        def train(self, *arguments: Any, **options: Any) -> Any:
            """Train as the base class does. After an exception the model is as after the last completed step."""
            try:
                return super().train(*arguments, **options)
            except BaseException:
                with contextlib.suppress(OSError):  # what is called next tries it again
                    if not training.closed:
                        training.undo_step()
                raise

        def get_batch_samples(self, epoch_iterator: Any, num_batches: Any, device: Any) -> Any:
            """Return the batches of the next step, after passing them to the offloaded training."""
            batches, num_items_in_batch = super().get_batch_samples(epoch_iterator, num_batches, device)
            steps.begin(batches)
            return batches, num_items_in_batch

        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            """Return the loss of a batch. The first call of a step runs all batches of the step. Raises OSError."""
            own = super().training_step
            return steps.loss_of(inputs, lambda batch: own(model, batch, num_items_in_batch))

        def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
            with _states_on_the_drive(self.model, training):
                super()._save(output_dir, state_dict)

        def _load_from_checkpoint(self, resume_from_checkpoint: Any, model: Any = None) -> None:
            with _states_on_the_drive(self.model, training):
                super()._load_from_checkpoint(resume_from_checkpoint, model)

        def _load_best_model(self) -> None:
            with _states_on_the_drive(self.model, training):
                super()._load_best_model()

        def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
            with _mapping_files():
                super()._load_optimizer_and_scheduler(checkpoint)

    OffloadedTrainer.__name__ = OffloadedTrainer.__qualname__ = base.__name__
    return OffloadedTrainer


class _Thread(threading.local):
    loss: torch.Tensor | None = None
    """Loss that the forward running in this thread has passed to ``accelerator.backward``; None if there is none yet."""


class _Steps:
    """Runs all batches of a trainer's step together, when the loss of the first one is requested.

    Args:
        training: The offloaded training that runs them.
        max_norm: Norm to which the training clips gradients; None for no clipping.
    """

    def __init__(self, training: OffloadedTraining, max_norm: float | None) -> None:
        self._training, self._max_norm = training, max_norm
        self._batches: list[Any] = []
        self._losses: list[Any] = []
        self._thread = _Thread()

    def begin(self, batches: Sequence[Any]) -> None:
        """Set the batches of the next step."""
        self._batches, self._losses = list(batches), []

    def loss_of(self, batch: Any, training_step: Callable[[Any], Any]) -> Any:
        """Return the result of ``training_step`` for a batch, which must be the next one of the step. Raises OSError."""
        if not self._batches or batch is not self._batches[0]:
            raise RuntimeError("training_step() is to be called with the batches of get_batch_samples(), one after the other")
        if not self._losses:
            self._losses = self._run(training_step)
        del self._batches[0]
        return self._losses.pop(0)

    def _run(self, training_step: Callable[[Any], Any]) -> list[Any]:
        returned: list[Any] = [None] * len(self._batches)

        def forward(index: int, batch: Any) -> torch.Tensor:
            """Run ``training_step`` for one batch, and return the loss that it passes to ``accelerator.backward``."""
            self._thread.loss = None
            returned[index] = training_step(batch)
            loss, self._thread.loss = self._thread.loss, None
            if loss is None:
                raise RuntimeError("the trainer's training_step() has to call accelerator.backward(loss)")
            return loss

        self._training.run_micro_batches([functools.partial(forward, *each) for each in enumerate(self._batches)])
        return returned

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Replace ``accelerator.backward``: record the loss. The training runs the backward after ``training_step`` returns."""
        if self._thread.loss is not None or options:
            raise RuntimeError("training_step() may call accelerator.backward() once, with nothing but the loss")
        self._thread.loss = loss

    def clip_grad_norm(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor | None:
        """Replace ``accelerator.clip_grad_norm_``: the training clips gradients during its step.

        Returns:
            The norm of the gradients; None if gradients are not clipped, because they have been freed by then.
        """
        if self._max_norm is None and math.isinf(max_norm):
            return None
        if (max_norm, norm_type) != (self._max_norm, 2):
            raise RuntimeError(f"max_grad_norm cannot be changed any more: it was {self._max_norm or 0} for offload_training()")
        return self._training.gradient_norm()


class _OffloadedOptimizer(Optimizer):
    """The optimizer of an offloaded trainer. Its state dict has the same form as that of an optimizer in memory."""

    _is_accelerate_prepared = True  # it has no gradients to be scaled, and no states to be moved to a device
    step_was_skipped = False

    def __init__(self, training: OffloadedTraining) -> None:
        super().__init__(training.optimizer.param_groups, training.optimizer.defaults)
        self.param_groups = training.optimizer.param_groups
        self._training = training

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Run the training's step for the micro-batches since the last step. Raises like OffloadedTraining.step.

        Args:
            closure: Ignored.
        """
        self._training.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's states and options, with tensors mapped from the drive. Raises OSError."""
        state = self._training.state_dict()["optimizer"]
        index_of = {name: index for index, name in enumerate(_names(state))}
        return {
            "state": dict(sorted((index_of[name], values) for name, values in state["state"].items())),
            "param_groups": [
                {**group, "params": [index_of[name] for name in group["params"]]} for group in state["param_groups"]
            ],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace the states and options by a state dict of this optimizer, or of one in memory. Raises ValueError, OSError."""
        now = self._training.state_dict()
        groups = now["optimizer"]["param_groups"]
        saved = state_dict["param_groups"]
        if [len(group["params"]) for group in saved] != [len(group["params"]) for group in groups]:
            raise ValueError("these are the states of another optimizer: its parameter groups have other numbers of parameters")
        name_of = dict(zip(_names(state_dict), _names(now["optimizer"]), strict=True))
        states = {name_of[index]: values for index, values in state_dict["state"].items()}
        named = [{**theirs, "params": ours["params"]} for theirs, ours in zip(saved, groups, strict=True)]
        self._training.load_state_dict({**now, "optimizer": {"state": states, "param_groups": named}})


def _names(optimizer_state: Mapping[str, Any]) -> list[Any]:
    """Return the parameters of all groups of an optimizer state: their names, or their numbers if it is from memory."""
    return [name for group in optimizer_state["param_groups"] for name in group["params"]]


@contextlib.contextmanager
def _states_on_the_drive(model: nn.Module, training: OffloadedTraining) -> Iterator[None]:
    """Make the model's ``state_dict`` and ``load_state_dict`` use the weights on the drive, unless the training is closed."""
    if training.closed:
        yield
        return
    now = training.state_dict()
    now = {**now, "model": dict(now["model"])}
    params = dict(model.named_parameters(remove_duplicate=False))

    def load(state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> _IncompatibleKeys:
        """Load weights into the training, on the drive, with the arguments and result of ``Module.load_state_dict``."""
        missing = [name for name in now["model"] if name not in state_dict]
        unexpected = [name for name in state_dict if name not in now["model"]]
        if strict and (missing or unexpected):
            raise RuntimeError(f"the state has no {missing}, and {unexpected} that the model does not have")
        given = {params[name]: value for name, value in state_dict.items() if name in params}
        for name, value in now["model"].items():
            alike = given.get(params[name], value) if name in params else value  # one name of a tied parameter is enough
            now["model"][name] = state_dict.get(name, alike)
        training.load_state_dict(now)
        return _IncompatibleKeys(missing, unexpected)

    ours: Any = model
    ours.state_dict, ours.load_state_dict = lambda *_, **__: dict(now["model"]), load
    try:
        yield
    finally:
        del ours.state_dict, ours.load_state_dict


def _mapping_files() -> contextlib.AbstractContextManager[object]:
    """Return a context in which ``torch.load`` maps files, so that states need not fit into memory.

    With torch 2.6, which lacks the option, files are read into memory.
    """
    serialization: Any = getattr(torch.utils, "serialization", None)
    return contextlib.nullcontext() if serialization is None else serialization.config.patch("load.mmap", True)


def _optimizer_of(trainer: Any) -> tuple[type[Optimizer], dict[str, Any], list[dict[str, Any]]]:
    """Return the class, options and parameter groups of a trainer's optimizer. Raises ValueError if it cannot be offloaded."""
    given = trainer.optimizer
    optimizer = trainer.create_optimizer()
    trainer.optimizer = given
    transformers = importlib.import_module("transformers")
    each_by_itself = {*ELEMENTWISE, torch.optim.Adafactor, getattr(transformers, "Adafactor", torch.optim.Adafactor)}
    if type(optimizer) not in each_by_itself:
        known = ", ".join(sorted({each.__name__ for each in each_by_itself}))
        raise ValueError(f"a {type(optimizer).__name__} may not step each parameter by itself: use one of {known}")
    if any(state.get("step", 1) for state in optimizer.state.values() if state):
        raise ValueError("the optimizer has states already: give the trainer one that has not stepped")
    names = inspect.signature(type(optimizer)).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in names}
    return type(optimizer), options, optimizer.param_groups


def check_version(overridden: Mapping[str, Sequence[str]], function: str) -> None:
    """Raise ImportError if transformers is missing, and RuntimeError if its ``Trainer`` lacks an expected method or argument.

    Args:
        overridden: The expected methods, with the names of their arguments.
        function: The function that overrides them.
    """
    try:
        transformers = importlib.import_module("transformers")
        importlib.import_module("accelerate")
    except ImportError as error:
        raise ImportError(f"{error}: there is no Trainer; pip install 'deepnvme[transformers]'") from error
    for name, arguments in overridden.items():
        method = getattr(transformers.Trainer, name, None)
        if method is None or not set(arguments) <= set(inspect.signature(method).parameters):
            missing = f"Trainer.{name}({', '.join(arguments)})"
            raise RuntimeError(f"{missing} is not in transformers {transformers.__version__}: {function} needs version 5")


def _check(trainer: Any) -> None:
    """Raise ValueError if a trainer's options do not support offloading, and RuntimeError if it is offloaded already."""
    if hasattr(trainer, "offloaded_training"):
        raise RuntimeError("the training of this trainer is offloaded already")
    arguments = trainer.args
    refused = {
        "several processes: use OffloadedTraining in a loop of your own": arguments.world_size > 1,
        "fp16: use bf16": arguments.fp16,
        f"the model on {arguments.device}: set use_cpu=True": arguments.device.type != "cpu",
        "DeepSpeed and FSDP": trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled,
        "torch_compile": arguments.torch_compile,
        "fp16_full_eval and bf16_full_eval": arguments.fp16_full_eval or arguments.bf16_full_eval,
        "auto_find_batch_size": arguments.auto_find_batch_size,
        "model_init: give the trainer a model": trainer.model_init is not None,
    }
    for what, is_so in refused.items():
        if is_so:
            raise ValueError(f"training cannot be offloaded with {what}")
