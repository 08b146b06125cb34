"""The process in which a library moves tensors: ``python -m harness.transfer_worker LIBRARY REQUESTS REPLIES``.

Runs in the interpreter that has the library, ours or DeepSpeed's, and stays, so that neither imports nor allocations nor
page faults of the tensors are ever measured.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import resource
import sys
from collections.abc import Callable
from typing import Any

import torch

from harness.meter import measure
from harness.serving import serve
from harness.tensors import fill_with, holds

Transfer = Callable[[], None]


class _Tensors:
    """Tensors of one shape, by kind of memory. Kept until another shape is asked for: touching 1 GiB takes longer than
    writing it."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._shape: tuple[int, int] | None = None
        self._kept: dict[str, list[torch.Tensor]] = {}
        self._locked: list[torch.Tensor] = []

    def get(self, memory: str, count: int, nbytes: int) -> list[torch.Tensor]:
        if self._shape != (count, nbytes):
            self.free()
            self._shape = (count, nbytes)
        if memory not in self._kept:
            self._kept[memory] = self._allocate(memory, count, nbytes)
        return self._kept[memory]

    def free(self) -> None:
        self._kept.clear()
        while self._locked:
            self._handle.free_cpu_locked_tensor(self._locked.pop())
        self._shape = None

    def _allocate(self, memory: str, count: int, nbytes: int) -> list[torch.Tensor]:
        if memory == "pinned":
            # Slices of one locked buffer, as swappers hold them; DeepSpeed knows slices of its buffers for pinned, too.
            buffer = self._handle.new_cpu_locked_tensor(count * nbytes, torch.empty(0, dtype=torch.uint8))
            self._locked.append(buffer)
            tensors = [buffer[i * nbytes : (i + 1) * nbytes] for i in range(count)]
        elif memory == "ordinary":
            tensors = [torch.empty(nbytes, dtype=torch.uint8) for _ in range(count)]
        elif memory == "misaligned":
            tensors = [torch.empty(nbytes + 1, dtype=torch.uint8)[1:] for _ in range(count)]
        else:
            raise ValueError(f"unknown kind of memory {memory!r}")
        for index, tensor in enumerate(tensors):
            fill_with(tensor, 0, index * nbytes)
        return tensors


class Worker:
    """One library, its faces made on first use."""

    def __init__(self, library: str, backend: str) -> None:
        self._library = library
        self._options: dict[str, Any] = {} if backend == "auto" else {"backend": backend}
        if library == "deepspeed":
            # DeepSpeed opens a file as its transfer is queued: 4000 at once.
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        # The same names in both, which is the point.
        self._builder = importlib.import_module(f"{library}.ops.op_builder").AsyncIOBuilder()
        self._op = self._builder.load()
        self._handle = self._op.aio_handle(**self._options)
        self._engine: Any = None
        self._tensors = _Tensors(self._handle)

    def describe(self) -> dict[str, Any]:
        described: dict[str, Any] = {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "block_size": self._handle.get_block_size(),
            "queue_depth": self._handle.get_queue_depth(),
        }
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            described["version"] = importlib.metadata.version(self._library)
        if self._library == "deepnvme":
            described["backend"] = self._face("engine").backend
            described["prebuilt"] = bool(self._builder.is_prebuilt())
        return described

    def transfer(
        self,
        *,
        face: str,
        memory: str,
        operation: str,
        paths: list[str],
        nbytes: int,
        tensors_a_file: int = 1,
        fill: int | None = None,
        check: int | None = None,
    ) -> dict[str, Any]:
        """Move tensors of ``nbytes`` to or from each path. ``fill``, ``check``: patterns that the tensors hold before, and must
        hold after."""
        tensors = self._tensors.get(memory, len(paths) * tensors_a_file, nbytes)
        if tensors_a_file > 1:
            tensors = tensors[::-1]  # neighbours in the file are none in memory, so that they are not moved together
        if fill is not None:
            for index, tensor in enumerate(tensors):
                fill_with(tensor, fill, index * nbytes)
        if tensors_a_file > 1:
            measured = measure(self._of_one_file(operation, tensors, paths[0], nbytes))
        else:
            measured = measure(self._prepared(self._face(face), operation, tensors, paths, 0))
        if check is not None:
            for index, tensor in enumerate(tensors):
                if not holds(tensor, check, index * nbytes):
                    raise ValueError(f"tensor {index} of {len(tensors)} does not hold what its file does")
        return measured

    def footprint(
        self, *, face: str, operation: str, path: str, offset: int, nbytes: int, options: dict[str, int]
    ) -> dict[str, Any]:
        """Memory that a new engine or handle takes for its first request, one that is aligned in no way."""
        (tensor,) = self._tensors.get("misaligned", 1, nbytes)
        if operation == "write":
            fill_with(tensor, 0, offset)
        # Code, allocator arenas and imports that come with the first use of anything are not the request's.
        (small,) = _Tensors(self._handle).get("pinned", 1, 4096)
        self._prepared(self._new_face(face), "read", [small], [path], 0)()

        measured = measure(lambda: self._prepared(self._new_face(face, **options), operation, [tensor], [path], offset)())
        if operation == "read" and not holds(tensor, 0, offset):
            raise ValueError("the tensor does not hold what its file does")
        return measured

    def _face(self, face: str) -> Any:
        if face == "handle":
            return self._handle
        if self._engine is None:
            self._engine = self._new_face("engine")
        return self._engine

    def _new_face(self, face: str, **options: Any) -> Any:
        options |= self._options
        if face == "handle":
            return self._op.aio_handle(**options)
        import deepnvme

        return deepnvme.Engine(**options)

    def _of_one_file(self, operation: str, tensors: list[torch.Tensor], path: str, nbytes: int) -> Transfer:
        """By one call, in the order of the file."""
        engine = self._face("engine")
        submit = engine.read_many if operation == "read" else engine.write_many
        offsets = [index * nbytes for index in range(len(tensors))]
        return lambda: submit(tensors, path, offsets).result()

    def _prepared(self, face: Any, operation: str, tensors: list[torch.Tensor], paths: list[str], offset: int) -> Transfer:
        if hasattr(face, "wait"):
            start = face.async_pread if operation == "read" else face.async_pwrite

            def through_handle() -> None:
                for tensor, path in zip(tensors, paths, strict=True):
                    # DeepSpeed reports a refusal as -1.
                    if start(tensor, path, offset) != 0:
                        raise OSError(f"{operation} of '{path}' was refused")
                completed = face.wait()
                if completed != len(paths):
                    raise OSError(f"wait() returned {completed} for {len(paths)} requests")

            return through_handle

        if len(paths) > 1:
            submit_many = face.read_many if operation == "read" else face.write_many
            return lambda: submit_many(tensors, paths, [offset] * len(paths)).result()
        submit = face.read if operation == "read" else face.write
        return lambda: submit(tensors[0], paths[0], offset).result()


def main() -> None:
    library, backend, request_fd, reply_fd = sys.argv[1:]
    serve(lambda: Worker(library, backend), ("transfer", "footprint"), int(request_fd), int(reply_fd))


if __name__ == "__main__":
    main()
