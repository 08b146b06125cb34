"""Embeddings of a streamed model whose rows are read from the checkpoint's own files when ids look them up.

A token uses some rows of an embedding, so a table of tens of GB need not be read as a whole. Only the weight is replaced, by a
:class:`TableWeight`; the module stays as it is. So its forward may be that of a subclass, which scales the rows or shifts the
ids, and may ask the weight for its device or dtype.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from deepnvme.checkpoint.file_io import Version
from deepnvme.checkpoint.weight_locations import Location, OpenFiles
from deepnvme.drives.profiles import engine_for
from deepnvme.memory.host import empty_aligned
from deepnvme.model.fp8 import float32_scales
from deepnvme.model.weight_differences import WeightInfo
from deepnvme.tables.layout import TableLayout
from deepnvme.tables.mapped_tensors import parts_of
from deepnvme.tables.opening import ranges_layout
from deepnvme.tables.reading import DEFAULT_STAGING_BYTES
from deepnvme.tables.row_scales import RowScales
from deepnvme.tables.session import TableSession
from deepnvme.tables.table import DEFAULT_MEMORY_BUDGET, Table
from deepnvme.telemetry.sizes import ByteCount, byte_count

from .placeholder import Placeholder
from .weights.checkpoint_weights import check_unchanged
from .weights.places import MergedWeight, Place, ScaledWeight, paths_of

if TYPE_CHECKING:
    from deepnvme.drives.aio_config import AioConfig

MIN_TABLE_BYTES = 256_000_000
"""Default of ``min_table_bytes``. A smaller embedding is read in a few hundredths of a second, or fits into the budget."""


class TableWeight(Placeholder):
    """The weight of an embedding, whose rows are read when ids look them up. Any other use of its data raises RuntimeError."""

    look_up: Callable[[torch.Tensor], torch.Tensor]
    """Returns the rows of ids, of shape ``ids.shape + (columns,)``. Blocks until they are read."""
    on_demand = True
    """Has functions that list a model's weights leave this one out: see :func:`weights_by_name`."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.embedding.default and isinstance(args[0], TableWeight):
            with torch._C._DisableFuncTorch():  # tensors made here must not belong to a transform such as vmap
                return args[0].look_up(args[1])
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _refuse(self, what: str) -> NoReturn:
        raise RuntimeError(
            f"{what}: the rows of {self.weight!r} are read when ids look them up, and the whole weight is never in memory; give a"
            " larger min_table_bytes to stream it as a whole, or close(restore=True) the stream"
        )


@dataclass
class _ModelTable:
    """An embedding's weight in a model, and where its rows are."""

    names: list[str]
    """Names of the weight in the model; several if embeddings share it."""
    modules: list[nn.Embedding]
    """For each name, the embedding whose weight it is."""
    info: WeightInfo
    """Dtype and shape of the weight in the model."""
    requires_grad: bool
    """Whether the model's own parameter requires grad."""
    place: Place
    """Where the weight lies, with the scales of FP8 values."""
    layout: TableLayout
    """Where the rows are in files, and their dtype there."""

    @functools.cached_property
    def paths(self) -> set[str]:
        """The files of the rows, and of their scales."""
        return paths_of(self.place)

    def put(self, weight: torch.Tensor) -> None:
        """Put a parameter, or a placeholder for it, into the modules."""
        for module in self.modules:
            module._parameters["weight"] = weight  # type: ignore[assignment]  # a placeholder counts as a parameter


