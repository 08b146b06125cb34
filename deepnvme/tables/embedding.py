"""Embeddings whose rows are on a drive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import torch
from torch import nn
from torch.nn import functional

from deepnvme._former_names import former_names, option_names, refuse_options
from deepnvme.drives.profiles import AnyPath

from .creating import Values, normal_rows
from .layout import State
from .manifest import MANIFEST_NAME
from .mapped_tensors import mapped_tensors, parts_of
from .row_states import OptimizerFactory, check_states, optimizer_name, states_of
from .rows_future import check_integers, checked_ids
from .table import Table, TableMemory, as_paths

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

Mode = Literal["sum", "mean"]


class _RowGradients(torch.autograd.Function):
    """Autograd function: the dense gradient of a batch's rows becomes the sparse gradient of all rows.

    The sparse gradient is the one that torch gives with ``sparse=True``. autograd adds up the gradients of several forwards as
    it does for torch's module.
    """

    @staticmethod
    def forward(ctx: Any, holder: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return ``weight``, the values of the rows numbered ``rows``, and connect it to the gradient holder for the backward."""
        ctx.rows, ctx.size = rows, holder.shape
        return weight

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of ``holder``: sparse, over all rows of the table. ``gradient`` is that of ``weight``."""
        indices = ctx.rows[gradient._indices()[0]].unsqueeze(0)
        found = torch.sparse_coo_tensor(
            indices, gradient._values(), ctx.size, check_invariants=False, is_coalesced=gradient.is_coalesced()
        )
        return found, None, None


class RowsOnDisk(nn.Module):
    """Base class of :class:`EmbeddingOnDisk` and :class:`EmbeddingBagOnDisk`: rows in a :class:`Table` and their gradients."""

    table: Table
    """The table that has the rows, with their optimizer states."""
    gradient_holder: torch.Tensor
    """A leaf with the shape of all rows and the memory of one element. Its ``grad`` is the rows' sparse gradient. It is not a
    parameter."""

    def __init__(
        self, num_embeddings: int, embedding_dim: int, padding_idx: int | None, path: AnyPath | Sequence[AnyPath] | Table,
        dtype: torch.dtype | None, optimizer: OptimizerFactory | None, values: Values | None, memory: TableMemory,
    ) -> None:  # fmt: skip
        super().__init__()
        settings = {name: name for name in TableMemory.__annotations__}
        refuse_options(
            type(self).__name__, memory.keys() - settings.keys(), {**option_names(type(self)), **settings},
            "gradients are always sparse, and not scaled, results are on the device of the ids, no forward changes rows"
            " (max_norm), and from_pretrained() takes rows",
        )  # fmt: skip
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(f"padding_idx must be in [{-num_embeddings}, {num_embeddings}), got {padding_idx}")
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = padding_idx % num_embeddings if padding_idx is not None else None
        self.optimizer = optimizer
        """The torch optimizer class (or a partial of one) that trains the rows; None if they are not trained."""
        if isinstance(path, Table):
            table = path
            _check_fits(table, (num_embeddings, embedding_dim), dtype, optimizer)
        else:
            table = self._open(as_paths(path), dtype, values, memory)
            try:
                _check_fits(table, (num_embeddings, embedding_dim), dtype, optimizer)
            except BaseException:
                table.close()
                raise
        self.table = table
        self.gradient_holder = _holder(table, torch.device("cpu"))
        self.requires_grad_(optimizer is not None)

    def _open(self, paths: list[Path], dtype: torch.dtype | None, values: Values | None, memory: TableMemory) -> Table:
        """Open the table at a path, or make it."""
        if (paths[0] / MANIFEST_NAME).exists():
            return Table.open(paths, writable=self.optimizer is not None, **memory)
        dtype = dtype or torch.get_default_dtype()
        states: Mapping[str, State] = {}
        if self.optimizer is not None:
            states = states_of(self.optimizer, dtype, self.embedding_dim).rows
        if values is None:
            values = normal_rows(self.embedding_dim, dtype, self.padding_idx)
        updatable = self.optimizer is not None
        return Table.create(
            paths, self.num_embeddings, self.embedding_dim, dtype, values=values, states=states, updatable=updatable, **memory
        )

    @classmethod
    def from_pretrained(
        cls, embeddings: torch.Tensor | Table, freeze: bool = True, *, path: AnyPath | Sequence[AnyPath] | None = None,
        optimizer: OptimizerFactory | None = None, **more: Any,
    ) -> Self:  # fmt: skip
        """Return a module for existing rows.

        Args:
            embeddings: A tensor of two dimensions, or a :class:`Table`, which is used in place without ``path``.
            freeze: Whether the rows stay as they are. With False, they are trained, and ``optimizer`` is needed.
            path: A directory, or several, for a copy of the rows. Needed for tensors. If there is a table already, it is
                opened, and ``embeddings`` is not copied.
            optimizer: What will train the rows, as for the class.
            **more: Other arguments of the class. The row ``padding_idx`` keeps its values.
        """
        if not freeze and optimizer is None:
            raise ValueError("rows that are trained (freeze=False) need optimizer=, whose states are kept beside them")
        if not isinstance(embeddings, torch.Tensor | Table):
            raise TypeError(f"embeddings must be a tensor or a Table, got {embeddings!r}: give Table.open(...)")
        if path is None and isinstance(embeddings, torch.Tensor):
            raise ValueError("path= is needed: a directory for the rows of the tensor")
        if len(embeddings.shape) != 2:
            raise ValueError(f"embeddings must have two dimensions, got the shape {tuple(embeddings.shape)}")

        def values(begin: int, end: int) -> torch.Tensor:
            """Return rows ``begin`` to ``end``."""
            if isinstance(embeddings, Table):
                return embeddings.read(torch.arange(begin, end))
            return embeddings.detach()[begin:end].cpu()

        new: Any = cls  # the subclass, whose arguments are others
        found: Self = new(
            *embeddings.shape, path=embeddings if path is None else path, dtype=embeddings.dtype, optimizer=optimizer,
            values=values, **more,
        )  # fmt: skip
        return found.requires_grad_(not freeze)

    # -- what is trained

    @property
    def trained(self) -> bool:
        """Whether a backward gives the rows gradients."""
        return self.gradient_holder.requires_grad and self.table.writable

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Set whether the rows are trained, and return the module.

        Raises:
            ValueError: If the rows cannot be trained: the table is read-only, or the module was made without ``optimizer``.
        """
        if requires_grad and not (self.table.writable and self.optimizer is not None):
            raise ValueError("the rows cannot be trained: give optimizer=, and a table that can be changed")
        self.gradient_holder.requires_grad_(requires_grad)
        return self

    def prefetch(self, ids: torch.Tensor) -> None:
        """Start reading the rows that a later forward with ``ids`` needs; return at once. See :meth:`Table.prefetch`.

        Args:
            ids: Row numbers, integers of any shape.
        """
        self.table.prefetch(self._unique(ids)[0])

    def _unique(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the distinct row numbers in ``ids``, ascending, and the index of each id among them.

        Raises:
            TypeError, IndexError: As :meth:`Table.read` does.
        """
        check_integers(ids)
        rows, positions = torch.unique(ids.detach(), return_inverse=True)
        if len(rows) and (int(rows[0]) < 0 or int(rows[-1]) >= self.num_embeddings):
            checked_ids(ids, self.num_embeddings)  # raises with the position in ids
        return rows, positions

    def _gather(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int | None]:
        """Read the distinct rows of ``ids``. Blocks. Raises what :meth:`Table.read` does.

        Returns:
            (values, positions, padding). ``values`` has the distinct rows, ascending by row number, and one more row of zeros if
            the padding row is not among the ids. ``positions`` is the index in ``values`` of each id's row. ``padding`` is the
            index of the padding row, None without ``padding_idx``.
        """
        rows, positions = self._unique(ids)
        padding, count = None, len(rows)
        if self.padding_idx is not None:
            found = int(torch.searchsorted(rows, self.padding_idx))
            padding = found if found < count and int(rows[found]) == self.padding_idx else count
        training = torch.is_grad_enabled() and self.trained
        # One row more stands for padding that is not among the ids; and no kernel has to work without any row.
        extra = int(padding == count or not count)
        weight = torch.empty(count + extra, self.embedding_dim, dtype=self.table.dtype, device=ids.device)
        weight[count:] = 0
        if training:  # with their states, which the step will need: they stay in memory meanwhile
            weight[:count] = self.table.read_records(rows)["values"]
            self._move_holder(ids.device)
            weight = _RowGradients.apply(self.gradient_holder, rows.long(), weight)  # type: ignore[no-untyped-call]
        else:
            self.table.read(rows, out=weight[:count])
        return weight, positions.to(ids.dtype), padding

    def _move_holder(self, device: torch.device) -> None:
        """Move the gradient holder to the device of the ids. Raises ValueError if its gradient is on another device."""
        holder = self.gradient_holder
        if holder.device != device:
            if holder.grad is not None:
                raise ValueError(
                    f"ids are on {device}, and the gradient of the forwards before on {holder.device}: call step() or zero_grad()"
                )
            holder.data = _holder(self.table, device)

    # -- state dicts, in torch's form

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Add the rows to ``destination`` as one tensor, mapped from an unnamed temporary file in the table's directory."""
        table = self.table
        columns = [(table.dtype, table.row_shape)]
        (destination[prefix + "weight"],) = mapped_tensors(
            table.directory, table.rows, columns, lambda begin, end: [table.read(torch.arange(begin, end))]
        )

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Mapping[str, Any], strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        name = prefix + "weight"
        unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key != name] if strict else []
        weight = state_dict.get(name)
        table = self.table
        if weight is None:
            missing_keys += [name] if strict else []
        elif tuple(weight.shape) != table.shape:
            error_msgs.append(f"size mismatch for {name}: the state dict has {tuple(weight.shape)}, the table {table.shape}")
        elif not table.writable:
            error_msgs.append(
                f"{name} cannot be loaded: the rows of {table} cannot be changed, as it was opened without optimizer="
            )
        else:
            for begin, end in parts_of(table.rows, table.nbytes // max(table.rows, 1)):
                rows = weight.detach()[begin:end].to("cpu", table.dtype)
                table.write(torch.arange(begin, end), rows)

    def extra_repr(self) -> str:
        """Return torch's text for the module, and the table."""
        if "table" not in self.__dict__:  # the constructor has not come so far
            return ""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        trained = "" if self.optimizer is None else f", optimizer={optimizer_name(self.optimizer)}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}{trained}, table={self.table}"


class EmbeddingOnDisk(RowsOnDisk):
    """A ``torch.nn.Embedding`` whose rows are on a drive. Only the rows of a batch and the most used rows are in memory.

    >>> embedding = EmbeddingOnDisk(100_000_000, 64, path="/mnt/nvme/users", optimizer=torch.optim.SparseAdam)
    >>> optimizer = RowOptimizer(embedding, torch.optim.SparseAdam, lr=1e-3)
    >>> embedding(ids).sum().backward()
    >>> optimizer.step()

    Results and gradients are bit-identical to those of ``torch.nn.Embedding(sparse=True)``, and are on the device of the ids.

    The rows are not an ``nn.Parameter``. A parameter has its values in memory, where optimizers, DistributedDataParallel and
    ``model.to()`` expect to read and change them. Instead, the gradients are in :attr:`gradient_holder`, from which
    :class:`~deepnvme.tables.RowOptimizer` takes them. So ``model.zero_grad()`` does not drop the gradients, and
    ``clip_grad_norm_(model.parameters())`` does not clip them: see RowOptimizer for what to call instead.

    ``state_dict`` has the rows under the same name as torch's module, mapped from a file. ``load_state_dict`` changes the rows.
    Do not call it after a failed :meth:`RowOptimizer.commit`, which it does not finish.

    A copy, made by ``copy.deepcopy`` or pickle, opens the same table again, read-only. This is impossible while the original's
    table is open for training.

    A training step reads each row twice: in the forward, and again in the optimizer's step, where the row is in memory. So if
    the forwards found a fraction ``h`` of their rows in memory, ``table.stats().hit_rate`` is ``(1 + h) / 2``. ``rows_read``
    counts the rows that the forwards did not find in memory.

    Args:
        num_embeddings: Number of rows.
        embedding_dim: Elements of each row.
        padding_idx: Number of a row that is not trained; zeros in a new table.
        path: A directory, or several on different drives. If it has a table, that table is opened; else a table is created, with
            the rows that ``torch.nn.Embedding`` has with the same seed. Or an open :class:`Table`, which is used as it is.
        dtype: Dtype of the rows; None for that of the existing table, or torch's default for a new one.
        optimizer: What will train the rows: a torch optimizer class, or a ``functools.partial`` of one. Its states are kept
            beside each row. None if the rows will not be trained: a new table then takes half the space.
        values: Returns rows ``begin`` to ``end`` of a new table, as for :meth:`Table.create`; None for those of torch.
        **memory: ``memory_budget``, ``staging_bytes`` and ``aio_config`` of :meth:`Table.open`. Ignored with an open table.

    Raises:
        ValueError: If the existing table has another shape, dtype or other states, or the optimizer cannot train
            single rows.
        TypeError: For other arguments of torch's module, such as ``max_norm``, ``scale_grad_by_freq`` and ``sparse``.
        OSError: If the drive cannot be read or written.
    """

    @former_names(config="aio_config")
    def __init__(
        self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None, *,
        path: AnyPath | Sequence[AnyPath] | Table, dtype: torch.dtype | None = None, optimizer: OptimizerFactory | None = None,
        values: Values | None = None, **memory: Unpack[TableMemory],
    ) -> None:  # fmt: skip
        super().__init__(num_embeddings, embedding_dim, padding_idx, path, dtype, optimizer, values, memory)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the rows of ids: ``input.shape + (embedding_dim,)``, on their device. Blocks until they are read."""
        if not (torch.is_grad_enabled() and self.trained):
            if input.device.type == "cpu":
                return self.table.read(input)
            out = torch.empty(*input.shape, self.embedding_dim, dtype=self.table.dtype, device=input.device)
            self.table.read(input, out=out)
            return out
        weight, positions, padding = self._gather(input)
        return functional.embedding(positions, weight, padding, sparse=True)


class EmbeddingBagOnDisk(RowsOnDisk):
    """``torch.nn.EmbeddingBag`` whose rows are on a drive. See :class:`EmbeddingOnDisk`, also for the arguments.

    Args:
        mode: "sum" or "mean".
        include_last_offset: Whether ``offsets`` has the end of the last bag too.
    """

    @former_names(config="aio_config")
    def __init__(
        self, num_embeddings: int, embedding_dim: int, *, path: AnyPath | Sequence[AnyPath] | Table, mode: Mode = "mean",
        padding_idx: int | None = None, include_last_offset: bool = False, dtype: torch.dtype | None = None,
        optimizer: OptimizerFactory | None = None, values: Values | None = None, **memory: Unpack[TableMemory],
    ) -> None:  # fmt: skip
        if mode not in ("sum", "mean"):
            raise ValueError(f'mode must be "sum" or "mean", for which there are sparse gradients, got {mode!r}')
        super().__init__(num_embeddings, embedding_dim, padding_idx, path, dtype, optimizer, values, memory)
        self.mode = mode
        self.include_last_offset = include_last_offset

    def forward(
        self, input: torch.Tensor, offsets: torch.Tensor | None = None, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return one row for each bag, as ``torch.nn.EmbeddingBag`` does. Blocks until the rows are read.

        Args:
            input: Ids of shape (bags, ids per bag), or of one dimension together with ``offsets``.
            offsets: Index in ``input`` at which each bag begins, for ids of one dimension.
            per_sample_weights: A factor for each id, with ``mode="sum"``.
        """
        weight, positions, padding = self._gather(input)
        return functional.embedding_bag(
            positions, weight, offsets, mode=self.mode, sparse=True, per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset, padding_idx=padding,
        )  # fmt: skip


Batch = TypeVar("Batch")


class Lookahead(Generic[Batch]):
    """Iterates over a loader's batches; while one batch is used, the rows of the next batch are read into memory.

    >>> for batch in Lookahead(loader, lambda batch: {users: batch.users, items: batch.items}):
    ...     train(batch)

    Results are the same as without Lookahead: the next batch uses the trained rows. The memory budget of each embedding needs
    room for the rows of two batches. The loader runs one batch ahead, so one more batch is in memory.

    Args:
        loader: An iterable of batches, such as a DataLoader.
        rows: Returns the ids that a batch needs, by embedding or table.
    """

    def __init__(self, loader: Iterable[Batch], rows: Callable[[Batch], Mapping[Any, torch.Tensor]]) -> None:
        self._loader, self._rows = loader, rows

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Batch]:
        batches = iter(self._loader)
        try:
            batch = next(batches)
        except StopIteration:
            return
        for following in batches:
            for embedding, ids in self._rows(following).items():
                embedding.prefetch(ids)
            yield batch
            batch = following
        yield batch


def _holder(table: Table, device: torch.device) -> torch.Tensor:
    """Return a tensor of the shape of all rows, with the memory of one element."""
    return torch.zeros((), dtype=table.dtype, device=device).expand(table.shape)


def _check_fits(table: Table, shape: tuple[int, int], dtype: torch.dtype | None, optimizer: OptimizerFactory | None) -> None:
    """Raise ValueError if the table's shape, dtype or optimizer states are not those of the module and its optimizer."""
    if table.shape != shape or table.dtype != (dtype or table.dtype):
        raise ValueError(f"{table} has the shape {table.shape} in {table.dtype}, and {shape} in {dtype or table.dtype} is wanted")
    if optimizer is not None:
        check_states(table, optimizer)
