"""A JAX pytree of parameters that a server trains.

::

    from aiops.client.jax import RemoteTree

    remote = RemoteTree(params, "aiops://host:7171")
    for batch in data:
        gradients = grad(remote.params, batch)      # grad = jax.jit(jax.grad(loss))
        remote.step(gradients)                      # instead of the optimizer's update

`RemoteTree.params` is an ordinary pytree of ordinary arrays, so whatever takes one is jitted as
before; `RemoteTree.step` talks to the server and stays outside of ``jit``.

A leaf's name on the server is its path joined with dots: ``params["dense"]["kernel"]`` is
``dense.kernel``. So workers written with NumPy, PyTorch and JAX can train one model, if they give
its tensors the same names in the same order (JAX sorts the keys of a dict).

**Embeddings** too large for a worker are sparse tables (`aiops.Table`), whose rows stay on the
server. `RemoteTree.lookup` fetches the rows that a mini-batch names, each once; the loss takes them
as an argument, and `step` pushes their gradients::

    remote = RemoteTree(params, url, tables={"words": aiops.Table(10_000_000, 16)})
    grad = jax.jit(jax.grad(lambda p, rows, index, y: loss(p, rows[index], y), argnums=(0, 1)))
    for ids, y in data:
        words = remote.lookup("words", ids)
        gradients, of_rows = grad(remote.params, words.rows, words.index, y)
        remote.step(gradients, rows=[(words, of_rows)])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

try:
    import jax as _jax
except ImportError as missing:
    raise ImportError(
        "aiops.client.jax needs JAX, which is not here: pip install 'aiops-ps[jax]'", name="jax"
    ) from missing

from aiops.client.embedding_rows import fetch_unique, push_unique
from aiops.client.params import Params
from aiops.client.remote import Remote
from aiops.client.request_kinds import Receipt
from aiops.client.sync.worker import Worker
from aiops.common.frozen import value
from aiops.errors import UsageError, nearest
from aiops.model.arena import aligned
from aiops.model.layout import DTYPES, Array, Ints
from aiops.model.tables import Table

__all__ = ["LookedUpRows", "RemoteTree"]

_tree = _jax.tree_util


@value
class LookedUpRows:
    """The rows of a table that some ids name, for one mini-batch.

    ``rows[index]`` has the row of each id. It is no pytree: give ``rows`` and ``index`` to a jitted
    function, which is compiled once for each shape of ids.

    Attributes
    ----------
    name
        The table's name.
    rows
        JAX array, ``dtype[k, width]``, k the number of ids: each row that they name once, in the
        order of the rows' numbers, and then zeros.
    index
        JAX array, int32, of the shape of the ids: the place in ``rows`` of each.
    ids
        int64[n], n ≤ k: the numbers of the first n rows.
    version
        Of the table, when they were fetched.
    """

    name: str
    rows: Any
    index: Any
    ids: Ints
    version: int


class RemoteTree(Remote):
    """A pytree of parameters: gradients go to the server, new parameters come from it.

    Parameters
    ----------
    tree
        A pytree whose leaves are float64, float32, float16 or bfloat16 arrays of JAX or NumPy, of
        any shape. float64 becomes float32 unless JAX has 64 bits enabled. The first worker's define
        the model; the others receive the server's.
    tables
        The sparse parameters (`aiops.Table`) by name; default: none. `lookup` fetches their rows.
    url, overlap, token, name, timeout
        As `Worker`'s.

    Attributes
    ----------
    params
        The current parameters: a pytree like ``tree``, of JAX arrays on the devices where its
        leaves were. Every step makes new arrays; old ones stay as they are.
    worker
        The `Worker` underneath: ``stats()``, ``traffic``, ``policy``.
    version
        The model version of `params`.
    last
        The `Receipt` of the last step, or None.

    Raises
    ------
    UsageError
        When a leaf cannot be trained; the text names its path.
    BadPush
        When the server's model has other tensors; the text names the first difference.
    ConnectionLost, DeadlineExceeded, RemoteProtocolError, Unauthorised
        As `Client`.
    """

    params: Any

    def __init__(
        self,
        tree: Any,
        url: str | None = None,
        *,
        tables: Mapping[str, Table] | None = None,
        overlap: bool | int | None = None,
        token: str | None = None,
        name: str | None = None,
        timeout: float = 60.0,
    ) -> None:
        pairs, self._structure = _tree.tree_flatten_with_path(tree)
        leaves = [_leaf(path, leaf) for path, leaf in pairs]
        self._paths = [path for path, _ in pairs]
        self._names = _names(self._paths)
        # Arrays that are bound to their devices stay there; the others stay free.
        self._homes = [
            leaf.sharding if getattr(leaf, "committed", True) else None for leaf in leaves
        ]
        arrays = dict(zip(self._names, map(np.asarray, _jax.device_get(leaves)), strict=True))
        self.last: Receipt | None = None
        worker = Worker(
            url, arrays, tables=tables, overlap=overlap, token=token, name=name, timeout=timeout
        )
        self._hold(worker)
        self.params = self._current()

    def lookup(self, name: str, ids: Any) -> LookedUpRows:
        """Fetch the rows of a table that ids name, each once.

        Parameters
        ----------
        name
            The table's name.
        ids
            Integers from 0 to the table's rows - 1, of any shape: an array of JAX or NumPy, or a
            list. The rows have as many places as there are ids, so their shape depends on the
            shape of the ids alone.

        Raises
        ------
        UsageError
            When there is no such table, or an id is none of its rows.
        ConnectionLost, DeadlineExceeded
            When the server cannot be reached, or does not answer.
        """
        if isinstance(ids, _jax.core.Tracer):
            raise UsageError(
                "lookup() talks to the server and cannot be traced: keep it out of jit"
            )
        numbers = np.asarray(ids)
        found = fetch_unique(self.worker, name, numbers, room=numbers.size)
        index = _jax.numpy.asarray(found.index.astype(np.int32).reshape(numbers.shape))
        rows = _jax.numpy.asarray(found.rows)
        return LookedUpRows(name, rows, index, found.ids, found.version)

    def step(
        self,
        gradients: Any,
        rows: Iterable[tuple[LookedUpRows, Any]] = (),
        lr_factor: float | None = None,
    ) -> Receipt:
        """Push the gradients of one mini-batch, and bring `params` up to date.

        Parameters
        ----------
        gradients
            A pytree like `params`, computed at `params`, of the same shapes; where it has None
            instead of an array or a subtree, those parameters take no part in this step. Or a
            function params → gradients: the server may refuse a stale gradient (``hardsync`` with
            ``admission=reject``), and the function is then called again, with newer parameters.
        rows
            Rows that were looked up, each with its gradients, of the shape of its ``rows``. They
            are pushed before the parameters' gradients.
        lr_factor
            What the server's learning rate is multiplied by for this step, from 0 to 100: where the
            loop has a schedule of its own, ``schedule(step) / peak``, say, ``peak`` being its
            largest rate. Default: 1.

        Returns
        -------
        The step's `Receipt`, as `Worker.step` returns it.

        Raises
        ------
        UsageError
            When the gradients' structure, a shape or a dtype is not that of `params` (the text
            names the path), all are None, ``lr_factor`` may be no factor, or the policy needs a
            function.
        BadPush
            When a value is not finite, or is 1e18 or more in magnitude; the text names its tensor,
            and nothing has changed.
        ConnectionLost, DeadlineExceeded
            When the server cannot be reached, or does not answer.
        """
        if _is_function(gradients):
            if rows:
                raise UsageError(
                    "step(function) has no gradients of rows: compute them first, and give arrays"
                )
            self.last = self.worker.step(self._computed_by(gradients), lr_factor)
        else:
            if self.worker.plan.get("recompute"):
                raise UsageError(
                    f"{self.worker.policy} may ask for gradients to be computed again: call"
                    " step(function) with a function params → gradients"
                )
            arrays = self._arrays(gradients)
            for looked_up, of_rows in rows:
                self._push_rows(looked_up, of_rows, 1.0 if lr_factor is None else lr_factor)
            self.last = self.worker.step(arrays, lr_factor)
        self.params = self._current()
        return self.last

    def refresh(self) -> int:
        """Bring `params` up to date without a push; return their version. Raises as `step` does."""
        version = self.worker.refresh()
        self.params = self._current()
        return version

    def evaluation(self) -> Any:
        """Return the server's parameters where the model is evaluated, a pytree like `params`.

        Under some policies, ``schedule-free`` for one, that is not where gradients are computed:
        validate with these. `params` stays as it is. Raises as `step` does.
        """
        return self._tree_of(self.worker.evaluation())

    def close(self) -> Any:
        """Push what has not been pushed yet, take over the model, and leave the server.

        Under some policies, ``schedule-free`` for one, `params` is then where the model is
        evaluated; if it cannot be fetched, a warning says so. It may be called twice, and no step
        can be taken after it.

        Returns
        -------
        pytree
            `params`, which are the last.

        Raises
        ------
        ConnectionLost, DeadlineExceeded, BadPush
            When the last push failed; the connection is closed all the same.
        """
        super().close()
        return self.params

    def __repr__(self) -> str:
        return (
            f"<RemoteTree of {len(self._names)} arrays at {self.worker.url}, {self.worker.policy},"
            f" version {self.version}>"
        )

    # ------------------------------------------------------------ inside

    def _show(self, params: Params) -> None:
        self.params = self._tree_of(params)

    def _push_rows(self, looked_up: LookedUpRows, of_rows: Any, lr_factor: float) -> None:
        grads = np.asarray(_jax.device_get(of_rows))
        if grads.shape != looked_up.rows.shape:
            raise UsageError(
                f"table {looked_up.name!r}: the gradients have shape {grads.shape}, but the rows"
                f" that were looked up have {looked_up.rows.shape}"
            )
        table, ids = self.worker.tables[looked_up.name], looked_up.ids
        mine = np.ascontiguousarray(grads[: len(ids)], table.dtype)
        given = table, looked_up.name, ids, mine, looked_up.version
        push_unique(self.worker, *given, lr_factor)

    def _computed_by(self, function: Callable[[Any], Any]) -> Callable[[Params], dict[str, Array]]:
        """Return what the worker calls for gradients: again, when the server refused the last."""
        again = False

        def compute(params: Params) -> dict[str, Array]:
            nonlocal again
            if again:
                self.params = self._current()
            again = True
            return self._arrays(function(self.params))

        return compute

    def _current(self) -> Any:
        """Return the worker's parameters as a new pytree."""
        return self._tree_of(self.worker.params)

    def _tree_of(self, params: Params) -> Any:
        """Return parameters as a new pytree.

        Each array is a copy: JAX would share the memory of a NumPy array on a CPU, and the worker's
        are overwritten by the next step. The copy is aligned, so that JAX makes no second one.
        """
        leaves = []
        for name, home in zip(self._names, self._homes, strict=True):
            array = params[name]
            copy = aligned(array.nbytes).view(array.dtype).reshape(array.shape)
            np.copyto(copy, array)
            leaves.append(_jax.device_put(copy, home))
        return _tree.tree_unflatten(self._structure, leaves)

    def _arrays(self, gradients: Any) -> dict[str, Array]:
        """Return the gradients by name, as arrays over the same memory where they are on a CPU."""
        leaves, structure = _tree.tree_flatten(gradients)
        if structure == self._structure:
            found = dict(zip(self._names, leaves, strict=True))
        else:
            found = self._matched(gradients)
        if any(isinstance(leaf, _jax.core.Tracer) for leaf in found.values()):
            raise UsageError("step() talks to the server and cannot be traced: keep it out of jit")
        return {name: np.asarray(leaf) for name, leaf in _jax.device_get(found).items()}

    def _matched(self, gradients: Any) -> dict[str, Any]:
        """Return the gradients by name, from a tree that has None here and there."""
        given: dict[str, Any] = {}
        absent: set[str] = set()
        for path, leaf in _tree.tree_flatten_with_path(gradients, is_leaf=_is_none)[0]:
            if leaf is None:
                absent.add(_tree.keystr(path))
            else:
                given[_tree.keystr(path)] = leaf
        found = {}
        for path, name in zip(self._paths, self._names, strict=True):
            where = _tree.keystr(path)
            if where in given:
                found[name] = given.pop(where)
            elif not any(_tree.keystr(path[:depth]) in absent for depth in range(len(path) + 1)):
                others = given.keys() - {_tree.keystr(path) for path in self._paths}
                hint = nearest(where, others) if others else "None says that it has no gradient"
                raise UsageError(f"the gradients have nothing at {where}, but params do; {hint}")
        if given:
            raise UsageError(f"the gradients have {next(iter(given))}, but params do not")
        if not found:
            raise UsageError("all gradients are None: push at least one")
        return found


