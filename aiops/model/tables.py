"""Describe sparse tables, and the parts of messages about their rows.

A table is a matrix of ``rows`` × ``width``, for example the embeddings of a vocabulary, of which a
worker fetches the rows that it needs. It is stored on the server alone. Until its first push, a row
is not stored: its values are generated from the table's initialiser, its seed and the row's number
(`aiops.kernels.row_initialiser`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, TypeAlias

import numpy as np

from aiops.common.settings import whole_number
from aiops.errors import BadPush, UsageError, nearest
from aiops.model.layout import Array, Ints
from aiops.model.parts import LARGEST, MAX_TEXT, Part, Parts

INITIALISERS = ("zeros", "uniform", "normal")
"""The distributions of initial values, as `Table` describes them."""

TABLE_DTYPES = ("float32", "float64")

MAX_TABLES = 1024
MAX_ROWS = 1 << 40
MAX_WIDTH = 1 << 16

MAX_IDS = 1 << 20
"""The largest number of rows in one message."""

MAX_ROWS_BYTES = 1 << 26
"""The largest number of bytes of rows that one message may carry or request."""

ID_BYTES = 8

_WHOLE = {
    "rows": ("", 1, MAX_ROWS),
    "width": ("", 1, MAX_WIDTH),
    "seed": ("", 0, (1 << 63) - 1),
    "max_rows": (" (0: no bound)", 0, MAX_ROWS),
    "max_age": (" (0: no bound)", 0, LARGEST),
}
"""What of a table is a whole number: words after its name in an error, the least, and the most."""


def _dtype(given: object) -> str:
    """Return the name of a table's dtype, given as that or as what NumPy takes for it.

    Raises
    ------
    UsageError
        When no table has it.
    """
    found: object = given
    if given is not None and not isinstance(given, str):  # NumPy would take None for float64
        with contextlib.suppress(TypeError, ValueError):
            found = np.dtype(given).name  # type: ignore[call-overload]
    if found not in TABLE_DTYPES:
        raise UsageError(f"a table's dtype must be {' or '.join(TABLE_DTYPES)}, not {given!r}")
    return str(found)


@dataclass(frozen=True, slots=True)
class Table:
    """A sparse parameter: a matrix whose rows are fetched and pushed by their ids.

    Parameters
    ----------
    rows
        The number of rows; ids are 0 to ``rows - 1``. A row without a push costs no memory.
    width
        Elements per row.
    dtype
        ``"float32"`` or ``"float64"``, or NumPy's type of that name.
    init
        The initial values: ``"zeros"``; ``"uniform"`` in [-scale, scale]; ``"normal"``: mean 0,
        standard deviation ``scale``, cut at two standard deviations (as Keras's
        ``TruncatedNormal``: the deviation is that of the distribution before it is cut).
    scale
        The scale of ``init``; the default, 0.05, is that of Keras's ``Embedding``.
    seed
        0 to 2**63 - 1. The initial value of an element depends on (seed, row, column) alone: not on
        the order of requests, and not on the processor.
    max_rows
        The most rows that are stored. A push that makes them more evicts the rows whose last push
        is the oldest, and of those the lowest ids, until 15/16 of ``max_rows`` are left. An evicted
        row has its initial values again, and the rule's state for it is gone. Default 0: no bound.
    max_age
        Rows that none of the table's last ``max_age`` pushes has named are evicted; the server
        looks for them after every ``max_age // 16`` pushes. Default 0: rows of any age are kept.

    Attributes
    ----------
    row_bytes
        Bytes of one row in a message.
    most
        The number of rows that one message, and so one call, may carry or request.

    Raises
    ------
    UsageError
        When a value is of another type, or out of its range.

    Examples
    --------
    >>> Table(10_000_000, 16).nbytes
    640000000
    """

    rows: int
    width: int
    dtype: str = "float32"
    init: str = "uniform"
    scale: float = 0.05
    seed: int = 0
    max_rows: int = 0
    max_age: int = 0
    row_bytes: int = field(init=False, repr=False, compare=False)
    most: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the values."""
        for name, (note, least, most) in _WHOLE.items():
            number = whole_number(f"a table's {name}{note}", getattr(self, name), least, most)
            object.__setattr__(self, name, number)
        object.__setattr__(self, "dtype", _dtype(self.dtype))
        if self.init not in INITIALISERS:
            raise UsageError(
                f"no initialiser is called {self.init!r}; {nearest(str(self.init), INITIALISERS)}"
            )
        scale: Any = self.scale
        if isinstance(scale, bool) or not isinstance(scale, Real) or not scale < 1e18 or scale < 0:
            raise UsageError(
                f"a table's scale must be a number that is 0 or more and below 1e18, not {scale!r}"
            )
        object.__setattr__(self, "scale", float(scale))
        row_bytes = self.width * np.dtype(self.dtype).itemsize
        object.__setattr__(self, "row_bytes", row_bytes)
        object.__setattr__(self, "most", min(MAX_IDS, MAX_ROWS_BYTES // row_bytes))

    @property
    def nbytes(self) -> int:
        """Bytes of all rows, stored or not."""
        return self.rows * self.row_bytes

    @property
    def evicts(self) -> bool:
        """True if rows are evicted."""
        return bool(self.max_rows or self.max_age)

    @property
    def described(self) -> tuple[Any, ...]:
        """Its values as they are sent: rows to seed, and the bounds of a table that evicts."""
        bounds = (self.max_rows, self.max_age) if self.evicts else ()
        return (self.rows, self.width, self.dtype, self.init, self.scale, self.seed, *bounds)


def share_of(table: Table, shards: int) -> Table:
    """Return the table as each of several servers keeps it, with its share of ``max_rows``."""
    return replace(table, max_rows=-(-table.max_rows // shards))


_TRAITS = ("rows", "width", "dtype", "init", "scale", "seed", "max_rows", "max_age")


@dataclass(frozen=True, slots=True)
class NamedTable:
    """A table of a model: its name, and its number on the wire."""

    name: str
    index: int
    table: Table

    def check_ids(self, ids: Any) -> Ints:
        """Return ids as they are sent: int64[n], contiguous.

        Raises
        ------
        UsageError
            When they are not a flat sequence of integers, are too many for one message, or one of
            them is no row of the table.
        """
        array = np.asarray(ids)
        if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
            raise UsageError(
                f"table {self.name!r}: ids must be a flat array of integers, not"
                f" {array.dtype.name} of shape {array.shape}"
            )
        if len(array) > self.table.most:
            raise UsageError(
                f"table {self.name!r}: {len(array):,} rows in one call; at most"
                f" {self.table.most:,} of this width travel at once, so call it in pieces"
            )
        if array.dtype == np.uint64 and array.size and array.max() >= 1 << 63:
            array = array.astype(object)  # so that the error below shows the number that was given
        else:
            array = np.ascontiguousarray(array, np.dtype("<i8"))
        bad = outside(array, self.table.rows)
        if bad >= 0:
            raise UsageError(self.no_such_row(int(array[bad]), bad))
        return array

    def check_gradients(self, grads: Any, count: int) -> Array:
        """Return gradients as they are sent: ``dtype[count, width]``, contiguous.

        Raises
        ------
        UsageError
            When shape or dtype are not those of ``count`` rows.
        """
        array, dtype = np.asarray(grads), np.dtype(self.table.dtype)
        if array.shape != (count, self.table.width):
            raise UsageError(
                f"table {self.name!r}: the gradients have shape {array.shape}, but {count} ids need"
                f" {(count, self.table.width)}"
            )
        if array.dtype != dtype:  # also of the other byte order
            raise UsageError(
                f"table {self.name!r}: the gradients are {array.dtype}, the table is"
                f" {dtype.name}: convert them with .astype({dtype.name!r})"
            )
        return np.ascontiguousarray(array)

    def no_such_row(self, id: int, place: int) -> str:
        """Return the error text about ``id``, at index ``place`` of the ids, being out of range."""
        return (
            f"table {self.name!r} has no row {id} (it is number {place} of the ids): rows are"
            f" 0 to {self.table.rows - 1}"
        )

    def bad_gradients(self, ids: Ints, grads: Array) -> BadPush | None:
        """Return why gradients of rows cannot be applied, or None.

        Each value, and each sum of those of one row, must be finite and below 1e18 in magnitude.
        """
        if not len(ids):
            return None
        most = grads.dtype.type(1e18)
        largest = max(grads.max(), -grads.min())  # NaN if one of them is
        if not largest < most:
            bad = int(np.argmin(np.abs(grads.reshape(-1)) < most))
            return self.bad_value(int(ids[bad // self.table.width]), bad, float(grads.flat[bad]))
        if float(largest) * len(ids) < float(most) / 2:  # no sum can reach it
            return None
        unique, whose = np.unique(ids, return_inverse=True)
        sums = np.zeros((len(unique), grads.shape[1]), grads.dtype)
        np.add.at(sums, whose.reshape(-1), grads)
        wrong = np.flatnonzero(~(np.abs(sums) < most).all(axis=1))
        if not len(wrong):
            return None
        place = int(np.flatnonzero(np.isin(ids, unique[wrong]))[0])
        return self.bad_sum(int(ids[place]), place)

    def bad_value(self, row: int, index: int, value: float) -> BadPush:
        """Return the fault of a gradient; ``index``: its place among the elements of the push."""
        place, column = divmod(index, self.table.width)
        return BadPush(
            f"table {self.name!r}: the gradient of row {row} (number {place} of the push) holds"
            f" {value} in column {column}: every value must be finite and below 1e18 in magnitude;"
            " nothing of this push was applied",
            table=self.name,
        )

    def bad_sum(self, row: int, place: int) -> BadPush:
        """Return the fault of gradients of one row with a sum that is too large.

        ``place``: the first of them in the push.
        """
        return BadPush(
            f"table {self.name!r}: the gradients of row {row} (first at {place} of the push)"
            " add up to 1e18 or more in magnitude; nothing of this push was applied",
            table=self.name,
        )

    def bad_row(self, row: int) -> BadPush:
        """Return the fault of an update that would make a row infinite, or not a number."""
        return BadPush(
            f"the update would make row {row} of table {self.name!r} infinite, or not a number:"
            " nothing of this push was applied; look for a gradient that is too large, or a"
            " learning rate (--set lr=...)",
            table=self.name,
        )


StoredTable: TypeAlias = tuple[NamedTable, Ints, Array]
"""A table with the ids of its stored rows, int64[n], and their parameters, dtype[n, width]."""


def outside(ids: Array, rows: int) -> int:
    """Return the index of the first id that is not in [0, rows), or -1."""
    if not ids.size:
        return -1
    if ids.dtype == object:
        return next((i for i, id in enumerate(ids) if not 0 <= id < rows), -1)
    unsigned = ids.view(np.uint64)  # as unsigned numbers, negative ones are larger than all others
    return -1 if int(unsigned.max()) < rows else int(np.argmax(unsigned >= rows))


class Tables(Mapping[str, NamedTable]):
    """The tables of a model by name; messages refer to them by their index in name order.

    Raises
    ------
    UsageError
        When they are no mapping, or too many, or a name is not allowed or used twice, also by a
        tensor.
    """

    def __init__(self, tables: Mapping[str, Table], tensors: Iterable[str] = ()) -> None:
        if not isinstance(tables, Mapping):
            raise UsageError(
                f"tables must be a mapping of names to aiops.Table, not {type(tables).__name__}:"
                ' write {"NAME": aiops.Table(...)}'
            )
        if len(tables) > MAX_TABLES:
            raise UsageError(f"a model has at most {MAX_TABLES:,} tables, not {len(tables):,}")
        both = set(tables) & set(tensors)
        if both:
            raise UsageError(f"{min(both)!r} is the name of a table and of a tensor; use two names")
        for name, table in tables.items():
            if not isinstance(name, str) or not 0 < len(name) <= MAX_TEXT:
                raise UsageError(f"a table's name must be a string that can be sent, not {name!r}")
            if not isinstance(table, Table):
                raise UsageError(f"table {name!r} must be an aiops.Table, not {table!r}")
        self.each: tuple[NamedTable, ...] = tuple(
            NamedTable(name, index, tables[name]) for index, name in enumerate(sorted(tables))
        )
        self._by_name = {named.name: named for named in self.each}

    @classmethod
    def from_description(
        cls,
        described: Iterable[tuple[Any, ...]],
        tensors: Iterable[str] = (),
    ) -> Tables:
        """Return the tables of a message; ``described`` is as the property is."""
        rows = list(described)
        for row in rows:
            if not 3 <= len(row) <= 1 + len(_TRAITS):
                raise UsageError(
                    f"a table is described by {len(row)} values, and has a name, rows, a width and"
                    f" up to {len(_TRAITS) - 2} others"
                )
        named = [(row[0], Table(*row[1:])) for row in rows]
        tables = dict(named)
        if len(tables) < len(named):
            raise UsageError("two tables have the same name; names must differ")
        return cls(tables, tensors)

    @property
    def described(self) -> tuple[tuple[Any, ...], ...]:
        """The name of each table and its `Table.described`, as sent, in index order."""
        return tuple((named.name, *named.table.described) for named in self.each)

    def named(self, name: str) -> NamedTable:
        """Return the table of that name; raise `UsageError`, with the nearest, if there is none."""
        found = self._by_name.get(name)
        if found is None:
            known = nearest(name, self._by_name) if self._by_name else "it has no tables at all"
            raise UsageError(f"the model has no table {name!r}; {known}")
        return found

    def difference(self, other: Tables) -> str | None:
        """Return how other tables differ from these, as a clause for an error, or None."""
        for name, theirs in other.items():
            mine = self._by_name.get(name)
            if mine is None:
                return f"it has no table {name!r}"
            for trait in _TRAITS:
                here, there = getattr(mine.table, trait), getattr(theirs.table, trait)
                if here != there:
                    return f"the {trait} of its table {name!r} is {here!r}, not {there!r}"
        missing = [name for name in self if name not in other]
        return f"its table {missing[0]!r} is missing here" if missing else None

    def __getitem__(self, name: str) -> NamedTable:
        return self._by_name[name]

    def __iter__(self) -> Any:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self.each)


# ---------------------------------------------------------------- parts


def fetch_parts(table: Table, wanted: int) -> Parts:
    """Return the parts of a request for ``wanted`` rows: their ids."""
    return (_part(wanted, ID_BYTES),) if wanted else ()


def push_parts(table: Table, pushed: int, wanted: int) -> Parts:
    """Return the parts of a push: ids of ``pushed`` rows, ids of ``wanted`` rows, gradients.

    Of a push whose rows lie on other shards, only the second is there, if rows are wanted.
    """
    asked = fetch_parts(table, wanted)
    if not pushed:
        return asked
    return (_part(pushed, ID_BYTES), *asked, _part(pushed, table.row_bytes))


def rows_parts(table: Table, count: int, version: int) -> Parts:
    """Return the parts of a reply that carries ``count`` rows of a version."""
    return (Part(0, count, "raw", count * table.row_bytes, version),) if count else ()


def counts(named: NamedTable, parts: Parts, push: bool) -> tuple[int, int]:
    """Return the numbers of rows that a message pushes and requests, from its parts alone.

    Raises
    ------
    BadPush
        When the parts are not what `fetch_parts` or `push_parts` would be.
    """
    table, number = named.table, len(parts)
    if number > 3 or (number > 1 and not push):
        raise BadPush(
            f"table {named.name!r}: {number} payloads came, but a push of rows has at most 3 (ids,"
            " ids to send back if any, gradients) and a fetch has 1 (ids)"
        )
    pushed = parts[0].stop if number > 1 else 0
    wanted = parts[number // 2].stop if number in (1, 3) else 0
    if max(pushed, wanted) > table.most:
        raise BadPush(
            f"table {named.name!r}: {max(pushed, wanted):,} rows in one message; at most"
            f" {table.most:,} of this width are allowed"
        )
    meant = push_parts(table, pushed, wanted)
    if len(meant) != number:
        raise BadPush(f"table {named.name!r}: a payload is announced for no rows: leave it out")
    for part, right in zip(parts, meant, strict=True):
        if part[:4] != right[:4]:
            raise BadPush(
                f"table {named.name!r}: a payload is announced as {list(part[:4])}, which should be"
                f" {list(right[:4])} (first row, rows, codec, bytes)"
            )
    return pushed, wanted


def _part(count: int, each: int) -> Part:
    return Part(0, count, "raw", count * each, 0)
