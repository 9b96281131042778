"""Which backend is taken, with Numba and without."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from aiops.errors import UsageError
from aiops.kernels import Spans, backend, build, scan, survey, surveyor
from tests.calls import calls
from tests.kernels.rules import FASGD, SGD

pytestmark = pytest.mark.usefixtures("none_pending")


@pytest.fixture
def without_numba(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "numba", None)  # the import system then says it is not there
    backend._obstacle.cache_clear()
    backend._advise.cache_clear()
    yield
    monkeypatch.undo()
    backend._obstacle.cache_clear()
    backend._advise.cache_clear()


def test_numba_is_taken_where_it_is_installed() -> None:
    assert build(SGD, np.float32).backend == "numba"
    assert build(SGD, np.float16).backend == "numba"
    assert build(SGD, np.float32, "numpy").backend == "numpy"
    assert build(SGD, np.float16, "numpy").backend == "numpy"


@pytest.mark.usefixtures("without_numba")
def test_without_numba_one_line_of_advice_and_numpy(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="aiops.kernels"):
        kernels = [build(rule, dtype) for rule in (SGD, FASGD) for dtype in ("f4", "f8", "f2")]
        survey(np.ones(3))
    assert {kernel.backend for kernel in kernels} == {"numpy"}
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "pip install 'aiops-ps[server]'" in record.getMessage()
    assert "\n" not in record.getMessage()
    w = np.ones(3, np.float32)
    kernels[0].warm()
    kernels[0](Spans.whole(3, 0.5), 1.0, w, np.ones(3, np.float32), w, [])
    assert w.tolist() == [0.5] * 3


@pytest.mark.usefixtures("without_numba")
def test_without_numba_asking_for_it_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UsageError, match=r"numba backend cannot be had: .*pip install"):
        build(SGD, np.float32, "numba")
    assert not caplog.records


def test_numba_that_must_not_compile_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    import numba

    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    assert "NUMBA_DISABLE_JIT" in str(backend._obstacle.__wrapped__())


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(UsageError, match="no kernel backend 'cuda'; known: auto, numba, numpy"):
        build(SGD, np.float32, "cuda")


def test_importing_and_building_do_not_import_numba() -> None:
    code = (
        "import sys, numpy, aiops.kernels\n"
        "aiops.kernels.build(aiops.kernels.FOLD, numpy.float32, 'numpy')\n"
        "sys.exit(any(name.split('.')[0] in ('numba', 'ml_dtypes') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class TestPendingNumba:
    def test_numpy_is_at_hand_until_numba_has_come(self) -> None:
        promise = backend.PendingNumba()
        assert backend.numba_pending()
        assert (backend.current_backend("auto"), backend.current_backend("numba")) == (
            "numpy",
            "numpy",
        )
        assert backend.resolve("auto") == "numba"
        promise.arrived()
        assert not backend.numba_pending()
        assert backend.current_backend("auto") == "numba"
        promise.arrived()  # a second time is no fault

    def test_a_promise_that_is_forgotten_is_over(self) -> None:
        promise = backend.PendingNumba()
        del promise
        assert not backend.numba_pending()

    def test_one_that_ends_while_calls_are_counted_has_ended_afterwards(self) -> None:
        promise = backend.PendingNumba()
        calls(promise.arrived)
        assert not backend.numba_pending()

    def test_one_made_while_calls_are_counted_is_there_afterwards(self) -> None:
        made = list[backend.PendingNumba]()
        calls(lambda: made.append(backend.PendingNumba()))
        assert backend.numba_pending()

    def test_a_surveyor_turns_to_numba_when_it_has_come(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[int] = []
        compiled = scan.compiled_survey

        def ask(*key: int) -> object:
            asked.append(1)
            return compiled(*key)

        monkeypatch.setattr(scan, "compiled_survey", ask)
        promise = backend.PendingNumba()
        look, bad = surveyor(np.dtype(np.float32)), np.array([1, np.nan], np.float32)
        assert (look(bad), asked) == (1, [])
        promise.arrived()
        assert (look(bad), look(bad), asked) == (1, 1, [1])
