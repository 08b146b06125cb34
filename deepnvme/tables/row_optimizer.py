"""An optimizer for rows on a drive, which steps them by torch's optimizers, and commits their tables together."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .embedding import RowsOnDisk
from .mapped_tensors import mapped_tensors, parts_of
from .row_states import OptimizerFactory, OptimizerStates, check_states, copied, optimizer_name
from .session import TableSession
from .table import Table

_ATTRIBUTE = "optimizer"
"""Name of the table's attribute that stores optimizer states of the whole table, such as the number of steps."""


class CommonCommits:
    """Commits several tables together, atomically.

    First each table is prepared: its changes are written to the drive, and its manifest records that. Then the tables are
    committed, beginning with the first one, whose commit decides for all. A crash before that commit leaves each table at its
    previous commit. After a later crash, the constructor of the next CommonCommits object for these tables finishes the remaining
    commits, which it recognises by the name of the first table's commit.

    Args:
        tables: Opened ``writable``, with no row changed since then. The first table decides.

    Raises:
        OSError: If the drive cannot be read or written.
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        self._sessions = [table.session for table in tables]
        self._unfinished: tuple[str, list[dict[str, Any]]] | None = None
        if len(tables) > 1:
            names = {commit_name(session) for session in self._sessions} - {""}
            for session in self._sessions:
                with session.lock:
                    writer = session.writer_here()
                    if writer.prepared is not None and writer.prepared.name in names:
                        writer.adopt_prepared()

    def commit(self, attributes: Sequence[Mapping[str, Any]]) -> None:
        """Commit all tables. Blocks until they are on stable storage.

        Args:
            attributes: One mapping for each table, as for :meth:`Table.commit`.

        Raises:
            OSError: If the drive cannot be read or written. commit() may be called again.
        """
        self.finish()
        name, noted = secrets.token_hex(8), [dict(each) for each in attributes]
        if len(self._sessions) == 1:
            name = ""
        else:
            for session, each in zip(self._sessions, noted, strict=True):
                with session.lock:
                    session.writer_here().prepare(name, each)
            self._unfinished = name, noted
        self._commit(name, noted)

    def finish(self) -> None:
        """Finish a commit that failed or was interrupted after all tables were prepared. Blocks.

        Must be called before rows are changed. Some of the tables may have made the commit already. Does nothing if no commit is
        unfinished.

        Raises:
            OSError: If the drive cannot be read or written. Call finish() again, or :meth:`rollback`.
        """
        if self._unfinished is not None:
            self._commit(*self._unfinished)

    def rollback(self) -> None:
        """Undo the changes of all tables since the last commit. Blocks.

        If the first table has made an unfinished commit, that commit is finished first and is then the last commit.

        Raises:
            OSError: If the drive cannot be read or written. rollback() may be called again.
        """
        if self._unfinished is not None and commit_name(self._sessions[0]) == self._unfinished[0]:
            self.finish()
        for session in self._sessions:  # the first table first: then none of the others is prepared for a commit in force
            with session.lock:
                session.writer_here().rollback()
        self._unfinished = None

    def _commit(self, name: str, attributes: Sequence[Mapping[str, Any]]) -> None:
        for session, each in zip(self._sessions, attributes, strict=True):
            with session.lock:
                session.writer_here().commit(each, name)
        self._unfinished = None


def commit_name(session: TableSession) -> str:
    """Return the name of a table's last commit; "" if the table was committed alone."""
    with session.lock:
        return session.writer_here().epochs.name


@dataclass(eq=False)
class _Trained:
    """An embedding, and the optimizer of its rows."""

    embedding: RowsOnDisk
    states: OptimizerStates
    inner: torch.optim.Optimizer
    """Torch's optimizer. It has a parameter only during a step."""

    @property
    def table(self) -> Table:
        """The table with the embedding's rows and their states."""
        return self.embedding.table


