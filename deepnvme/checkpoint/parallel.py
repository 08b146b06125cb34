"""Save one file with all ranks of a process group: each writes its shards, and the file is published when all have synced."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from deepnvme.engine import Engine
from deepnvme.memory.pool import BufferPool, buffer_pool
from deepnvme.telemetry.progress import Progress

from .background import raise_unseen, wait_for_saves
from .file_io import write
from .formats.file_image import FileImage
from .formats.sharding import Span
from .publication import Destination, Publication, name_the_final_file

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Result = TypeVar("Result")


class Description(NamedTuple):
    """What a rank tells the others of its part of the file, so that all can check that they save the same object."""

    digest: str
    """Hash of everything in the file but the tensors' bytes."""
    nbytes: int
    """Size of the file in bytes."""
    held: list[int]
    """Bytes that this rank has of each DTensor."""


class CollectiveSteps:
    """Steps that all ranks of a group run together, each only after all ranks have completed the previous one.

    Args:
        group: Process group of ``torch.distributed``.
        what: What the ranks are doing, for messages: "saving 'model.pt'".

    Raises:
        ValueError: If this process is not in the group.
    """

    def __init__(self, group: ProcessGroup, what: str) -> None:
        import torch.distributed as dist

        self._group = group
        self._what = what
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError(f"{what}: this process is not of the group given: only those that are may call this")

    def all(self, step: Callable[[], Result], undo: Callable[[], object] = lambda: None) -> list[Result]:
        """Run ``step`` on every rank and return the results of all ranks, in rank order. Collective. Blocks.

        If a step fails on any rank, every rank calls ``undo``, and raises after all have called it.

        Args:
            step: Returns a result that can be pickled.
            undo: Called if ``step`` failed on any rank. Must not raise.

        Raises:
            RuntimeError: On ranks whose own step succeeded, naming the ranks that failed and why.
            BaseException: On ranks that failed: their own error.
        """
        import torch.distributed as dist

        result: Result | None = None
        error: BaseException | None = None
        try:
            result = step()
        except BaseException as caught:  # of any kind: the other ranks are waiting for this one
            error = caught
        outcomes: list[Any] = [None] * self.size
        dist.all_gather_object(outcomes, (result, None if error is None else f"{type(error).__name__}: {error}"), self._group)
        failed = "; ".join(f"rank {rank}: {text}" for rank, (_, text) in enumerate(outcomes) if text is not None)
        if not failed:
            return [result for result, _ in outcomes]
        undo()
        with contextlib.suppress(RuntimeError):  # a dead rank cannot be waited for, and the first error matters more
            dist.all_gather_object([None] * self.size, None, self._group)
        raise error if error is not None else RuntimeError(f"{self._what}: {failed}")


def save_together(
    destination: Destination,
    make: Callable[[], FileImage],
    progress: Progress | None,
    group: ProcessGroup,
) -> None:
    """Write the image that each rank makes into one file, which rank 0 creates and publishes. Collective. Blocks.

    On an error nothing is published, and the temporary file is removed before any rank raises. Only after an error of
    ``Destination.end``, which is called after publication, the new file is in place; the message says so.

    Args:
        destination: Where rank 0 publishes the file.
        make: Returns this rank's image of the object.
        progress: Called with (bytes written, bytes to write) of this rank.
        group: Process group of ``torch.distributed``.

    Raises:
        ValueError: On all ranks, if their images differ, naming the ranks; or if together they do not hold each byte of a
            DTensor exactly once.
        RuntimeError: If another rank failed.
        Exception: Whatever a step raises on this rank.
    """
    path = destination.path
    ranks = CollectiveSteps(group, f"saving '{path}'")
    mine: list[tuple[FileImage, Engine, BufferPool]] = []

    def prepare() -> Description:
        """Make this rank's image, and return the description of it that the ranks compare."""
        raise_unseen()
        image = make()
        mine.append((image, destination.engine(), buffer_pool()))
        return Description(image.digest().hex(), image.nbytes, bytes_held(image))

    described = ranks.all(prepare)
    image, engine, memory = mine[0]
    check_descriptions(path, image, described)
    parts = sorted([*image.held, *(outside_dtensors(image) if ranks.rank == 0 else ())])
    new = Publication(destination, image.nbytes, engine) if ranks.rank == 0 else None
    temporary = ""

    def start() -> str:
        """Create the temporary file on rank 0, and return its path, so that the other ranks can open it."""
        if new is None:
            return ""
        wait_for_saves(path)
        new.begin()
        return str(new.temporary)

    def write_part() -> None:
        """Write this rank's ranges of the file."""
        try:
            with contextlib.nullcontext(new.file) if new is not None else engine.open(temporary, "r+") as file:
                if parts:
                    write(image, file, engine, memory, parts, progress)
                if destination.fsync:
                    engine.fsync(file).result()
        except OSError as error:
            name_the_final_file(error, temporary, str(path))
            raise

    def publish() -> None:
        """Rename the temporary file to its final name, on rank 0."""
        if new is not None:
            new.publish()
            destination.end()

    def discard() -> None:
        """Remove the temporary file if it was not published, on rank 0."""
        if new is not None:
            new.discard()

    try:
        temporary = ranks.all(start, discard)[0]
        ranks.all(write_part, discard)
        ranks.all(publish, discard)
    finally:
        discard()  # does nothing after success; after an interrupt it removes the temporary file


def check_descriptions(path: Path, image: FileImage, described: list[Description]) -> None:
    """Raise ValueError unless all ranks have images of the same object and together hold every byte of its DTensors once."""
    holders: dict[tuple[str, int], list[int]] = {}
    for rank, (digest, nbytes, _) in enumerate(described):
        holders.setdefault((digest, nbytes), []).append(rank)
    if len(holders) > 1:
        different = " and ".join(f"ranks {', '.join(map(str, ranks))}" for ranks in holders.values())
        raise ValueError(
            f"'{path}' is not saved: {different} hold different objects: other keys, order, shapes, dtypes or values that are no"
            " tensors, or equal ones that are one object here and several there (strings too); save the same on all"
        )
    for (first, last), *held in zip(image.spread, *(each.held for each in described), strict=True):
        if sum(held) != last - first:
            raise ValueError(
                f"'{path}' is not saved: of a DTensor of {last - first} bytes the ranks of the group hold {sum(held)}: give the"
                " group of all ranks of its mesh"
            )


def bytes_held(image: FileImage) -> list[int]:
    """Return the bytes that this rank has of each DTensor."""
    ends = [last for _, last in image.spread]
    held = [0] * len(ends)
    for first, last in image.held:
        held[bisect.bisect_right(ends, first)] += last - first
    return held


def outside_dtensors(image: FileImage) -> list[Span]:
    """Return the ranges of the file outside DTensors, which every rank has."""
    begins = [0, *(last for _, last in image.spread)]
    ends = [*(first for first, _ in image.spread), image.nbytes]
    return [(begin, end) for begin, end in zip(begins, ends, strict=True) if begin < end]
