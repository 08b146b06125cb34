"""CUDA for a machine without a GPU: stand_in_cuda.cpp in the driver's place, and tensors in its memory that pass for torch's."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import weakref
from collections.abc import Iterator
from pathlib import Path

import torch

from ..support.memory import GUARD, PAGE

OUT_OF_MEMORY, INVALID_VALUE, ILLEGAL_ADDRESS = 2, 1, 700

_SIGNATURES = {
    "allocate": (ctypes.c_uint64, [ctypes.c_int, ctypes.c_size_t]),
    "free": (None, [ctypes.c_uint64]),
    "reach": (ctypes.c_void_p, [ctypes.c_uint64, ctypes.c_size_t]),
    "stream": (ctypes.c_void_p, [ctypes.c_int]),
    "free_stream": (None, [ctypes.c_void_p]),
    "enqueue": (None, [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int]),
    "enqueue_back": (None, [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]),
    "hold": (ctypes.c_void_p, [ctypes.c_void_p]),
    "go_on": (None, [ctypes.c_void_p]),
    "break_stream": (None, [ctypes.c_void_p, ctypes.c_int, ctypes.c_int]),
    "fail": (None, [ctypes.c_char_p, ctypes.c_int, ctypes.c_int]),
    "forget_failures": (None, []),
    "lock": (None, []),
    "unlock": (None, []),
    "delay": (None, [ctypes.c_int]),
    "calls": (ctypes.c_int, [ctypes.c_char_p]),
    "live_streams": (ctypes.c_uint64, []),
    "live_events": (ctypes.c_uint64, []),
    "registered_bytes": (ctypes.c_uint64, []),
    "most_registered_bytes": (ctypes.c_uint64, []),
    "pageable_copies": (ctypes.c_uint64, []),
}


class Stream:
    """A stream of the test's own. Its work is done in order, each ``after`` so many seconds; none of these calls waits."""

    def __init__(self, driver: StandIn, device: int) -> None:
        self._driver = driver
        self.device = device
        self.cuda_stream = driver.call("stream", device)
        self._end = weakref.finalize(self, driver.call, "free_stream", self.cuda_stream)

    def fill(self, tensor: torch.Tensor, content: bytes, after: float) -> None:
        """``content`` will be in the tensor."""
        self._driver.call("enqueue", self.cuda_stream, tensor.data_ptr(), content, len(content), int(after * 1e6))

    def copy_to(self, buffer: ctypes.Array[ctypes.c_char], tensor: torch.Tensor, after: float) -> None:
        """What the tensor then holds will be in the buffer."""
        self._driver.call("enqueue_back", self.cuda_stream, tensor.data_ptr(), buffer, len(buffer), int(after * 1e6))

    def pause(self, seconds: float) -> None:
        """Nothing is done meanwhile."""
        nothing = self._driver.tensor(b"-", self.device)
        self.fill(nothing, b"-", seconds)

    @contextlib.contextmanager
    def held(self) -> Iterator[Stream]:
        """Nothing is done in the ``with`` block, however long that takes."""
        gate = self._driver.call("hold", self.cuda_stream)
        try:
            yield self
        finally:
            self._driver.call("go_on", gate)

    def break_off(self, after: float, result: int = ILLEGAL_ADDRESS) -> None:
        """Whatever comes after fails."""
        self._driver.call("break_stream", self.cuda_stream, int(after * 1e6), result)

    def finish(self) -> None:
        """Wait for all of it; the stream is gone then."""
        self._end()


class DefaultStream:
    cuda_stream = 0


class DeviceTensor(torch.Tensor):
    """Its address is in device memory; what would touch that goes through the stand-in."""

    driver: StandIn

    is_cpu = property(lambda self: False)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]

    def __repr__(self, **_: object) -> str:
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype})"  # pytest shows it where a test fails

    def get_device(self) -> int:
        return self.driver.device_of(self)

    def cpu(self, *_: object) -> torch.Tensor:  # type: ignore[override]
        content = bytearray(self.driver.content(self))
        return torch.frombuffer(content, dtype=torch.uint8).view(self.dtype) if content else torch.empty(0, dtype=self.dtype)

    def contiguous(self, *_: object) -> torch.Tensor:  # type: ignore[override]
        """Work of the current stream, as any copy on a device, and late."""
        if self.is_contiguous():
            return self
        driver, device = self.driver, self.get_device()
        copy = driver.tensor(b"\xee" * (self.numel() * self.element_size()), device, dtype=self.dtype)
        stream = driver.current_stream(device)
        assert isinstance(stream, Stream), "give the test a stream of its own"
        stream.fill(copy, driver.gather(self), 0.05)
        return copy


class StandIn:
    """The driver, and the device memory, streams and failures that a test wants."""

    def __init__(self, library: Path | str) -> None:
        self.path = str(library)
        self._library = ctypes.CDLL(self.path)  # by its soname, the op's dlopen finds this one
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self._library, f"standin_{name}")
            function.restype, function.argtypes = result, arguments
        self._devices: dict[int, tuple[int, int]] = {}  # of the memory at an address: its end, its device
        self._current: dict[int, Stream] = {}
        self.may_keep_some = False
        """Said by a test after which not all can have been given back."""
        DeviceTensor.driver = self

    def call(self, name: str, *arguments: object) -> int:
        result: int = getattr(self._library, f"standin_{name}")(*arguments)
        return result

    # -- memory

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
        begin = base + PAGE + misalignment
        memory = (ctypes.c_char * len(content)).from_address(begin)
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
        if tensor.numel() == 0:
            return b""
        assert tensor.is_contiguous()
        nbytes = tensor.numel() * tensor.element_size()
        return ctypes.string_at(self.call("reach", tensor.data_ptr(), nbytes), nbytes)

    def gather(self, tensor: torch.Tensor) -> bytes:
        """The same for a tensor that is not contiguous, in the order of its elements."""
        size, begin = tensor.element_size(), tensor.data_ptr()
        places = itertools.product(*(range(length) for length in tensor.shape))
        elements = (sum(i * stride for i, stride in zip(place, tensor.stride(), strict=True)) for place in places)
        return b"".join(ctypes.string_at(self.call("reach", begin + at * size, size), size) for at in elements)

    def guards_are_intact(self, tensor: torch.Tensor) -> bool:
        begin, nbytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        before = ctypes.string_at(self.call("reach", begin - PAGE, PAGE), PAGE)
        after = ctypes.string_at(self.call("reach", begin + nbytes, PAGE), PAGE)
        return before == after == GUARD * PAGE

    # -- streams

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

    # -- failures and figures

    def fail(self, function: str, calls: int = 0, result: int = OUT_OF_MEMORY) -> None:
        """The call after so many more fails, once. A copy with " later" to its name fails on the device, and all that its stream
        is given after it."""
        self.call("fail", function.encode(), calls, result)

    def forget_failures(self) -> None:
        self.call("forget_failures")

    def delay(self, seconds: float = 200e-6) -> None:
        """How long a copy of a block takes."""
        self.call("delay", int(seconds * 1e6))

    def calls(self, function: str) -> int:
        return self.call("calls", function.encode())

    def held(self) -> dict[str, int]:
        """What of the driver's has not been given back, and copies so far that were not from or to registered memory."""
        return {name: self.call(name) for name in ("live_streams", "live_events", "registered_bytes", "pageable_copies")}

    def registered_bytes(self) -> int:
        return self.call("registered_bytes")

    def most_registered_bytes(self) -> int:
        """At a time, since it was last asked for."""
        return self.call("most_registered_bytes")