class RowOptimizer(torch.optim.Optimizer):
    """Trains the rows of embeddings on a drive.

    A step reads the rows that have gradients, steps them by torch's optimizer, and writes them with their states.

    >>> optimizer = RowOptimizer(model, torch.optim.SparseAdam, lr=1e-3)
    >>> for step, (ids, labels) in enumerate(loader):
    ...     loss_function(model(ids), labels).backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    ...     if step % 1000 == 0:
    ...         optimizer.commit({"step": step})

    The rows are afterwards bit-identical to those of ``torch.nn.Embedding(sparse=True)`` with the same optimizer.

    Changes become durable with :meth:`commit`; after a crash, rows are as at the last commit (see :meth:`Table.write`). An
    optimizer of embeddings that were opened again continues from their last commit, with the right number of steps.

    ``param_groups`` is for learning rate schedulers, as in torch. Its ``params`` are the ``gradient_holder`` of each embedding,
    tensors without memory. They are not parameters of the model, so ``model.zero_grad()`` does not drop their gradients:
    call this optimizer's :meth:`zero_grad`. Clip the gradients with ``clip_grad_norm_([*model.parameters(), *holders])``,
    where ``holders`` are the params of these groups.

    Args:
        embeddings: A model, whose embeddings on a drive are trained unless they are frozen; or a list of embeddings; or
            groups of embeddings, as ``{"params": [embedding, ...], "lr": ...}``.
        optimizer: A class of torch.optim, or :class:`RowWiseAdagrad`; None for the optimizer that the embeddings were made for.
        **settings: Arguments of that class.

    Raises:
        ValueError: If there is no embedding to train, or the tables do not store the states that the optimizer needs.
        OSError: If the drive cannot be read or written. The constructor also finishes the commit of a process that was killed.
    """

    def __init__(
        self, embeddings: nn.Module | Iterable[nn.Module | dict[str, Any]], optimizer: OptimizerFactory | None = None,
        **settings: Any,
    ) -> None:  # fmt: skip
        groups = list(_groups_of(embeddings))
        if optimizer is None:
            optimizer = groups[0]["params"][0].optimizer
            if optimizer is None:
                raise ValueError("the embedding was made without optimizer=: its rows cannot be trained")
        self._factory = functools.partial(optimizer, **settings)
        self._trained: dict[torch.Tensor, _Trained] = {}
        self._failed = False
        tried = self._factory([nn.Parameter(torch.zeros(1, 1))])
        super().__init__([self._with_holders(group) for group in groups], tried.defaults)
        self._commits = CommonCommits([trained.table for trained in self._trained.values()])
        for holder in self._trained:
            self._continue(holder)

    def _with_holders(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of ``group`` whose ``params`` are the embeddings' gradient holders, the tensors that get the gradients.

        Raises TypeError or ValueError for an embedding that cannot be trained.
        """
        holders = []
        for embedding in group["params"]:
            if not isinstance(embedding, RowsOnDisk):
                raise TypeError(f"RowOptimizer trains embeddings on a drive, got {type(embedding).__name__}")
            if not (embedding.table.writable and embedding.optimizer is not None):
                raise ValueError(f"the rows of {embedding.table} cannot be trained: make the embedding with optimizer=")
            settings = {name: value for name, value in group.items() if name != "params"}
            states = check_states(embedding.table, functools.partial(self._factory, **settings))
            inner = self._factory([nn.Parameter(torch.zeros(1, embedding.embedding_dim, dtype=embedding.table.dtype))])
            inner.state.clear()
            self._trained[embedding.gradient_holder] = _Trained(embedding, states, inner)
            holders.append(embedding.gradient_holder)
        return {**group, "params": holders}

    def _continue(self, holder: torch.Tensor) -> None:
        """Set the optimizer's state to that of the last commit of an embedding's table. ``holder``: its gradient holder."""
        trained = self._trained[holder]
        committed = trained.table.attributes.get(_ATTRIBUTE, {})
        self.state[holder] = copied(trained.states.table)
        for name in trained.states.names:
            if name in committed:
                self.state[holder][name] = _like(committed[name], trained.states.table.get(name))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Called by the constructor. Raises ValueError for other embeddings than those given there."""
        if not set(param_group["params"]) <= self._trained.keys():
            raise ValueError("the tables of a RowOptimizer are committed together: give all embeddings to its constructor")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Train the rows that have gradients. Blocks until they are read and changed in memory.

        They are written later, at the latest by :meth:`commit`.

        Args:
            closure: Computes the loss and its gradients again, as for torch's optimizers. None if the gradients exist already.

        Returns:
            What the closure returned; None without one.

        Raises:
            OSError: If the drive cannot be read or written, such as RowsUnreadable. Some rows may be changed: call
                :meth:`rollback`. Also if an earlier commit has failed and still cannot be finished: no row is changed then.
            RuntimeError: If an earlier step failed or was interrupted, until :meth:`rollback`; or if a gradient is not sparse.
                No row is changed then.
        """
        self._check_whole()
        self._commits.finish()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        changed = [(each, group) for group in self.param_groups for each in group["params"] if each.grad is not None]
        if not all(holder.grad.is_sparse for holder, _ in changed):
            raise RuntimeError("gradients of rows on the drive must be sparse, as their forward makes them")
        self._failed = True  # until all tables are changed: an interrupt between two of them would leave half a step
        for holder, group in changed:
            self._step(holder, group)
        self._failed = False
        return loss

    def _step(self, holder: torch.Tensor, group: Mapping[str, Any]) -> None:
        trained, gradient = self._trained[holder], holder.grad
        assert gradient is not None
        rows, positions = torch.unique(gradient._indices()[0], return_inverse=True)
        if not len(rows):  # the step is counted nevertheless
            rows = rows.new_zeros(1)
        records = trained.table.read_records(rows)
        values = {name: column.to(gradient.device).contiguous() for name, column in records.items()}
        compact = nn.Parameter(values.pop("values"))
        compact.grad = torch.sparse_coo_tensor(
            positions.unsqueeze(0),
            gradient._values(),
            compact.shape,
            check_invariants=False,
            is_coalesced=gradient.is_coalesced(),
        )
        inner = trained.inner
        inner.param_groups[0].update({name: value for name, value in group.items() if name != "params"}, params=[compact])
        try:
            if self.state[holder] or trained.states.all_by_row:  # else the optimizer makes them: it is the first step
                whole = {**copied(self.state[holder]), **values}
                inner.state[compact] = {name: whole[name] for name in trained.states.names}
            inner.step()
            states = dict(inner.state[compact])
        finally:
            inner.state.clear()
            inner.param_groups[0]["params"] = []
        changed = {"values": compact.detach(), **{name: states.pop(name) for name in trained.states.rows}}
        trained.table.write_records(rows, {name: column.cpu() for name, column in changed.items()})
        self.state[holder] = states

    def _check_whole(self) -> None:
        if self._failed:
            raise RuntimeError(
                "a step or load_state_dict() failed or was interrupted, and has perhaps changed some rows only: call rollback()"
            )

    # -- commits

    @property
    def attributes(self) -> dict[str, Any]:
        """Attributes given to the last :meth:`commit`; with several tables, those of the first table."""
        first = next(iter(self._trained.values()))
        return {name: value for name, value in first.table.attributes.items() if name != _ATTRIBUTE}

    def commit(self, attributes: Mapping[str, Any] | None = None) -> None:
        """Commit the changes of all tables so far, together with the number of steps. Blocks until they are on stable storage.

        If the process crashes, the next optimizer made for these tables finds all of them at this commit, or all at the previous
        commit.

        Args:
            attributes: Stored with the commit and returned by :attr:`attributes`, such as a position in the data: anything that
                JSON can hold. None keeps the attributes of the last commit.

        Raises:
            ValueError: For attributes named "optimizer".
            OSError: If the drive cannot be read or written (ENOSPC and others). commit() may be called again. Until a commit() or
                a step has succeeded, do not change rows by :meth:`Table.write` or a module's ``load_state_dict``. These do not
                finish the failed commit first, so their changes might become part of a commit that only some tables have.
            RuntimeError: After a step that has failed.
        """
        self._check_whole()
        if attributes is not None and _ATTRIBUTE in attributes:
            raise ValueError(f"attributes must not have the name {_ATTRIBUTE!r}: the number of steps is noted there")
        noted = []
        for holder, trained in self._trained.items():
            states = {name: torch.as_tensor(value).item() for name, value in self.state[holder].items()}
            noted.append({**(trained.table.attributes if attributes is None else attributes), _ATTRIBUTE: states})
        self._commits.commit(noted)

    def rollback(self) -> None:
        """Undo all changes since the last commit, and drop the gradients. Blocks. After an OSError, call it again."""
        self._failed = True
        self._commits.rollback()
        for holder in self._trained:
            self._continue(holder)
            holder.grad = None
        self._failed = False

    # -- state dicts, in torch's form

    def state_dict(self) -> dict[str, Any]:
        """Return a state dict as torch's optimizer of ``nn.Embedding(sparse=True)`` has it. Blocks until the states are written.

        The states of rows are tensors mapped from unnamed temporary files beside the table. They take no memory, but space
        on the drive until the tensors are garbage-collected.

        Raises:
            OSError: If the drive cannot be read or written (ENOSPC and others).
        """
        packed = super().state_dict()
        for number, trained in self._numbered():
            states = packed["state"].pop(number, {})
            if not trained.states.names or not (states or trained.states.all_by_row):
                continue  # no step yet: torch has none either
            table, rows = trained.table, trained.states.rows

            def values(begin: int, end: int, table: Table = table, names: tuple[str, ...] = tuple(rows)) -> list[torch.Tensor]:
                """Return rows ``begin`` to ``end`` of each optimizer state."""
                records = table.read_records(torch.arange(begin, end), keep=False)
                return [records[name] for name in names]

            columns = [(state.dtype, tuple(state.shape)) for state in rows.values()]
            whole = copied(states)  # an optimizer that loads them may change them in place
            if columns:
                whole |= zip(rows, mapped_tensors(table.directory, table.rows, columns, values), strict=True)
            packed["state"][number] = {name: whole[name] for name in trained.states.names}
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class, or of torch's optimizer. Blocks until the states are written to the tables.

        The loaded states are durable from the next :meth:`commit` on.

        Raises:
            ValueError: If the states have other shapes or names; nothing is changed then.
            OSError: If the drive cannot be read or written. Call :meth:`rollback` then.
            RuntimeError: After a step that has failed.
        """
        states = state_dict["state"]
        self._check_whole()
        self._commits.finish()
        by_row: list[tuple[_Trained, dict[str, torch.Tensor] | None]] = []
        of_tables: dict[int, dict[str, Any]] = {}
        for number, trained in self._numbered():
            given = dict(states.get(number, {}))
            if given and given.keys() != set(trained.states.names):
                raise ValueError(
                    f"the state dict has the states {sorted(given)} for {trained.table}, and {optimizer_name(self._factory)} has"
                    f" {sorted(trained.states.names)}"
                )
            own = {name: given.pop(name) for name in trained.states.rows} if given else None
            for name, state in trained.states.rows.items():
                shape = (trained.table.rows, *state.shape)
                if own is not None and tuple(own[name].shape) != shape:
                    raise ValueError(f"the state {name!r} must have the shape {shape}, got {tuple(own[name].shape)}")
            by_row.append((trained, own))
            if given:
                of_tables[number] = copied(given)
        self._failed = True  # until all is loaded, also if an interrupt comes between
        try:
            super().load_state_dict({**state_dict, "state": of_tables})
        except ValueError:  # other groups, of which torch makes sure first
            self._failed = False
            raise
        for trained, own in by_row:
            _load_rows(trained, own)
        for holder, trained in self._trained.items():
            self.state[holder] = {**copied(trained.states.table), **self.state.get(holder, {})}
        self._failed = False

    def _numbered(self) -> Iterator[tuple[int, _Trained]]:
        """Yield each embedding with its index in state dicts."""
        holders = [holder for group in self.param_groups for holder in group["params"]]
        return ((number, self._trained[holder]) for number, holder in enumerate(holders))


def _load_rows(trained: _Trained, given: Mapping[str, torch.Tensor] | None) -> None:
    """Write the optimizer states of all rows, some MiB at a time. ``given``: the states; None for their initial values."""
    table, rows = trained.table, trained.states.rows
    if not rows:
        return
    row_bytes = table.nbytes // max(table.rows, 1) * (1 + len(rows))
    for begin, end in parts_of(table.rows, row_bytes):
        columns = {}
        for name, state in rows.items():
            if given is None:
                columns[name] = torch.full((end - begin, *state.shape), state.initial, dtype=state.dtype)
            else:
                columns[name] = given[name].detach()[begin:end].to("cpu", state.dtype)
        table.write_records(torch.arange(begin, end), columns)


def _groups_of(embeddings: nn.Module | Iterable[nn.Module | dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield parameter groups of the embeddings that are on a drive. Raises ValueError if there are none."""
    if isinstance(embeddings, nn.Module):
        embeddings = [each for each in embeddings.modules() if isinstance(each, RowsOnDisk) and each.trained]
    given = list(embeddings)
    if not given:
        raise ValueError("there are no embeddings on a drive to train: make them with optimizer=")
    if not any(isinstance(each, dict) for each in given):
        yield {"params": given}
        return
    for each in given:
        if not isinstance(each, dict):
            raise TypeError(f"embeddings must all be in groups, or none, got {type(each).__name__} beside a group")
        params = each["params"]
        yield {**each, "params": [params] if isinstance(params, nn.Module) else list(params)}


def _like(number: float, example: Any) -> Any:
    """Return a number as it is, or as a tensor like ``example`` if that is a tensor."""
    return torch.full_like(example, number) if isinstance(example, torch.Tensor) else number
