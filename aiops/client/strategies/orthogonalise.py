"""Orthogonalise a matrix: an array's, or a tensor's on any device."""

from __future__ import annotations

from typing import Any

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan et al. 2024: the steepest at 0
_STEPS = 5
_NONE = 1e-30
"""What counts as zeros, in magnitude: what is left of a momentum without gradients.

Its last bits would stay for ever, as half of the least float32 is rounded to that.
"""


def orthogonalised(matrix: Any) -> Any:
    """Return nearly the orthogonal matrix nearest to one, by Newton and Schulz.

    Parameters
    ----------
    matrix
        float32[m, n]: an array, or a tensor on any device, at whose values the host does not look.
        It stays as it is.

    Returns
    -------
    Array or tensor
        float32[m, n]. Singular values that are not tiny beside the largest become 0.7 to 1.2;
        of values below 1e-30 in magnitude it returns zeros.

    Source
    ------
    Jordan et al. 2024, *Muon*: five steps of x ← a·x + b·xxᵀx + c·(xxᵀ)²x.
    """
    scale = abs(matrix).max()  # first: squares of what is tiny are 0
    # A product, not a choice: the host does not wait for a device to tell the scale.
    x = matrix * (scale >= _NONE) / (scale + (scale < _NONE))
    flat = x.reshape(-1)
    norm = (flat @ flat) ** 0.5
    x = x / (norm + (norm == 0))
    wide = matrix.shape[0] <= matrix.shape[1]
    x = x if wide else x.T
    a, b, c = _COEFFICIENTS
    for _ in range(_STEPS):
        gram = x @ x.T
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x if wide else x.T
