"""GPUDirect Storage for a machine without a GPU: stand_in_cuda.cpp and stand_in_cufile.cpp in the places of NVIDIA's libraries,
and tensors in their memory that pass for torch's.

Nothing here needs pytest to have started: interpreters of their own import it too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

from deepnvme.ops.op_builder import GDSBuilder, OpBuilder, jit, toolchain
from deepnvme.ops.op_builder.cuda import Found, GdsProbe

from ..memory import GUARD, PAGE

HERE = Path(__file__).resolve().parent

_DRIVER = {
    "allocate": (ctypes.c_uint64, [ctypes.c_int, ctypes.c_size_t]),
    "free": (None, [ctypes.c_uint64]),
    "reach": (ctypes.c_void_p, [ctypes.c_uint64, ctypes.c_size_t]),
    "stream": (ctypes.c_void_p, [ctypes.c_int]),
    "enqueue": (None, [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int]),
    "fail": (None, [ctypes.c_char_p, ctypes.c_int, ctypes.c_int]),
    "forget_failures": (None, []),
    "delay": (None, [ctypes.c_int]),
    "calls": (ctypes.c_int, [ctypes.c_char_p]),
    "live_streams": (ctypes.c_uint64, []),
    "live_events": (ctypes.c_uint64, []),
    "registered_bytes": (ctypes.c_uint64, []),
    "pageable_copies": (ctypes.c_uint64, []),
}

_CUFILE = {
    "fail": (None, [ctypes.c_char_p, ctypes.c_int, ctypes.c_int]),
    "forget_failures": (None, []),
    "calls": (ctypes.c_int, [ctypes.c_char_p]),
    "most": (None, [ctypes.c_size_t]),
    "version": (None, [ctypes.c_int]),
    "handles": (ctypes.c_int, []),
    "registered": (ctypes.c_int, []),
    "through_registered": (ctypes.c_uint64, []),
    "is_open": (ctypes.c_int, []),
    "compatible": (ctypes.c_int, []),
}


def compile_stand_in(soname: str, directory: Path, *flags: str) -> Path | None:
    """libcuda.so.1 or libcufile.so.0, made of the source with the name in between. None without a compiler."""
    compiler = toolchain.find()
    if isinstance(compiler, toolchain.Attempt):
        return None
    source = HERE / f"stand_in_{soname[3 : soname.index('.')]}.cpp"
    library = directory / soname
    always = ["-std=c++20", "-O0", "-g0", "-Wall", "-Wextra", "-shared", "-fPIC", "-pthread", f"-Wl,-soname,{soname}"]
    subprocess.run([*compiler.command, *always, *flags, str(source), "-o", str(library), "-ldl"], check=True)
    return library


def _loaded(soname: str, path: Path | str) -> ctypes.CDLL:
    """The one that is loaded already if one is: by that name, the op's dlopen finds it and no other."""
    try:
        return ctypes.CDLL(soname, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError:
        return ctypes.CDLL(str(path))


class _Library:
    def __init__(self, library: ctypes.CDLL, prefix: str, signatures: dict[str, tuple[type | None, list[type]]]) -> None:
        self._library, self._prefix = library, prefix
        for name, (result, arguments) in signatures.items():
            function = getattr(library, prefix + name)
            function.restype, function.argtypes = result, arguments

    def call(self, name: str, *arguments: object) -> int:
        result: int = getattr(self._library, self._prefix + name)(*arguments)
        return result

    def fail(self, function: str, calls: int = 0, result: int = 2) -> None:
        """The call after so many more fails, once."""
        self.call("fail", function.encode(), calls, result)

    def calls(self, function: str) -> int:
        return self.call("calls", function.encode())

    def forget_failures(self) -> None:
        self.call("forget_failures")


class CuFile(_Library):
    """The stand-in libcufile. Loaded before the op asks for it."""

    def __init__(self, path: Path | str) -> None:
        super().__init__(_loaded("libcufile.so.0", path), "cufile_standin_", _CUFILE)

    def most(self, nbytes: int) -> None:
        """Moved by one call; until the failures are forgotten."""
        self.call("most", nbytes)

    @property
    def files(self) -> int:
        """Registered now."""
        return self.call("handles")

    @property
    def tensors(self) -> int:
        """Registered now."""
        return self.call("registered")

    @property
    def calls_on_registered_memory(self) -> int:
        return self.call("through_registered")


class Stream:
    """A stream of the test's own. Its work is done in order, each ``after`` so many seconds; none of these calls waits."""

    def __init__(self, driver: StandIn, device: int) -> None:
        self._driver, self.device = driver, device
        self.cuda_stream = driver.call("stream", device)

    def fill(self, tensor: torch.Tensor, content: bytes, after: float) -> None:
        """``content`` will be in the tensor."""
        kept = ctypes.create_string_buffer(content, len(content))
        self._driver.kept.append(kept)
        self._driver.call("enqueue", self.cuda_stream, tensor.data_ptr(), kept, len(content), int(after * 1e6))


class DefaultStream:
    cuda_stream = 0


class DeviceTensor(torch.Tensor):
    """Its address is in device memory; what would touch that goes through the stand-in."""

    driver: StandIn

    is_cpu = property(lambda self: False)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]

    def get_device(self) -> int:
        return self.driver.device_of(self)

    def cpu(self, *_: object) -> torch.Tensor:  # type: ignore[override]
        content = bytearray(self.driver.content(self))
        return torch.frombuffer(content, dtype=torch.uint8).view(self.dtype) if content else torch.empty(0, dtype=self.dtype)


