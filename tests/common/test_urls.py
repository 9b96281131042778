"""Addresses."""

from __future__ import annotations

import pytest

from aiops.common.urls import (
    PORT,
    ServerAddress,
    is_loopback,
    parse,
    parse_all,
    write,
    write_all,
)
from aiops.errors import UsageError
from tests.rows import each_row


@each_row(
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


@each_row(
    "url", ["", "http://host:7", "aiops://", "aiops://host:x", "aiops://host:70000", "aiops://h/p"]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="aiops://host:port"):
        parse(url)


@each_row(
    ("url", "expected", "written"),
    [
        ("aiops://a:7", [ServerAddress("a", 7)], "aiops://a:7"),
        ("a", [ServerAddress("a", PORT)], "aiops://a:7171"),
        (
            "aiops://a:7,b",
            [ServerAddress("a", 7), ServerAddress("b", PORT)],
            "aiops://a:7,b:7171",
        ),
        (
            "aiops://a+[::1]:8+f",
            [ServerAddress("a", PORT, (("::1", 8), ("f", PORT)))],
            "aiops://a:7171+[::1]:8+f:7171",
        ),
        (
            "a+f,b+f,c",
            [
                ServerAddress("a", PORT, (("f", PORT),)),
                ServerAddress("b", PORT, (("f", PORT),)),
                ServerAddress("c", PORT),
            ],
            "aiops://a:7171+f:7171,b:7171+f:7171,c:7171",
        ),
    ],
)
def test_alternatives_and_shards(url: str, expected: list[ServerAddress], written: str) -> None:
    assert parse_all(url) == tuple(expected)
    assert write_all(expected) == written
    assert parse_all(written) == tuple(expected)
    assert expected[0].url == write(expected[0].host, expected[0].port)


@each_row("url", ["", "aiops://", "a,", ",a", "a+", "a++b", "aiops://a,aiops://b"])
def test_a_list_with_something_else_in_it(url: str) -> None:
    with pytest.raises(UsageError, match="aiops://host:port"):
        parse_all(url)


@each_row("url", ["a,b,a:7171", "a+a", "a+f+f", "a+f,a+g"])
def test_an_address_that_comes_twice(url: str) -> None:
    with pytest.raises(UsageError, match="names an address twice"):
        parse_all(url)


@each_row(
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
