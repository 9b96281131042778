"""Norms of parameters, computed beside training."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aiops.serving.norms import ParameterNorms, parameter_norms
from tests.inline import Inline
from tests.rows import each_row
from tests.support import PATIENCE


@each_row("dtype", ["float64", "float32", "float16"])
def test_of_one_version_whatever_comes_meanwhile(dtype: str) -> None:
    inline = Inline("asgd", {"lr": 1.0})
    large = np.arange(200_000) % 7 - 3.0
    model = {"large": large.astype(dtype), "small": np.full((2, 2), 2.0, dtype)}
    assert parameter_norms(inline.engine) is None, "there is no model"
    inline.define(model)
    peer = 1
    inline.join(peer)
    compute = parameter_norms(inline.engine)
    assert compute is not None
    inline.push(peer, {name: np.ones_like(array) for name, array in model.items()})
    assert inline.version == 1
    assert compute() == pytest.approx([np.linalg.norm(large), 4.0])
    store = inline.engine.defined_store
    assert store.alive == 1, "the lease has ended"
    again = parameter_norms(inline.engine)
    assert again is not None
    assert again() == pytest.approx([np.linalg.norm(large - 1), 2.0])


def test_not_of_a_version_that_is_being_overwritten() -> None:
    inline = Inline("asgd", hold=True)
    inline.define({"w": np.ones(3, np.float32)})
    inline.join(1)
    inline.push(1, {"w": np.ones(3, np.float32)})
    assert parameter_norms(inline.engine) is None
    inline.run_kernel()
    compute = parameter_norms(inline.engine)
    assert compute is not None
    compute()


class Source:
    """A server of one tensor, whose norm is computed when it is let; or cannot be."""

    def __init__(self) -> None:
        self.made, self.over = 0, asyncio.Event()
        self.error: Exception | None = None

    def norms(self) -> Callable[[], list[float]]:
        self.made += 1
        loop = asyncio.get_running_loop()

        def compute() -> list[float]:
            loop.call_soon_threadsafe(self.over.set)
            if self.error is not None:
                raise self.error
            return [float(self.made)]

        return compute


async def computed(norms: ParameterNorms, source: Source) -> dict[str, Any]:
    """Ask once, and return what is added to a report afterwards."""
    source.over.clear()
    norms.ask()
    norms.ask()  # the second waits for the first
    async with asyncio.timeout(PATIENCE):
        await source.over.wait()
        assert norms._computing is not None
        await norms._computing
    report: dict[str, Any] = {"by_tensor": {"names": ["w"], "sizes": [9]}}
    norms.add_to(report)
    return report["by_tensor"]  # type: ignore[no-any-return]


async def test_who_asks_has_those_of_the_time_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiops.serving.norms._EVERY", 0.0)
    monkeypatch.setattr("aiops.serving.norms._SHARE", 1e9)
    source = Source()
    norms, report = ParameterNorms(lambda: source), {"by_tensor": {"names": ["w"]}}
    norms.add_to(report)
    assert "params" not in report["by_tensor"]
    assert (await computed(norms, source))["params"] == [1.0]
    assert (await computed(norms, source))["params"] == [2.0]
    other: dict[str, Any] = {"by_tensor": {"names": ["w", "b"]}}
    norms.add_to(other)
    assert "params" not in other["by_tensor"], "they are of another model"


async def test_they_are_computed_rarely_and_an_error_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = Source()
    source.error = LookupError("the model is gone")
    norms = ParameterNorms(lambda: source)
    with caplog.at_level(logging.ERROR):
        assert "params" not in await computed(norms, source)
    assert caplog.text.count("LookupError('the model is gone')") == 1
    norms.ask()
    assert source.made == 1, "five seconds have not passed"
    ParameterNorms(lambda: None).ask()
