"""Settings as text: what is read, and what is refused with which words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiops.common.settings import read_setting, read_settings, whole_number
from aiops.errors import UsageError
from tests.rows import each_row

DEFAULTS: dict[str, Any] = {"fraction": 0.1, "rank": 4, "free": False, "values": "int8"}


def test_a_text_is_read_in_the_types_of_the_defaults() -> None:
    found = read_settings("thing", " rank = 7,free=YES,fraction=1e-3,values=bf16", DEFAULTS)
    assert found == {"rank": 7, "free": True, "fraction": 1e-3, "values": "bf16"}
    assert read_settings("thing", "", DEFAULTS) == {}
    assert read_settings("thing", "0.5,rank=1", DEFAULTS, first=True) == {
        "fraction": 0.5,
        "rank": 1,
    }


@each_row(
    ("text", "words"),
    [
        ("rnk=1", "thing has no setting 'rnk'; did you mean 'rank'"),
        ("rank=1,rank=1", "thing was given 'rank' twice"),
        ("rank=1,0.5", "thing cannot read '0.5'; write setting=value"),
        ("rank=1,", "thing cannot read ''; write setting=value"),
        ("rank=1.5", "thing: rank must be a whole number, not '1.5'"),
        ("fraction=few", "thing: fraction must be a number, not 'few'"),
        ("free=maybe", "thing: free must be true or false, not 'maybe'"),
    ],
)
def test_what_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read_settings("thing", text, DEFAULTS, first=True)


@each_row("value", [1.5, float("inf"), float("nan"), None, [1]])
def test_values_that_are_no_integer(value: Any) -> None:
    with pytest.raises(UsageError, match="rank must be a whole number"):
        read_setting("thing", "rank", value, DEFAULTS)
    assert read_setting("thing", "rank", 3.0, DEFAULTS) == 3


@each_row("value", [0, 11, 5.0, "5", True, np.True_, None])
def test_what_is_no_whole_number(value: Any) -> None:
    with pytest.raises(UsageError) as caught:
        whole_number("size", value, 1, 10)
    assert str(caught.value) == f"size must be a whole number from 1 to 10, not {value!r}"


def test_whole_numbers() -> None:
    found = whole_number("size", np.int8(5), 1, 10)
    assert (found, type(found)) == (5, int)
    with pytest.raises(UsageError, match=r"from 0 to 2\*\*53 - 1, not -1"):
        whole_number("size", -1, 0, 2**53 - 1)
    with pytest.raises(UsageError, match="from 0 to 1,099,511,627,776, not -1"):
        whole_number("size", -1, 0, 2**40)
