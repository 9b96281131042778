"""Rows of tables: how they begin, and how they move; both backends to the same bits."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiops.kernels.row_initialiser import CELLS, KINDS, RowInitialiser, first_rows, quantiles
from aiops.kernels.table_rows import mover
from tests.rows import each_row
from tests.strategies import DETERMINISTIC

F32, F64 = np.dtype(np.float32), np.dtype(np.float64)
MASK = (1 << 64) - 1


def splitmix64(state: int) -> tuple[int, int]:
    """The generator as its author wrote it, in Python's integers: (next state, output)."""
    state = (state + 0x9E3779B97F4A7C15) & MASK
    z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return state, z ^ (z >> 31)


def drawn(seed: int, row: int, width: int) -> list[int]:
    _state, mixed_seed = splitmix64(seed)
    _state, state = splitmix64((mixed_seed + row) & MASK)
    found = []
    for _ in range(width):
        state, output = splitmix64(state)
        found.append(output)
    return found


class TestFirstRows:
    @each_row("seed", [0, 7, 2**63 - 1])
    @each_row("row", [0, 1, 12_345_678_901])
    def test_uniform_by_its_definition(self, seed: int, row: int) -> None:
        got = first_rows(RowInitialiser("uniform", 0.25, seed), np.array([row]), 5, F64)
        wanted = [((z >> 11) * 2.0**-52 - 1.0) * 0.25 for z in drawn(seed, row, 5)]
        assert got.tolist() == [wanted]

    def test_normal_by_its_definition(self) -> None:
        got = first_rows(RowInitialiser("normal", 2.0, 3), np.array([99]), 4, F64)
        table, wanted = quantiles(), []
        for z in drawn(3, 99, 4):
            cell, inside = z >> 52, (z & (2**52 - 1)) * 2.0**-52
            wanted.append((table[cell] + inside * (table[cell + 1] - table[cell])) * 2.0)
        assert got.tolist() == [wanted]

    def test_the_quantiles_are_those_of_the_cut_normal_distribution(self) -> None:
        normal, table = NormalDist(), quantiles()
        low, high = normal.cdf(-2), normal.cdf(2)
        wanted = [normal.inv_cdf(low + (high - low) * i / CELLS) for i in range(1, CELLS)]
        np.testing.assert_allclose(table[1:-1], wanted, rtol=0, atol=1e-13)
        assert (table[0], table[CELLS // 2], table[-1]) == (-2.0, 0.0, 2.0)
        assert (np.diff(table) > 0).all()

    @pytest.mark.parametrize(
        ("kind", "deviation"), [("uniform", 0.1 / 3**0.5), ("normal", 0.1 * 0.87963)]
    )
    def test_the_distribution(self, kind: str, deviation: float) -> None:
        rows = first_rows(RowInitialiser(kind, 0.1, 1), np.arange(20_000), 16, F64)
        assert abs(rows.mean()) < 5 * deviation / rows.size**0.5
        assert rows.std() == pytest.approx(deviation, rel=0.01)
        assert abs(np.corrcoef(rows[:, 0], rows[:, 1])[0, 1]) < 0.03
        assert abs(np.corrcoef(rows[:-1, 0], rows[1:, 0])[0, 1]) < 0.03
        assert np.abs(rows).max() <= (0.1 if kind == "uniform" else 0.2)
        assert len(np.unique(rows)) == rows.size

    def test_zeros(self) -> None:
        rows = first_rows(RowInitialiser("zeros", 0.1, 1), np.arange(3), 2, F32)
        assert rows.tobytes() == bytes(24)

    def test_a_column_does_not_depend_on_the_width(self) -> None:
        wide = first_rows(RowInitialiser("uniform", 1.0, 5), np.arange(9), 16, F32)
        narrow = first_rows(RowInitialiser("uniform", 1.0, 5), np.arange(9), 3, F32)
        np.testing.assert_array_equal(wide[:, :3], narrow)

    def test_seeds_differ(self) -> None:
        one, two = (
            first_rows(RowInitialiser("uniform", 1.0, s), np.arange(9), 4, F32) for s in (0, 1)
        )
        assert not (one == two).any()


class Moving:
    """A table and a mover, driven as a store drives them."""

    def __init__(
        self, kind: str, dtype: np.dtype[Any], backend: str, rows: int, width: int, states: Any
    ) -> None:
        self.mover = mover(RowInitialiser(kind, 0.5, 11), width, states, dtype, backend)
        self.store = np.zeros((rows, width * (1 + len(states))), dtype)
        self.made = np.zeros(-(-rows // 8), np.uint8)
        self.width, self.arrays, self.dtype = width, 1 + len(states), dtype

    def gather(self, ids: Any) -> Any:
        out = np.full((len(ids), self.width), 88, self.dtype)
        self.mover.gather(self.store, ids, out)
        return out

    def collect(self, ids: Any, grads: Any) -> tuple[Any, Any, Any]:
        room = len(ids) * self.width
        unique, total = np.empty(len(ids), np.int64), np.empty(room, self.dtype)
        work = np.empty((self.arrays, room), self.dtype)
        count = self.mover.collect(self.store, ids, grads, unique, total, work)
        size = count * self.width
        return unique[:count], total[:size], work[:, :size]

    def scatter(self, unique: Any, work: Any) -> int:
        return self.mover.scatter(self.store, self.made, unique, np.ascontiguousarray(work))


@st.composite
def pushes(draw: st.DrawFn) -> tuple[int, int, list[tuple[Any, Any]]]:
    rows, width = draw(st.integers(1, 40)), draw(st.integers(1, 19))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    found = []
    for _ in range(draw(st.integers(1, 4))):
        ids = rng.integers(0, rows, draw(st.integers(1, 60)))
        grads = rng.standard_normal((len(ids), width))
        grads[rng.random(grads.shape) < 0.1] = -0.0
        found.append((ids, grads))
    return rows, width, found


class TestMoving:
    @pytest.mark.parametrize("dtype", [F32, F64])
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("states", [(), (0.0, 1.0)])
    def test_the_backends_agree_to_the_bit(
        self, kind: str, dtype: np.dtype[Any], states: tuple[float, ...]
    ) -> None:
        @DETERMINISTIC
        @given(pushes())
        def check(case: Any) -> None:
            rows, width, rounds = case
            both = [Moving(kind, dtype, b, rows, width, states) for b in ("numpy", "numba")]
            for ids, grads in rounds:
                seen = []
                for moving in both:
                    before = moving.gather(ids)
                    unique, total, work = moving.collect(ids, grads.astype(dtype))
                    work[:] = work * dtype.type(0.5) - dtype.type(1)
                    work[0] -= total
                    fresh = moving.scatter(unique, work)
                    seen.append((before, unique, total, work, fresh, moving.store, moving.made))
                for one, two in zip(*seen, strict=True):
                    assert np.asarray(one).tobytes() == np.asarray(two).tobytes()

        check()

    @pytest.mark.parametrize("backend", ["numpy", "numba"])
    def test_gradients_of_a_row_are_added_up_in_the_order_in_which_they_come(
        self, backend: str
    ) -> None:
        moving = Moving("zeros", F32, backend, 10, 1, ())
        ids = np.array([4, 2, 4, 4, 2])
        grads = np.array([[1e8], [1.0], [1.0], [-1e8], [2.0]], np.float32)
        unique, total, _work = moving.collect(ids, grads)
        assert unique.tolist() == [4, 2]
        in_order = np.float32(np.float32(1e8) + np.float32(1)) - np.float32(1e8)
        assert total.tolist() == [float(in_order), 3.0]
        assert total[0] == 0.0  # in another order it would be 1

    @pytest.mark.parametrize("backend", ["numpy", "numba"])
    def test_reading_leaves_no_trace(self, backend: str) -> None:
        moving = Moving("uniform", F32, backend, 10, 3, (2.0,))
        ids = np.array([9, 0, 9])
        got = moving.gather(ids)
        np.testing.assert_array_equal(
            got, first_rows(RowInitialiser("uniform", 0.5, 11), ids, 3, F32)
        )
        moving.collect(ids, np.zeros((3, 3), np.float32))
        assert not moving.store.any()
        assert not moving.made.any()

    @pytest.mark.parametrize("backend", ["numpy", "numba"])
    def test_state_begins_with_its_initial_value_and_is_kept(self, backend: str) -> None:
        moving = Moving("zeros", F64, backend, 16, 2, (0.0, 1.0))
        ids, grads = np.array([7]), np.zeros((1, 2))
        unique, _total, work = moving.collect(ids, grads)
        assert work.tolist() == [[0, 0], [0, 0], [1, 1]]
        assert moving.scatter(unique, work + 5) == 1
        unique, _total, work = moving.collect(ids, grads)
        assert work.tolist() == [[5, 5], [5, 5], [6, 6]]
        assert moving.scatter(unique, work) == 0

    @each_row("backend", ["numpy", "numba"])
    @each_row("dtype", [F32, F64])
    def test_any_values_may_be_stored(self, dtype: np.dtype[Any], backend: str) -> None:
        """A record tells by its first element whether it was written, whatever that is."""
        moving = Moving("uniform", dtype, backend, 40, 2, (3.0,))
        ones = np.frombuffer(b"\xff" * dtype.itemsize, dtype)[0]
        values = [0.0, -0.0, 1.0, -1e-40, np.inf, -np.inf, np.nan, ones]
        ids = np.arange(len(values)) * 3
        unique, _total, work = moving.collect(ids, np.zeros((len(ids), 2), dtype))
        work[0] = np.repeat(np.array(values, dtype), 2)
        assert moving.scatter(unique, work) == len(values)
        assert moving.scatter(unique, work) == 0
        got = moving.gather(ids)
        np.testing.assert_array_equal(got, work[0].reshape(-1, 2))
        np.testing.assert_array_equal(np.signbit(got[:4]), np.signbit(work[0].reshape(-1, 2)[:4]))
        assert np.unpackbits(moving.made, bitorder="little").nonzero()[0].tolist() == ids.tolist()

    @DETERMINISTIC
    @given(st.permutations(range(12)), st.integers(0, 12))
    def test_what_a_row_is_does_not_depend_on_who_came_first(
        self, order: list[int], split: int
    ) -> None:
        one = Moving("normal", F32, "numba", 12, 3, ())
        for part in (order[:split], order[split:]):
            if part:
                ids = np.array(part)
                unique, _total, work = one.collect(ids, np.zeros((len(ids), 3), np.float32))
                one.scatter(unique, work)
        ids = np.arange(12)
        np.testing.assert_array_equal(
            one.gather(ids), first_rows(RowInitialiser("normal", 0.5, 11), ids, 3, F32)
        )
