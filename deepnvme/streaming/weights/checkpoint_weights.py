"""A checkpoint's weights, streamed from the checkpoint's own files. Nothing is written.

The weights of a block usually lie next to each other in a file, but begin at any byte: of 324 tensors of a checkpoint, all
began at 8 mod 64. A direct read without a copy has to begin and end at pages. So neighbouring weights are read as one *run*,
which is widened to whole pages: at most 8 KiB more than the weights. An extent is the runs of its weights, one after another.

    file      |....aaaaaaaabbbb|bbbbbbbbcccccc..|   a, b, c: weights of one block; |: multiples of 4096
    extent    |....aaaaaaaabbbb|bbbbbbbbcccccc..|   the model's weights are views of this memory

A weight that the model wants in another form is copied after the read: see :attr:`Weight.elements`. The pieces of a weight that
are several tensors in the files, such as the experts of a mixture, are read right where they belong in it. The engine copies
them on the way, since they begin at other places of a page in memory than in the file. An FP8 weight is dequantised instead of
copied. The scales of an extent's weights are runs of their own, which come first.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from deepnvme.checkpoint.file_io import Version, file_version
from deepnvme.checkpoint.formats.elements import Elements
from deepnvme.checkpoint.formats.pt_records import CorruptCheckpoint
from deepnvme.checkpoint.weight_locations import Location, OpenFiles, files_of, weights_in
from deepnvme.drives.profiles import engine_for
from deepnvme.memory.alignment import PAGE, padded
from deepnvme.memory.lease import Transfer
from deepnvme.memory.tensor_bytes import check_storable, contiguous_strides
from deepnvme.model.structure import find_ties, weights_by_name
from deepnvme.model.weight_differences import WeightInfo, WeightMismatch, described
from deepnvme.telemetry.descriptions import representation, shorten, size_for_people, state_text
from deepnvme.transfer.gather import Transfers

from .build_pipeline import structure_for
from .extent_store import ExtentStore
from .manifest import Extent, ScalesInExtent, Weight
from .places import MergedWeight, Place, Run, ScaledWeight, paths_of
from .scales import quantization_beside, with_scales
from .weight_store import IN_FLIGHT_BYTES

if TYPE_CHECKING:
    from deepnvme.drives.aio_config import AioConfig

_DEVICE_ALIGNMENT = 16
"""Bytes. Least alignment of weights on a CUDA device, whose libraries choose other kernels for less."""


class CheckpointWeights(ExtentStore):
    """A model's weights where they lie in checkpoint files. Reads them; writes nothing. Thread-safe.

    A file that was written to, replaced or removed since ``versions`` were taken makes the reads of its weights fail.

    Args:
        weights: Where each weight of the model lies, by name.
        versions: Version of each file, taken before its header was read: see :func:`file_version`.
        model: The model that the weights are for. It may be on the meta device. Floating-point weights of other dtypes are
            converted to the model's as they are read, FP8 weights with their scales.
        device: Where the model computes.
        aio_config: Settings of the engine; None for the profile of the drive, see :func:`deepnvme.engine_for`.

    Raises:
        WeightMismatch: If the weights are not those of ``model``.
        TypeError: If a weight is of a kind that cannot be streamed, such as a sparse tensor; or if ``aio_config`` is not an
            AioConfig.
        OSError: If the kernel refuses the backend that ``aio_config`` names.
    """

    def __init__(
        self,
        weights: Mapping[str, Place],
        versions: Mapping[str, Version],
        model: nn.Module,
        device: torch.device | str | None = None,
        aio_config: AioConfig | None = None,
    ) -> None:
        _check_located(weights, versions)
        self._versions = dict(versions)
        self._process = os.getpid()
        self._closed = False
        self._lock = threading.Lock()
        self._engine = engine_for({os.path.dirname(path) or "." for path in versions}, aio_config, IN_FLIGHT_BYTES)
        try:
            self._files = OpenFiles(self._engine)
            found = {name: _info_of(weight) for name, weight in weights.items()}
            structure, names = structure_for(found, find_ties(weights, _identity), model)
            alignment = _DEVICE_ALIGNMENT if torch.device(device or "cpu").type == "cuda" else 1
            infos = _wanted(found, model, names)
            sizes = {path: version[_SIZE] for path, version in versions.items()}
            extents, self._runs = {}, {}
            for each in structure.extents():
                inside = {name: (weights[names[name]], infos[name]) for name in each.weights}
                extents[each.name], self._runs[each.name] = lay_out(each.name, inside, sizes, alignment)
        except BaseException:
            self._engine.close()
            raise
        super().__init__(extents, structure.needs(), structure.ties)

    @property
    def title(self) -> str:
        """What the weights are read from, for error messages."""
        return f"the checkpoint in {shorten(map(repr, self._versions))}"

    def read(self, extent: str, out: torch.Tensor) -> Transfer:
        """Start reading an extent; return at once.

        Args:
            extent: Name of the extent.
            out: ``extents[extent].nbytes`` bytes (uint8) on the CPU. They must not be touched until the transfer is done.

        Returns:
            The transfer. Its error, if any, is an OSError that names the file: CorruptCheckpoint if the file was changed or
            cut off since the weights were located.

        Raises:
            KeyError: If there is no such extent.
            OSError: If a file cannot be opened, or was cut off.
            ValueError: If this object is closed.
        """
        runs = self._runs[extent]
        started = Transfers()
        with self._lock:
            for run in runs:
                try:
                    started.start(self._files.read, run.path, run.offset, out[run.place : run.place + run.nbytes])
                except OSError as error:
                    check_unchanged([run.path], self._versions, error)
                    raise
        return CheckedRead(started, list(dict.fromkeys(run.path for run in runs)), self._versions)

    def verifies(self, extent: str) -> bool:
        """Return True: after each read, the versions of the extent's files are compared."""
        return True

    def close(self) -> None:
        """Wait for reads in flight, and close the files. Idempotent."""
        self._closed = True
        with self._lock:
            self._files.close()
        self._engine.close()

    def __repr__(self) -> str:
        return representation(
            self,
            lambda: f"of {shorten(map(repr, self._versions))}",
            lambda: f"{len(self.weights)} weights, {len(self.blocks)} blocks",
            lambda: size_for_people(self.nbytes),
            lambda: state_text(self._closed, self._process),
        )


