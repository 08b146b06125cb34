"""TensorNVMe's offloaders and file writer on this package's engine, for code that was written for TensorNVMe.

    import deepnvme.integrations.tensornvme as d
    d.enable()                                  # ``import tensornvme`` then imports these classes

``python -m deepnvme.integrations.tensornvme SCRIPT`` runs a program after that, unchanged.

TensorNVMe need not be installed, and is never imported. Contract: hpcaitech/TensorNVMe at commit cb5c3a9f.
"""

from typing import TYPE_CHECKING

from deepnvme._lazy import from_modules

if TYPE_CHECKING:
    from .async_file_io import AsyncFileWriter
    from .backends import get_backends, probe_backend
    from .enabling import disable, enable
    from .offload import DiskOffloader, Offloader

__all__ = ["AsyncFileWriter", "DiskOffloader", "Offloader", "disable", "enable", "get_backends", "probe_backend"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = from_modules(
        __name__,
        {
            "AsyncFileWriter": "async_file_io",
            **dict.fromkeys(("get_backends", "probe_backend"), "backends"),
            **dict.fromkeys(("disable", "enable"), "enabling"),
            **dict.fromkeys(("DiskOffloader", "Offloader"), "offload"),
        },
    )
