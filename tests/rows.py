"""Many small cases as rows of one test: `each_row` in the place of `pytest.mark.parametrize`.

A test of pytest costs 10 ms of a processor beside its own work: it is collected by every process of
pytest-xdist, set up, taken down, sent to and reported. A case that takes less is a row: all rows of
a test run, each by itself, and the test fails with the names and the tracebacks of those that fail.
``AIOPS_TEST_ROWS=text make test`` runs the rows in whose name the text stands.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import pytest

_ROWS = "_aiops_rows"
_CHOSEN = "AIOPS_TEST_ROWS"
_TIMEOUT = "Timeout ("
"""How the error of pytest-timeout begins, which is the whole test's."""

_OUTPUT = {"capfd", "capsys"}

Test = Callable[..., Any]
Named = str | Callable[[Any], Any] | Iterable[Any] | None


class _Row(NamedTuple):
    name: str
    given: dict[str, Any]


class _Rows(NamedTuple):
    """The test as it was written, and one table of rows for each `each_row` above it."""

    test: Test
    tables: list[list[_Row]]


def each_row(names: str | Sequence[str], values: Iterable[Any], ids: Named = None) -> Any:
    """Return a decorator by which a test runs for each row of values, as one test.

    Its arguments are those of `pytest.mark.parametrize`, and several of them make a product, too.
    Each row finds the fixtures ``monkeypatch``, ``tmp_path``, ``capsys``, ``capfd`` and ``caplog``
    as if it were a test, and has its own instance of a class of tests, a copy of that which the
    fixtures have seen. It shares all other fixtures with the other rows.

    Parameters
    ----------
    names
        The parameters of the test that a row gives, separated by commas, or in a list.
    values
        The rows: a value each, or as many as there are names; `pytest.param` without marks.
    ids
        Their names, or what makes a name of a value.
    """
    wanted = (
        [*filter(None, map(str.strip, names.split(",")))] if isinstance(names, str) else [*names]
    )
    ids = ids if ids is None or callable(ids) else list(ids)
    table = list(_table(wanted, isinstance(names, str) and len(wanted) == 1, list(values), ids))
    assert table, "a test without rows tests nothing"
    assert len({row.name for row in table}) == len(table), "two rows have one name"

    def decorator(test: Test) -> Test:
        found = getattr(test, _ROWS, None)
        tables = [table, *(found.tables if found else ())]
        return _as_one(_Rows(found.test if found else test, tables), test)

    return decorator


def _table(
    wanted: Sequence[str], single: bool, values: Sequence[Any], ids: Named
) -> Iterator[_Row]:
    taken = set[str]()
    for number, value in enumerate(values):
        name = None if ids is None or callable(ids) else ids[number]
        if hasattr(value, "marks"):  # pytest.param
            assert not value.marks, "a row has no marks"
            name, row = value.id or name, value.values
        else:
            row = (value,) if single else value
        assert len(row) == len(wanted), f"{wanted} are {len(wanted)}, not {len(row)}"
        given = dict(zip(wanted, row, strict=True))
        name = name or "-".join(
            _said(ids, field, one, number) for field, one in zip(wanted, row, strict=True)
        )
        if name in taken:
            name = f"{name}#{number}"
        taken.add(name)
        yield _Row(name, given)


def _said(ids: Named, field: str, value: Any, number: int) -> str:
    """Return a value's part of its row's name, as pytest would name it."""
    if callable(ids) and (said := ids(value)) is not None:
        return str(said)
    if value is None or isinstance(value, str | int | float | complex):
        return str(value)
    if isinstance(value, bytes):
        return value.decode("ascii", "backslashreplace")
    if isinstance(value, enum.Enum):
        return str(value)
    name = getattr(value, "__name__", None)
    return name if isinstance(name, str) else f"{field}{number}"


def _as_one(rows: _Rows, like: Test) -> Test:
    """Return a test of all rows of a test; ``like`` has the marks that it keeps."""
    own = inspect.signature(rows.test)
    given = {name for table in rows.tables for name in table[0].given}
    assert given <= set(own.parameters), f"the test takes no {given - set(own.parameters)}"

    if inspect.iscoroutinefunction(rows.test):

        @functools.wraps(like)
        async def of_all(*receiver: Any, **fixtures: Any) -> None:
            errors = _Errors()
            for row in _chosen(rows.tables):
                with errors.of(row), _fixtures(fixtures, row) as found:
                    await rows.test(*map(copy.copy, receiver), **found, **row.given)
            errors.tell()

    else:

        @functools.wraps(like)
        def of_all(*receiver: Any, **fixtures: Any) -> None:
            errors = _Errors()
            for row in _chosen(rows.tables):
                with errors.of(row), _fixtures(fixtures, row) as found:
                    rows.test(*map(copy.copy, receiver), **found, **row.given)
            errors.tell()

    left = [one for name, one in own.parameters.items() if name not in given]
    of_all.__signature__ = own.replace(parameters=left)  # type: ignore[attr-defined]
    setattr(of_all, _ROWS, rows)
    return of_all


def _chosen(tables: Sequence[Sequence[_Row]]) -> Iterator[_Row]:
    wanted, any_left = os.environ.get(_CHOSEN, ""), False
    for parts in product(*tables):
        row = _Row(
            "-".join(part.name for part in parts),
            {name: value for part in parts for name, value in part.given.items()},
        )
        if wanted in row.name:
            any_left = True
            yield row
    if not any_left:
        pytest.skip(f"no row has {wanted!r} in its name")


@contextlib.contextmanager
def _fixtures(fixtures: dict[str, Any], row: _Row) -> Iterator[dict[str, Any]]:
    """Yield a test's fixtures as a row of it is to find them."""
    found = dict(fixtures)
    with contextlib.ExitStack() as stack:
        if "monkeypatch" in found:  # undone after the row, and after that the test's own
            found["monkeypatch"] = stack.enter_context(pytest.MonkeyPatch.context())
        if "tmp_path" in found:
            count = len(list(found["tmp_path"].iterdir()))
            found["tmp_path"] = found["tmp_path"] / f"row{count}"
            found["tmp_path"].mkdir()
        for name in _OUTPUT & set(found):
            found[name].readouterr()
        if "caplog" in found:
            found["caplog"].clear()
        yield found


class _Errors:
    """What came of the rows of a test."""

    def __init__(self) -> None:
        self._errors: list[BaseException] = []
        self._names: list[str] = []
        self._skipped: list[str] = []
        self._count = 0

    @contextlib.contextmanager
    def of(self, row: _Row) -> Iterator[None]:
        """Run a row, whose failure is kept."""
        self._count += 1
        try:
            yield
        except pytest.skip.Exception as skipped:
            self._skipped.append(f"{row.name}: {skipped}")
        except (Exception, pytest.fail.Exception) as error:
            if str(error).startswith(_TIMEOUT):
                error.add_note(f"in row {row.name}")
                raise
            error.add_note(f"in row {row.name}")
            self._errors.append(error)
            self._names.append(row.name)

    def tell(self) -> None:
        """Fail if a row has failed; skip if all were skipped."""
        if self._errors:
            what = f"{len(self._errors)} of {self._count} rows failed: {', '.join(self._names)}"
            raise BaseExceptionGroup(what, self._errors)
        if self._skipped and len(self._skipped) == self._count:
            pytest.skip("; ".join(self._skipped[:3]))