class CheckedRead:
    """A transfer from checkpoint files, whose :meth:`exception` also finds out whether a file was changed.

    Args:
        reads: The transfer.
        paths: The files.
        versions: Version of each file, by path, from before its header was read.
    """

    def __init__(self, reads: Transfer, paths: Sequence[str], versions: Mapping[str, Version]) -> None:
        self._reads, self._paths, self._versions = reads, paths, versions

    def done(self) -> bool:
        """Return whether all reads have ended. Never blocks."""
        return self._reads.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for all reads. Return the first error, or one that says that a file was changed; None if there is none."""
        error = self._reads.exception(timeout)
        try:
            check_unchanged(self._paths, self._versions, error)
        except OSError as changed:
            return changed
        return error


def located_in(checkpoint: str | os.PathLike[str], model: nn.Module) -> tuple[dict[str, Place], dict[str, Version]]:
    """Return where the weights of a checkpoint lie, by name, and the versions of its files. Blocks while headers are read.

    Weights of experts that :func:`offload_experts` reads on demand are left out.

    Args:
        checkpoint: As for :func:`deepnvme.checkpoint.weight_locations.weights_in`.
        model: The model that the weights are for.

    Returns:
        (weights, versions): the weights by name, and the version of each file, by path, from before its header was read.

    Raises:
        WeightMismatch: If experts of the model are read on demand, and the checkpoint has weights that the model does not have.
        TypeError: If a weight of the checkpoint lies in no file as it is in memory.
        CorruptCheckpoint: If the checkpoint was changed meanwhile.
        Exception: Any error of :func:`deepnvme.checkpoint.weight_locations.weights_in`.
    """
    checkpoint = os.path.abspath(checkpoint)  # the current directory may change while the model is streamed
    versions: dict[str, Version] = {}
    for path in files_of(checkpoint):
        with contextlib.suppress(FileNotFoundError):  # of which weights_in says more
            versions[path] = file_version(path)
    own = weights_by_name(model)
    weights = _without_experts(with_scales(weights_in(checkpoint), quantization_beside(checkpoint), own=own), model, own)
    _check_located(weights, versions)
    return weights, versions


def _without_experts(weights: dict[str, Place], model: nn.Module, own: Container[str]) -> dict[str, Place]:
    """Return the weights of a checkpoint other than those of experts that are read on demand.

    Raises WeightMismatch if there are such experts, and weights that the model does not have.
    """
    parameters = (
        (path, *each) for path, module in model.named_modules(remove_duplicate=False) for each in module._parameters.items()
    )
    experts = {f"{path}.{key}" for path, key, weight in parameters if hasattr(weight, "on_demand")}
    modules = {name.rpartition(".")[0] for name in experts}

    def is_expert(name: str) -> bool:
        """Return whether a weight in the files is one of an experts' module, or that of one of its experts, by number."""
        numbered = re.match(r"(.+)\.\d+\.", name)
        return name in experts or (numbered is not None and numbered[1] in modules and name not in own)

    others = {name: place for name, place in weights.items() if not is_expert(name)}
    unexpected = [f"unexpected: {name!r}" for name in others if name not in own]
    if experts and unexpected:
        text = f"experts of this {type(model).__name__} are read on demand, and the checkpoint has weights under names that the"
        text += " model does not have: if transformers renames them, use deepnvme.streaming.from_pretrained(experts='on-demand')"
        raise WeightMismatch(text, unexpected)
    return others


