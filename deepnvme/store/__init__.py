"""Named tensors stored on drives."""

from deepnvme.files.directory_lock import StoreLocked

from .catalog import CorruptTensor, TensorInfo
from .manifest import CorruptManifest
from .tensor_store import TensorStore

__all__ = ["CorruptManifest", "CorruptTensor", "StoreLocked", "TensorInfo", "TensorStore"]


def __dir__() -> list[str]:
    """Return the public names, without the submodules that define them."""
    return sorted(__all__)
