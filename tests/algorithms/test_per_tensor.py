"""Values of settings with patterns: which are read, which one counts, and what is refused."""

from __future__ import annotations

import doctest

import pytest

from aiops.algorithms import per_tensor
from aiops.algorithms.asgd import ASGD
from aiops.algorithms.per_tensor import PerTensor, gathered
from aiops.errors import UsageError
from aiops.serving import config
from tests.rows import each_row

NAMES = ["embed.table", "layers.0.norm.weight", "layers.0.norm.bias", "head.weight"]


def test_the_last_that_matches_counts() -> None:
    found = PerTensor.of("lr=1@* lr=2@*norm*,head.? lr=3@*.bias weight_decay=0@*.bias")
    assert [found.value("lr", name, 9.0) for name in NAMES] == [1, 2, 3, 1]
    assert [found.value("weight_decay", name, 9.0) for name in NAMES] == [9, 9, 0, 9]
    assert [found.value("clip", name, 9.0) for name in NAMES] == [9] * 4
    assert PerTensor.of(str(found)) == found


def test_a_number_survives_being_written() -> None:
    text = "lr=0.30000000000000004@a lr=1e-07@b lr=3@c"
    assert str(PerTensor.of(text)) == text


@each_row(
    "text",
    ["lr", "lr=0.1", "lr=@a", "lr=0.1@", "=0.1@a", "lr=0.1@a,,b", "lr=x@a", "0.1@a", "lr=0.1@,"],
)
def test_a_form_that_says_nothing_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"write setting=value@pattern,pattern, as in"):
        PerTensor.of(text)


@each_row("value", ["-1", "nan", "inf", "1e38", "1e-40"])
def test_a_value_out_of_range_is_refused(value: str) -> None:
    with pytest.raises(UsageError, match=r"must be 0, or from 1e-37 to 1e37"):
        ASGD(per_tensor=f"lr={value}@a")


@each_row(
    ("pattern", "hint"),
    [
        ("*nrom*", "did you mean 'layers.0.norm.weight'?"),
        ("haed.weight", "did you mean 'head.weight'?"),
        ("embd*", "did you mean 'embed.table'?"),
        ("?", "known: embed.table, head.weight, layers.0.norm.bias, layers.0.norm.weight"),
    ],
)
def test_a_pattern_that_matches_nothing_names_the_nearest_tensor(pattern: str, hint: str) -> None:
    found = PerTensor.of(f"lr=1@* weight_decay=0@head*,{pattern}").unmatched(NAMES)
    clause = f"weight_decay=0@head*,{pattern}"
    assert found == f"no tensor's name matches {pattern!r} of --set {clause}; {hint}"
    assert PerTensor.of("lr=1@*,[eh]*").unmatched(NAMES) is None


def test_settings_without_a_pattern_stay_and_the_others_become_one() -> None:
    items = ["lr=0.1", "lr=0.2@a b, c", "name=x@y", "per_tensor=lr=3@d", "lr=0.4", "per_tensor="]
    plain, text = gathered(items)
    assert plain == ["lr=0.1", "name=x@y", "lr=0.4"]
    assert text == "lr=0.2@a?b,c lr=3@d"
    found = config.settings_of(items, None)
    assert found == {"lr": "0.4", "name": "x@y", "per_tensor": text}


def test_its_examples() -> None:
    assert doctest.testmod(per_tensor).failed == 0
