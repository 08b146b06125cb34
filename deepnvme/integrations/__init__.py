"""Implementations of other projects' interfaces by this package. Each module imports the project it is named after.

The modules are attributes of this package without an import of their own. One whose project is missing raises ImportError then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepnvme._lazy import from_modules

if TYPE_CHECKING:
    from . import accelerate as accelerate
    from . import deepspeed as deepspeed
    from . import graphbolt as graphbolt
    from . import sglang as sglang
    from . import transformers as transformers

__all__: list[str] = []

if not TYPE_CHECKING:
    __getattr__, __dir__ = from_modules(__name__, {}, ("accelerate", "deepspeed", "graphbolt", "sglang", "transformers"))
