"""A PyTorch embedding layer whose table is held by the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch as _torch

from aiops.client.embedding_rows import (
    FetchedRows,
    RowSource,
    RowTarget,
    fetch_unique,
    push_unique,
    table_of,
)
from aiops.client.request_kinds import Receipt
from aiops.errors import UsageError
from aiops.model.tables import Table

_UNCONNECTED = (
    "this Embedding has no server yet: make RemoteOptimizer(model, url) before the first forward"
    " pass, or, to evaluate, call embedding.attach(client, name)"
)


@dataclass(slots=True, eq=False)
class _Looked:
    """Rows that a forward pass has fetched, as the leaf tensor that backward gives a gradient."""

    fetched: FetchedRows
    leaf: Any
    listed: bool = False  # among the leaves of the optimizer: it has a gradient


class Embedding(_torch.nn.Module):  # type: ignore[misc]
    """`torch.nn.Embedding` with a sparse table of the server's as its weight.

    ::

        model = torch.nn.Sequential(Embedding(10_000_000, 16), torch.nn.Linear(16, 1))
        opt = RemoteOptimizer(model, "aiops://host:7171")

    A forward pass fetches the rows that the batch names, each once. `RemoteOptimizer.step` pushes
    the gradients of these rows, summed per row, with the version at which they were fetched. The
    weight is never here as a whole, so the layer has no parameters: `state_dict` is empty, and
    the server keeps the rows. A row's initial value is that of `aiops.Table`.

    The table's name is the layer's path in the module given to `RemoteOptimizer`, as in
    ``named_modules()``; workers must agree on it. Once the optimizer is made the layer fetches
    through its worker. Without gradients (``torch.no_grad()``) it only fetches.

    Parameters
    ----------
    num_embeddings, embedding_dim
        The table's rows and width.
    padding_idx
        An id whose output is zeros, and which is neither fetched with the others' values nor
        trained, as in `torch.nn.Embedding`. Default None.
    settings
        Further settings of `aiops.Table`: ``dtype``, ``init``, ``scale``, ``seed`` and so on.

    Attributes
    ----------
    table
        The `aiops.Table`.

    Raises
    ------
    UsageError
        When a setting is out of its range.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.table: Table = Table(num_embeddings, embedding_dim, **settings)
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise UsageError(f"padding_idx must be an id of the table, not {padding_idx}")
        self.padding_idx: int | None = None if padding_idx is None else padding_idx % num_embeddings
        self._forget()

    def _forget(self) -> None:
        self._name = ""
        self._source: RowSource | None = None
        self._leaves: list[Any] | None = None  # those of the optimizer that trains it
        self._looked: list[_Looked] = []  # those that have a gradient

    def attach(self, client: RowSource, name: str) -> Embedding:
        """Fetch rows of the table ``name`` through a `Client` or a `Worker`, and train none.

        To evaluate in another process than those that train: an observer's `Client` will do.

        Returns
        -------
        This layer.

        Raises
        ------
        UsageError
            When the server's model has no such table, or it is another one.
        """
        theirs = table_of(client, name)
        if theirs != self.table:
            raise UsageError(
                f"table {name!r} of the server is {theirs}, but this layer has {self.table}"
            )
        self._forget()
        self._name, self._source = name, client
        return self

    def train_with(self, worker: Any, name: str, leaves: list[Any]) -> None:
        """Have `RemoteOptimizer` train it; ``leaves`` receives the rows that have a gradient."""
        self.attach(worker, name)
        self._leaves = leaves

    def forward(self, ids: Any) -> Any:
        """Return the rows of integer ids of any shape: ``[*ids.shape, embedding_dim]``.

        Raises
        ------
        UsageError
            When there is no server yet, or an id is out of range. Otherwise as `Client.fetch_rows`.
        """
        if self._source is None:
            raise UsageError(_UNCONNECTED)
        fetched = fetch_unique(self._source, self._name, ids.detach().cpu().numpy())
        if self.padding_idx is not None:
            fetched.rows[fetched.ids == self.padding_idx] = 0
        leaf = _torch.from_numpy(fetched.rows).to(ids.device)
        if self._leaves is not None and _torch.is_grad_enabled():
            leaf.requires_grad_()
            looked = _Looked(fetched, leaf)
            leaf.register_post_accumulate_grad_hook(lambda _leaf: self._received(looked))
        index = _torch.from_numpy(fetched.index).to(ids.device).reshape(ids.shape)
        return _torch.nn.functional.embedding(index, leaf)

    def _received(self, looked: _Looked) -> None:
        """Take note of rows for which a backward pass has computed a gradient."""
        if self._leaves is not None and not looked.listed:
            looked.listed = True
            self._looked.append(looked)
            self._leaves.append(looked.leaf)

    def discard(self) -> None:
        """Forget the gradients that have not been pushed."""
        for looked in self._looked:
            looked.listed = False
        self._looked = []

    def push(self, worker: RowTarget, factor: float) -> Receipt | None:
        """Push the gradients since the last push; return the last receipt.

        ``factor``: what the learning rate is multiplied by. Those of several forward passes are
        pushed one after the other, each with the version of its own rows.
        """
        looked, receipt = self._looked, None
        self.discard()
        for each in looked:
            if each.leaf.grad is None:
                continue
            grads = each.leaf.grad.detach().cpu().numpy()
            ids, version = each.fetched.ids, each.fetched.version
            if self.padding_idx is not None:
                kept = ids != self.padding_idx
                ids, grads = ids[kept], grads[kept]
            given = worker, self.table, self._name, ids, grads, version, factor
            receipt = push_unique(*given) or receipt
        return receipt

    def __getstate__(self) -> dict[str, Any]:
        """Leave the connection out of a copy: it has no server until an optimizer is made."""
        state = dict(self.__dict__)
        state.update(_name="", _source=None, _leaves=None, _looked=[])
        return state

    def extra_repr(self) -> str:
        """Return the table and its name, for the module's text."""
        table = self.table
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{table.rows}, {table.width}{padding}" + (f", {self._name!r}" if self._name else "")


def embeddings_in(params: Any, given: Mapping[str, Embedding] | None) -> dict[str, Embedding]:
    """Return the layers to train by the names of their tables.

    Parameters
    ----------
    params
        The optimizer's: if it is a module, its layers are found.
    given
        Layers by name, for parameters that are no module.

    Raises
    ------
    UsageError
        When both have layers, or one is no `Embedding`.
    """
    found: dict[str, Embedding] = {}
    if isinstance(params, _torch.nn.Module):
        for path, layer in params.named_modules():
            if isinstance(layer, Embedding):
                # torch.compile wraps a module and renames its layers; the other workers may not.
                found[path.replace("_orig_mod.", "") or "embedding"] = layer
    for name, layer in (given or {}).items():
        if not isinstance(layer, Embedding):
            raise UsageError(f"embeddings[{name!r}] is a {type(layer).__name__}, no Embedding")
        if layer in found.values():
            raise UsageError(f"the layer of embeddings[{name!r}] is in the module: leave it out")
        if name in found:
            raise UsageError(f"two embeddings are called {name!r}: give them different names")
        found[name] = layer
    return found
