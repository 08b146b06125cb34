"""State dicts of an offloaded training: tensors are mapped from the drive, and loading goes block by block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from deepnvme.model.structure import weights_by_name
from deepnvme.model.weight_differences import WeightInfo, WeightMismatch, differences
from deepnvme.offload.activations.saved_tensor import is_distributed
from deepnvme.states.params import local_of
from deepnvme.states.partition import SubGroupPlanner
from deepnvme.states.state_dict import OffloadedStates
from deepnvme.states.sub_group import BlockLayout, BlockSection
from deepnvme.states.versions import Versioned
from deepnvme.telemetry.descriptions import shorten

from .blocks.frozen_parameters import FrozenParameters
from .blocks.parameter_block import ParameterBlock
from .blocks.trained_block import TrainedBlock
from .model_partition import names_of_parameters
from .step import TrainingStep


class TrainingState:
    """Returns and replaces the state of a training as of its last completed step.

    Modules whose parameters are on the drive raise an error if other code calls their ``state_dict()``.

    Args:
        trained: The model, its blocks, the optimizer's options, and the ranks.
        planner: Gives the optimizer's class.
        states: The optimizer's states.
        modules: Modules whose parameters are in memory only while in use.
    """

    def __init__(
        self, trained: TrainingStep, planner: SubGroupPlanner, states: OffloadedStates, modules: Iterable[nn.Module]
    ) -> None:
        self._trained, self._planner, self._states = trained, planner, states
        self._model, self._optimizer, self._ranks = trained.model, trained.optimizer, trained.ranks
        self._versions = trained.drive.versions
        self._guarding = True
        self._guards = [
            module.register_state_dict_pre_hook(self._refuse)  # type: ignore[no-untyped-call]
            for module in {trained.model, *(each for module in modules for each in module.modules())}
        ]

    def remove_hooks(self) -> None:
        """Remove the hooks from the modules."""
        for handle in self._guards:
            handle.remove()

    def _refuse(self, *_: object) -> None:
        if self._guarding:
            raise RuntimeError("the parameters are on the drive: take 'model' of OffloadedTraining.state_dict()")

    @contextlib.contextmanager
    def _unguarded(self) -> Iterator[None]:
        self._guarding = False
        try:
            yield
        finally:
            self._guarding = True

    def get(self) -> dict[str, Any]:
        """Return the training's state dict, see :meth:`OffloadedTraining.state_dict`. Raises OSError."""
        self.write_changed_rest()
        names = names_of_parameters(self._model)
        values: dict[torch.Tensor, torch.Tensor] = {}
        quantized: dict[str, torch.Tensor] = {}
        for block in self._trained.blocks:
            parameters, frozen = block.parameters, block.parameters.frozen
            layouts: list[tuple[Versioned, BlockLayout]] = [(parameters, parameters.layout)]
            if frozen is not None:
                layouts.append((self._dequantized(parameters, frozen), frozen.layout))
                for section in frozen.quantized_sections:
                    quantized[names[parameters.params[section.piece]]] = self._mapped(frozen, section)
            for of, layout in layouts:
                for section in layout.sections:
                    param = parameters.params[section.piece]
                    values[param] = self._distributed(parameters, param, self._mapped(of, section))
        with self._unguarded():
            model = self._model.state_dict(keep_vars=True)
        groups = [{**group, "params": [names[each] for each in group["params"]]} for group in self._optimizer.param_groups]
        model = {name: values.get(value, value) if isinstance(value, torch.Tensor) else value for name, value in model.items()}
        found: dict[str, Any] = {
            "model": model,
            "optimizer": {"state": self._optimizer_state(names), "param_groups": groups},
            "steps": self._trained.steps,
        }
        if quantized:
            found["quantized"] = quantized
        return found

    def write_changed_rest(self) -> None:
        """Write the parameters that stay in memory, if other code has changed them since the last step. Raises OSError.

        Compares them with their bytes on the drive, which are read for it. Frozen ones that are quantised there are left out.
        """
        rest = self._trained.blocks[-1].parameters
        frozen = rest.frozen
        parts: list[tuple[Versioned, BlockLayout]] = [(rest, rest.layout)]
        if frozen is not None and not frozen.quantized:
            parts.append((frozen, frozen.layout))
        for of, layout in parts if rest.holds else ():
            for section in layout.sections:
                if not _same_bytes(self._mapped(of, section), rest.params[section.piece].detach()):
                    self._trained.write_rest()
                    return

    def _optimizer_state(self, names: Mapping[torch.Tensor, str]) -> dict[str, dict[str, Any]]:
        """Return the optimizer states of each parameter, by the parameter's name."""
        found = {}
        for parameters in (block.parameters for block in self._trained.blocks):
            for param, shard in zip(parameters.params, parameters.shards, strict=True):
                if shard in self._states:
                    found[names[param]] = {
                        key: self._distributed(parameters, param, value) if _is_like(value, shard) else value
                        for key, value in self._states[shard].items()
                    }
        return found

    def _distributed(self, parameters: ParameterBlock, param: nn.Parameter, local: torch.Tensor) -> torch.Tensor:
        """Return a DTensor of a parameter, or of a state of its shape, from this process's part of it.

        Parameters that are whole in each process become DTensors as well, of some rows each, so that FSDP2 models can load them.
        A scalar, and with one process any tensor, is returned as it is.
        """
        if not self._ranks.several or not param.dim():
            return local
        return self._ranks.as_dtensor(local if parameters.ranks is not None else self._ranks.shard_of(local), param)

    def _mapped(self, versioned: Versioned, section: BlockSection) -> torch.Tensor:
        """Map one tensor of a block, in its own storage, since a ``.pt`` file cannot hold a storage with several dtypes."""
        if not section.nbytes:
            return torch.empty(section.shape, dtype=section.dtype, device="cpu")
        return self._versions.map([(versioned, section)]).as_strided(section.shape, section.stride)

    def _dequantized(self, parameters: ParameterBlock, frozen: FrozenParameters) -> Versioned:
        """Return the block on the drive with the values of frozen parameters. Writes a dequantised copy if they are quantised."""
        if not frozen.quantized:
            return frozen
        if frozen.copy.outdated:
            number = self._versions.next_of(frozen.copy)
            self._trained.uses.begin(parameters)
            try:
                self._versions.write(frozen.copy, number, frozen.values)
            finally:
                self._trained.uses.end(parameters)
            frozen.copy.written(number)
        return frozen.copy

    def load(self, state: Mapping[str, Any]) -> None:
        """Replace the training's state, see :meth:`OffloadedTraining.load_state_dict`. Raises ValueError, OSError."""
        _check_keys(state, ("model", "optimizer", "steps"), "a state")
        names, model, optimizer = names_of_parameters(self._model), state["model"], state["optimizer"]
        _check_keys(model, (), "the model of a state")
        _check_keys(optimizer, ("state", "param_groups"), "the optimizer of a state")
        _check_keys(optimizer["state"], (), "what the optimizer has as 'state'")
        for group in optimizer["param_groups"]:
            _check_keys(group, ("params",), "a parameter group of a state")
        for name, values in optimizer["state"].items():
            _check_keys(values, (), f"the optimizer's state of {name}")
        if not isinstance(state["steps"], int) or state["steps"] < 0:
            raise ValueError(f"steps must be a number of steps, at least 0, got {state['steps']!r}")
        options = {name: group for group in optimizer["param_groups"] for name in group["params"]}
        self._check_fits(model, {*optimizer["state"], *options}, names)
        self._check_groups(options, names)
        missing = [name for param, name in names.items() if param.requires_grad and name not in options]
        if missing:
            raise ValueError(f"the optimizer's param_groups do not have {shorten(missing, 8)}")
        self._check_states(optimizer["state"], options, names)
        self._check_shards(model, optimizer["state"], names)
        groups = self._optimizer.param_groups
        before = [dict(group) for group in groups]
        with self._trained.undone_if_it_fails():
            try:
                for group in filter(lambda each: each["params"], groups):
                    group.update({key: value for key, value in options[names[group["params"][0]]].items() if key != "params"})
                for block in self._trained.blocks:
                    self._load_block(block, names, model, state.get("quantized"), optimizer["state"])
                self._trained.commit(state["steps"])
            except BaseException:
                for group, values in zip(groups, before, strict=True):
                    group.clear()
                    group.update(values)
                raise
            for name, buffer in self._model.named_buffers():
                if name in model:
                    buffer.copy_(model[name])

    def _load_block(
        self,
        block: TrainedBlock,
        names: Mapping[torch.Tensor, str],
        model: Mapping[str, Any],
        quantized: Mapping[str, Any] | None,
        states: Mapping[str, Any],
    ) -> None:
        if not block.parameters.params:
            return
        found: dict[torch.Tensor, Any] = {}
        for param, shard in zip(block.trained, block.trained_shards, strict=True):
            state = states.get(names[param])
            if state is not None:
                found[shard] = {key: self._own(block.parameters, value, param) for key, value in state.items()}
        values = [self._own(block.parameters, model[names[param]], param) for param in block.parameters.params]
        self._trained.uses.begin_change(block.parameters)
        try:
            block.load(values, quantized, found, self._optimizer.param_groups)
        finally:
            self._trained.uses.end_change(block.parameters)

    def _own(self, parameters: ParameterBlock, value: Any, param: torch.Tensor) -> Any:
        """Return this process's part of a parameter's value or state: its rows, or all. May block to gather a DTensor."""
        if not isinstance(value, torch.Tensor):
            return value
        if parameters.ranks is not None:
            return parameters.ranks.local_shard(value, param)
        return self._ranks.whole_of(value, parameters.number) if value.shape == param.shape else local_of(value)

    def _check_shards(
        self, model: Mapping[str, Any], states: Mapping[str, Mapping[str, Any]], names: Mapping[torch.Tensor, str]
    ) -> None:
        """Raise ValueError if DTensors are sharded unlike this training, or differ in name between ranks. Blocks."""
        distributed = []
        for param, name in names.items():
            for key, value in {"": model[name], **states.get(name, {})}.items():
                if isinstance(value, torch.Tensor) and is_distributed(value) and value.shape == param.shape:
                    self._ranks.rows_in(value, f"{key} of {name}" if key else name)
                    distributed.append(f"{name} {key}")
        self._ranks.check_alike(distributed, "the names of the DTensors in the state")

    def _check_states(
        self, states: Mapping[str, Any], options: Mapping[str, Mapping[str, Any]], names: Mapping[torch.Tensor, str]
    ) -> None:
        """Raise ValueError if a parameter's states lack what the optimizer needs for a step, or have other shapes."""
        wrong = []
        kept: dict[tuple[int, int], dict[str, bool]] = {}  # most parameters are like others
        for param, name in names.items():
            if param.requires_grad and states.get(name):
                like = id(options[name]), param.dim()
                if like not in kept:
                    kept[like] = self._planner.states_kept(options[name], param.dim())
                for key, has_shape in kept[like].items():
                    if key not in states[name]:
                        wrong.append(f"{name}: {self._planner.optimizer_class.__name__} needs {key!r}")
                    elif key == "step" and not _is_count(states[name][key]):
                        wrong.append(f"step of {name}: {states[name][key]!r:.40} instead of a tensor of one number")
                    elif has_shape and (shape := tuple(getattr(states[name][key], "shape", ()))) != param.shape:
                        wrong.append(f"{key} of {name}: {shape} instead of {tuple(param.shape)}")
        if wrong:
            raise ValueError(f"these are no states to go on from: {shorten(wrong, 8)}")

    def _check_groups(self, options: Mapping[str, Mapping[str, Any]], names: Mapping[torch.Tensor, str]) -> None:
        """Raise ValueError if parameters of one group here have different options in the state: a group has one set."""
        for group in self._optimizer.param_groups:
            found = {names[param]: options[names[param]] for param in group["params"] if names[param] in options}
            kinds = {repr({key: value for key, value in each.items() if key != "params"}): name for name, each in found.items()}
            if len(kinds) > 1:
                raise ValueError(
                    f"the state has different options for {shorten(list(kinds.values()), 4)}, which are in one parameter group"
                    " here: make this OffloadedTraining with the param_groups of the one that was saved"
                )

    def _check_fits(self, state: Mapping[str, Any], stepped: Iterable[str], names: Mapping[torch.Tensor, str]) -> None:
        """Raise WeightMismatch unless a state has exactly the parameters of the model, in their shapes.

        Args:
            state: The model's state.
            stepped: Names of the parameters in the optimizer's state.
            names: Names of all parameters.
        """
        with self._unguarded():
            known = self._model.state_dict(keep_vars=True)
        weights = weights_by_name(self._model)
        wanted = {name: WeightInfo.of(each) for name, each in weights.items() if names.get(each) == name or name in state}
        tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        found = {name: WeightInfo.of(value) for name, value in tensors.items() if name in wanted or name not in known}
        wrong = differences(wanted, {}, found, {}, dtypes=False)
        wrong += [f"without a value, on the meta device: {name!r}" for name, value in tensors.items() if value.is_meta]
        wrong += [f"unexpected: {name!r} in the optimizer's state" for name in stepped if name not in names.values()]
        if wrong:
            raise WeightMismatch(f"this is the state of another model than this {type(self._model).__name__}", wrong)


def _check_keys(state: Any, keys: Iterable[str], what: str) -> None:
    """Raise ValueError if ``state`` is not a mapping with these keys. ``what`` names it in the message."""
    if not isinstance(state, Mapping):
        raise ValueError(f"{what} is a mapping, got {type(state).__name__}")
    missing = [repr(key) for key in keys if key not in state]
    if missing:
        raise ValueError(f"{what} has what state_dict() returns, and this one lacks {', '.join(missing)}")


def _is_count(value: Any) -> bool:
    """Return whether a value is a tensor of one number, at least 0."""
    return isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex() and value.item() >= 0


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether tensors of one dtype, shape and stride have the same bytes, so that NaN is the same as NaN."""
    return torch.equal(_as_bytes(one), _as_bytes(other))


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8, device="cpu")


def _is_like(value: Any, shard: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == shard.shape
