"""Guard for a model that lost its values when its training was closed: used as it is, it would silently compute and save NaN."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn


class AbsentValues:
    """Makes a model's forward, ``state_dict()`` and copies raise RuntimeError until all of its parameters have values again.

    Parameters get values, in new memory, by ``load_state_dict``, by another training, or by an assignment to ``data``.

    Args:
        model: The model.
        params: The model's parameters without values, that is, without memory, as :meth:`ParameterBlock.detach` leaves them.
    """

    def __init__(self, model: nn.Module, params: Iterable[nn.Parameter]) -> None:
        self._absent = {param: param.data for param in params}
        self._model = weakref.ref(model)
        self._kind = type(model).__name__
        self._handles: list[Any] = []
        for module in model.modules():
            if any(map(self._is_absent, module.parameters())):
                self._handles += [
                    module.register_forward_pre_hook(self._before_forward),
                    module.register_state_dict_pre_hook(self._before_state_dict),  # type: ignore[no-untyped-call]
                    module.register_load_state_dict_pre_hook(self._before_loading),  # type: ignore[no-untyped-call]
                ]

    def _is_absent(self, param: nn.Parameter) -> bool:
        absent = self._absent.get(param)
        return absent is not None and param.data_ptr() == absent.data_ptr()

    def _check(self, params: Iterable[nn.Parameter]) -> None:
        if any(map(self._is_absent, params)):
            raise RuntimeError(
                f"the parameters of this {self._kind} have no values any more: the OffloadedTraining that has trained it was"
                " closed without restore=True. To use it, load_state_dict() all values, or make an OffloadedTraining of it with a"
                " checkpoint"
            )

    def _before_forward(self, module: nn.Module, _: object) -> None:
        self._check(module.parameters())
        model = self._model()
        if model is not None and not any(map(self._is_absent, model.parameters())):
            for handle in self._handles:
                handle.remove()

    def _before_state_dict(self, module: nn.Module, *_: object) -> None:
        self._check(module.parameters())

    @torch.no_grad()
    def _before_loading(
        self, module: nn.Module, state: Mapping[str, Any], prefix: str, metadata: Mapping[str, Any], *_: object
    ) -> None:
        """Allocate memory for the module's own parameters that ``state`` has values for, unless it is loaded by assignment."""
        if metadata.get("assign_to_params_buffers"):
            return
        for name, param in module.named_parameters(recurse=False):
            if self._is_absent(param) and getattr(state.get(prefix + name), "shape", None) == param.shape:
                param.data = param.data.clone(memory_format=torch.contiguous_format)

    def __reduce_ex__(self, protocol: Any) -> Any:
        model = self._model()
        if model is not None:
            self._check(model.parameters())
        return AbsentValues, (nn.Module(), ())  # a copy has values
