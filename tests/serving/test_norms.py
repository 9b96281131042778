"""Norms of parameters, computed beside training."""

from __future__ import annotations

import numpy as np
import pytest

from aiops.serving.norms import parameter_norms
from tests.inline import Inline


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
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
