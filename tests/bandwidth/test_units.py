"""Rates as people write them, and what is said of those that mean nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiops.bandwidth.units import LEAST, SLOWEST, format_rate, parse_rate, parse_size, too_slow
from aiops.errors import UsageError
from tests.rows import each_row


@each_row(
    ("text", "expected"),
    [
        ("2MB/s", 2_000_000),
        ("2 MB/s", 2_000_000),
        ("2mB/s", 2_000_000),
        ("1.5MB/s", 1_500_000),
        (".5GB/s", 500_000_000),
        ("200KB/s", 200_000),
        ("200kB/s", 200_000),
        ("200kBps", 200_000),
        ("4KiB/s", 4096),
        ("4 MiB/s", 4 << 20),
        ("1GiB/s", 1 << 30),
        ("5000B/s", 5000),
        ("5000", 5000),
        ("5_000", 5000),
        (5000, 5000),
        (2.5e6, 2_500_000),
        ("16kbit/s", 2000),
        ("16Mbit/s", 2_000_000),
        ("16 Mbit/s", 2_000_000),
        ("1Gbit/s", 125_000_000),
        ("100Mbits/s", 12_500_000),
        ("100Mbitps", 12_500_000),
    ],
)
def test_a_rate(text: str | float, expected: int) -> None:
    assert parse_rate("--bandwidth-budget", text) == expected


@each_row(
    ("text", "hint"),
    [
        ("fast", "is not a rate"),
        ("", "is not a rate"),
        ("-1MB/s", "is not a rate"),
        ("nan", "is not a rate"),
        ("2MB/h", "is not a rate"),
        ("2TB/s", "is not a rate"),
        ("2M", "does not say of what: write 2MB/s"),
        ("2/s", "does not say of what: write 2B/s"),
        ("2Mb/s", "write 2MB/s for bytes, 2Mbit/s for bits"),
        ("999B/s", "must be from 1000"),
        ("0", "must be from 1000"),
        ("9" * 30, "must be from 1000"),
    ],
)
def test_what_is_no_rate(text: str, hint: str) -> None:
    with pytest.raises(UsageError, match=hint) as caught:
        parse_rate("--worker-budget", text)
    assert "--worker-budget" in str(caught.value)


@each_row(
    ("text", "expected"),
    [
        ("64MiB", 64 << 20),
        ("5 mb", 5_000_000),
        (".5GB", 500_000_000),
        ("4B", 4),
        ("5_000", 5000),
        ("1.5KiB", 1536),
    ],
)
def test_a_size(text: str, expected: int) -> None:
    assert parse_size("--model", text) == expected


@each_row(
    ("text", "words"),
    [
        ("5XB", "--model '5XB' is no size: write a number of bytes, or one with KB"),
        ("5M", "is no size: .* such as 5MB"),
        ("16 Gi", "is no size: .* such as 16 GiB"),
        ("", "is no size"),
        ("-1MB", "is no size"),
        ("16Mbit", "is no size"),
        ("2MB/s", "--model '2MB/s' is a rate, and no size: write a number of bytes"),
        ("16Mbit/s", "is a rate, and no size"),
        ("0", "--model 0 is 0 bytes: give 1 byte to 1,048,576 GiB"),
        ("0.9", "is 0.9 bytes: give 1 byte to"),
        ("9" * 30, "bytes: give 1 byte to"),
        ("9" * 400, "is inf bytes: give 1 byte to"),
    ],
)
def test_what_is_no_size(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_size("--model", text)


@given(st.floats(LEAST, 1e12))
def test_a_rate_that_is_suggested_can_be_given(rate: float) -> None:
    suggested = parse_rate("--bandwidth-budget", format_rate(rate))
    assert suggested is not None
    assert rate - 1 <= suggested <= 1.011 * rate + 1


@given(st.integers(LEAST, 10**9), st.integers(1, 10**12))
def test_the_budget_that_is_named_would_do(rate: int, nbytes: int) -> None:
    said = too_slow(rate, [("small", 1), ("large", nbytes)])
    if said is None:
        assert nbytes <= rate * SLOWEST
        return
    assert "'large'" in said
    enough = parse_rate("--bandwidth-budget", said.rpartition(" ")[2])
    assert enough is not None
    assert enough > rate
    assert too_slow(enough, [("large", nbytes)]) is None


def test_any_budget_carries_a_model_without_tensors() -> None:
    assert too_slow(LEAST, []) is None
