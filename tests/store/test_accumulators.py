"""Gradients that are held for a trimmed mean, of all tensors or of some."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiops.algorithms import find
from aiops.engine.events import Options
from aiops.errors import ConflictError, UsageError
from aiops.wire.messages import Ack
from tests.inline import Inline

WORKERS = 5


def running(policy: str = "hardsync", **settings: Any) -> Inline:
    inline = Inline(policy, {"lr": 1.0, "trim": 0.2, **settings}, workers=WORKERS, backend="numpy")
    inline.define({"a": np.zeros(3, np.float32), "b": np.zeros(2, np.float16)})
    for peer in range(1, WORKERS + 1):
        inline.join(peer)
    return inline


def gradient(value: float) -> dict[str, np.ndarray]:
    return {"a": np.full(3, value, np.float32), "b": np.full(2, min(value, 6e4), np.float16)}


@pytest.mark.parametrize("order", [(1, 2, 3, 4, 5), (5, 3, 1, 2, 4)])
def test_the_ends_are_left_out(order: tuple[int, ...]) -> None:
    inline = running()
    for peer in order:
        inline.push(peer, gradient(9e17 if peer == 4 else float(peer)))
    np.testing.assert_allclose(inline.params()["a"], -(2 + 3 + 5) / 3, rtol=1e-6)
    np.testing.assert_allclose(inline.params()["b"], -(2 + 3 + 5) / 3, rtol=1e-3)
    for peer in order:  # the next step holds none of these
        inline.push(peer, gradient(3.0))
    np.testing.assert_allclose(inline.params()["a"], -(2 + 3 + 5) / 3 - 3, rtol=1e-6)


def test_a_tensor_is_compared_with_those_that_have_it() -> None:
    inline = running("softsync", n=1, modulate="none")
    for number, value in enumerate((1.0, 2.0, 30.0, 4.0, 5.0)):
        some = gradient(value)
        inline.push(1, some if number < 3 else {"a": some["a"]})
    assert inline.version == 1
    np.testing.assert_allclose(inline.params()["a"], -(2 + 4 + 5) / 3, rtol=1e-6)
    np.testing.assert_allclose(inline.params()["b"], -2.0)


def test_a_worker_that_left_is_not_counted() -> None:
    inline = running()
    for peer in range(1, WORKERS):
        inline.push(peer, gradient(float(peer)))
    inline.leave(WORKERS)
    assert inline.version == 1
    np.testing.assert_allclose(inline.params()["a"], -2.5)  # of four, the middle two


def test_an_infinite_step_is_refused_with_all_that_is_held() -> None:
    inline = running(lr=1e36)
    before = inline.params()
    answers = [inline.push(peer, gradient(1e5)) for peer in range(1, WORKERS + 1)]
    assert not isinstance(answers[-1], Ack)
    assert [len(inline.errors(peer)) for peer in range(1, WORKERS + 1)] == [1] * WORKERS
    for name, array in inline.params().items():
        np.testing.assert_array_equal(array, before[name])


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match=r"trim must be 0 .* below 0\.5, not 0\.5"):
        find("hardsync").make({"trim": 0.5})
    with pytest.raises(ConflictError, match="at most 64 gradients, and a step here is of 65"):
        Inline(find("hardsync").make({"trim": 0.1}), workers=65)
    assert Options(workers=65)  # which is fine without
