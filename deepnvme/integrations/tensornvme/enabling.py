"""Stand-in modules named ``tensornvme``, ``tensornvme.offload`` and so on, for programs that import TensorNVMe."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

from deepnvme._lazy import public_names

from .async_file_io import AsyncFileWriter, DescriptorWriter
from .backends import get_backends, probe_backend
from .offload import DiskOffloader, Offloader

__all__ = ["disable", "enable"]

__dir__ = public_names(__name__)

_CONTENTS: dict[str, dict[str, object]] = {
    "tensornvme": {"DiskOffloader": DiskOffloader},
    "tensornvme.offload": {"DiskOffloader": DiskOffloader, "Offloader": Offloader, "get_backends": get_backends},
    "tensornvme.async_file_io": {"AsyncFileWriter": AsyncFileWriter},
    "tensornvme._C": {
        "AsyncFileWriter": DescriptorWriter,
        "Offloader": Offloader,
        "get_backends": get_backends,
        "probe_backend": probe_backend,
    },
}
_modules: dict[str, ModuleType] = {}
"""The modules that :func:`enable` has made; none while it is disabled."""


def enable() -> None:
    """Make ``import tensornvme`` and its submodules import this package's classes, in this process.

    Call it before the program imports TensorNVMe or ColossalAI. TensorNVMe need not be installed; if it is, it is not imported.
    Idempotent.

    Raises:
        RuntimeError: If TensorNVMe itself has been imported already; nothing is changed then.
    """
    if _modules:
        return
    imported = [name for name in sys.modules if name.partition(".")[0] == "tensornvme"]
    if imported:
        raise RuntimeError(f"{imported[0]} has been imported already: call enable() before the program imports TensorNVMe")
    for name, contents in _CONTENTS.items():
        package, _, last = name.rpartition(".")
        module = ModuleType(name, "TensorNVMe's names, of deepnvme.integrations.tensornvme.")
        module.__spec__ = ModuleSpec(name, None, origin=__name__, is_package=not package)
        module.__package__ = package or name
        module.__dict__.update(contents, __all__=[*contents])
        if package:
            setattr(_modules[package], last, module)
        else:
            module.__path__ = []
        _modules[name] = module
    sys.modules.update(_modules)


def disable() -> None:
    """Take the modules away again. What was imported from them stays usable. Idempotent."""
    for name, module in _modules.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]
    _modules.clear()
