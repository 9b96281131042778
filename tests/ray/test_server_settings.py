"""The settings that `aiops.ray.train` gives a server, or finds at one that runs."""

from __future__ import annotations

from typing import Any

import pytest

from aiops.errors import UsageError
from aiops.ray.server_settings import check_same, server_config

RUNNING = server_config({"policy": "asgd", "lr": 0.5, "threads": 2, "push_codec": "int8"})


@pytest.mark.parametrize(
    "given", [{}, {"policy": "asgd"}, {"lr": 0.5, "push_codec": "int8"}, {"push_codec": ["int8"]}]
)
def test_what_is_left_out_or_the_same_is_taken(given: dict[str, Any]) -> None:
    check_same("digits", given, RUNNING, None, 2)
    check_same("digits", given, RUNNING, 2, 2)


@pytest.mark.parametrize(
    ("given", "asked", "what"),
    [
        ({"policy": "fasgd", "lr": 0.5}, None, "has policy='asgd', not 'fasgd': leave"),
        ({"lr": 0.1, "push_codec": "raw"}, 2, r"has lr=0\.5, not 0\.1; push_codec=\['int8'\], not"),
        ({}, 3, "has servers=2, not 3: leave"),
    ],
)
def test_others_are_refused(given: dict[str, Any], asked: int | None, what: str) -> None:
    with pytest.raises(UsageError, match=rf"under the name 'digits' {what}"):
        check_same("digits", given, RUNNING, asked, 2)


def test_a_setting_that_is_not_the_callers() -> None:
    with pytest.raises(UsageError, match=r"aiops\.ray\.train sets 'port' of the server itself"):
        server_config({"port": 7171})
