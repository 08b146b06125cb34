"""SGLang: an offloader that streams weights from a drive, and a storage backend of HiCache that keeps KV cache on drives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepnvme._lazy import from_modules

try:
    import sglang  # type: ignore[import-not-found]  # noqa: F401
except ImportError as error:
    raise ImportError(f"deepnvme.integrations.sglang needs SGLang 0.5 (pip install sglang): {error}") from error

if TYPE_CHECKING:
    from .hicache import NVMeHiCache as NVMeHiCache
    from .offloader import StreamingOffloader as StreamingOffloader
    from .offloader import enable as enable

__all__ = ["NVMeHiCache", "StreamingOffloader", "enable"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = from_modules(
        __name__, {"NVMeHiCache": "hicache", "StreamingOffloader": "offloader", "enable": "offloader"}
    )