class OffloadedTables(contextlib.AbstractContextManager["OffloadedTables"]):
    """The large embeddings of a model, whose rows are read in place in checkpoint files. Thread-safe.

    An embedding becomes a table if its weight lies in the files row after row, in one range or in several, and if all modules
    that have the weight are embeddings, without ``max_norm``. Rows in FP8 are dequantised as they are read, with scales that
    stay in memory.

    Args:
        model: The model, whose weights are replaced. It may be on the meta device.
        weights: Where each weight of the model lies, by name.
        versions: Version of each file, by path, from before its header was read.
        min_bytes: Least bytes of a table, or a size such as "1GB"; None for no tables.
        device: Where the model computes.
        aio_config: Settings of the engines; None for the profile of the drive.

    Raises:
        CorruptCheckpoint: If a file was changed since ``versions``.
        OSError: If a file cannot be opened.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: Mapping[str, Place],
        versions: Mapping[str, Version],
        min_bytes: ByteCount | None,
        device: torch.device | str | None,
        aio_config: AioConfig | None,
    ) -> None:
        self._device = torch.device("cpu" if device is None else device)
        self._versions = dict(versions)
        self._closed = False
        least = math.inf if min_bytes is None else byte_count(min_bytes, "min_table_bytes")
        self._found = list(_tables_in(model, weights, least))
        self.names = {name for each in self._found for name in each.names}
        """All names of the weights that are tables."""
        self._own = [each.modules[0].weight for each in self._found]
        self.tables: dict[str, Table] = {}
        """The tables, by the first name of the weight in the model."""
        whole = sum(each.info.nbytes for each in self._found)
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            for each in self._found:
                memory = DEFAULT_MEMORY_BUDGET * each.info.nbytes // whole
                staging = DEFAULT_STAGING_BYTES // len(self._found)
                where = each.layout, each.place, each.info.dtype, self._versions
                self.tables[each.names[0]] = _open(*where, memory, staging, aio_config)
            for each in self._found:
                weight = TableWeight(each.names[0], each.names[0].rpartition(".")[0], each.info, self._device)
                weight.look_up = functools.partial(self._rows, each)
                each.put(weight)
            undo.pop_all()

    def keep(self) -> None:
        """Release the model's own parameters: :meth:`close` does not put them back any more."""
        self._own.clear()

    def read_whole(self) -> list[torch.Tensor]:
        """Read all tables into newly allocated memory. Blocks. Raises OSError if reading fails."""
        found = []
        for each in self._found:
            values = torch.empty(each.info.shape, dtype=each.info.dtype, device=self._device)
            for begin, end in parts_of(each.layout.rows, each.layout.values.nbytes):
                values[begin:end] = self._rows(each, torch.arange(begin, end))
            found.append(values)
        return found

    def close(self, whole: list[torch.Tensor] | None = None) -> None:
        """Close the tables. Waits for reads in flight. Idempotent.

        The model gets back its own parameters; or after :meth:`keep`, the tensors of ``whole``, which :meth:`read_whole` has
        returned, or placeholders if that is None.
        """
        if self._closed:
            return
        self._closed = True
        for number, each in enumerate(self._found):
            if self._own:
                each.put(self._own[number])
            elif whole is not None:
                each.put(nn.Parameter(whole[number], requires_grad=each.requires_grad))
            else:
                each.put(Placeholder(each.names[0], each.names[0].rpartition(".")[0], each.info, self._device))
        for table in self.tables.values():
            table.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _rows(self, each: _ModelTable, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of ids, in the dtype of the model's weight. Blocks."""
        table = self.tables[each.names[0]]
        out = None
        if self._device.type != "cpu":
            out = torch.empty(*ids.shape, *table.row_shape, dtype=table.dtype, device=self._device)
        try:
            rows = table.read(ids, out)
        except IndexError as error:  # which begins as that of torch
            raise IndexError(f"index out of range in self: {error} ({each.names[0]!r})") from None
        except OSError as error:
            check_unchanged(each.paths, self._versions, error)
            raise
        check_unchanged(each.paths, self._versions)
        return rows.to(each.info.dtype)


def _open(
    layout: TableLayout,
    place: Place,
    dtype: torch.dtype,
    versions: Mapping[str, Version],
    memory_budget: int,
    staging_bytes: int,
    aio_config: AioConfig | None,
) -> Table:
    """Open a table in checkpoint files. Blocks while scales are read.

    Args:
        layout: Where the rows are.
        place: The weight that the rows are.
        dtype: Dtype to which rows in FP8 are dequantised.
        versions: As for :class:`OffloadedTables`.
        memory_budget: Bytes of memory for rows.
        staging_bytes: Bytes of pinned memory through which rows are read.
        aio_config: Settings of the engine; None for the profile of the drive.

    Raises:
        CorruptCheckpoint: If a file was changed since ``versions``.
        OSError: If a file cannot be opened, or scales cannot be read.
    """
    reopen = functools.partial(_open, layout, place, dtype, versions, memory_budget, staging_bytes, aio_config)
    scales = _read_scales(place, dtype, aio_config) if isinstance(place, ScaledWeight) else None
    table = Table(TableSession(layout, [], False, memory_budget, staging_bytes, aio_config), reopen, scales)
    try:
        check_unchanged(paths_of(place), versions)
    except BaseException:
        table.close()
        raise
    return table


def _read_scales(weight: ScaledWeight, dtype: torch.dtype, aio_config: AioConfig | None) -> RowScales:
    """Read the scales of a weight for which :func:`_have_one_grid` is true. Blocks. Raises OSError if reading fails."""
    grids = []
    engine = engine_for({part.scales.path for part in weight.parts}, aio_config)
    with engine, contextlib.closing(OpenFiles(engine)) as files:
        for matrices, (path, offset, info, _) in weight.parts:
            memory = empty_aligned(info.nbytes)
            files.read(path, offset, memory).result()
            grids.append(float32_scales(memory.view(info.dtype)).view(matrices.grid[1:]))
    return RowScales(torch.cat(grids), dtype, block=weight.parts[0].matrices.block)


def _have_one_grid(weight: ScaledWeight) -> bool:
    """Return whether the scales of a weight's parts, one below the other, are the scales of the weight."""
    block = weight.parts[0].matrices.block
    whole_blocks = all(part.matrices.rows % block[0] == 0 for part in weight.parts[:-1])
    return whole_blocks and all(part.matrices.block == block for part in weight.parts)


def _tables_in(model: nn.Module, weights: Mapping[str, Place], least: float) -> Iterator[_ModelTable]:
    """Yield the weights of a model that can be tables and have at least ``least`` bytes."""
    users: dict[int, dict[str, nn.Embedding | None]] = {}  # by parameter and name: the embedding; None for another use of it
    for path, module in model.named_modules(remove_duplicate=False):
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.nbytes >= max(least, 1):
                looked_up = isinstance(module, nn.Embedding) and key == "weight" and module.max_norm is None
                users.setdefault(id(parameter), {})[f"{path}.{key}" if path else key] = module if looked_up else None
    for by_name in users.values():
        modules = [module for module in by_name.values() if module is not None]
        place = next((weights[name] for name in by_name if name in weights), None)
        if place is None or len(modules) < len(by_name):
            continue
        info, requires_grad = WeightInfo.of(modules[0].weight), modules[0].weight.requires_grad
        layout = _layout(place, info)
        if layout is not None:
            yield _ModelTable(list(by_name), modules, info, requires_grad, place, layout)


def _layout(place: Place, wanted: WeightInfo) -> TableLayout | None:
    """Return the layout of a weight's rows in files; None if rows do not lie there one after the other, in a form to be read."""
    if isinstance(place, ScaledWeight):
        return _layout(place.codes, wanted) if _have_one_grid(place) else None
    if isinstance(place, MergedWeight):
        ranges = [(piece.path, piece.offset, piece.nbytes) for piece in place.pieces]
    elif isinstance(place, Location) and place.elements is None:
        ranges = [(place.path, place.offset, place.info.nbytes)]
    else:
        return None
    dtype = place.info.dtype
    same = dtype == wanted.dtype or (dtype.is_floating_point and wanted.dtype.is_floating_point)
    return ranges_layout(place.info, ranges) if same and place.info.shape == wanted.shape else None
