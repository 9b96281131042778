"""Which tensors are matrices."""

from __future__ import annotations

from aiops.model.matrices import as_matrix
from tests.rows import each_row


@each_row(
    ("shape", "matrix"),
    [
        ((64, 32), (64, 32)),
        ((32, 32, 5, 5), (32, 800)),  # PyTorch's
        ((5, 5, 32, 32), (800, 32)),  # Flax's
        ((64, 3, 7, 7), (64, 147)),
        ((1024, 16), (1024, 16)),
        ((1025, 16), None),
        ((16, 1024), (16, 1024)),
        ((50_000, 64), None),
        ((150, 10), (150, 10)),
        ((200, 10), None),
        ((10, 1024), None),
        ((8, 1), None),
        ((8,), None),
        ((), None),
        ((0, 4), None),
    ],
)
def test_neither_embeddings_nor_few_classes(
    shape: tuple[int, ...], matrix: tuple[int, int] | None
) -> None:
    assert as_matrix(shape) == matrix
