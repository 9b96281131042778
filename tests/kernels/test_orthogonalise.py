"""Matrices made orthogonal, block by block."""

from __future__ import annotations

from typing import Any

import numpy as np

from aiops.kernels import orthogonalise
from aiops.kernels.orthogonalise import BLOCK, operations, orthogonalised
from tests.rows import each_row

NEAR, FAR = 0.91, 1.09
"""Where singular values come to."""


def drawn(*shape: int, seed: int = 1) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def singular(matrix: Any) -> Any:
    return np.linalg.svd(np.asarray(matrix, np.float64), compute_uv=False)


def blocks(matrix: Any) -> list[Any]:
    """Return the blocks of the shorter side."""
    rows = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    return np.array_split(rows, -(-len(rows) // BLOCK))


@each_row("shape", [(8, 8), (4, 32), (32, 4), (1, 5), (64, 70), (65, 130), (300, 130), (200, 200)])
@each_row("scale", [1.0, 1e-29, 1e17])
def test_singular_values_of_each_block_become_about_one(
    shape: tuple[int, int], scale: float
) -> None:
    matrix = drawn(*shape) * np.float32(scale)
    before = matrix.copy()
    found = orthogonalised(matrix)
    assert found.shape == shape
    for block, given in zip(blocks(found), blocks(matrix), strict=True):
        assert 1 <= len(block) <= BLOCK
        values = singular(given)
        large = values >= 0.005 * np.linalg.norm(values)
        ends = singular(block)
        assert ((ends > NEAR) | ~large).all()
        assert (ends < FAR).all()
    np.testing.assert_array_equal(matrix, before)


def test_blocks_are_as_equal_as_can_be() -> None:
    for many in range(1, 400):
        rows = [
            rows for _first, rows, count in orthogonalise.block_groups(many) for _ in range(count)
        ]
        firsts = [first for first, _rows, _count in orthogonalise.block_groups(many)]
        assert rows == [len(part) for part in np.array_split(np.zeros(many), -(-many // BLOCK))]
        assert firsts == [0, rows.count(rows[0]) * rows[0]][: len(firsts)]


@each_row("shape", [(5, 9), (9, 5), (100, 150)])
def test_it_points_where_the_matrix_does(shape: tuple[int, int]) -> None:
    """The left and right singular vectors of each block stay."""
    matrix = drawn(*shape)
    for block, given in zip(blocks(orthogonalised(matrix)), blocks(matrix), strict=True):
        left, values, right = np.linalg.svd(given.astype(np.float64), full_matrices=False)
        core = left.T @ block @ right.T
        assert np.abs(core - np.diag(np.diag(core))).max() < 1e-4
        assert (np.diag(core) > NEAR)[values > 0.005 * np.linalg.norm(values)].all()


def test_small_singular_values_grow_230_times() -> None:
    matrix = np.diag(np.array([1, 1e-3, 1e-4], np.float32))
    found = np.diag(orthogonalised(matrix))
    assert NEAR < found[0] < FAR
    assert 0.2 < found[1] < 0.25
    assert 0.02 < found[2] < 0.025


@each_row("value", [0, 1.4e-45, 1e-38, 9e-31])
def test_of_next_to_nothing_it_makes_zeros(value: float) -> None:
    assert not orthogonalised(np.full((3, 4), value, np.float32)).any()


@each_row("scale", [0, 1e-40, 1e-22, 1e-20, 1e-15])
def test_a_block_of_next_to_nothing_beside_another(scale: float) -> None:
    matrix = drawn(2 * BLOCK, 3 * BLOCK)
    matrix[:BLOCK] *= np.float32(scale)
    found = orthogonalised(matrix)
    assert not found[:BLOCK].any()
    assert (singular(found[BLOCK:]) > NEAR).all()


def test_a_small_block_is_made_as_long_as_the_others() -> None:
    matrix = drawn(2 * BLOCK, 3 * BLOCK)
    wanted = orthogonalised(matrix)
    matrix[:BLOCK] *= np.float32(1e-9)
    np.testing.assert_allclose(orthogonalised(matrix), wanted, atol=1e-5)


def test_the_steps_are_the_best() -> None:
    """Each a·x + b·x³ + c·x⁵ brings what the one before left nearest to 1; 1 % is for rounding."""
    least, most, wanted = 0.005, 1.0, []
    for number in range(4):
        *step, error = best_step(least, most * (1.01 if number else 1))
        wanted.append(step)
        least, most = 1 - error, 1 + error
    np.testing.assert_allclose(orthogonalise.STEPS, wanted, atol=1e-4)
    np.testing.assert_allclose((NEAR, FAR), (least, most), atol=2e-3)


def best_step(least: float, most: float) -> Any:
    """Return a, b, c and the largest error on an interval: equal at four places (Remez)."""
    places = np.linspace(least, most, 4)
    for _ in range(100):
        powers = places[:, None] ** np.array([1, 3, 5])
        a, b, c, error = np.linalg.solve(np.column_stack([powers, [1, -1, 1, -1]]), np.ones(4))
        root = np.sqrt(9 * b * b - 20 * a * c)
        places[1:3] = np.sqrt((-3 * b + np.array([-root, root])) / (10 * c))
    return a, b, c, error


@each_row("shape", [(128, 512), (128, 128), (1024, 1024)])
def test_operations_grow_with_the_matrix(shape: tuple[int, int]) -> None:
    small, large = shape
    assert operations(*shape) == operations(*shape[::-1])
    assert operations(small, 2 * large) < 2 * operations(small, large)
    assert operations(2 * small, 2 * large) < 4 * operations(small, large)
