"""A table's rows are read as they were at one moment, whatever is pushed meanwhile."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiops.algorithms.optimizers import adagrad
from aiops.errors import UsageError
from aiops.kernels.rule import Rule
from aiops.model.layout import Array, Ints
from aiops.model.tables import NamedTable, Table
from aiops.store import row_bitmap, table_image
from aiops.store.sparse_table import SparseTable
from aiops.store.table_image import TableImage
from aiops.store.untouched import untouched
from tests.rows import each_row
from tests.seeds import seeds
from tests.strategies import DETERMINISTIC

ADAGRAD = Rule(adagrad, {"s": 0.0}, {"decay": 0.0, "eps": 1e-10})


def table(
    rows: int,
    width: int = 3,
    backend: str = "numpy",
    max_rows: int = 0,
    max_age: int = 0,
    **machine: object,
) -> SparseTable:
    named = NamedTable("t", 0, Table(rows, width, seed=4, max_rows=max_rows, max_age=max_age))
    return SparseTable(named, ADAGRAD, backend, **machine)  # type: ignore[arg-type]


def push(store: SparseTable, ids: Ints, seed: int = 0) -> None:
    grads = np.random.default_rng(seed).normal(size=(len(ids), store.table.width))
    _place, _rows, fresh, *evicted = store.update(ids, grads.astype(np.float32), 0.1)
    store.made += int(fresh - sum(evicted))
    store.version += 1


def copied(store: SparseTable) -> tuple[bytes, bytes]:
    """The twin: everything copied at once."""
    ids = store.stored_ids()
    return ids.tobytes(), store._store[ids].tobytes()


def joined(pieces: Iterator[Array]) -> bytes:
    return b"".join([piece.tobytes() for piece in pieces])


def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces and ranges so small that there are several in a small table."""
    monkeypatch.setattr(table_image, "_BYTES", 1)
    monkeypatch.setattr(table_image, "_PAGE", 64)
    monkeypatch.setattr(table_image, "_IDS", 4)
    monkeypatch.setattr(table_image, "BLOCK", 64)
    monkeypatch.setattr(row_bitmap, "BLOCK", 64)
    monkeypatch.setattr(row_bitmap, "_BYTES", 8)


