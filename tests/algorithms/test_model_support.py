"""What a policy can train: its refusals name the policy, the bound and a way out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from aiops.algorithms import find
from aiops.algorithms.model_support import size_obstacle
from aiops.engine.registration import offered
from aiops.errors import BadPush
from aiops.kernels import STATISTIC_CAP, STATISTIC_MOST
from aiops.model.layout import Layout


def test_the_statistic_of_every_parameter_fits_64_bits() -> None:
    fasgd, sasgd = find("fasgd").make({}), find("sasgd").make({})
    assert STATISTIC_MOST * int(STATISTIC_CAP) < 2**63 <= (STATISTIC_MOST + 1) * int(STATISTIC_CAP)
    assert size_obstacle(fasgd, STATISTIC_MOST) is None
    assert size_obstacle(sasgd, 2**40) is None
    why = size_obstacle(fasgd, STATISTIC_MOST + 1)
    assert why is not None
    assert "8589934591 at most" in why


def test_a_model_that_is_too_large_is_refused_when_it_is_offered() -> None:
    layout = Layout([("a", "float32", (2**32,)), ("b", "float32", (2**32,))])
    offer: Any = SimpleNamespace(layout=layout, buffer=None)
    message: Any = SimpleNamespace(tables=(), tensors=())
    with pytest.raises(BadPush, match=r"fasgd adds up .* the model has 8589934592: choose"):
        offered(message, offer, find("fasgd").make({}), (), 2**60)
    assert offered(message, offer, find("asgd").make({}), (), 2**60).layout is layout