def check_unchanged(paths: Iterable[str], versions: Mapping[str, Version], cause: BaseException | None = None) -> None:
    """Raise CorruptCheckpoint if one of the files is no longer the one in which the weights were located.

    Args:
        paths: Paths of the files.
        versions: Their versions at that time, by path.
        cause: Becomes the cause of the error.

    Raises:
        FileNotFoundError: If a file is gone.
    """
    for path in paths:
        if file_version(path) != versions.get(path):
            raise CorruptCheckpoint(path, "it was changed while its weights were streamed: load the model again") from cause


_SIZE = 2
"""Index of a file's size in its :data:`Version`."""


def _check_located(weights: Mapping[str, Place], versions: Mapping[str, Version]) -> None:
    """Check that each weight with elements lies in a file whose version is known.

    Raises:
        TypeError: If a weight with elements is in memory.
        CorruptCheckpoint: If the version of a weight's file is not known.
    """
    for name, weight in weights.items():
        if isinstance(weight, torch.Tensor):
            check_storable(name, weight)
            if weight.numel():
                text = f"weight {name!r} lies in no file as it is in memory, so it cannot be streamed: build a WeightStore"
                raise TypeError(text)
            continue
        for path in paths_of(weight):
            if path not in versions:
                raise CorruptCheckpoint(path, "the checkpoint was changed while it was opened: load the model again")


def _info_of(weight: Place) -> WeightInfo:
    """Return the dtype and shape of a weight in its file."""
    return WeightInfo.of(weight) if isinstance(weight, torch.Tensor) else weight.info


def _identity(weight: Place) -> object:
    """Return a key that is equal for tied weights: the place in files. None for a weight without elements."""
    return None if isinstance(weight, torch.Tensor) or not weight.info.nbytes else weight


def _wanted(found: Mapping[str, WeightInfo], model: nn.Module, names: Mapping[str, str]) -> dict[str, WeightInfo]:
    """Return the dtype and shape that the model wants of each weight, by the weight's first name.

    Args:
        found: Dtype and shape of the weights in the files.
        model: The model.
        names: The name in ``found`` of each weight.

    Raises:
        WeightMismatch: If dtypes differ that are not both of floating point.
    """
    infos, _ = described(model)
    wanted = {name: infos[name] for name in names}
    wrong = [
        f"dtype: {name!r} should be {info}, found {found[names[name]]}"
        for name, info in wanted.items()
        if info.dtype != (dtype := found[names[name]].dtype) and not (info.dtype.is_floating_point and dtype.is_floating_point)
    ]
    if wrong:
        raise WeightMismatch(f"these are not the weights of {type(model).__name__}", wrong)
    return wanted


