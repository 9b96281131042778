"""Bad values: pushes that would ruin the model are refused whole."""

from __future__ import annotations

import pytest

from aiops.lab.torture.bad_values import BadValues
from aiops.store.parameters import Store


def test_bad_values_leave_the_state_as_it_is() -> None:
    found = BadValues(seed=3)
    found.run(400)
    assert found.wrong == []
    assert found.cases == 400
    assert found.outcomes["result"] > 0
    assert found.outcomes["used"] > 100


def test_an_update_that_is_not_looked_at_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Store, "is_finite", lambda store, job: True)
    found = BadValues(seed=3)
    found.run(400)
    assert any("is not finite" in each for each in found.wrong)
