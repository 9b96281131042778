"""The keyword arguments of `aiops.serve`, as type checkers see them: the server's settings."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from aiops.errors import UsageError
from aiops.serving.config import Config
from aiops.serving.embedded import config_of
from aiops.serving.serve_keywords import ServeKeywords
from tests.rows import each_row

TYPES = get_type_hints(Config)
KEYWORDS = get_type_hints(ServeKeywords)


def test_each_setting_is_one() -> None:
    assert {*KEYWORDS, "standby"} == {field.name for field in dataclasses.fields(Config)}
    assert not ServeKeywords.__required_keys__


@each_row("name", KEYWORDS)
def test_it_takes_what_the_setting_takes(name: str) -> None:
    wanted = {TYPES[name], *get_args(TYPES[name])} - {TYPES[name] if get_args(TYPES[name]) else 0}
    taken = {KEYWORDS[name], *get_args(KEYWORDS[name])}
    if TYPES[name] == list[str]:
        assert "Sequence[str]" in str(KEYWORDS[name])
    else:
        assert wanted <= taken


@each_row("name", [name for name in KEYWORDS if Path in get_args(TYPES[name])])
def test_a_path_may_be_text(name: str) -> None:
    others = {"tls_key": {"tls_cert": "c"}, "tls_ca": {"tls_cert": "c"}, "tokens": {"token": "t"}}
    config = config_of({name: "some/file", **others.get(name, {})})
    assert getattr(config, name) == Path("some/file")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"optimizer": "adamw"}, "a server has no setting 'optimizer'"),
        (
            {"policy": "hardsync", "optimizer": "adamw"},
            r"'optimizer' is a setting of the policy hardsync: set=\{'optimizer': ...\}",
        ),
    ],
)
def test_a_setting_of_the_policy_is_told_where_to_go(settings: dict[str, str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        config_of(settings)
