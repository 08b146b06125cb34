"""The forward that replaces a module's own while weights of its model are read from the drive."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch._guards import detect_fake_mode

FIRST = "close(restore=True) its stream first"
"""What to do before a use that needs all weights in memory, for messages."""


class ReplacedForward:
    """Replaces a module's forward: calls ``call(forward, args, kwargs)``, and refuses what would need all weights in memory.

    Args:
        called: Runs a function without arguments, one thread at a time, and returns its result.
        forward: The module's own forward.
        call: Runs the forward with the weights that it needs.
    """

    def __init__(self, called: Callable[[Callable[[], Any]], Any], forward: Callable[..., Any], call: Callable[..., Any]) -> None:
        functools.update_wrapper(self, forward)  # transformers and others inspect a forward's signature
        self._called, self._forward, self._call = called, forward, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            _refuse_to_compile()
        if torch._C._is_tracing():  # a trace keeps the tensors that it has recorded, even if it fails
            raise RuntimeError(f"a model whose weights are streamed cannot be traced by torch.jit: {FIRST}")
        if torch._C._len_torch_dispatch_stack() and detect_fake_mode() is not None:
            raise RuntimeError(f"a model whose weights are streamed does not compute with fake tensors: {FIRST}")
        return self._called(functools.partial(self._call, self._forward, args, kwargs))

    def __getattr__(self, name: str) -> NoReturn:
        """Raise AttributeError, with advice for users of torch.jit.script and torch.export, which look for a function's code."""
        raise AttributeError(f"the forward of a model whose weights are streamed has no {name}, for it is no function: {FIRST}")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise RuntimeError(f"a model whose weights are streamed cannot be copied or pickled: {FIRST}")


def check_process(process: int) -> None:
    """Raise RuntimeError unless this is the process that made the model's stream: a forked child has none of its threads."""
    if os.getpid() != process:
        raise RuntimeError(f"the model is streamed in process {process}, and not in one forked from it: load the model here")


def _refuse_to_compile() -> NoReturn:
    from torch._dynamo.exc import TorchRuntimeError  # which it does not take for a bug of its own; a RuntimeError

    raise TorchRuntimeError(f"a model whose weights are streamed cannot be compiled by torch.compile: {FIRST}")


# As torch._dynamo.assume_constant_result does, whose import takes a second: what is so marked runs when torch.compile comes to
# it, which ends the compiling with the error. An exception that it only traces would have it go on without compiling here, and
# read weights into graphs elsewhere.
_refuse_to_compile._dynamo_marked_constant = True  # type: ignore[attr-defined]
