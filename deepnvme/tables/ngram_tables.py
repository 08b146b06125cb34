"""Opens a model's tables of n-gram embeddings in place, in its safetensors files."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from deepnvme._former_names import former_names
from deepnvme.checkpoint.weight_locations import Location, weights_in
from deepnvme.drives.aio_config import AioConfig
from deepnvme.drives.profiles import AnyPath
from deepnvme.memory.budget import MemoryBudget, budget_bytes
from deepnvme.telemetry.descriptions import shorten
from deepnvme.telemetry.sizes import ByteCount, byte_count

from .layout import TableLayout
from .opening import tensor_layout
from .reading import DEFAULT_STAGING_BYTES
from .row_scales import RowScales
from .session import TableSession
from .table import DEFAULT_MEMORY_BUDGET, Table

_SHARD_NAME = r"(?P<table>.+?)[._-](?:shard|part)[._-]?(?P<number>\d+)(?P<rest>\.\w+)?"
"""Pattern of the names of a table's shards: "ngram.shard_3.weight" is the fourth shard of the table "ngram.weight"."""


@former_names(config="aio_config")
def open_ngram_tables(
    path: AnyPath,
    names: str = r".*",
    *,
    scales: Mapping[str, RowScales] | None = None,
    memory_budget: MemoryBudget = DEFAULT_MEMORY_BUDGET,
    staging_bytes: ByteCount = DEFAULT_STAGING_BYTES,
    aio_config: AioConfig | None = None,
) -> dict[str, Table]:
    """Open the embedding tables of a model's safetensors files in place, without a copy.

    Args:
        path: A ``.safetensors`` file, an ``index.json`` of several, or a directory with one of these.
        names: Regular expression that must match a table's whole name. Tensors of one dimension are not tables.
        scales: For tables in FP8, by name: the scales with which rows are dequantised as they are read. Those of a table in
            several shards are for all its rows. Rows of other tables are as they are in the file.
        memory_budget: Bytes of memory for all tables together, shared in proportion to their sizes; or "8GB", "25%", "auto".
        staging_bytes: Bytes of pinned memory through which rows are read, for all tables together, shared equally. A table
            has at least 512 KiB, or two rows.
        aio_config: Settings of the engine; None for the profile of the drive.

    Returns:
        The tables by name, in the file's order. A table is one tensor, or several shards in the order of their numbers.

    Raises:
        ValueError: If no name matches, or the numbers of a table's shards are not 0, 1, 2 and so on; or if ``scales`` are of a
            table that is not opened, or do not fit the rows.
        FileNotFoundError: If a file is missing.
    """
    memory_budget = budget_bytes(memory_budget, "memory_budget")
    staging_bytes = byte_count(staging_bytes, "staging_bytes")
    path = os.path.abspath(os.fsdecode(path))
    tables: dict[str, list[tuple[int, str, Location]]] = {}
    for name, weight in weights_in(path).items():
        if not isinstance(weight, Location) or len(weight.info.shape) < 2:
            continue
        shard = re.fullmatch(_SHARD_NAME, name)
        whole = name if shard is None else shard["table"] + (shard["rest"] or "")
        if re.fullmatch(names, whole):
            tables.setdefault(whole, []).append((0 if shard is None else int(shard["number"]), name, weight))
    if not tables:
        raise ValueError(f"'{path}' has no table whose name matches {names!r}")
    layouts = {name: _layout_of(name, shards) for name, shards in tables.items()}
    scales = scales or {}
    for name, each in scales.items():
        if name not in layouts:
            raise ValueError(f"there are scales for {name!r}, and no table of this name: got {shorten(map(repr, layouts))}")
        each.check(layouts[name].rows, layouts[name].values)
    sizes = {name: layout.rows * layout.values.nbytes for name, layout in layouts.items()}
    staging = staging_bytes // len(layouts)
    found = {}
    with contextlib.ExitStack() as opened:
        for name, layout in layouts.items():
            budget = memory_budget * sizes[name] // max(sum(sizes.values()), 1)
            reopen = functools.partial(_reopened, path, name, scales.get(name), budget, staging, aio_config)
            table = Table(TableSession(layout, [], False, budget, staging, aio_config), reopen, scales.get(name))
            found[name] = opened.enter_context(table)
        opened.pop_all()
    return found


def _reopened(
    path: str, name: str, scales: RowScales | None, memory_budget: int, staging_bytes: int, aio_config: AioConfig | None
) -> Table:
    """Open one of the tables again, in another process."""
    tables = open_ngram_tables(
        path,
        re.escape(name),
        scales=None if scales is None else {name: scales},
        memory_budget=memory_budget,
        staging_bytes=staging_bytes,
        aio_config=aio_config,
    )
    return tables[name]


def _layout_of(name: str, shards: Sequence[tuple[int, str, Location]]) -> TableLayout:
    """Return the layout of a table made of ``shards``, which may be in any order.

    Raises:
        ValueError: If a shard's number is missing, or shards have rows of different shapes or dtypes.
    """
    shards = sorted(shards, key=lambda shard: shard[0])
    if [number for number, _, _ in shards] != list(range(len(shards))):
        raise ValueError(f"the table {name!r} has the parts {[shard for _, shard, _ in shards]}: some are missing")
    layouts = [tensor_layout(Path(weight.path), shard, weight) for _, shard, weight in shards]
    if len({layout.columns for layout in layouts}) > 1:
        found = ", ".join(f"{shard!r} {tuple(weight.info.shape)} in {weight.info.dtype}" for _, shard, weight in shards)
        raise ValueError(f"the parts of the table {name!r} must have rows of the same shape and dtype, got {found}")
    begins = itertools.accumulate((layout.rows for layout in layouts), initial=0)
    places = tuple(layout.shards[0]._replace(first_row=begin) for layout, begin in zip(layouts, begins, strict=False))
    return TableLayout(places, sum(layout.rows for layout in layouts), layouts[0].columns)
