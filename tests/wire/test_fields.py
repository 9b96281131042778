"""The types of fields: each accepts its own values, and nothing else."""

from __future__ import annotations

from typing import Any

from hypothesis import given

from aiops.wire.fields import CHECKS, TYPES
from tests.headers import BAD, GOOD
from tests.rows import each_row
from tests.strategies import DETERMINISTIC, FIELDS


def test_every_type_of_field_is_tested() -> None:
    assert set(GOOD) == set(FIELDS) == set(TYPES)
    assert set(BAD) == set(CHECKS) == set(TYPES) - {"Parts"}


@each_row("type_", CHECKS)
def test_what_is_of_a_type_is_accepted(type_: str) -> None:
    assert CHECKS[type_](GOOD[type_])

    @DETERMINISTIC
    @given(FIELDS[type_])
    def check(value: Any) -> None:
        assert CHECKS[type_](value)

    check()


@each_row(("type_", "value"), [(t, value) for t in BAD for value in BAD[t]])
def test_what_is_not_of_a_type_is_refused(type_: str, value: Any) -> None:
    assert not CHECKS[type_](value)