class StandIn(_Library):
    """The driver, and the device memory, streams and failures that a test wants."""

    def __init__(self, path: Path | str) -> None:
        super().__init__(_loaded("libcuda.so.1", path), "standin_", _DRIVER)
        self._devices: dict[int, tuple[int, int]] = {}  # of the memory at an address: its end, its device
        self._current: dict[int, Stream] = {}
        self.kept: list[object] = []
        DeviceTensor.driver = self

    def tensor(self, content: bytes, device: int = 0, misalignment: int = 0, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Of ``content``, ``misalignment`` bytes after the start of a page, with guard bytes before and after it."""
        size = PAGE + misalignment + len(content) + PAGE
        base = self.call("allocate", device, size)
        assert base
        inside = self.call("reach", base, size)
        ctypes.memset(inside, GUARD[0], size)
        ctypes.memmove(inside + PAGE + misalignment, content, len(content))
        if not content:
            return torch.empty(0, dtype=dtype).as_subclass(DeviceTensor)
        memory = (ctypes.c_char * len(content)).from_address(base + PAGE + misalignment)
        self._devices[base] = (base + size, device)
        weakref.finalize(memory, self._free, base)
        flat = torch.frombuffer(memory, dtype=torch.uint8).as_subclass(DeviceTensor)
        return flat.view(dtype) if dtype != torch.uint8 else flat

    def _free(self, base: int) -> None:
        del self._devices[base]
        self.call("free", base)

    def device_of(self, tensor: torch.Tensor) -> int:
        address = tensor.data_ptr()
        return next((device for base, (end, device) in self._devices.items() if base <= address < end), 0)

    def content(self, tensor: torch.Tensor) -> bytes:
        """What device memory holds now, whatever streams have still to do."""
        nbytes = tensor.numel() * tensor.element_size()
        return ctypes.string_at(self.call("reach", tensor.data_ptr(), nbytes), nbytes) if nbytes else b""

    def surroundings_are_intact(self, tensor: torch.Tensor) -> bool:
        begin, nbytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        before = ctypes.string_at(self.call("reach", begin - PAGE, PAGE), PAGE)
        after = ctypes.string_at(self.call("reach", begin + nbytes, PAGE), PAGE)
        return before == after == GUARD * PAGE

    def stream(self, device: int = 0) -> Stream:
        return Stream(self, device)

    @contextlib.contextmanager
    def using(self, stream: Stream) -> Iterator[Stream]:
        """It is the current one of its device meanwhile."""
        self._current[stream.device] = stream
        try:
            yield stream
        finally:
            del self._current[stream.device]

    def current_stream(self, device: int) -> Stream | DefaultStream:
        return self._current.get(device, DefaultStream())

    def delay(self, seconds: float = 200e-6) -> None:
        """How long a copy of a block takes."""
        self.call("delay", int(seconds * 1e6))

    def held(self) -> dict[str, int]:
        """What of the driver's has not been given back, and copies that were not from or to registered memory."""
        return {name: self.call(name) for name in ("live_streams", "live_events", "registered_bytes", "pageable_copies")}


class ReadyBuilder(GDSBuilder):
    """Builds the op as where torch knows CUDA and cuFile is there: at ``library``, or where the loader finds it."""

    def __init__(self, library: Path | str | None = None) -> None:
        super().__init__()
        self._library = library

    def probe(self) -> GdsProbe:
        found = Found(str(self._library or "/nowhere/libcufile.so.0"), "1.14")
        return GdsProbe(Found(), Found(), Found(), found, Found(), torch_cuda="13.0", mismatch="")


def load_op(library: Path | str | None = None, compiled: Path | str | None = None) -> ModuleType:
    """``compiled``: what another process has got, which need not be looked for again."""
    builder = ReadyBuilder(library)
    if compiled is not None:
        OpBuilder._loaded_ops[builder.absolute_name()] = jit.import_extension(builder.absolute_name(), Path(compiled))
    return builder.load()
