"""Addresses."""

from __future__ import annotations

import pytest

from aiops.common.urls import PORT, is_loopback, parse, write
from aiops.errors import UsageError


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("aiops://host:7", ("host", 7)),
        ("aiops://host", ("host", PORT)),
        ("host:7", ("host", 7)),
        ("10.0.0.1", ("10.0.0.1", PORT)),
        ("aiops://[::1]:9", ("::1", 9)),
        ("aiops://host:7/", ("host", 7)),
    ],
)
def test_parse(url: str, expected: tuple[str, int]) -> None:
    assert parse(url) == expected
    assert parse(write(*expected)) == expected


@pytest.mark.parametrize(
    "url", ["", "http://host:7", "aiops://", "aiops://host:x", "aiops://host:70000", "aiops://h/p"]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="aiops://host:port"):
        parse(url)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("example.org", False),
    ],
)
def test_is_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
