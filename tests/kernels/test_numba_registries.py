"""Numba's registries are loaded without SciPy's linear algebra, which stays usable."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("numba")
pytest.importorskip("scipy")

CODE = """
import sys
from aiops.kernels import numba_jit, numba_registries

NAMES = "scipy.linalg", "scipy.linalg.cython_blas"
print([name in sys.modules for name in NAMES])

with numba_registries._without_linear_algebra():  # as another thread may see it
    import scipy.linalg.cython_blas
    stand_in = sys.modules[NAMES[1]]
    print(NAMES[0] in sys.modules, hasattr(stand_in, "__path__"), NAMES[0] in sys.modules)
    print("dgemm" in stand_in.__pyx_capi__, NAMES[0] in sys.modules)
    print(sys.modules[NAMES[1]] is stand_in)

import numba, numpy as np
print(numba.njit("float64(float64[:, :])")(lambda a: np.dot(a, a)[0, 0])(np.full((2, 2), 3.0)))
"""


def test_linear_algebra_is_imported_when_it_is_used() -> None:
    made = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert made.stdout.splitlines() == [
        "[False, False]",
        "False False False",
        "True True",
        "False",
        "18.0",
    ], made.stderr
