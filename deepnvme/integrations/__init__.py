"""Adapters for other projects. Each module is named after the project that it adapts; ``metrics`` serves several projects.

The modules are attributes of this package and need no import of their own. If a module's project is not installed, accessing
the attribute raises AttributeError, and importing the module raises ImportError; the message names what to install.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepnvme._lazy import from_modules

if TYPE_CHECKING:
    from . import accelerate as accelerate
    from . import deepspeed as deepspeed
    from . import lightning as lightning
    from . import lmcache as lmcache
    from . import metrics as metrics
    from . import sglang as sglang
    from . import tensornvme as tensornvme
    from . import torchrec as torchrec
    from . import torchrl as torchrl
    from . import transformers as transformers
    from . import transformers_checkpoints as transformers_checkpoints
    from . import transformers_training as transformers_training
    from . import vllm as vllm

__all__: list[str] = []

if not TYPE_CHECKING:
    __getattr__, __dir__ = from_modules(
        __name__,
        {},
        (
            "accelerate",
            "deepspeed",
            "lightning",
            "lmcache",
            "metrics",
            "sglang",
            "tensornvme",
            "torchrec",
            "torchrl",
            "transformers",
            "transformers_checkpoints",
            "transformers_training",
            "vllm",
        ),
    )
