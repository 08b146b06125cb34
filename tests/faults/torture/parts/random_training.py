"""Random small models and options of OffloadedTraining, some on a drive that fails: the bits of the same training in memory."""

from __future__ import annotations

import contextlib
import copy
import errno
import itertools
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepnvme.offload import OffloadedTraining

from ....support.offloaded_training import InMemory, assert_same_values, same_values
from .. import Wrong
from .optimizer_faults import FaultyDrive

SHORT = 6
SECONDS = 60

_WORDS = 23
_FAULTY_ATTEMPTS = 12
"""After which the drive is well."""

OPTIMIZERS: tuple[tuple[type[torch.optim.Optimizer], dict[str, Any]], ...] = (
    (torch.optim.Adadelta, {}),
    (torch.optim.Adafactor, {}),
    (torch.optim.Adagrad, {}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.Adam, {"fused": True}),
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.Adamax, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (torch.optim.Rprop, {}),
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
)
"""The classes that step element by element, and one that does not; each with options that give it other states."""


class Layer(nn.Module):
    """A block: normalised, through two linear layers and back to where it came from, which its calls are counted of."""

    def __init__(self, width: int, factor: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, factor * width, bias=factor > 1), nn.Linear(factor * width, width)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Around(nn.Module):
    """A block with weights of its own around another one."""

    def __init__(self, width: int, inner: nn.Module) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(width) + 0.5)
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.gain * x + self.inner(x)) * self.gain


class Model(nn.Module):
    """Has layers that are called in ``order``, some perhaps several times or never, between an embedding and a head."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self.width = random.choice([8, 16, 17, 31, 33, 64])
        dropout = random.choice([0.0, 0.1])
        self.embedding = nn.Embedding(_WORDS, self.width)
        layers: list[nn.Module] = []
        for _ in range(random.randint(2, 4)):
            kind = random.choice(["layer", "layer", "linear", "around"])
            layer: nn.Module = (
                nn.Linear(self.width, self.width) if kind == "linear" else Layer(self.width, random.randint(1, 3), dropout)
            )
            layers.append(Around(self.width, layer) if kind == "around" else layer)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(self.width, _WORDS, bias=random.random() < 0.5)
        self.checkpoints = random.random() < 0.2
        self.order = list(range(len(layers)))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for index in self.order:
            layer = self.layers[index]
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def some_model(random: Random) -> Model:
    """One with shared blocks, weights that two have, and frozen ones."""
    torch.manual_seed(random.randrange(1 << 30))
    model = Model(random)
    linears = [module for module in model.layers.modules() if isinstance(module, nn.Linear)]
    if random.random() < 0.3:
        model.head.weight = model.embedding.weight
    if random.random() < 0.3:  # two blocks have one weight
        one = random.choice(linears)
        for other in linears:
            if other is not one and other.weight.shape == one.weight.shape:
                other.weight = one.weight
                break
    if random.random() < 0.4:
        share = random.choice([0.2, 0.6])
        for param in model.layers.parameters():
            param.requires_grad_(random.random() > share)
    if random.random() < 0.2:
        model.embedding.requires_grad_(False)
    if random.random() < 0.2:
        random.choice(list(model.layers)).requires_grad_(False)
    model.head.requires_grad_(True)
    return model


def some_order(random: Random, layers: int) -> list[int]:
    """In which the layers are called."""
    kind = random.choice(["each", "each", "twice", "any"])
    if kind == "each":
        return list(range(layers))
    if kind == "twice":
        return sorted([*range(layers), random.randrange(layers)])
    return [random.randrange(layers) for _ in range(random.randint(1, layers + 2))]


def some_options(random: Random, model: Model) -> dict[str, Any]:
    """Options of OffloadedTraining."""
    params_bytes = sum(param.nbytes for param in model.parameters())
    options: dict[str, Any] = {
        "memory_budget": random.choice([0, 0, 16 * params_bytes, 1 << 26]),
        "parameters": random.choice(["nvme", "nvme", "nvme", "memory"]),
        "activations": random.choice(["memory", "nvme"]),
        "accumulation": random.choice(["vertical", "vertical", "horizontal"]),
        "micro_batches": random.choice([1, 2, 2, 3, 4]),
        "max_norm": random.choice([None, None, 0.1, 1e6]),
        "master_weights": random.random() < 0.3,
        "blocks": random.choice([None, ["layers.*"], list(model.layers)]),
    }
    if random.random() < 0.3:
        options["activation_budget"] = random.choice([0, 4096, 1 << 20])
    return options


@torch.no_grad()
def evaluated(model: Model, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the loss without dropout."""
    model.eval()
    loss: torch.Tensor = model(*batch)
    model.train()
    return loss