@given(data=st.data())
@DETERMINISTIC
def test_it_is_as_a_copy_that_was_made_at_once(data: st.DataObject) -> None:
    """Images at any moment, several at a time, read piece by piece between pushes."""
    with pytest.MonkeyPatch.context() as patch:
        small_pieces(patch)
        rows = data.draw(st.integers(1, 200), "rows")
        bounds = {
            "max_rows": data.draw(st.sampled_from((0, 1, rows // 3)), "max_rows"),
            "max_age": data.draw(st.sampled_from((0, 0, 1, 5)), "max_age"),
        }
        store = table(rows, **bounds)
        ids = st.lists(st.integers(0, rows - 1), min_size=1, max_size=9)
        running: list[tuple[TableImage, Iterator[Array], list[Array], tuple[bytes, bytes]]] = []
        for step in range(data.draw(st.integers(1, 25), "steps")):
            kind = data.draw(st.sampled_from(("push", "push", "image", "read", "read", "release")))
            if kind == "push":
                push(store, np.array(data.draw(ids)), step)
            elif kind == "image":
                image = store.image()
                assert (image.ids.nbytes, image.rows.nbytes) == tuple(map(len, copied(store)))
                running.append((image, both(image), [], copied(store)))
            elif running:
                image, pieces, found, twin = data.draw(st.sampled_from(running))
                assert image.held <= image.rows.shape[0]
                if kind == "release":
                    store.end_image(image)
                    running = [each for each in running if each[0] is not image]
                elif (piece := next(pieces, None)) is not None:
                    found.append(piece)
        for image, pieces, found, twin in running:
            assert b"".join(each.tobytes() for each in [*found, *pieces]) == b"".join(twin)
            assert image.held == 0
            store.end_image(image)
        assert store._images == ()


def both(image: TableImage) -> Iterator[Array]:
    yield from image.ids.pieces()
    yield from image.rows.pieces()


def read_into(image: TableImage, found: list[bytes]) -> None:
    found.append(joined(both(image)))


@each_row("backend", ["numpy", "auto"])
@each_row("evicts", [False, True])
def test_a_thread_reads_while_another_pushes(
    backend: str, evicts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_image, "_BYTES", 1 << 12)
    for seed in seeds(3):
        rng = random.Random(seed)
        rows = rng.choice((500, 5_000, 70_000))
        bounds = {"max_rows": rows // 3, "max_age": 40} if evicts else {}
        store = table(rows, 16, backend, guard=threading.Lock, **bounds)
        for number in range(5):
            push(store, np.array([rng.randrange(rows) for _ in range(rows // 4)]), number)
        image, twin, found = store.image(), copied(store), list[bytes]()
        reader = threading.Thread(target=read_into, args=(image, found))
        reader.start()
        while reader.is_alive():
            push(store, np.array([rng.randrange(rows) for _ in range(64)]))
        reader.join()
        assert found == [b"".join(twin)]


def test_nothing_is_copied_before_it_is_overwritten() -> None:
    store = table(5_000)
    push(store, np.arange(1_000))
    image = store.image()
    assert image.held == 0
    push(store, np.arange(900, 1_100))  # a half of them new
    push(store, np.arange(950, 960))  # kept already
    assert image.held == 100
    assert joined(image.ids.pieces()) == np.arange(1_000).tobytes()
    rows = image.rows.pieces()
    assert sum(map(len, rows)) == 1_000
    push(store, np.arange(5_000))
    assert image.held == 0


def test_places_behind_the_reader_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """So copies take the memory of the rows that wait for the reader, and not of all pushes."""
    small_pieces(monkeypatch)
    store = table(4_096)
    push(store, np.arange(4_096))
    image = store.image()
    steps = 0
    for step, _piece in enumerate(image.rows.pieces(), 1):  # pushes run along before the reader
        ahead = np.arange(step * 8, step * 8 + 64)
        push(store, ahead[ahead < 4_096], step)
        steps = step
    assert steps > 100
    assert image._top <= 72


def test_pieces_are_whole_pages_but_for_the_last() -> None:
    """As the writing past the system's cache needs them."""
    store = table(300_000, 5)
    push(store, np.arange(0, 300_000, 2))
    image = store.image()
    for stream in (image.ids, image.rows):
        pieces = [*stream.pieces()]
        assert len(pieces) > 1
        assert all(piece.nbytes % 4096 == 0 for piece in pieces[:-1])
        assert sum(piece.nbytes for piece in pieces) == stream.nbytes
    assert all(piece.ctypes.data % 4096 == 0 for piece in pieces)


def test_it_is_read_once() -> None:
    store = table(50)
    push(store, np.arange(50))
    image = store.image()
    assert joined(image.rows.pieces())
    with pytest.raises(UsageError, match="once"):
        joined(image.rows.pieces())
    image = store.image()
    store.end_image(image)
    with pytest.raises(UsageError, match="before it is released"):
        joined(image.ids.pieces())
    push(store, np.arange(50))  # keeps nothing


def test_a_refused_push_keeps_nothing() -> None:
    store = table(50)
    push(store, np.arange(50))
    image = store.image()
    huge = np.full((2, 3), 9e37, np.float32)
    assert store.update(np.array([7, 7]), huge, 0.1)[0] == 0
    assert image.held == 0


def test_an_empty_table_has_an_image() -> None:
    image = table(50).image()
    assert joined(image.ids.pieces()) == joined(image.rows.pieces()) == b""


def test_no_address_space_is_no_memory() -> None:
    with pytest.raises(MemoryError):
        untouched(1 << 60, np.dtype(np.float32))
