"""GPUDirect Storage for a machine without a GPU: stand_in_cufile.cpp in cuFile's place, beside the driver of stand_in.py.

Nothing here needs pytest to have started: interpreters of their own import it too.
"""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import tempfile
from pathlib import Path
from types import ModuleType

from deepnvme.ops.op_builder import GDSBuilder, OpBuilder, cache, jit, toolchain
from deepnvme.ops.op_builder.cuda import Found, GdsProbe

HERE = Path(__file__).resolve().parent

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


def _source(soname: str) -> Path:
    return HERE / f"stand_in_{soname[3 : soname.index('.')]}.cpp"


def compile_stand_in(soname: str, directory: Path, *flags: str) -> Path | None:
    """libcuda.so.1 or libcufile.so.0, made of the source with the name in between. None without a compiler."""
    compiler = toolchain.find()
    if isinstance(compiler, toolchain.Attempt):
        return None
    library = directory / soname
    always = ["-std=c++20", "-O0", "-g0", "-Wall", "-Wextra", "-shared", "-fPIC", "-pthread", f"-Wl,-soname,{soname}"]
    subprocess.run([*compiler.command, *always, *flags, str(_source(soname)), "-o", str(library), "-ldl"], check=True)
    return library


def cached_stand_in(soname: str, *flags: str) -> Path:
    """As :func:`compile_stand_in` where there is a compiler; compiled once, as ops are, because it takes seconds."""
    compiler = toolchain.find()
    assert isinstance(compiler, toolchain.Toolchain)
    made_of = (compiler.identity, flags, _source(soname).read_bytes())
    digest = hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]
    directory = cache.directory(f"stand_in_{digest}", make=True)
    if not (directory / soname).exists():
        with tempfile.TemporaryDirectory(dir=directory) as elsewhere:  # several processes may be here at once
            library = compile_stand_in(soname, Path(elsewhere), *flags)
            assert library is not None
            library.replace(directory / soname)
    return directory / soname


class CuFile:
    """The stand-in libcufile. Loaded before the op asks for it."""

    def __init__(self, path: Path | str) -> None:
        self._library = ctypes.CDLL(str(path))  # by its soname, the op's dlopen finds this one
        for name, (result, arguments) in _CUFILE.items():
            function = getattr(self._library, f"cufile_standin_{name}")
            function.restype, function.argtypes = result, arguments

    def call(self, name: str, *arguments: object) -> int:
        result: int = getattr(self._library, f"cufile_standin_{name}")(*arguments)
        return result

    def fail(self, function: str, calls: int = 0, result: int = 2) -> None:
        """The call after so many more fails, once."""
        self.call("fail", function.encode(), calls, result)

    def calls(self, function: str) -> int:
        return self.call("calls", function.encode())

    def forget_failures(self) -> None:
        self.call("forget_failures")

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


class ReadyBuilder(GDSBuilder):
    """Builds the op as where torch knows CUDA and cuFile is there: at ``library``, or where the loader finds it."""

    def __init__(self, library: Path | str | None = None) -> None:
        super().__init__()
        self._library = library

    def probe(self) -> GdsProbe:
        found = Found(str(self._library or "/nowhere/libcufile.so.0"), "1.14")
        return GdsProbe(Found(), Found(), Found(), found, Found(), torch_cuda="13.0")


def load_op(library: Path | str | None = None, compiled: Path | str | None = None) -> ModuleType:
    """``compiled``: what another process has got, which need not be looked for again."""
    builder = ReadyBuilder(library)
    if compiled is not None:
        OpBuilder._loaded_ops[builder.absolute_name()] = jit.import_extension(builder.absolute_name(), Path(compiled))
    return builder.load()