def lay_out(
    name: str, weights: Mapping[str, tuple[Place, WeightInfo]], sizes: Mapping[str, int], alignment: int = 1
) -> tuple[Extent, tuple[Run, ...]]:
    """Return an extent of weights in files, and the runs to read for it. Merged weights come last.

    Args:
        name: Name of the extent.
        weights: For each weight, by name: where it lies, and the dtype and shape that the model wants.
        sizes: Bytes of the files, by path.
        alignment: Least alignment in bytes that the model wants of a weight, besides the size of the dtype.
    """
    codes = {weight: each.codes if isinstance(each, ScaledWeight) else each for weight, (each, _) in weights.items()}
    located = {weight: each for weight, each in codes.items() if isinstance(each, Location) and each.info.nbytes}
    scaled = {weight: each.parts for weight, (each, _) in weights.items() if isinstance(each, ScaledWeight)}
    runs, scales_at = _runs([part.scales for parts in scaled.values() for part in parts], sizes, 0)
    own, places = _runs(located.values(), sizes, _end(runs))
    runs += own
    placed = []

    def place(weight: str, offset: int) -> None:
        """Add a weight, which lies at ``offset`` of the extent."""
        found = _placed(weight, codes[weight], weights[weight][1], offset, alignment)
        if weight in scaled:
            there = (ScalesInExtent(part.matrices, scales_at[part.scales], part.scales.info) for part in scaled[weight])
            found = found._replace(scales=tuple(there))
        placed.append(found)

    for weight in sorted(located, key=lambda weight: (*_range(located[weight]), weight)):
        place(weight, places[located[weight]])
    end = _end(runs)
    for weight, each in codes.items():
        if weight in located:
            continue
        if isinstance(each, MergedWeight):
            runs += [piece._replace(place=end + piece.place) for piece in each.pieces]
        place(weight, end)
        end = padded(placed[-1].end, PAGE)
    return Extent(name, tuple(placed)), tuple(runs)


def _runs(locations: Iterable[Location], sizes: Mapping[str, int], end: int) -> tuple[list[Run], dict[Location, int]]:
    """Return runs that have weights in files, and the offset of each weight in the extent. The first run begins at ``end``."""
    runs: list[Run] = []
    places: dict[Location, int] = {}
    for location in sorted(set(locations), key=_range):
        path, begin, last = _range(location)
        first, last = begin // PAGE * PAGE, min(padded(last, PAGE), sizes[path])
        run = runs[-1] if runs else None
        if run is not None and run.path == path and first <= run.offset + run.nbytes:
            runs[-1] = run = run._replace(nbytes=max(run.nbytes, last - run.offset))
        else:
            run = Run(path, first, last - first, _end(runs) or end)
            runs.append(run)
        places[location] = run.place + begin - run.offset
    return runs, places


def _end(runs: Sequence[Run]) -> int:
    """Return the offset in the extent of the first page behind the last run."""
    return padded(runs[-1].place + runs[-1].nbytes, PAGE) if runs else 0


def _range(location: Location) -> tuple[str, int, int]:
    """Return the path of a weight's file, and its first byte and the one behind its last byte in the file."""
    return location.path, location.offset, location.offset + _span(location)


def _placed(name: str, weight: Place, info: WeightInfo, offset: int, alignment: int) -> Weight:
    """Return a weight at ``offset`` of its extent, to be copied if it does not lie there as the model wants it."""
    there = _info_of(weight)
    elements = weight.elements if isinstance(weight, Location) else None
    found = elements or Elements(0, *there, contiguous_strides(there.shape))
    ready = found.dtype == info.dtype and found.contiguous and not offset % max(info.dtype.itemsize, alignment)
    return Weight(name, info, offset, elements=None if ready else found)


def _span(location: Location) -> int:
    """Return the bytes in the file from a weight's first element to the end of its last."""
    return location.info.nbytes if location.elements is None else location.elements.nbytes
