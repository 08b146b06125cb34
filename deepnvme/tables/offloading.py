"""Moves the embeddings of a model to a drive."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepnvme._former_names import former_names
from deepnvme.drives.aio_config import AioConfig
from deepnvme.drives.profiles import AnyPath
from deepnvme.memory.budget import MemoryBudget, budget_bytes
from deepnvme.telemetry.callers import stack_level
from deepnvme.telemetry.sizes import ByteCount, byte_count

from .embedding import EmbeddingBagOnDisk, EmbeddingOnDisk, RowsOnDisk
from .manifest import MANIFEST_NAME
from .reading import DEFAULT_STAGING_BYTES
from .row_states import OptimizerFactory
from .table import DEFAULT_MEMORY_BUDGET, TableMemory, as_paths

_MIN_BYTES = 1 << 30


@former_names(config="aio_config")
def offload_embeddings(
    model: nn.Module,
    path: AnyPath | Sequence[AnyPath],
    *,
    min_bytes: ByteCount = _MIN_BYTES,
    optimizer: OptimizerFactory | None = None,
    memory_budget: MemoryBudget = DEFAULT_MEMORY_BUDGET,
    staging_bytes: ByteCount = DEFAULT_STAGING_BYTES,
    aio_config: AioConfig | None = None,
) -> list[str]:
    """Replace the large embeddings of a model by ones whose rows are on a drive. Blocks until the rows are written.

    Each ``nn.Embedding`` and ``nn.EmbeddingBag`` gets a table in a directory that is named after the module. If the directory
    has a table already, that table is opened and its rows are used instead of the module's, so that training can be continued.
    For a model on the meta device, the tables must exist.

    An embedding whose weight is used by another module too, or which has ``max_norm``, ``scale_grad_by_freq`` or the mode
    "max", is left as it is, with a warning that says why.

    Args:
        model: The model, in which modules are replaced. Subclasses of torch's two classes are left as they are.
        path: A directory, or several on different drives, for the directories of the tables.
        min_bytes: Embeddings of fewer bytes stay in memory; or a size such as "512MiB".
        optimizer: What will train the rows, as for :class:`EmbeddingOnDisk`; None for rows that are not trained any more.
        memory_budget: Bytes of memory for all tables together, shared in proportion to their sizes; or "8GB", "25%", "auto".
        staging_bytes: Bytes of pinned memory through which rows are read and written, for all tables together, shared
            equally. A table has at least 512 KiB, or two rows, for reads and as much for writes.
        aio_config: Settings of the engine; None for the profile of the drive.

    Returns:
        The names of the replaced modules, in the model's order. For a module with several names, the first name.

    Raises:
        ValueError: If the model is itself an embedding; or as :class:`EmbeddingOnDisk` raises.
        OSError: If the drive cannot be read or written. No module is replaced then; tables that were created stay.
    """
    min_bytes = byte_count(min_bytes, "min_bytes")
    memory_budget = budget_bytes(memory_budget, "memory_budget")
    staging_bytes = byte_count(staging_bytes, "staging_bytes")
    if type(model) in (nn.Embedding, nn.EmbeddingBag):
        raise ValueError("the model is an embedding itself, and cannot be replaced in itself: use from_pretrained()")
    chosen, reasons = _embeddings_to_move(model, min_bytes)
    for name, reason in reasons.items():
        warnings.warn(f"the embedding {name!r} stays in memory: it {reason}", stacklevel=stack_level())
    paths = as_paths(path)
    whole = sum(module.weight.nbytes for module in chosen.values())
    replaced: dict[nn.Module, RowsOnDisk] = {}
    try:
        for name, module in chosen.items():
            memory: TableMemory = {
                "memory_budget": memory_budget * module.weight.nbytes // max(whole, 1),
                "staging_bytes": staging_bytes // len(chosen),
                "aio_config": aio_config,
            }
            replaced[module] = _on_disk(module, [each / name for each in paths], optimizer, memory)
    except BaseException:
        for each in replaced.values():
            each.table.close()
        raise
    for parent in list(model.modules()):
        for child_name, child in list(parent._modules.items()):  # named_children() has only the first of several names
            if child in replaced:
                setattr(parent, child_name, replaced[child])
    return list(chosen)


def _embeddings_to_move(model: nn.Module, min_bytes: int) -> tuple[dict[str, nn.Embedding | nn.EmbeddingBag], dict[str, str]]:
    """Return the large embeddings by name, and for those that cannot be moved the reasons by name."""
    users = _users_of_weights(model)
    chosen: dict[str, nn.Embedding | nn.EmbeddingBag] = {}
    reasons: dict[str, str] = {}
    for name, module in model.named_modules():
        if type(module) not in (nn.Embedding, nn.EmbeddingBag) or module.weight.nbytes < min_bytes:
            continue
        assert isinstance(module, nn.Embedding | nn.EmbeddingBag)
        others = [each for each in users[module.weight] if each != f"{name}.weight"]
        if module.scale_grad_by_freq or getattr(module, "mode", "sum") == "max":
            reasons[name] = "has scale_grad_by_freq, or the mode 'max', for which there are no sparse gradients"
        elif module.max_norm is not None:
            reasons[name] = f"has max_norm={module.max_norm}, for which each forward would change rows"
        elif others:
            reasons[name] = f"has the same weight as {', '.join(others)}"
        else:
            chosen[name] = module
    return chosen, reasons


def _users_of_weights(model: nn.Module) -> dict[torch.Tensor, list[str]]:
    """Return the names of each parameter: several, if several modules have it."""
    users: dict[torch.Tensor, list[str]] = {}
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            users.setdefault(parameter, []).append(f"{module_name}.{name}" if module_name else name)
    return users


def _on_disk(
    module: nn.Embedding | nn.EmbeddingBag, directories: list[Path], optimizer: OptimizerFactory | None, memory: TableMemory
) -> RowsOnDisk:  # fmt: skip
    """Return an embedding on the drive with the rows of ``module``. ``memory``: budgets and aio_config for :meth:`Table.open`."""
    weight = module.weight
    if weight.is_meta and not (directories[0] / MANIFEST_NAME).exists():
        raise ValueError(f"there is no table in '{directories[0]}', and the module on the meta device has no rows to make it of")
    settings: dict[str, Any] = {
        **memory, "path": directories, "optimizer": optimizer, "padding_idx": module.padding_idx,
        "freeze": optimizer is None or not weight.requires_grad,
    }  # fmt: skip
    rows = weight.detach()
    found: RowsOnDisk
    if isinstance(module, nn.Embedding):
        found = EmbeddingOnDisk.from_pretrained(rows, **settings)
    else:
        mode: Any = module.mode
        found = EmbeddingBagOnDisk.from_pretrained(rows, mode=mode, include_last_offset=module.include_last_offset, **settings)
    return found.train(module.training)
