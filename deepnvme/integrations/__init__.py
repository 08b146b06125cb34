"""Adapters for other projects. Each module is named after the project that it imports; ``metrics`` serves several.

The modules are attributes of this package without an import of their own. One whose project is missing raises
AttributeError then, and ImportError where it is imported; the message names what to install.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepnvme._lazy import from_modules

if TYPE_CHECKING:
    from . import accelerate as accelerate
    from . import deepspeed as deepspeed
    from . import graphbolt as graphbolt
    from . import metrics as metrics
    from . import sglang as sglang
    from . import tensornvme as tensornvme
    from . import transformers as transformers
    from . import transformers_training as transformers_training

__all__: list[str] = []

if not TYPE_CHECKING:
    __getattr__, __dir__ = from_modules(
        __name__,
        {},
        ("accelerate", "deepspeed", "graphbolt", "metrics", "sglang", "tensornvme", "transformers", "transformers_training"),
    )