def _is_none(leaf: Any) -> bool:
    return leaf is None


def _is_function(value: Any) -> bool:
    """Return whether this is a function and no pytree (modules of some libraries are both)."""
    return callable(value) and bool(_tree.all_leaves([value]))


def _leaf(path: Any, leaf: Any) -> Any:
    """Return a leaf as the JAX array that it will be from now on."""
    where = _tree.keystr(path) or "the tree"
    if not isinstance(leaf, _jax.Array | np.ndarray):
        raise UsageError(
            f"{where} is a {type(leaf).__name__}, not an array: keep it out of the tree"
        )
    if str(leaf.dtype) not in DTYPES:
        raise UsageError(
            f"{where} is {leaf.dtype}, which cannot be trained; {', '.join(DTYPES)} can:"
            " keep the others out of the tree"
        )
    return _jax.numpy.asarray(leaf)  # float64 becomes float32 here, unless JAX has it enabled


def _names(paths: list[Any]) -> list[str]:
    """Return the leaves' names: their paths, joined with dots.

    Raises
    ------
    UsageError
        When there is no leaf, or two have the same name.
    """
    if not paths:
        raise UsageError("the tree has no array: give it at least one")
    found: dict[str, str] = {}
    for path in paths:
        name, where = ".".join(map(_key, path)) or "params", _tree.keystr(path)
        if name in found:
            raise UsageError(f"{found[name]} and {where} would both be called {name!r}: rename one")
        found[name] = where
    return list(found)


def _key(entry: Any) -> str:
    """Return one step of a path: a key, an index or an attribute's name."""
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry).strip(".[]'\"")