class Step(NamedTuple):
    """A step of a training, and what it comes to in memory."""

    seed: int
    order: list[int]
    batch: tuple[torch.Tensor, torch.Tensor]
    lr: float
    loss: torch.Tensor
    evaluated: torch.Tensor
    """The loss of the same batch after the step, without dropout."""
    state: dict[str, torch.Tensor]


def steps_in_memory(random: Random, reference: InMemory) -> list[Step]:
    """Train a model as anybody would."""
    model: Any = reference.model
    group = reference.optimizer.param_groups[0]
    order, found = some_order(random, len(model.layers)), []
    rows = random.randint(4, 9)
    for _ in range(random.randint(2, 5)):
        if random.random() < 0.3:
            order = some_order(random, len(model.layers))
        if random.random() < 0.2:
            group["lr"] = random.choice([1e-2, 1e-4])
        seed = random.randrange(1 << 30)
        torch.manual_seed(seed)
        ids = torch.randint(0, _WORDS, (rows, random.randint(1, 7)))
        batch = ids, ids.roll(-1, 1)
        model.order = order
        torch.manual_seed(seed)
        loss = reference.step(*batch)
        found.append(Step(seed, order, batch, group["lr"], loss, evaluated(model, batch), copy.deepcopy(model.state_dict())))
    return found


def attack(random: Random, directory: Path) -> None:
    model = some_model(random)
    options = some_options(random, model)
    dtype = random.choice([torch.float32, torch.float32, torch.float32, torch.float64, torch.bfloat16])
    options["master_weights"] &= dtype is torch.bfloat16
    model.to(dtype)
    optimizer, chosen = random.choice(OPTIMIZERS)
    settings = {"lr": random.choice([1e-1, 1e-3]), **chosen}
    drive = FaultyDrive(random) if random.random() < 0.5 else None
    try:
        results = {name: options[name] for name in ("master_weights", "micro_batches", "max_norm")}
        steps = steps_in_memory(random, InMemory(model, optimizer, **results, **settings))
        training = OffloadedTraining(model, optimizer, path=directory, **settings, **options)
        with contextlib.nullcontext() if drive is None else drive.transfers:
            # In memory, too, loading casts NAdam's product of momenta, a float32, to the dtype of the parameter.
            loads = 0 if optimizer is torch.optim.NAdam and dtype is not torch.float32 else 2
            _train(random, training, model, steps, drive, loads)
        if list(directory.iterdir()):
            raise Wrong(f"close() has left {list(directory.iterdir())}")
    except Exception as error:
        faulty = "a drive that is well" if drive is None else "a drive that fails"
        if hasattr(error, "add_note"):
            error.add_note(
                f"on {faulty}: {dtype}, {optimizer.__name__} {settings}, {options}, checkpoints: {model.checkpoints}\n{model}"
            )
        raise


def _train(
    random: Random,
    training: OffloadedTraining,
    model: Model,
    steps: list[Step],
    drive: FaultyDrive | None,
    loads: int,
) -> None:
    for attempt in itertools.count():
        before = training.steps
        if before == len(steps):
            break
        step = steps[before]
        if drive is not None and attempt < _FAULTY_ATTEMPTS and random.random() < 0.5:
            drive.fail()
        made = _step(training, model, step, drive)
        if drive is not None:
            drive.heal()
        if training.steps != before + made:
            raise Wrong(f"a step that was {'made' if made else 'undone'} leaves {training.steps} steps, and there were {before}")
        if made and random.random() < 0.3 and not same_values(evaluated(model, step.batch), step.evaluated):
            raise Wrong(f"another loss than in memory after {before + 1} steps, without dropout")
        if training.steps and random.random() < 0.3:
            assert_same_values(training.state_dict()["model"], steps[training.steps - 1].state)
        if loads and random.random() < 0.2:
            loads -= 1
            training.load_state_dict(copy.deepcopy(training.state_dict()))
    assert_same_values(training.state_dict()["model"], steps[-1].state)
    training.close(restore=True)
    assert_same_values(model.state_dict(), steps[-1].state)


def _step(training: OffloadedTraining, model: Model, step: Step, drive: FaultyDrive | None) -> bool:
    """Make a step. Returns whether it was made; otherwise the drive has failed."""
    model.order = step.order
    for group in training.optimizer.param_groups:
        group["lr"] = step.lr
    torch.manual_seed(step.seed)
    try:
        loss = training.step(*step.batch)
    except OSError as error:
        if error.errno != errno.EIO or drive is None:
            raise
        return False
    if loss is None or not same_values(loss, step.loss):
        raise Wrong(f"in step {training.steps} the loss is {loss}, in memory {step.loss}")
    return True
