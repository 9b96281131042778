"""The survey of gradients: by wide vectors, where the processor has them, it finds the same."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiops.compiled.loading import core
from aiops.kernels import survey
from aiops.model.layout import Array
from tests.engine.test_compiled_answers import GENERAL, Scene, is_answer, scenes

ROOT = Path(__file__).parents[2]
SPECIAL = np.array(
    [
        *(0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 1e-38, 9.9e17, -9.9e17, 1e18, -1e18, 3e38),
        *(np.inf, -np.inf, np.nan, -np.nan),
    ],
    np.float32,
)
"""Numbers of each kind; the smallest are denormal."""

SHIM = """
#include "survey.c"
#define SHOWN __attribute__((visibility("default")))
SHOWN uint64_t plain(const char *data, Py_ssize_t nbytes)
{
    return plain_largest_of_4(data, nbytes, 0x7FFFFFFF);
}
SHOWN uint64_t usual(const char *data, Py_ssize_t nbytes)
{
    return largest_of_4(data, nbytes, 0x7FFFFFFF);
}
SHOWN int fit(const char *data, Py_ssize_t nbytes)
{
    return are_fit(data, nbytes);
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Both variants, as the library has them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT)
        hatch_build = pytest.importorskip("hatch_build")
    folder = tmp_path_factory.mktemp("survey")
    (folder / "shim.c").write_text(SHIM, encoding="utf-8")
    try:
        command = hatch_build.compiler(os.environ)
    except hatch_build.CannotCompile as error:
        pytest.skip(str(error))
    sources = f"-I{ROOT / 'aiops' / 'compiled'}"
    made = folder / "survey.so"
    subprocess.run([*command, sources, str(folder / "shim.c"), "-o", str(made)], check=True)
    found = ctypes.CDLL(str(made))
    for name in ("plain", "usual", "fit"):
        function = getattr(found, name)
        function.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t]
        function.restype = ctypes.c_int if name == "fit" else ctypes.c_uint64
    return found


def arrays() -> list[Array]:
    """Return arrays of 0 to 100 elements: numbers of each kind at each place of a vector."""
    rng = np.random.default_rng(5)
    found: list[Array] = []
    for size in range(101):
        found.append(np.zeros(size, np.float32))
        found.append(rng.normal(size=size).astype(np.float32))
        found.append(rng.integers(0, 1 << 32, size, dtype=np.uint32).view(np.float32))
        for number, value in enumerate(SPECIAL):
            if size:
                each = rng.normal(size=size).astype(np.float32)
                each[(7 * number + size) % size] = value
                found.append(each)
                last = np.zeros(size, np.float32)
                last[-1] = value
                found.append(last)
    return found


def test_both_variants_find_the_same(library: Any) -> None:
    """At any address; next to it lies what is larger than all numbers, and is not read."""
    around = np.full(512, 0xFF, np.uint8)
    for values in arrays():
        bits = values.view(np.uint32) & 0x7FFFFFFF
        largest = int(bits.max(initial=0))
        for offset in (0, 1, 2, 3, 4, 31, 33):
            begin = 40 + offset
            around[:] = 0xFF
            around[begin : begin + values.nbytes] = values.view(np.uint8)
            given = around.ctypes.data + begin, values.nbytes
            assert library.plain(*given) == library.usual(*given) == largest, (values, offset)
            assert library.fit(*given) == (survey(values, "numpy") == -1), (values, offset)


@pytest.mark.skipif(core() is None, reason="there was no C compiler")
@pytest.mark.usefixtures("none_pending")
class TestExchanges:
    """The library's own survey: what is unfit goes the general way."""

    SIZES = (1, 3, 7, 8, 9, 16, 31, 33, 100)

    @pytest.fixture(params=SIZES)
    async def scene(
        self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
    ) -> AsyncIterator[Scene]:
        async for each in scenes(monkeypatch, "asgd", {"w": np.zeros(request.param, np.float32)}):
            yield each

    async def test_each_place_is_looked_at(self, scene: Scene) -> None:
        size = scene.nbytes // 4
        for value in SPECIAL:
            fit = bool(abs(value) < 1e18)  # not one that is no number
            for at in {0, size // 2, size - 1}:
                data = np.full(size, -0.25, np.float32)
                data[at] = value
                scene.guard._left = 1000
                found = scene.exchange(scene.push(data=data))
                assert is_answer(found, scene) if fit else found == GENERAL, (value, at)

    async def test_the_largest_magnitude_is_found(self, scene: Scene) -> None:
        size = scene.nbytes // 4
        scene.guard._left, scene.guard.narrow = 1000, True
        for at in {0, size // 2, size - 1}:
            data = np.zeros(size, np.float32)
            data[at] = -3.0
            scene.guard.magnitude = 3.0
            assert is_answer(scene.exchange(scene.push(data=data)), scene)
            scene.guard.magnitude = float(np.nextafter(np.float32(3), np.float32(0)))
            assert scene.exchange(scene.push(data=data)) == GENERAL
