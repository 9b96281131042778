"""Matrices made orthogonal to the same bits, whatever the order in which products are added up."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np

from aiops.kernels import exact_orthogonalise
from aiops.kernels.exact_orthogonalise import exact_product, orthogonalised_exactly
from aiops.kernels.orthogonalise import orthogonalised
from tests.rows import each_row


def drawn(*shape: int, seed: int = 1) -> Any:
    return np.random.default_rng(seed).normal(size=shape)


@each_row("shape", [(8, 8), (4, 32), (32, 4), (1, 5), (64, 70), (65, 130), (300, 130), (2, 2000)])
@each_row("scale", [1.0, 1e-29, 1e20])
@each_row("dtype", ["f4", "f8"])
def test_it_is_what_workers_make(shape: tuple[int, int], scale: float, dtype: str) -> None:
    matrix = (drawn(*shape) * scale).astype(dtype)
    before = matrix.copy()
    found = orthogonalised_exactly(matrix)
    assert found.shape == shape
    assert found.dtype == np.float64
    wanted = orthogonalised((matrix / np.abs(matrix).max()).astype("f4"))
    np.testing.assert_allclose(found, wanted, atol=2e-5)
    np.testing.assert_array_equal(matrix, before)


@each_row("shape", [(7, 300), (128, 400), (130, 131)])
def test_its_bits_do_not_depend_on_the_order_of_sums(shape: tuple[int, int]) -> None:
    """Were any sum rounded, columns in another order would have other bits."""
    matrix = drawn(*shape)
    wanted = orthogonalised_exactly(matrix)
    order = np.random.default_rng(2).permutation(shape[1])
    found = orthogonalised_exactly(np.ascontiguousarray(matrix[:, order]))
    np.testing.assert_array_equal(found, wanted[:, order])


@each_row("terms", [1, 2, 3, 100, 128, 5000])
def test_a_product_is_exact_of_rounded_factors(terms: int) -> None:
    a, b = drawn(3, terms), 1e-7 * drawn(terms, 2, seed=2)
    a[0], b[:, 0] = 1.0 - 2.0**-53, 1e-7 * (1 - 2.0**-53)  # the largest sums
    bits = exact_orthogonalise._bits(terms)
    (p, low), (q, high) = (exact_orthogonalise._integers(each, bits) for each in (a, b))
    assert max(np.abs(p).max(), np.abs(q).max()) <= 2.0**bits
    rows, columns = p.astype(int).tolist(), q.T.astype(int).tolist()
    exact = [[sum(x * y for x, y in zip(r, c, strict=True)) for c in columns] for r in rows]
    assert max(abs(each) for row in exact for each in row) <= 2**53
    found = exact_product(a, b)
    scale = Fraction(2) ** -(low + high)
    assert [[Fraction(each) for each in row] for row in found.tolist()] == [
        [each * scale for each in row] for row in exact
    ]
    most = terms * np.abs(a).max() * np.abs(b).max() * 2.0 ** (1 - bits)
    np.testing.assert_allclose(found, a @ b, rtol=0, atol=most)


def test_factors_are_as_precise_as_sums_allow() -> None:
    for terms in (1, 2, 3, 4, 128, 129, 65_536):
        bits = exact_orthogonalise._bits(terms)
        assert terms * 2 ** (2 * bits) <= 2**53
        assert bits == 26 or terms * 2 ** (2 * (bits + 1)) > 2**53


@each_row("value", [0, 1.4e-45, 1e-38, 9e-31])
def test_of_next_to_nothing_it_makes_zeros(value: float) -> None:
    assert not orthogonalised_exactly(np.full((3, 4), value, np.float32)).any()
    assert orthogonalised_exactly(np.zeros((0, 4))).shape == (0, 4)


def test_a_block_of_zeros_beside_another() -> None:
    matrix = drawn(256, 300)
    matrix[:128] = 0
    found = orthogonalised_exactly(matrix)
    assert not found[:128].any()
    np.testing.assert_array_equal(found[128:], orthogonalised_exactly(matrix[128:]))


@each_row("scale", [5e-324, 1e-310, 1e-200, 1e-40, 1e-20, 1e-15, 1e-9, 1e-3])
def test_a_block_of_next_to_nothing_beside_another(scale: float) -> None:
    """As workers' directions: of zeros, or as long as the others."""
    matrix = drawn(256, 300)
    matrix[:128] *= scale
    found = orthogonalised_exactly(matrix)
    wanted = orthogonalised(matrix.astype(np.float32))
    assert found[:128].any() == bool(wanted[:128].any()) == (scale > 1e-13)
    np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_no_element_is_larger_than_they_say() -> None:
    """`aiops.store.sum_directions` bounds updates by it."""
    for seed in range(20):
        matrix = drawn(5, 9, seed=seed) ** 5
        assert np.abs(orthogonalised_exactly(matrix)).max() <= 1.1
    assert np.abs(orthogonalised_exactly(np.eye(4))).max() <= 1.1
