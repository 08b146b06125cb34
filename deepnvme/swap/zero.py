"""Public names of the swapper classes for DeepSpeed, which are in :mod:`deepnvme.integrations.deepspeed.swap_tensor`."""

from deepnvme.integrations.deepspeed.swap_tensor import *  # noqa: F403
from deepnvme.integrations.deepspeed.swap_tensor import __all__ as __all__
